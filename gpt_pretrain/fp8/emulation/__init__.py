"""FP8 where no hardware has it: megatron-core's local layers on the real FP8 grids, by Transformer Engine's rules."""
