"""PCM, recordings in, WAV out, and the stateful resampler; numpy alone, no MLX."""
