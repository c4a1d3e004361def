"""What `/metrics` tells, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
SMOOTHING = 1 / 50  # weight of the newest frame in the real-time factor: four seconds


class Metrics:
    """Counters of one server; they may be used from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._frame_seconds = Histogram(
            "mlx_voicechat_frame_seconds", "Time that a frame of 80 ms took", buckets=BUCKETS, registry=self.registry
        )
        self._factor = Gauge(
            "mlx_voicechat_realtime_factor", "Frame time through frame length, of late", registry=self.registry
        )
        self._errors = Counter("mlx_voicechat_errors", "Error events", ["code"], registry=self.registry)
        self.connections = Counter("mlx_voicechat_connections", "WebSockets accepted", registry=self.registry)
        self.opened = Counter("mlx_voicechat_sessions_opened", "Sessions opened", registry=self.registry)
        self._smooth: float | None = None

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add `mlx_voicechat_<name>`, read when it is asked for."""
        Gauge(f"mlx_voicechat_{name}", text, registry=self.registry).set_function(value)

    def frame(self, seconds: float, frame_seconds: float) -> None:
        """Count one frame."""
        self._frame_seconds.observe(seconds)
        factor = seconds / frame_seconds
        self._smooth = factor if self._smooth is None else self._smooth + SMOOTHING * (factor - self._smooth)
        self._factor.set(self._smooth)

    def error(self, code: str) -> None:
        """Count one error event."""
        self._errors.labels(code).inc()

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)
