"""Tests; a package, so that they share `tests.launching` under one name."""
