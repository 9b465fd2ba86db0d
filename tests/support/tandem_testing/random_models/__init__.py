"""Random checkpoints of every family whose sizes and options are drawn, and their comparison with transformers."""
