"""What helps when a run does not go as planned: out-of-memory retries."""
