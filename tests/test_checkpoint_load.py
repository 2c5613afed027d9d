"""What is loaded is what was saved, or nothing is: damage, other models, other data; weights alone for a new run."""

import dataclasses
import hashlib
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from gpt_pretrain.checkpoint.load import (
    VerifiedCheckpoint,
    choose_start,
    load_checkpoint,
    load_weights,
    verify_checkpoint,
)
from gpt_pretrain.checkpoint.manifest import TrainingProgress, read_manifest
from gpt_pretrain.checkpoint.state import (
    describe_fp8_state,
    describe_weights,
    differences,
    keeps_fp8_state,
    take_extra_states,
)
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.optimizer_state import is_moment
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.run.products import resolve
from tests.checkpoint_files import flip
from tests.emulated_training import TINY, emulate, emulated_training, save_checkpoint
from tests.optimizer_states import LEAN
from tests.refusals import compose_quickly
from tests.resharded_training import saved_state

DATA = {"tokenizer": "of the run", "tokens": "of the run", "splits": "of the run"}
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
DISTRIBUTED = "model.use_distributed_optimizer=true"


def save(training, folder, step, data=DATA):
    progress = TrainingProgress(step=step, consumed_samples=4 * step)
    return save_checkpoint(folder, training.trainable, progress, training.config, data)


def restore(training, path, data=DATA):
    return load_checkpoint(verify_checkpoint(path), training.trainable, training.config, data)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run's checkpoints of steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("kept") / "checkpoints"
    with emulated_training(*DROPOUT) as training:
        for step in (1, 2, 3):
            training.step()
            save(training, folder, step)
    return folder


@pytest.fixture
def checkpoints(kept, tmp_path):
    """A copy to do harm to."""
    return shutil.copytree(kept, tmp_path / "run" / "checkpoints")


@cache
def tiny_config():
    return compose_quickly(TINY)


@pytest.fixture
def choose(checkpoints):
    """What a run in this process starts from, with keys of `checkpoint` as given."""
    install_cpu_device()

    def chosen(**keys):
        config = dataclasses.replace(tiny_config().checkpoint, **{"resume": "auto", **keys})
        with process_groups(tiny_config().model, read_launch({}), detect_platform()):
            return choose_start(config, checkpoints)

    return chosen


def step(checkpoints, number):
    return checkpoints / f"step_{number:08d}"


# A checkpoint's kinds of files.
KINDS = ("*.distcp", ".metadata", "metadata.json", "manifest.json")


def test_these_are_all_kinds_of_files(kept):
    files = set(step(kept, 3).iterdir())
    assert files == {path for kind in KINDS for path in step(kept, 3).glob(kind)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_one_changed_byte_is_an_error_that_names_the_file(kind, place, checkpoints, choose):
    file = next(step(checkpoints, 3).glob(kind))
    flip(file, place)
    with pytest.raises(UserError) as refused:
        choose()
    assert re.match(rf"{re.escape(str(file))} (has changed|is garbled|cannot be read)", str(refused.value))
    assert "checkpoint.fall_back=true" in str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", ["truncated", "missing"])
def test_a_truncated_or_missing_file_is_an_error_that_names_it(kind, harm, checkpoints, choose):
    file = next(step(checkpoints, 3).glob(kind))
    content = file.read_bytes()
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"checkpoint\.fall_back=true") as refused:
        choose()
    if kind == "manifest.json":
        assert "manifest.json" in str(refused.value)
        assert str(step(checkpoints, 3)) in str(refused.value)
    else:
        found = f"it has {len(content) // 2} bytes, and {len(content)} were written"
        said = f"{file} is missing" if harm == "missing" else f"{file} is truncated: {found}"
        assert str(refused.value).startswith(said)


def test_every_damaged_file_is_named_up_to_a_number(checkpoints, choose):
    flip(step(checkpoints, 3) / ".metadata", 0.5)
    (step(checkpoints, 3) / "metadata.json").unlink()
    with pytest.raises(UserError) as refused:
        choose()
    assert ".metadata has changed" in str(refused.value)
    assert "metadata.json is missing" in str(refused.value)


