"""The two variables that refine a profile: times of the stages' parts, and a file with every frame's timings."""

from __future__ import annotations

import os
from pathlib import Path

STAGES_VARIABLE = "MLX_VOICECHAT_PROFILE_STAGES"
FRAMES_VARIABLE = "MLX_VOICECHAT_PROFILE_FRAMES"


def wants_parts() -> bool:
    """Whether the parts of the stages are to be timed."""
    return os.environ.get(STAGES_VARIABLE) == "1"


def frames_file() -> Path | None:
    """Where every frame's timings go (`Targets` checks it); None if nowhere."""
    name = os.environ.get(FRAMES_VARIABLE)
    return Path(name) if name else None
