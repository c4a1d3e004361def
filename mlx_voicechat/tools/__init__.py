"""The function channel: what the model may call, its calls, their results, and the cycle that they go through."""

from .tool import Tool

__all__ = ["Tool"]
