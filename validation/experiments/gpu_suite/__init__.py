"""The tests that need a GPU, as an artifact."""
