"""Prepares the data of a run ahead of it."""
