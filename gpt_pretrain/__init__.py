"""Hydra-configured, Megatron-style GPT pretraining with FP8 on NVIDIA Hopper and newer."""
