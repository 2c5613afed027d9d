"""Primer's MLP (So et al. 2021, arXiv 2109.08668)."""

import torch
from megatron.core.transformer.mlp import MLP


class SquaredReluMLP(MLP):
    """megatron-core's MLP, built, stored and sharded in the same way; biases are added before the activation."""

    def forward(self, hidden_states, *_, **__):
        """From [s, b, h] to [s, b, h] (s / TP under sequence parallelism), and the bias of the output."""
        inner, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            inner = inner + bias
        return self.linear_fc2(torch.relu(inner).square())
