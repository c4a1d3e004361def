"""What the echo canceller costs: processor time of an 80 ms frame at both sides' usual rates, with an echo.

python benchmarks/echo_cost.py [--seconds 60]
"""

import argparse
import resource
import time

import numpy as np

from mlx_voicechat.sound.echo import EchoCanceller

FRAME_MS = 80
RATES_HZ = ((16_000, 22_050), (16_000, 48_000), (48_000, 48_000))  # near, far


def cost_ms(near_hz: int, far_hz: int, seconds: int) -> tuple[float, float]:
    """Processor time of a frame in ms, mean, and wall time, the slowest hundredth."""
    random = np.random.default_rng(0)
    far = random.normal(0, 0.1, far_hz * FRAME_MS // 1000).astype(np.float32)
    near = random.normal(0, 0.03, near_hz * FRAME_MS // 1000).astype(np.float32)
    canceller = EchoCanceller(near_hz, far_hz)
    frames = seconds * 1000 // FRAME_MS
    walls = []
    used = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(frames):
        began = time.perf_counter()
        canceller.far(far)
        canceller.near(near)
        walls.append(time.perf_counter() - began)
    now = resource.getrusage(resource.RUSAGE_SELF)
    return (now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime) / frames * 1000, np.quantile(
        walls, 0.99
    ) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="of sound at each pair of rates")
    seconds = parser.parse_args().seconds
    for near_hz, far_hz in RATES_HZ:
        mean, slow = cost_ms(near_hz, far_hz, seconds)
        print(f"near {near_hz} Hz, far {far_hz} Hz: {mean:.2f} ms of processor a frame, 99 of 100 within {slow:.2f} ms")


if __name__ == "__main__":
    main()
