"""Scores on the tasks of lm-evaluation-harness, by whatever scores continuations of token ids."""