def test_an_earlier_checkpoint_takes_the_place_of_a_damaged_one_if_asked(checkpoints, choose):
    file = next(step(checkpoints, 3).glob("*.distcp"))
    flip(file, 0.5)
    start = choose(fall_back=True)
    assert (start.checkpoint.path, start.weights_only) == (step(checkpoints, 2), False)
    (warning,) = start.warnings
    assert warning.startswith(f"{step(checkpoints, 3)} was skipped: {file} has changed")
    # One that the user names likewise, and none that is newer than what was asked for.
    assert choose(fall_back=True, resume=str(step(checkpoints, 3))).checkpoint.path == step(checkpoints, 2)
    flip(step(checkpoints, 1) / ".metadata", 0.5)
    with pytest.raises(UserError, match="no checkpoint verifies"):
        choose(fall_back=True, resume=str(step(checkpoints, 1)))
    flip(step(checkpoints, 2) / ".metadata", 0.5)
    with pytest.raises(UserError, match="no checkpoint verifies") as refused:
        choose(fall_back=True)
    assert all(str(step(checkpoints, number)) in str(refused.value) for number in (1, 2, 3))


def test_the_first_checkpoint_of_a_run_has_none_to_fall_back_to(checkpoints, choose):
    (checkpoints / "latest").write_text("step_00000001\n")
    flip(step(checkpoints, 1) / ".metadata", 0.5)
    with pytest.raises(UserError) as refused:
        choose()
    assert "fall_back" not in str(refused.value)
    assert str(refused.value).endswith("Put the files back from a copy, or start afresh with another run_dir")


@pytest.mark.parametrize("pointer", [None, b"", b"step_00000007", b"step_00000002/..", b"\x00\xff\n"])
def test_without_a_good_pointer_the_newest_checkpoint_that_verifies_is_found(pointer, checkpoints, choose):
    latest = checkpoints / "latest"
    latest.unlink()
    if pointer is not None:
        latest.write_bytes(pointer)
    start = choose()
    assert start.checkpoint.path == step(checkpoints, 3)
    (warning,) = start.warnings
    assert warning.startswith(f"{latest} {'is missing' if pointer is None else 'names no existing checkpoint'}")
    assert warning.endswith("continuing from step_00000003, the newest one that verifies")
    flip(next(step(checkpoints, 3).glob("*.distcp")), 0.5)
    start = choose()
    assert start.checkpoint.path == step(checkpoints, 2)
    assert "step_00000003 was skipped" in start.warnings[1]


def test_the_pointer_is_followed_back(checkpoints, choose):
    (checkpoints / "latest").write_text("step_00000002\n")
    start = choose()
    assert (start.checkpoint.path, start.warnings) == (step(checkpoints, 2), [])
    flip(step(checkpoints, 2) / ".metadata", 0.5)
    assert choose(fall_back=True).checkpoint.path == step(checkpoints, 1), "not the newer one, which was given up"


def test_a_start_behind_newer_checkpoints_gives_them_up_and_no_other_does(checkpoints, choose, tmp_path):
    def given_up(**keys):
        return [first for first, saved_before in choose(**keys).checkpoint.manifest.given_up if saved_before > began]

    began = read_manifest(step(checkpoints, 3)).time_unix
    assert given_up() == given_up(resume=str(step(checkpoints, 3))) == []
    assert given_up(resume=str(step(checkpoints, 1))) == [2]
    another = shutil.copytree(step(checkpoints, 2), tmp_path / "another" / "step_00000002")
    assert given_up(resume=str(another)) == [0], "what its directory has is no run's that came from there"
    flip(step(checkpoints, 3) / ".metadata", 0.5)
    assert given_up(fall_back=True) == [3]
    (checkpoints / "latest").write_text("step_00000001\n")
    assert given_up() == [2]


