"""The soak: healthy runs whose every step is proven, resumed three times. None may be stopped, and none warned.

    pytest -m soak -n 12                        on one GPU of 80 GB, or twelve workers for each of several
    pytest -m slow tests/test_soak.py -n 2      small models in emulated FP8, on two cores

Each family of models is cut to a few layers of smaller width. What makes a check wrong about a healthy run shows after
hundreds of steps, with real text, after resumes, and with weights of a trained model.
"""

import json
import os

import pytest
import torch

from gpt_pretrain.config.recipes import RECIPES
from gpt_pretrain.report.metrics_file import load_metrics
from tests.forked_runs import fork_ranks
from tests.launching import run_ranks
from tests.runs import small_run_arguments

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
    # A replay reports none of its products.
    "model.cuda_graph_impl=none",
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


# The same families in small, for emulation.
SMALL = (
    "model.num_layers=3",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.micro_batch_size=2",
    "model.global_batch_size=8",
    "model.optim.sched.warmup_steps=20",
    "model.optim.sched.decay_steps=200",
    "trainer.val_check_interval=50",
    "trainer.log_every_n_steps=10",
    "logging.fp8_proof_interval=1",
)
GROUPED = ("model.ffn_hidden_size=128", "model.num_query_groups=2", "model.kv_channels=16")
EXPERTS = (*GROUPED, "model.num_moe_experts=4", "model.moe_ffn_hidden_size=96", "model.moe_router_topk=2")
SMALL_FAMILIES = {
    "gpt2": ("model=gpt2_124m",),
    "gpt3": ("model=gpt3_1_3b", "model.ffn_hidden_size=256"),
    "llama": ("model=llama3_8b", *GROUPED),
    "qwen3": ("model=qwen3_8b", *GROUPED),
    "mixtral": ("model=mixtral_8x7b", *EXPERTS),
    "qwen3_moe": ("model=qwen3_30b_a3b", *EXPERTS),
}
EMULATED = [recipe.preset for recipe in RECIPES.values()]


def gpus(count: int) -> dict[str, str]:
    """GPUs for a worker's run: one of those there, dealt out, or the first ones."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    first = int(worker) % len(visible) if count == 1 else 0
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + count])}


def check_proofs(run_dir, num_starts):
    """Every step was proven once, and none warned."""
    metrics = load_metrics(run_dir)
    assert [proof.step for proof in metrics.fp8_proofs] == list(range(1, STOPS[-1] + 1))
    assert [proof.proof for proof in metrics.fp8_proofs] == list(range(1, STOPS[-1] + 1))
    assert [(proof.step, proof.warnings) for proof in metrics.fp8_proofs if proof.warnings] == []
    assert len(metrics.starts) == num_starts


def soak(run_dir, num_ranks, starts):
    """Runs each start on GPUs, given its overrides with the step that it trains to."""
    for overrides in starts:
        arguments = ["-m", "gpt_pretrain", *RUN, f"run_dir={run_dir}", *overrides]
        done = run_ranks(num_ranks, arguments, env=gpus(num_ranks), timeout_s=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_proofs(run_dir, len(starts))


def soak_small(run_dir, cache_dir, num_ranks, starts):
    """The same in emulated FP8 on CPUs."""
    for overrides in starts:
        arguments = small_run_arguments(run_dir, cache_dir, ["model.fp8_emulate=true", *overrides])
        done = fork_ranks(num_ranks, arguments, timeout_s=300)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_proofs(run_dir, len(starts))


def soak_alone(run_dir, run):
    """The four starts of one process."""
    soak(run_dir, 1, [(*run, f"trainer.max_steps={stop}") for stop in STOPS])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_every_step_of_a_healthy_run_is_proven(case, tmp_path):
    family, overrides = CASES[case]
    soak_alone(tmp_path / "run", (*FAMILIES[family], TEXT, *overrides))


TE_RECIPES = [*TE, *((*recipe, STORED) for recipe in TE)]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", TE_RECIPES, ids=" ".join)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_random_tokens_are_proven(family, recipe, tmp_path):
    soak_alone(tmp_path / "run", (*FAMILIES[family], RANDOM, *recipe))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", TE_RECIPES, ids=" ".join)
def test_a_text_of_one_word_is_proven(recipe, tmp_path):
    """All rows of a batch are alike, and rounding errors add up over its tokens."""
    text = tmp_path / "text.jsonl"
    text.write_text((json.dumps({"text": "word " * 2_000}) + "\n") * 200)
    data = ("data=text", f"model.data.text_files=[{text}]", "model.tokenizer.vocab_size=300")
    soak_alone(tmp_path / "run", (*FAMILIES["gpt2"], *data, *recipe))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", TE_RECIPES, ids=" ".join)
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


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, [f"fp8={recipe}"]) for family in DENSE for recipe in EMULATED),
        *((family, ["fp8=torchao_tensorwise", STORED, "trainer.precision=bf16"]) for family in DENSE),
        *((family, [f"fp8={recipe}"]) for family in ("mixtral", "qwen3_moe") for recipe in ("tensorwise", "blockwise")),
    ],
    ids=str,
)
def test_every_step_of_a_healthy_emulated_run_is_proven(family, overrides, tmp_path, cache_dir):
    run = [*SMALL_FAMILIES[family], *SMALL, *overrides]
    soak_small(tmp_path / "run", cache_dir, 1, [[*run, f"trainer.max_steps={stop}"] for stop in STOPS])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "torchao_rowwise"])
@pytest.mark.parametrize("layout", ["dp", "tp2_sp", "pp2"])
def test_every_step_of_two_emulated_ranks_is_proven_also_in_another_layout(layout, recipe, tmp_path, cache_dir):
    run = [*SMALL_FAMILIES["llama"], *SMALL, "model.num_layers=4", f"fp8={recipe}"]
    places = ["dp", layout, "tp2_sp" if layout == "dp" else "dp", layout]
    starts = [
        [*run, f"parallelism={place}", f"trainer.max_steps={stop}"] for stop, place in zip(STOPS, places, strict=True)
    ]
    soak_small(tmp_path / "run", cache_dir, 2, starts)
