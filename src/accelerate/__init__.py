"""One PyTorch training loop on one CPU, many GPUs or many machines."""
