"""What a session sent, kept for assertions and figures."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mlx_voicechat.client.duplex_events import AudioDelta, DuplexEvent, ErrorEvent
from mlx_voicechat.client.session_config import AudioFormat
from mlx_voicechat.errors import ServerError

if TYPE_CHECKING:
    from mlx_voicechat.client.duplex import DuplexClient

TEXT_DELTAS = ("response.output_audio_transcript.delta", "response.output_text.delta")
STAGE_METRICS = ("ttft_ms", "tpot_ms", "itls_ms")


class EventCollector:
    """Events in the order they came: `events` are the wire's own objects."""

    def __init__(self, output_audio: AudioFormat | None = None) -> None:
        self._output = output_audio or AudioFormat("pcm16", 24_000)
        self._received: list[DuplexEvent] = []

    async def consume(self, client: DuplexClient) -> None:
        """Collect to the end of the session, however it ends; to be run as a task."""
        self._output = client.config.output_audio
        with suppress(ServerError):
            async for event in client.events():
                self.add(event)

    def add(self, event: DuplexEvent) -> None:
        self._received.append(event)
        if isinstance(event, AudioDelta) and event.sample_rate_hz is not None:
            self._output = AudioFormat(self._output.format, event.sample_rate_hz)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event.raw for event in self._received]

    @property
    def output_sample_rate_hz(self) -> int:
        return self._output.sample_rate_hz

    def audio_bytes(self, response_id: str | None = None) -> bytes:
        """The audio of one response, or of all."""
        return b"".join(
            event.audio for event in self._received if response_id is None or event.response_id == response_id
        )

    def count(self, event_type: str) -> int:
        return sum(event.type == event_type for event in self._received)

    def errors(self) -> list[dict[str, Any]]:
        return [event.raw for event in self._received if isinstance(event, ErrorEvent)]

    def first_received_at(self, event_type: str, after_s: float = 0.0) -> float | None:
        """When the first of this type came after `after_s`, on time.monotonic's clock."""
        times = (event.received_at for event in self._received if event.type == event_type)
        return next((at for at in times if at >= after_s), None)

    def response_ids(self) -> list[str]:
        """Of responses with audio, in order."""
        ids = [event.response_id for event in self._received if isinstance(event, AudioDelta)]
        return list(dict.fromkeys(one for one in ids if one))

    def timing_summary(self, after_s: float = 0.0, input_committed_at_s: float | None = None) -> dict[str, Any]:
        """Latencies of the first text and audio from the commit (or `after_s`), and the cadence of the audio, in ms.

        `audio_generation_ms` is from the first delta to the last, `audio_duration_ms` what they hold; the metrics of a
        server that sends some stand beside them. What did not happen is None.
        """
        since = after_s if input_committed_at_s is None else input_committed_at_s
        received = [event for event in self._received if event.received_at >= after_s]
        texts = [event.received_at for event in received if event.type in TEXT_DELTAS and event.text]
        audio = [event for event in received if isinstance(event, AudioDelta)]
        times = [event.received_at for event in audio]
        gaps = sorted((later - earlier) * 1000 for earlier, later in pairwise(times))
        return {
            "first_text_ms": (texts[0] - since) * 1000 if texts else None,
            "first_audio_ms": (times[0] - since) * 1000 if times else None,
            "audio_chunks": len(times),
            "audio_duration_ms": self._output.milliseconds(sum(len(event.audio) for event in audio)),
            "audio_generation_ms": (times[-1] - times[0]) * 1000 if times else None,
            "audio_gap_p50_ms": gaps[len(gaps) // 2] if gaps else None,
            "audio_gap_max_ms": gaps[-1] if gaps else None,
            **_stage_metrics(received),
        }


def _stage_metrics(events: list[DuplexEvent]) -> dict[str, Any]:
    """A server's own metrics, of the first event that has them."""
    for event in events:
        response = event.raw.get("response")
        for place in (event.raw.get("metadata"), response.get("metadata") if isinstance(response, dict) else None):
            metrics = place.get("stage_metrics") if isinstance(place, dict) else None
            if isinstance(metrics, dict):
                return {name: metrics[name] for name in STAGE_METRICS if name in metrics}
    return {}


async def acknowledge_collected_playback(client: DuplexClient, collector: EventCollector) -> None:
    """Acknowledge all audio that a collector has as played."""
    for response_id in collector.response_ids():
        form = AudioFormat(client.config.output_audio.format, collector.output_sample_rate_hz)
        played_ms = form.milliseconds(len(collector.audio_bytes(response_id)))
        await client.ack_playback(played_ms, response_id=response_id)
