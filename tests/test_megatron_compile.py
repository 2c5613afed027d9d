"""Layers compiled as a whole (`model.compile`): the same numbers, names and checkpoints, and nothing falls back."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.codecache import compiled_fx_graph_hash

from gpt_pretrain.config.errors import RunError
from gpt_pretrain.megatron.whole_layers import prepare_compiler, without_graphs
from gpt_pretrain.run.kernels import describe_kernels
from tests.emulated_training import emulated_training
from tests.forked_runs import fork_ranks
from tests.platforms import H200, spec_of
from tests.refusals import Refused, check_refused
from tests.runs import run_small

COMPILED = "model.compile=true"
# The graph of a layer takes half a minute of C++ on two busy cores, where no earlier test has left it in torch's cache.
pytestmark = pytest.mark.timeout(900)
# What a layer computes in BF16 is rounded to 8 bits, at other places where it is fused. In fp32 it is 24, and a loss is
# the sum of some hundred such.
ROUNDING = {"fp32": 1e-5, "bf16": 2**-9}


# Where layers or precision are compiled wrongly, they are so without the other.
@pytest.mark.parametrize(("model", "precision"), [("tiny", "fp32"), ("tiny", "bf16"), ("gpt2_124m", "fp32")])
def test_it_learns_what_uncompiled_layers_learn(model, precision):
    kind = () if model == "tiny" else ("model.normalization=layernorm", "model.activation=gelu_tanh", "model.bias=true")
    losses, names, graphs = {}, {}, {}
    for overrides in ((), (COMPILED,)):
        before = counters["stats"]["unique_graphs"]
        with emulated_training(f"trainer.precision={precision}", *kind, *overrides) as training:
            losses[overrides] = [training.step(), training.step(), training.validate(), training.step()]
            graphs[overrides] = counters["stats"]["unique_graphs"] - before
            (chunk,) = training.chunks
            names[overrides] = (sorted(dict(chunk.named_parameters())), sorted(chunk.sharded_state_dict()))
    assert losses[COMPILED,] == pytest.approx(losses[()], rel=ROUNDING[precision])
    assert graphs == {(): 0, (COMPILED,): 1}
    assert names[COMPILED,] == names[()]


def test_microbatches_of_one_sample_share_the_graph():
    one = ("model.micro_batch_size=1", "model.global_batch_size=2")
    losses = {}
    for overrides in ((), (COMPILED,)):
        with emulated_training(*one, *overrides) as training:
            losses[overrides] = [training.step(), training.step()]
    assert losses[COMPILED,] == pytest.approx(losses[()], rel=ROUNDING["fp32"])


def test_a_graph_that_breaks_ends_the_run_rather_than_its_gain():
    with emulated_training(COMPILED) as training:
        training.chunks[0].decoder.layers[0].mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        with pytest.raises(RunError, match=r"model\.compile=true.*Unsupported.*model\.compile=false"):
            training.step()


def test_graphs_on_disk_are_for_one_instruction_set(monkeypatch):
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    keys = {}
    for tag in ("", "mine"):
        monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", tag)
        prepare_compiler()
        assert torch.compiler.config.cache_key_tag == tag + torch.backends.cpu.get_cpu_capability()
        keys[tag], _ = compiled_fx_graph_hash(graph, [], {}, [])
    assert len(set(keys.values())) == 2


@pytest.mark.parametrize(("name", "value"), [("PATH", "{}"), ("CXX", "{}/g++")])
def test_without_a_compiler_a_run_ends_before_it_reads_a_text(name, value, tmp_path):
    cache, run_dir = tmp_path / "cache", tmp_path / "run"
    command = ["-m", "gpt_pretrain", COMPILED, f"model.data.cache_dir={cache}", f"run_dir={run_dir}"]
    done = fork_ranks(1, command, env={name: value.format(tmp_path)})
    assert done.returncode == 2
    assert all(part in done.stderr for part in (COMPILED, "g++", name, "model.compile=false"))
    assert not cache.exists()
    assert not run_dir.exists()


def test_hooks_are_called_where_somebody_looks_into_the_layers():
    with emulated_training(COMPILED) as training:
        training.step()
        called = []
        for layer in training.chunks[0].decoder.layers:
            layer.mlp.register_forward_hook(lambda module, *_: called.append(module))
        training.step()
        assert called == []
        with without_graphs(training.chunks):
            training.step()
    # Two microbatches.
    assert len(called) == 2 * len(training.chunks[0].decoder.layers)


def test_a_second_graph_ends_the_run_and_other_lengths_run_uncompiled():
    with emulated_training(COMPILED) as training:
        training.step()
        (batch, *_) = training._batches(0)
        (chunk,) = training.chunks
        short = {"input_ids": batch.tokens[:, :16], "position_ids": batch.position_ids[:, :16], "attention_mask": None}
        chunk.eval()
        assert chunk(**short).shape[1] == 16
        chunk.train()
        with pytest.raises(RunError, match=r"model\.compile=true.*microbatches.*model\.compile=false"):
            chunk(**short)


# Layers of the sizes that `emulated_training` has: their graph is in torch's cache.
SHORT = (
    "trainer.limit_val_batches=0",
    "model.encoder_seq_length=32",
    "model.max_position_embeddings=32",
    "model.num_attention_heads=4",
    "model.num_layers=2",
    "model.micro_batch_size=2",
    "model.global_batch_size=4",
    "checkpoint.save_at_end=true",
    "model.optim.sched.name=constant",
)


THREE_STEPS = (*SHORT, "trainer.max_steps=3", "checkpoint.save_at_end=false")


@pytest.fixture(scope="module")
def uncompiled(tmp_path_factory, cache_dir):
    """Losses of one process."""
    return losses_of(1, tmp_path_factory.mktemp("uncompiled"), cache_dir, THREE_STEPS)


def losses_of(num_ranks, run_dir, cache_dir, overrides):
    return [record.loss for record in run_small(num_ranks, run_dir, cache_dir, overrides).train]


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp"])
def test_two_processes_learn_what_one_learns(layout, uncompiled, tmp_path, cache_dir):
    overrides = (*THREE_STEPS, COMPILED, f"parallelism={layout}", "model.overlap_param_gather=false")
    assert losses_of(2, tmp_path / "run", cache_dir, overrides) == pytest.approx(uncompiled, rel=1e-5)


def test_a_resumed_run_goes_on_bit_for_bit_and_an_uncompiled_one_takes_over(tmp_path, cache_dir):
    whole = run_small(1, tmp_path / "whole", cache_dir, [*SHORT, COMPILED, "trainer.max_steps=4"]).train
    for steps in (2, 4):
        parts = run_small(1, tmp_path / "parts", cache_dir, [*SHORT, COMPILED, f"trainer.max_steps={steps}"]).train
    assert [record.loss for record in parts] == [record.loss for record in whole]
    after = run_small(1, tmp_path / "parts", cache_dir, [*SHORT, "trainer.max_steps=5"]).train
    assert [record.step for record in after] == [1, 2, 3, 4, 5]


def test_a_gpu_computes_them_without_transformer_engine_and_the_header_says_so(compose_config):
    kernels = spec_of(compose_config(COMPILED), H200).kernels
    assert (kernels.compile, kernels.torch_attention, kernels.transformer_engine) == (True, True, False)
    fused = (kernels.bias_dropout_add_fusion, kernels.bias_activation_fusion, kernels.gradient_accumulation_fusion)
    assert not any(fused)
    described = describe_kernels(kernels, H200)
    assert described["layers"] == "megatron-core local, compiled"


WRONG = [
    "model.cuda_graph_impl=local",
    "parallelism=dp model.overlap_param_gather=true",
    "parallelism=tp2_sp model.overlap_param_gather=false model.sequence_parallel=true",
    "parallelism=cp2 model.overlap_param_gather=false model.context_parallel_size=2",
    "model.activations_checkpoint_granularity=selective",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    "model.transformer_engine=true",
    "model.use_flash_attention=true",
    "model.apply_rope_fusion=true",
    "model.bias_activation_fusion=true",
    "model.bias_dropout_add_fusion=true",
    "model.gradient_accumulation_fusion=true",
    "model.embedding_gradient_fusion=true",
]


@pytest.mark.parametrize("setting", WRONG)
def test_what_excludes_it_is_named_with_ways_out(setting):
    check_refused(Refused(f"{COMPILED} {setting}", f"{COMPILED} {setting.split()[-1]}"))


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("fp8=torchao_tensorwise", "model.fp8=true TorchAO"),
        ("fp8=delayed", "model.fp8=true"),
        ("trainer.deterministic=true", "trainer.deterministic=true"),
        # Without its experts moe_small would have other keys without effect.
        ("model=moe_small", "model.num_moe_experts=4"),
    ],
)
def test_what_a_run_is_about_is_not_offered_away(setting, told):
    check_refused(Refused(f"{COMPILED} {setting}", told=f"{COMPILED} {told}"))
