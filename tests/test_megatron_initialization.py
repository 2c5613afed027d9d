"""Initial weights: the same model at every layout, distributed as documented."""

import hashlib
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from tests.forked_runs import fork_ranks

SMALL = "model.num_layers=4,model.hidden_size=64,model.num_attention_heads=4,model.encoder_seq_length=32"
LLAMA = f"model=llama3_8b,{SMALL},model.num_query_groups=2,model.ffn_hidden_size=96,model.vocab_size=250"
# Biases, a learned position table and tied embeddings.
GPT2 = f"model=gpt2_124m,{SMALL},model.vocab_size=250"

Whole = dict[str, torch.Tensor]


def merge_tensor_parallel(parts: list[torch.Tensor], dim: int | None, stride: int) -> torch.Tensor:
    """One weight from its parts in the order of the tensor parallel ranks.

    Args:
        parts: One of each rank.
        dim: The dimension in which they are parts; None: each is the whole.
        stride: Pieces of each part; 2 where a rank has gate rows and then up rows.
    """
    if dim is None:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    pieces = [part.chunk(stride, dim=dim) for part in parts]
    return torch.cat([piece[index] for index in range(stride) for piece in pieces], dim=dim)


def build_whole(folder: Path, num_ranks: int, **models: str) -> dict[str, list[Whole]]:
    """Builds models over `num_ranks` real processes.

    Returns:
        For each model the weights of each pipeline stage, whole again over the tensor parallel ranks.
    """
    folder.mkdir()
    arguments = [f"{name}:{overrides}" for name, overrides in models.items()]
    result = fork_ranks(num_ranks, ["tests/programs/whole_weights.py", str(folder), *arguments])
    assert result.returncode == 0, result.stderr
    whole: dict[str, list[Whole]] = {}
    for name in models:
        stages: dict[int, list[dict]] = defaultdict(list)
        for rank in range(num_ranks):
            saved = torch.load(folder / f"{name}.{rank}.pt")
            stages[saved["pp"]].append(saved)
        whole[name] = []
        for _, ranks in sorted(stages.items()):
            ranks.sort(key=lambda saved: saved["tp"])
            parts = zip(*(saved["tensors"] for saved in ranks), strict=True)
            whole[name].append(
                {part[0][0]: merge_tensor_parallel([tensor for _, tensor, *_ in part], *part[0][2:]) for part in parts}
            )
    return whole


def hashes(weights: Whole) -> dict[str, str]:
    return {name: hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest() for name, weight in weights.items()}


def united(stages: list[Whole], shared: frozenset[str] = frozenset()) -> Whole:
    """The stages' weights together; only `shared` names may be on more than one."""
    together: Whole = {}
    for stage in stages:
        assert not (together.keys() & stage.keys()) - shared
        together |= stage
    return together


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    folder = tmp_path_factory.mktemp("single") / "weights"
    models = build_whole(folder, 1, llama=LLAMA, gpt2=GPT2, llama_seed=f"{LLAMA},model.seed=4321", again=LLAMA)
    return {name: united(stages) for name, stages in models.items()}


def test_weights_do_not_depend_on_tensor_parallel_size(single: dict[str, Whole], tmp_path: Path) -> None:
    layout = "parallelism=tp2"
    models = build_whole(tmp_path / "tp2", 2, llama=f"{LLAMA},{layout}", gpt2=f"{GPT2},{layout}")
    for name, stages in models.items():
        assert hashes(united(stages)) == hashes(single[name])


def test_weights_do_not_depend_on_pipeline_stages(single: dict[str, Whole], tmp_path: Path) -> None:
    layout = "parallelism=pp2"
    models = build_whole(tmp_path / "pp2", 2, llama=f"{LLAMA},{layout}", gpt2=f"{GPT2},{layout}")
    assert [sorted(layer_numbers(stage)) for stage in models["llama"]] == [[0, 1], [2, 3]]
    assert hashes(united(models["llama"])) == hashes(single["llama"])
    # The last stage has a copy of the tied embedding under the name of the LM head.
    first, last = models["gpt2"]
    assert torch.equal(last.pop("output_layer.weight"), first["embedding.word_embeddings.weight"])
    assert hashes(united([first, last])) == hashes(single["gpt2"])


def test_weights_do_not_depend_on_interleaved_chunks(single: dict[str, Whole], tmp_path: Path) -> None:
    models = build_whole(tmp_path / "vp2", 2, llama=f"{LLAMA},parallelism=pp2_vp2")
    assert [sorted(layer_numbers(stage)) for stage in models["llama"]] == [[0, 2], [1, 3]]
    assert hashes(united(models["llama"])) == hashes(single["llama"])


def layer_numbers(weights: Whole) -> set[int]:
    return {int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers.")}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_are_distributed_as_documented(single: dict[str, Whole], name: str) -> None:
    for key, weight in single[name].items():
        if key.endswith("bias"):
            assert not weight.any(), key
        elif weight.dim() == 1:
            assert (weight == 1.0).all(), key
        else:
            is_residual = key.endswith(("linear_proj.weight", "linear_fc2.weight"))
            std = 0.02 / math.sqrt(2 * 4) if is_residual else 0.02
            # Five standard errors of the estimates of a normal distribution's mean and standard deviation.
            assert abs(weight.mean()) < 5 * std / math.sqrt(weight.numel()), key
            assert abs(weight.std() / std - 1) < 5 / math.sqrt(2 * weight.numel()), key


def test_every_matrix_is_drawn_on_its_own(single: dict[str, Whole]) -> None:
    """No two layers, and no two halves of a gated MLP, start from the same numbers."""
    matrices = {key: weight for key, weight in single["llama"].items() if weight.dim() > 1}
    for key in [key for key in matrices if key.endswith("linear_fc1.weight")]:
        matrices[f"{key}.gate"], matrices[f"{key}.up"] = matrices[key].chunk(2)
    assert len(set(hashes(matrices).values())) == len(matrices)


def test_seed_alone_decides(single: dict[str, Whole]) -> None:
    assert hashes(single["again"]) == hashes(single["llama"])
    for key, weight in single["llama_seed"].items():
        assert torch.equal(weight, single["llama"][key]) == (weight.dim() == 1), key
