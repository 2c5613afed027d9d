"""What this machine and its installed libraries can train, and how to fix what they cannot."""
