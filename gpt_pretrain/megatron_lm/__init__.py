"""Checkpoints of Megatron-LM and NeMo (`torch_dist`), both ways: their folders, arguments and tensors."""
