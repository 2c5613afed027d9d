"""What may not run, found before torch is imported: the gate on the command line, and the cross-field rules."""
