"""All that is built from megatron-core: a run becomes its configs, process groups, model and optimizer."""
