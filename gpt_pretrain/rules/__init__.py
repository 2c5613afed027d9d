"""What may not run, found before torch is imported: the checks of the command line, and the cross-field rules."""
