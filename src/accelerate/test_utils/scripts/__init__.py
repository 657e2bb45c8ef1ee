"""Scripts that `accelerate test` and the tests launch."""
