"""The soak: healthy runs whose every step is proven, resumed three times. None may be stopped, and none warned.

    pytest -m soak -n 12            one GPU: about 25 minutes on an H100
    pytest -m soak -n 44            four GPUs, among which the workers are dealt out

Each family of models is cut to a few layers of smaller width. What makes a check wrong about a healthy run shows after
hundreds of steps, with real text, after resumes, and with weights of a trained model.
"""

import json
import os

import pytest
import torch

from gpt_pretrain.report.metrics_file import load_metrics
from tests.launching import run_ranks

# A start trains to each of these steps; the last three resume.
STOPS = (3, 20, 150, 200)
CUT = ("model.vocab_size=2048", "model.hidden_size=1024", "model.encoder_seq_length=512", "model.num_layers=3")
HEADS = ("model.num_attention_heads=16", "model.num_query_groups=4", "model.kv_channels=64")
FAMILIES = {
    "gpt2": ("model=gpt2_124m", "model.vocab_size=2048", "model.num_layers=6", "model.encoder_seq_length=512"),
    "gpt3": ("model=gpt3_1_3b", "model.vocab_size=2048", "model.num_layers=2", "model.encoder_seq_length=512"),
    "llama": ("model=llama3_8b", *CUT, *HEADS, "model.ffn_hidden_size=3584"),
    "qwen3": ("model=qwen3_8b", *CUT, *HEADS, "model.ffn_hidden_size=3072"),
    "mixtral": ("model=mixtral_8x7b", *CUT, *HEADS, "model.ffn_hidden_size=1792", "model.moe_ffn_hidden_size=1792"),
    "qwen3_moe": (
        "model=qwen3_30b_a3b",
        *CUT,
        *HEADS,
        "model.num_moe_experts=32",
        "model.moe_ffn_hidden_size=512",
        "model.moe_grouped_kernel=transformer_engine",
    ),
}
DENSE = ("gpt2", "gpt3", "llama", "qwen3")
STORED = "model.fp8_params=true"
TE = (("fp8=delayed",), ("fp8=tensorwise",), ("fp8=blockwise",))
TORCHAO = (("fp8=torchao_tensorwise",), ("fp8=torchao_rowwise",), ("fp8=torchao_rowwise_with_gw_hp",))
RUN = (
    "model.micro_batch_size=4",
    "model.global_batch_size=16",
    "model.optim.lr=1e-3",
    "model.optim.sched.warmup_steps=20",
    "model.optim.sched.decay_steps=200",
    "trainer.limit_val_batches=2",
    "trainer.val_check_interval=50",
    "logging.fp8_proof_interval=1",
    "logging.tensorboard=false",
    "sample.max_new_tokens=0",
)
TEXT, RANDOM = "data=stdlib", "data=mock"

CASES = {
    **{f"{family} {recipe[0]}": (family, recipe) for family in DENSE for recipe in TE},
    **{f"{family} {recipe[0]} stored": (family, (*recipe, STORED)) for family in DENSE for recipe in TE},
    **{f"{family} {recipe[0]}": (family, recipe) for family in ("mixtral", "qwen3_moe") for recipe in TE[1:]},
    **{f"{family} {recipe[0]}": (family, recipe) for family in ("gpt2", "llama") for recipe in TORCHAO},
    "llama fp8=torchao_tensorwise stored": ("llama", (*TORCHAO[0], STORED)),
    # One microbatch, an odd number of layers, and a step of four ranks' samples.
    "llama fp8=delayed whole batch": ("llama", (*TE[0], "model.micro_batch_size=16")),
    # Experts with few tokens, or one.
    "mixtral fp8=tensorwise few tokens": ("mixtral", (*TE[1], "model.micro_batch_size=1", "model.num_moe_experts=12")),
}
LAYOUTS = {
    "DP 4": ("parallelism=dp",),
    "TP 2 + SP": ("parallelism=tp2_sp",),
    "PP 2": ("parallelism=pp2",),
    "EP 2": ("parallelism=dp", "model.expert_model_parallel_size=2"),
}


