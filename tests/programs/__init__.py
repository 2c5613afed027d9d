"""Programs that tests run as ranks (see `tests.launching`)."""
