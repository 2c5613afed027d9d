"""FP8: what ran in it, proven from the live layers; its statistics; and its emulation where there is none."""
