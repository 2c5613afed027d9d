"""What surrounds a run: its ranks, environment, directory and lock, signals, and Slurm. Imports no torch."""