def test_a_pointer_without_checkpoints_is_no_fresh_start(checkpoints, choose):
    for number in (1, 2, 3):
        shutil.rmtree(step(checkpoints, number))
    with pytest.raises(UserError, match="latest exists, but no complete checkpoint does"):
        choose()
    (checkpoints / "latest").unlink()
    assert choose() is None


def test_a_path_that_is_no_checkpoint_is_no_fresh_start(checkpoints, choose):
    for key in ("resume", "init_from"):
        keys = {"resume": "never", key: str(checkpoints / "nowhere")}
        if key == "init_from":
            shutil.rmtree(checkpoints)
        with pytest.raises(UserError, match="nowhere does not exist"):
            choose(**keys)


def test_weights_are_asked_for_only_where_the_run_has_no_checkpoint_of_its_own(checkpoints, choose, tmp_path):
    other = shutil.copytree(step(checkpoints, 1), tmp_path / "other")
    start = choose(init_from=str(other))
    assert (start.checkpoint.path, start.weights_only) == (step(checkpoints, 3), False)
    assert start.notes == [f"checkpoint.init_from={other} is ignored: this run has checkpoints of its own"]
    with pytest.raises(UserError, match=r"checkpoint\.resume=never, but run_dir="):
        choose(init_from=str(other), resume="never")
    shutil.rmtree(checkpoints)
    for resume in ("auto", "never"):
        start = choose(init_from=str(other), resume=resume)
        assert (start.checkpoint.path, start.weights_only) == (other, True)
    flip(other / ".metadata", 0.5)
    with pytest.raises(UserError, match=r"\.metadata has changed"):
        choose(init_from=str(other))


def test_missing_and_unexpected_tensors_are_listed(tmp_path):
    with emulated_training("model.bias=true", "model.normalization=layernorm") as training:
        path = save(training, tmp_path, 1)
        described = read_manifest(path).architecture
    # As if the descriptions had not told already.
    with emulated_training("model.bias=false", "model.normalization=rmsnorm") as training:
        own = read_manifest(save(training, tmp_path / "own", 1)).architecture
        manifest = dataclasses.replace(read_manifest(path), architecture=own)
        before = hash_of_weights(training)
        with pytest.raises(UserError) as refused:
            load_checkpoint(VerifiedCheckpoint(path=path, manifest=manifest), training.trainable, training.config, DATA)
        assert hash_of_weights(training) == before
    listed = re.fullmatch(r".* holds another model: it has (\d+) more tensors \((.*)\); ", str(refused.value))
    # Biases of four linear layers and three norms, each with two moments.
    assert int(listed[1]) == 3 * (4 + 2 + 1)
    names = listed[2].split(", ")
    assert (len(names), names[-1]) == (21, "…")
    assert "decoder.layers.mlp.linear_fc1.bias" in names
    assert "optimizer.state.exp_avg.decoder.final_layernorm.bias" in names
    with emulated_training("model.bias=true", "model.normalization=layernorm") as training:
        path = tmp_path / "own" / "step_00000001"
        manifest = dataclasses.replace(read_manifest(path), architecture=described)
        with pytest.raises(UserError, match=r"this model has 21 more tensors \(decoder\.final_layernorm\.bias, "):
            load_checkpoint(VerifiedCheckpoint(path=path, manifest=manifest), training.trainable, training.config, DATA)


@pytest.mark.parametrize(("key", "value"), [("model.no_rope_freq", "4"), ("model.final_logit_softcapping", "15.0")])
def test_layers_without_rope_and_capped_logits_make_another_model(key, value):
    usual, other = (describe_weights(compose_quickly([*given]).model) for given in ((), (f"{key}={value}",)))
    assert differences(other, usual) == f"{key}={value} (saved without it)"
    assert differences(usual, other) == f"{key}=null (saved with {value})"


