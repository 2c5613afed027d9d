"""Exports a model of many layers, and prints the bytes of its weights and by how many the process grew meanwhile.

FOLDER
"""

import resource
import sys
import time
from pathlib import Path

import torch

from gpt_pretrain.checkpoint.manifest import Manifest, hash_files, write_manifest
from gpt_pretrain.checkpoint.saved_model import PlannedTensor, write_weights
from gpt_pretrain.config.load import config_to_dict
from gpt_pretrain.huggingface.architectures import choose_architecture
from gpt_pretrain.huggingface.export import export_hf
from gpt_pretrain.huggingface.tensors import Rule, tensor_rules
from gpt_pretrain.megatron.cpu import install_cpu_device
from tests.saved_models import small_config

MODEL = ("model=llama3_8b", "model.num_layers=24", "model.hidden_size=384", "model.ffn_hidden_size=1344")


def planned(rule: Rule) -> PlannedTensor:
    return PlannedTensor(
        key=rule.key, layer=rule.layer, shape=rule.shape, dtype=torch.float32, load=lambda: torch.ones(rule.shape)
    )


def grown_to() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    folder = Path(sys.argv[1])
    install_cpu_device()
    config = small_config(*MODEL, "model.num_query_groups=2")
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    rules = tensor_rules(config.model, choose_architecture(config.model))
    write_weights(checkpoint, [planned(rule) for rule in rules], num_layers=config.model.num_layers)
    manifest = Manifest(
        step=0,
        consumed_samples=0,
        time_unix=time.time(),
        versions={},
        config=config_to_dict(config),
        data={},
        architecture={},
        layout={},
        fp8={},
        files=hash_files(checkpoint, [path.name for path in checkpoint.iterdir()]),
    )
    write_manifest(checkpoint, manifest)
    before = grown_to()
    export_hf(checkpoint, folder / "hf", max_shard_gib=5)
    num_bytes = (folder / "hf" / "model.safetensors").stat().st_size
    sys.stdout.write(f"{num_bytes} {grown_to() - before}\n")


if __name__ == "__main__":
    main()
