"""The objects that users pass to the constructor of `Accelerator`."""
