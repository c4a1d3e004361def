"""Data that ships with the package: the talking demonstration checkpoint and the configs of synthetic ones."""

from pathlib import Path

FOLDER = Path(__file__).parent
TINY = FOLDER / "tiny"  # a small trained checkpoint, `--model tiny`
CONFIGS = FOLDER / "configs"  # config.json of checkpoints that exist only as random weights