def test_another_model_is_told_in_the_words_of_the_command_line(kept):
    with emulated_training("model.num_layers=3", "model.bias=true") as training, pytest.raises(UserError) as refused:
        restore(training, step(kept, 3))
    expected = "holds another model: model.num_layers=3 (saved with 2), model.bias=true (saved with false); resume with"
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokenizer": "another"}, "tokenizer changed"),
        ({"tokens": "others", "splits": "others"}, "splits, tokens changed"),
    ],
)
def test_other_data_is_refused_unless_allowed(change, told, kept):
    refusal = rf"saved with other data: {told}; .*checkpoint\.allow_data_change=true$"
    with emulated_training(*DROPOUT) as training, pytest.raises(UserError, match=refusal):
        restore(training, step(kept, 3), {**DATA, **change})
    with emulated_training(*DROPOUT, "checkpoint.allow_data_change=true") as training:
        restored = restore(training, step(kept, 3), {**DATA, **change})
        assert restored.progress == TrainingProgress(step=3, consumed_samples=12)
        assert [note.partition(" was ")[2] for note in restored.notes] == [
            f"saved with other data: {told}; continuing with the new data (checkpoint.allow_data_change=true)"
        ]


def test_another_layout_seeds_anew_from_seed_and_step(kept):
    checkpoint = VerifiedCheckpoint(path=step(kept, 3), manifest=read_manifest(step(kept, 3)))
    elsewhere = {**checkpoint.manifest.layout, "processes": "2"}
    resharded, later = (
        dataclasses.replace(
            checkpoint, manifest=dataclasses.replace(checkpoint.manifest, layout=elsewhere, step=number)
        )
        for number in (3, 4)
    )
    drawn = []
    with emulated_training(*DROPOUT) as training:
        for each in (checkpoint, resharded, resharded, later):
            restored = load_checkpoint(each, training.trainable, training.config, DATA)
            drawn.append(torch.rand(4).tolist())
            assert len(restored.notes) == (each is not checkpoint)
    same, first, second, another_step = drawn
    assert first == second
    assert same != first
    assert first != another_step


def hash_of_weights(training):
    digest = hashlib.sha256()
    for name, parameter in training.chunks[0].named_parameters():
        digest.update(name.encode() + parameter.detach().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("trainer.precision=bf16", DISTRIBUTED),
        emulate("delayed", "trainer.precision=bf16"),
        ("optimizer=lion",),
        ("optimizer=muon", "trainer.precision=bf16", DISTRIBUTED),
    ],
    ids=["fp32", "bf16 distributed", "delayed bf16", "lion", "muon bf16 distributed"],
)
def test_fifty_steps_after_a_resume_are_bit_for_bit_those_of_the_uncut_run(overrides, tmp_path):
    overrides = (*DROPOUT, *overrides, "model.micro_batch_size=4", "trainer.deterministic=true")

    def fifty(training):
        seen = [training.result() for _ in range(50)]
        return [(result.loss_sum_and_tokens.tolist(), result.grad_norm.item()) for result in seen], hash_of_weights(
            training
        )

    with emulated_training(*overrides) as training:
        for _ in range(3):
            training.step()
        path = save(training, tmp_path, 3)
        expected = fifty(training)
        losses = [loss for (loss, _), _ in expected[0]]
        assert losses[-1] < 0.8 * losses[0], "it does not learn, so that nothing is shown"
    with emulated_training(*overrides, "model.seed=7") as training:
        restore(training, path)
        assert fifty(training) == expected


@pytest.mark.parametrize(
    "optimizer",
    [(), (DISTRIBUTED,), ("model.optim.name=sgd", "model.optim.lr=0.1"), ("optimizer=muon",), ("optimizer=lion",)],
)
def test_a_run_is_taken_back_to_its_checkpoint_in_place(optimizer, tmp_path):
    with emulated_training(*DROPOUT, *optimizer) as training:
        for _ in range(3):
            training.step()
        path = save(training, tmp_path, 3)
        expected = [training.step() for _ in range(3)]
        restore(training, path)
        assert [training.step() for _ in range(3)] == expected