def gpus(count: int) -> dict[str, str]:
    """GPUs for a worker's run: one of those there, dealt out, or the first ones."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    first = int(worker) % torch.cuda.device_count() if count == 1 else 0
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(first + index) for index in range(count))}


def soak(run_dir, num_ranks, starts):
    """Runs each start, given its overrides and the step that it trains to; every step is proven, and none warns."""
    for overrides in starts:
        arguments = ["-m", "gpt_pretrain", *RUN, f"run_dir={run_dir}", *overrides]
        done = run_ranks(num_ranks, arguments, env=gpus(num_ranks), timeout_s=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = load_metrics(run_dir)
    assert [proof.step for proof in metrics.fp8_proofs] == list(range(1, STOPS[-1] + 1))
    assert [proof.proof for proof in metrics.fp8_proofs] == list(range(1, STOPS[-1] + 1))
    warned = [(proof.step, proof.warnings) for proof in metrics.fp8_proofs if proof.warnings]
    assert warned == []
    assert len(metrics.starts) == len(starts)
    print(f"{len(metrics.fp8_proofs)} proofs, {len(starts) - 1} resumes, loss {metrics.train[-1].loss:.3f}")


def soak_alone(run_dir, run):
    """The four starts of one process."""
    soak(run_dir, 1, [(*run, f"trainer.max_steps={stop}") for stop in STOPS])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_every_step_of_a_healthy_run_is_proven(case, tmp_path):
    family, overrides = CASES[case]
    soak_alone(tmp_path / "run", (*FAMILIES[family], TEXT, *overrides))


RECIPES = [*TE, *((*recipe, STORED) for recipe in TE)]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", RECIPES, ids=" ".join)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_random_tokens_are_proven(family, recipe, tmp_path):
    soak_alone(tmp_path / "run", (*FAMILIES[family], RANDOM, *recipe))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", RECIPES, ids=" ".join)
def test_a_text_of_one_word_is_proven(recipe, tmp_path):
    """All rows of a batch are alike, and rounding errors add up over its tokens."""
    text = tmp_path / "text.jsonl"
    text.write_text((json.dumps({"text": "word " * 2_000}) + "\n") * 200)
    data = ("data=text", f"model.data.text_files=[{text}]", "model.tokenizer.vocab_size=300")
    soak_alone(tmp_path / "run", (*FAMILIES["gpt2"], *data, *recipe))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", RECIPES, ids=" ".join)
def test_imported_weights_with_outlier_channels_are_proven(recipe, tmp_path):
    import transformers

    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=2048,
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=3,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=512,
        )
    )
    with torch.no_grad():
        # Few channels are large from the embedding to the last layer, as in trained models.
        model.model.embed_tokens.weight[:, [7, 400]] *= 300
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[[7, 400]] *= 50
            layer.input_layernorm.weight[[7, 400]] *= 10
    model.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    imported = run_ranks(
        1, ["-m", "gpt_pretrain.import_hf", f"path={tmp_path / 'hf'}", f"out={tmp_path / 'start'}"], timeout_s=300
    )
    assert imported.returncode == 0, imported.stderr[-3000:]
    start = ("--config-dir", str(tmp_path / "start"), "experiment=imported", RANDOM)
    soak_alone(tmp_path / "run", (*start, "model.encoder_seq_length=512", *recipe))


@pytest.mark.soak(count=4)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        (layout, recipe)
        for layout in LAYOUTS
        for recipe in ((*TE[0], STORED), TE[1], TE[2])
        # Experts exclude delayed scaling and FP8 weights.
        if layout != "EP 2" or recipe[0] != "fp8=delayed"
    ],
    ids=str,
)
def test_every_step_of_four_ranks_is_proven_also_in_another_layout(layout, recipe, tmp_path):
    family = "mixtral" if layout == "EP 2" else "llama"
    run = (*FAMILIES[family], TEXT, *recipe, "model.num_layers=4", "model.micro_batch_size=2")
    others = [LAYOUTS["DP 4"], LAYOUTS[layout], LAYOUTS["DP 4"], LAYOUTS[layout]]
    starts = [(*run, *places, f"trainer.max_steps={stop}") for stop, places in zip(STOPS, others, strict=True)]
    soak(tmp_path / "run", 4, starts)
