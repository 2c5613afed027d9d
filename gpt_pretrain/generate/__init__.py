"""Text from a checkpoint."""
