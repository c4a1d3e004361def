"""A checkpoint: found, opened, checked, read, and made anew; the only wing that knows a file of weights."""
