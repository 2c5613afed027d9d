"""A published model as a checkpoint that training starts from."""
