"""One model on several machines, by `mx.distributed` under `mlx.launch`: what each rank loads, and what it sends."""
