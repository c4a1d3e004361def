"""The five networks as modules: weights only; state is made by `init_state` and passed from step to step."""
