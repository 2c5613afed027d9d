"""What a configuration comes to on a machine, resolved once: FP8, matrix products, kernels, the machine itself."""
