"""Train steps: how each family of models turns a batch into a loss."""
