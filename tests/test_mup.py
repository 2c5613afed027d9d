"""muP is table 8 of Yang et al. 2022 (arXiv 2203.03466), calculated here by hand, in every layout."""

import math

import pytest
import torch

from gpt_pretrain.checkpoint.saved_model import open_checkpoint
from gpt_pretrain.checkpoint.state import describe_weights, differences
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.training.loaded_model import inference_config, loaded_model
from tests.emulated_training import emulate, emulated_training
from tests.refusals import compose_quickly
from tests.runs import run_small
from tests.saved_models import FAMILIES, saved_model, some_tokens

# A model four times as wide as its base; TINY has width 64, two layers, four heads of 16, a rate of 3e-3.
M = 4
MUP = ("model.use_mup=true", f"model.mup_base_hidden_size={64 // M}")
# Attention as without muP.
USUAL_ATTENTION = "model.mup_attn_scale_power=0.5"
TIED = "model.share_embeddings_and_output_weights=true"
LEARNED = "model.position_embedding_type=learned_absolute"
RATE, EPSILON, DECAY = 3e-3, 1e-3, 0.1


def weights(training):
    return {
        name: parameter.detach().double().clone()
        for chunk in training.chunks
        for name, parameter in chunk.named_parameters()
    }


def is_hidden(name):
    """Whether both dimensions of a weight grow with the width."""
    return name.startswith("decoder.layers.") and name.split(".")[-2].startswith("linear_") and name.endswith("weight")


@pytest.mark.parametrize("overrides", [(), (TIED, LEARNED)], ids=["untied", "tied"])
def test_matrices_of_the_layers_begin_smaller_by_the_root_of_the_width(overrides):
    with emulated_training(*overrides) as training:
        before = weights(training)
    with emulated_training(*MUP, *overrides) as training:
        after = weights(training)
    assert sum(map(is_hidden, before)) == 8
    for name, weight in after.items():
        expected = 1 / math.sqrt(M) if is_hidden(name) else 1.0
        assert torch.equal(weight, before[name] * expected), name
    spread = {name: after[f"{name}.weight"].std().item() for name in ("embedding.word_embeddings", *LAYER_STDS)}
    assert spread == pytest.approx({"embedding.word_embeddings": 0.02, **LAYER_STDS}, rel=0.05)


LAYER_STDS = {
    "decoder.layers.0.self_attention.linear_qkv": 0.01,
    "decoder.layers.0.mlp.linear_fc1": 0.01,
    # Projections into the residual stream: by sqrt(2 · 2 layers), too.
    "decoder.layers.1.self_attention.linear_proj": 0.005,
    "decoder.layers.1.mlp.linear_fc2": 0.005,
}


@pytest.mark.parametrize(
    ("overrides", "embedding_rate"),
    [((), RATE), ((TIED, LEARNED), RATE), (("model.optim.decoupled_lr=1e-2",), 1e-2)],
    ids=["untied", "tied", "a rate of their own for embedding and head"],
)
def test_a_step_has_the_rate_and_epsilon_of_table_8(overrides, embedding_rate):
    given = (f"model.optim.eps={EPSILON}", f"model.optim.weight_decay={DECAY}", "trainer.gradient_clip_val=0")
    with emulated_training(*MUP, *given, *overrides) as training:
        before, gradients = weights(training), training.gradients()
        training.step()
        after = weights(training)
    for name, weight in before.items():
        mult = M if is_hidden(name) else 1
        of_embedding = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        rate = (embedding_rate if of_embedding else RATE) / mult
        decay = DECAY if weight.dim() > 1 else 0.0
        # Adam's first step, its moments corrected for their start.
        gradient = gradients[name]
        expected = weight * (1 - rate * decay) - rate * gradient / (gradient.abs() + EPSILON / mult)
        torch.testing.assert_close(
            after[name], expected, rtol=1e-6, atol=1e-6 * rate, msg=lambda text, at=name: f"{at}: {text}"
        )


@pytest.mark.parametrize("loss", [(), ("model.cross_entropy_loss_fusion=true",)], ids=["core", "linear"])
@pytest.mark.parametrize("tied", [(), (TIED,)], ids=["untied", "tied"])
def test_logits_are_divided_by_the_width_in_both_passes(loss, tied):
    """Beside a model without muP whose last norm gives a fourth, which is what the head then sees."""
    given = (*loss, *tied, "model.init_method_std=1")
    with emulated_training(*MUP, USUAL_ATTENTION, *given) as mup:
        ours, gradients = weights(mup), mup.gradients()
        loss_of_ours = mup.validate()
    with emulated_training(*given) as plain:
        (chunk,) = plain.chunks
        with torch.no_grad():
            for name, parameter in chunk.named_parameters():
                parameter.copy_(ours[name] / (M if name == "decoder.final_layernorm.weight" else 1))
        expected, loss_of_plain = plain.gradients(), plain.validate()
    assert loss_of_ours == pytest.approx(loss_of_plain, rel=1e-6)
    assert loss_of_ours != pytest.approx(math.log(128), rel=1e-2), "flat logits would agree whatever their factor"
    for name, gradient in gradients.items():
        # d loss / d norm, which is M times what the other model has.
        mult = 1 / M if name == "decoder.final_layernorm.weight" else 1
        norm = gradient.norm()
        assert (gradient - expected[name] * mult).norm() < 1e-5 * norm, name


