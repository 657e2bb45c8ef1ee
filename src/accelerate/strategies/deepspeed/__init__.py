"""Training by a DeepSpeed engine."""
