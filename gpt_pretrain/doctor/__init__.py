"""What this machine and its installed libraries can train, and how to mend what they cannot."""
