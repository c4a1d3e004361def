"""The realtime server: an engine thread that owns MLX, routes, and one file a wire dialect."""
