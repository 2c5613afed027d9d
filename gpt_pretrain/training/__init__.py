"""The run: from a checked configuration to a trained model."""
