"""Four ranks compute attention inside documents with the sequence split over them: FOLDER CP…

FOLDER/input.pt holds queries, keys and values [s, 1, heads or groups, width], the borders of documents, and a gradient
of the output. Of each context parallel size CP, rank r writes FOLDER/CP.r.pt: its part of the output and of the
inputs' gradients, and its places in the sequence.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.documents import gather_sequence, scatter_sequence
from gpt_pretrain.megatron.layers import attention_in_documents
from gpt_pretrain.megatron.parallel import context_parallel_slices, lay_out_ranks, process_groups
from gpt_pretrain.rules.jobs import load_config


def main() -> None:
    folder, sizes = Path(sys.argv[1]), map(int, sys.argv[2:])
    install_cpu_device()
    launch, model = read_launch(), load_config([]).model
    given = torch.load(folder / "input.pt")
    with process_groups(model, launch, detect_platform()):
        for cp in sizes:
            parallel_state.destroy_model_parallel()
            lay_out_ranks(replace(model, context_parallel_size=cp))
            group = parallel_state.get_context_parallel_group()
            length = len(given["query"])
            places = context_parallel_slices({"tokens": torch.arange(length).unsqueeze(0)})["tokens"][0]
            inputs = [given[name][places].requires_grad_() for name in ("query", "key", "value")]
            whole = [gather_sequence(each, group) for each in inputs]
            out = attention_in_documents(*whole, 0.25, borders=given["borders"], longest=length)
            mine = scatter_sequence(out, group)
            mine.backward(given["gradient"][places])
            found = {"places": places, "output": mine.detach(), "gradients": [each.grad for each in inputs]}
            torch.save(found, folder / f"{cp}.{launch.rank}.pt")


main()
