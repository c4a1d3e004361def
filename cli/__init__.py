"""The command line `mlx-voicechat`: one file a command, `main.py` brings them together."""