def test_a_run_saved_before_its_first_step_resumes_too(tmp_path):
    with emulated_training(DISTRIBUTED) as training:
        path = save(training, tmp_path, 0)
        expected = [training.step() for _ in range(3)]
    with emulated_training("model.seed=7") as training:
        restore(training, path)
        assert [training.step() for _ in range(3)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (DISTRIBUTED,),
        ("trainer.precision=bf16",),
        ("trainer.precision=bf16", DISTRIBUTED),
        ("model.optim.name=sgd",),
        ("optimizer=muon",),
        ("optimizer=muon", "trainer.precision=bf16", DISTRIBUTED),
        emulate("delayed"),
    ],
    ids=["fp32", "distributed", "bf16", "bf16 distributed", "sgd", "muon", "muon bf16 distributed", "delayed"],
)
def test_weights_alone_start_a_run_of_their_own(overrides, kept):
    with emulated_training(*DROPOUT) as training:
        restore(training, step(kept, 3))
        weights = {name: value.detach().clone() for name, value in training.chunks[0].named_parameters()}
    with emulated_training(*overrides, "model.seed=7", "trainer.max_steps=9") as training:
        # The data may be others, the tokenizer not.
        data = {**DATA, "tokens": "others"}
        restored = load_weights(verify_checkpoint(step(kept, 3)), training.trainable, training.config, data)
        assert (restored.progress, restored.notes) == (TrainingProgress(step=0, consumed_samples=0), [])
        loaded = {name: value.detach() for name, value in training.chunks[0].named_parameters()}
        torch.testing.assert_close(loaded, {name: value.to(loaded[name].dtype) for name, value in weights.items()})
        # Masters are these weights: a step of rate 0 writes them back.
        for group in training.trainable.optimizer.param_groups:
            group["max_lr"] = group["min_lr"] = 0.0
        before = {name: value.clone() for name, value in loaded.items()}
        training.trainable.scheduler.max_lr = training.trainable.scheduler.min_lr = 0.0
        training.step()
        torch.testing.assert_close(loaded, before, rtol=0, atol=0)
        assert training.trainable.scheduler.num_steps == 1


CHANGE = "checkpoint.allow_optimizer_change=true"
BF16 = "trainer.precision=bf16"


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (["optimizer=adam"], ["optimizer=muon"]),
        (["optimizer=muon"], ["optimizer=adam"]),
        (["optimizer=adam", BF16], ["optimizer=muon", BF16, DISTRIBUTED]),
        (["optimizer=muon", BF16, DISTRIBUTED], ["optimizer=adam", BF16]),
        (["optimizer=sgd", BF16], ["optimizer=muon", BF16]),
        (["optimizer=muon", BF16], ["optimizer=adam", *LEAN]),
        (["optimizer=adam", *LEAN], ["optimizer=muon", BF16, DISTRIBUTED]),
    ],
)
def test_another_optimizer_goes_on_from_masters_and_step_if_that_is_allowed(saved, resumed, tmp_path):
    with emulated_training(*saved) as training:
        for _ in range(3):
            training.step()
        path = save(training, tmp_path / "saved", 3)
    name = resumed[0].replace("optimizer=", "model.optim.name=")
    with emulated_training(*resumed, "model.seed=7") as training, pytest.raises(UserError) as refused:
        restore(training, path)
    assert f"{name} (saved with {saved[0].removeprefix('optimizer=')})" in str(refused.value)
    assert CHANGE in str(refused.value)
    with emulated_training(*resumed, CHANGE, "model.seed=7") as training:
        restored = restore(training, path)
        (note,) = restored.notes
        assert name in note
        assert training.trainable.scheduler.num_steps == 3
        before, after = (saved_state(each) for each in (path, save(training, tmp_path / "restored", 3)))
        assert after["common"]["optimizer"]["step"] == 0
        for key in (key for key in after if isinstance(after[key], torch.Tensor) and "_extra_state" not in key):
            if is_moment(key):
                assert not after[key].any(), key
            else:
                assert after[key].equal(before[key]), key
        training.step()
        path = save(training, tmp_path / "restored", 4)
        expected = [training.step() for _ in range(2)]
    with emulated_training(*resumed, CHANGE) as training:
        # A requeued run has the same command and drops nothing again.
        assert restore(training, path).notes == []
        assert [training.step() for _ in range(2)] == expected


