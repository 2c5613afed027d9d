"""FP8: the proof, from the live layers, of what ran in it; its statistics; and its emulation on other machines."""
