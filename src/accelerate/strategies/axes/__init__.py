"""Axes of the mesh along which ranks work on the same batch."""
