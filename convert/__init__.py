"""Checkpoints into other checkpoints: NVIDIA's original, mlx-community's layout or ours -> ours, in any precision."""