@pytest.mark.parametrize(
    ("overrides", "scale"), [((), 1 / 16), (("model.mup_base_head_dim=4",), 2 / 16), ((USUAL_ATTENTION,), 1 / 4)]
)
def test_attention_is_scaled_by_the_width_of_a_head(overrides, scale):
    with emulated_training(*MUP, "model.num_query_groups=4", *overrides) as training:
        attention = training.chunks[0].decoder.layers[0].self_attention.core_attention
        query, key, value = torch.randn(3, 8, 1, 4, 16, generator=torch.Generator().manual_seed(1)).unbind()
        found = attention(query, key, value, None, attn_mask_type=attention.attn_mask_type)
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * scale
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
    expected = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value).flatten(2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_embeddings_have_their_factor():
    tokens, positions = torch.arange(32)[None], torch.arange(32)[None]
    with emulated_training(*MUP, LEARNED, "model.mup_embedding_mult=10") as training:
        embedding = training.chunks[0].embedding
        found = embedding(tokens, positions)
        expected = 10 * (embedding.word_embeddings.weight[:32] + embedding.position_embeddings.weight)
    torch.testing.assert_close(found[:, 0], expected)


SHORT = (
    *("model.use_mup=true", "model.mup_base_hidden_size=32", "model.mup_embedding_mult=4"),
    *("trainer.max_steps=4", "trainer.limit_val_batches=0", "model.micro_batch_size=2"),
    "model.optim.sched.decay_steps=10",
)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, cache_dir):
    return run_small(1, tmp_path_factory.mktemp("one") / "run", cache_dir, SHORT)


# Groups of parameters with rates of their own find theirs again: in an optimizer of whole weights and of shards.
@pytest.mark.parametrize(
    ("layout", "resumes"), [("tp2_sp", False), ("pp2", False), ("dp", True), ("zero2", False), ("fsdp", True)]
)
def test_layouts_train_as_one_process_and_resume_to_the_bit(layout, resumes, tmp_path, cache_dir, one_process):
    run = [*SHORT, f"parallelism={layout}"]
    uncut = run_small(2, tmp_path / "uncut", cache_dir, run)
    for record, expected in zip(uncut.train, one_process.train, strict=True):
        assert record.loss == pytest.approx(expected.loss, rel=1e-5)
        assert (record.lr, record.hidden_lr) == (expected.lr, expected.lr / 2)
    if resumes:
        run_small(2, tmp_path / "run", cache_dir, [*run, "trainer.max_steps=2"])
        resumed = run_small(2, tmp_path / "run", cache_dir, run)
        assert [(each.loss, each.hidden_lr) for each in resumed.train] == [(e.loss, e.hidden_lr) for e in uncut.train]


@pytest.mark.parametrize("overrides", [("parallelism=pp2",), ("parallelism=tp2",)])
def test_tied_embeddings_train_as_in_one_process(overrides, tmp_path, cache_dir):
    tied = [*SHORT, TIED, LEARNED, "model.mup_output_mult=0.25", "checkpoint.save_at_end=false"]
    one = run_small(1, tmp_path / "one", cache_dir, tied)
    two = run_small(2, tmp_path / "two", cache_dir, [*tied, *overrides])
    assert [each.loss for each in two.train] == pytest.approx([each.loss for each in one.train], rel=1e-5)


def test_fp8_is_proven(tmp_path, cache_dir, one_process):
    fp8 = [*emulate("delayed"), "trainer.precision=bf16", "parallelism=dp"]
    metrics = run_small(1, tmp_path / "run", cache_dir, [*SHORT, *fp8])
    assert metrics.train[-1].loss == pytest.approx(one_process.train[-1].loss, rel=0.02)
    assert metrics.train[-1].hidden_lr == metrics.train[-1].lr / 2


def test_a_checkpoint_is_of_another_model_with_or_without_mup():
    plain, mup = (describe_weights(compose_quickly(list(given)).model) for given in ((), MUP))
    assert "model.use_mup=true" in differences(mup, plain)
    assert "model.use_mup=false (saved with true)" in differences(plain, mup)
    assert differences(plain, plain) == differences(mup, mup) == ""


def test_generation_computes_what_was_trained(tmp_path):
    mup = ("model.use_mup=true", "model.mup_base_hidden_size=48", "model.mup_embedding_mult=3")
    with saved_model(tmp_path, *FAMILIES["llama"], *mup, "model.mup_base_head_dim=7") as saved:
        tokens = some_tokens(saved.config)
        expected = saved.logits(tokens)
    checkpoint = open_checkpoint(saved.path)
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    with loaded_model(checkpoint, inference_config(checkpoint), read_launch({})) as loaded, torch.no_grad():
        found = loaded.gpt_chunks[0].eval()(tokens, positions, None)
    torch.testing.assert_close(found[..., : expected.size(-1)], expected)