def test_weights_of_another_model_or_tokenizer_are_refused(kept):
    checkpoint = VerifiedCheckpoint(path=step(kept, 3), manifest=read_manifest(step(kept, 3)))
    with (
        emulated_training("model.num_layers=3") as training,
        pytest.raises(UserError, match=r"another model: model\.num_layers=3"),
    ):
        load_weights(checkpoint, training.trainable, training.config, DATA)
    for allow in ("false", "true"):
        with emulated_training(f"checkpoint.allow_data_change={allow}") as training:
            with pytest.raises(UserError, match=r"tokenizer changed.*model\.tokenizer\.model=") as refused:
                load_weights(checkpoint, training.trainable, training.config, {**DATA, "tokenizer": "another"})
            assert "allow_data_change" not in str(refused.value), "embeddings of other ids are of no use"


def test_weights_for_token_ids_of_no_known_tokenizer_are_taken_if_that_is_allowed(kept):
    known = read_manifest(step(kept, 3))
    of_ids = dataclasses.replace(known, data={**known.data, "tokenizer": "none"})
    for saved, current in ((known, "none"), (of_ids, "another")):
        checkpoint, data = VerifiedCheckpoint(path=step(kept, 3), manifest=saved), {**DATA, "tokenizer": current}
        with emulated_training() as training, pytest.raises(UserError, match=r"allow_data_change=true$"):
            load_weights(checkpoint, training.trainable, training.config, data)
        with emulated_training("checkpoint.allow_data_change=true") as training:
            (note,) = load_weights(checkpoint, training.trainable, training.config, data).notes
            assert "tokenizer" in note


DELAYED, TENSORWISE, BLOCKWISE = emulate("delayed"), emulate("tensorwise"), emulate("blockwise")
ATTENTION = "model.fp8_dot_product_attention=true"
SHORT = "model.fp8_amax_history_len=16"


@pytest.mark.parametrize(
    ("saved", "resumed", "told"),
    [
        (DELAYED, DELAYED, None),
        ((*DELAYED, SHORT), DELAYED, ["model.fp8_amax_history_len=1024 (saved with 16)"]),
        (DELAYED, TENSORWISE, ["model.fp8_recipe=tensorwise (saved with delayed)"]),
        (DELAYED, BLOCKWISE, ["model.fp8_recipe=blockwise (saved with delayed)", "e4m3 (saved with e5m2)"]),
        (DELAYED, (), ["model.fp8=false (saved with true)"]),
        ((*TENSORWISE, ATTENTION), TENSORWISE, ["model.fp8_dot_product_attention=false (saved with true)"]),
        # These have no state that could be dropped.
        ((), DELAYED, None),
        (TENSORWISE, DELAYED, None),
        (TENSORWISE, BLOCKWISE, None),
        (BLOCKWISE, (), None),
    ],
)
def test_no_fp8_scales_are_dropped_unasked(saved, resumed, told):
    held = describe_fp8_state(resolve(compose_quickly(saved)).fp8)
    settings = resolve(compose_quickly(resumed)).fp8

    def keeps(*, reset):
        return keeps_fp8_state(Path("step_1"), settings, held, reset=reset)

    assert keeps(reset=True) is False
    if told is None:
        assert keeps(reset=False) == (saved == resumed)
        return
    with pytest.raises(UserError) as refused:
        keeps(reset=False)
    told = ["step_1", *told, "checkpoint.reset_fp8_state=true"]
    assert [text for text in told if text not in str(refused.value)] == []


def test_fp8_states_of_all_experts_of_a_module_are_taken_out():
    state = {"linear_fc1.weight0": 0, "linear_fc1._extra_state": 1, "linear_fc1._extra_state1": 2, "norm.weight": 3}
    assert take_extra_states(state) == ["linear_fc1._extra_state", "linear_fc1._extra_state1"]
    assert state == {"linear_fc1.weight0": 0, "norm.weight": 3}
