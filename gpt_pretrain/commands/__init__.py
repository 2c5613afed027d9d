"""One module per command, and the one door that all of them go through: arguments, help, messages, exit codes."""
