"""Devices behind torch_xla: TPUs, and others for trying it out."""
