"""The one room that speaks megatron-core: a run becomes its configs, process groups, model and optimizer."""
