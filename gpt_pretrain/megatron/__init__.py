"""The one room that speaks megatron-core: our configuration becomes its configs, groups, model and optimizer."""
