"""What memory bandwidth this machine has: a fact of Apple's chips, measured on any other."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache
from typing import NamedTuple

from .traffic import measured_bandwidth

# GB (10^9 bytes) a second of unified memory, from Apple's technical specifications of the Macs with that chip. The
# smaller figure of those sold with two: M3 Max 300 or 400, M4 Max 410 or 546, M5 Max 460 or 614 (the name is the same).
BANDWIDTH_GBPS = {
    "M1": 68,
    "M1 Pro": 200,
    "M1 Max": 400,
    "M1 Ultra": 800,
    "M2": 100,
    "M2 Pro": 200,
    "M2 Max": 400,
    "M2 Ultra": 800,
    "M3": 100,
    "M3 Pro": 150,
    "M3 Max": 300,
    "M3 Ultra": 819,
    "M4": 120,
    "M4 Pro": 273,
    "M4 Max": 410,
    "M5": 153,
    "M5 Pro": 307,
    "M5 Max": 460,
}
BRAND = re.compile(r"Apple (M\d+(?: (?:Pro|Max|Ultra))?)$")
SYSCTL = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]


class Bandwidth(NamedTuple):
    """GB a second, and the chip whose fact it is: empty when it was measured."""

    gbps: float
    chip: str

    @property
    def source(self) -> str:
        """Where the figure comes from, in words."""
        return f"Apple {self.chip}, as specified" if self.chip else "measured"


def known(brand: str) -> Bandwidth | None:
    """What is known of the chip that `sysctl` calls `brand`, None of any other."""
    found = BRAND.match(brand.strip())
    gbps = BANDWIDTH_GBPS.get(found[1]) if found else None
    return Bandwidth(gbps, found[1]) if found and gbps else None


@lru_cache(maxsize=1)
def bandwidth() -> Bandwidth:
    """This machine's, told once a process: of a known chip its fact, else a measured copy, which takes a second."""
    return known(brand()) or Bandwidth(measured_bandwidth(), "")


def brand() -> str:
    """What macOS calls the processor; empty on other systems."""
    if sys.platform != "darwin":
        return ""
    try:
        return subprocess.run(SYSCTL, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
