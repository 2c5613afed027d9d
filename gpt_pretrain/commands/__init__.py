"""What all commands share: their arguments, help, messages and exit codes."""
