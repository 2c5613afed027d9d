"""Checkpoints of Megatron-LM and NeMo come in and go out bit for bit, whatever form and layout they are stored in.

megatron-core's own code writes and reads the other side: a plain GPTModel (`tests.megatron_checkpoints`).
"""

import argparse
import shlex
import shutil
import zipfile
from functools import partial

import pytest
import torch
from megatron.training import checkpointing

from gpt_pretrain.checkpoint.load import load_weights, verify_checkpoint
from gpt_pretrain.checkpoint.saved_model import CheckpointTensors, PlannedTensor, write_weights
from gpt_pretrain.checkpoint.state import describe_weights
from gpt_pretrain.config.errors import UserError, written
from gpt_pretrain.config.source import Source
from gpt_pretrain.export import main as export_main
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.import_megatron import main
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.megatron_lm.arguments import arguments_of, fields_of
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.translate.megatron_arguments import megatron_parser
from tests.forked_runs import fork_ranks
from tests.hostile_pickles import hostile_pickles
from tests.megatron_checkpoints import EXPERTS, LLAMA, MODELS, NEMO, load_gpt, logits_of, save_gpt
from tests.saved_models import FAMILIES, build_trainable, randomize, save, small_config, weights_in

WINDOWS = "qwen2, window in some layers"
TOKENS = torch.arange(64).view(2, 32) * 3 % 250
LLAMA_KEYS = (
    "model=llama3_8b",
    "model.num_layers=4",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.vocab_size=256",
    "model.max_position_embeddings=32",
    "model.encoder_seq_length=32",
)
SHORT = (
    "data=mock",
    "model.micro_batch_size=1",
    "model.global_batch_size=2",
    "trainer.max_steps=2",
    "trainer.limit_val_batches=0",
    "sample.max_new_tokens=0",
    "logging.tensorboard=false",
)


@pytest.fixture(autouse=True)
def one_process():
    """megatron-core's groups, and an answer to who asks for a GPU."""
    install_cpu_device()
    with process_groups(load_config([]).model, read_launch({}), detect_platform()):
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of each model as megatron-core saves it."""
    folder = tmp_path_factory.mktemp("megatron")
    install_cpu_device()
    with process_groups(load_config([]).model, read_launch({}), detect_platform()):
        for name, arguments in MODELS.items():
            save_gpt(folder / name, arguments)
    return folder


def import_model(path, out, *overrides):
    given = [f"overrides=[{','.join(overrides)}]"] if overrides else []
    assert main([f"path={path}", f"out={out}", *given]) == 0


def export_model(path, out):
    assert export_main([f"checkpoint={path}", f"out={out}", "format=megatron"]) == 0


def assert_same(path, other):
    ours, theirs = weights_in(path), weights_in(other)
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def plain_logits(path, arguments):
    return logits_of(load_gpt(path, arguments), TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_give_a_plain_model_its_bits_back(name, dtype, tmp_path):
    arguments = {**MODELS[name], "params_dtype": dtype}
    before = save_gpt(tmp_path / "there", arguments)
    import_model(tmp_path / "there", tmp_path / "ours")
    export_model(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "release"
    after = load_gpt(tmp_path / "back" / "release", arguments)
    types = {key: CheckpointTensors(tmp_path / "back" / "release").dtype(key) for key in weights_in(tmp_path / "ours")}
    assert types == {key: CheckpointTensors(tmp_path / "there").dtype(key) for key in types}
    values = after.state_dict()
    assert all(torch.equal(value, values[key]) for key, value in before.state_dict().items() if value is not None)
    if dtype is torch.float32:
        # megatron-core's local norms stay in fp32, and nothing casts between them and BF16.
        assert torch.equal(logits_of(before, TOKENS), logits_of(after, TOKENS))
    # And what is said of it, in both places where versions of megatron-core look.
    common = torch.load(tmp_path / "back" / "release" / "common.pt", weights_only=True)
    told = vars(common["args"])
    assert {
        key: value for key, value in arguments.items() if told.get(key, value) != value and key != "num_query_groups"
    } == {}


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_starts_from_it_computes_the_same(name, saved, tmp_path):
    import_model(saved / name, tmp_path / "ours")
    config = load_config(["experiment=imported", *SHORT], Source(config_dir=tmp_path / "ours"))
    trainable = build_trainable(config)
    load_weights(verify_checkpoint(tmp_path / "ours"), trainable, config, {})
    expected = plain_logits(saved / name, MODELS[name])
    # Attention is computed by other kernels.
    torch.testing.assert_close(logits_of(trainable.model.gpt_chunks[0], TOKENS), expected, rtol=1e-4, atol=1e-4)


FORMS = {
    "one by one": ("llama", {"metadata": {"non_homogeneous_layers": True}}),
    "halves apart": ("llama", {"metadata": {"singleton_local_shards": True}}),
    "common.pt": ("llama", {"common_file": True}),
    "experts one by one": ("experts", {"metadata": {"non_homogeneous_layers": True}}),
    "experts and halves apart": ("experts", {"metadata": {"singleton_local_shards": True}}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_storage_is_read(form, saved, tmp_path):
    name, changed = FORMS[form]
    save_gpt(tmp_path / "form", MODELS[name], model=load_gpt(saved / name, MODELS[name]), **changed)
    import_model(tmp_path / "form", tmp_path / "ours")
    import_model(saved / name, tmp_path / "expected")
    assert_same(tmp_path / "ours", tmp_path / "expected")


def test_local_layers_name_the_norm_before_experts_otherwise(tmp_path):
    model = save_gpt(tmp_path / "form", {**EXPERTS, "local_names": True})
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in CheckpointTensors(tmp_path / "form")
    import_model(tmp_path / "form", tmp_path / "ours")
    ours = CheckpointTensors(tmp_path / "ours").read("decoder.layers.pre_mlp_layernorm.weight", 2)
    assert torch.equal(ours, model.decoder.layers[2].pre_mlp_layernorm.weight)


@pytest.mark.parametrize("folder", NEMO)
def test_nemo_has_a_prefix_and_no_arguments(folder, saved, tmp_path, capsys):
    model = load_gpt(saved / "llama", LLAMA)
    save_gpt(tmp_path / "nemo" / folder, LLAMA, prefix=NEMO[folder], common_file=True, model=model)
    # Lightning's state, which nothing here opens.
    (tmp_path / "nemo" / folder / "common.pt").write_bytes(b"garbled")
    assert main([f"path={tmp_path / 'nemo'}", f"out={tmp_path / 'none'}"]) == 2
    assert "overrides" in capsys.readouterr().err
    import_model(tmp_path / "nemo", tmp_path / "ours", *LLAMA_KEYS)
    import_model(saved / "llama", tmp_path / "expected")
    assert_same(tmp_path / "ours", tmp_path / "expected")


def test_the_folder_above_names_the_newest(saved, tmp_path):
    for name, source in (("iter_0000005", "gpt"), ("iter_0000010", "llama")):
        shutil.copytree(saved / source, tmp_path / "run" / name)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10\n")
    import_model(tmp_path / "run", tmp_path / "ours")
    import_model(saved / "llama", tmp_path / "expected")
    assert_same(tmp_path / "ours", tmp_path / "expected")


@pytest.mark.parametrize(("tokens", "divisor", "rows"), [(250, 128, 256), (120, 128, 128), (250, 512, 512)])
def test_rows_that_pad_the_vocabulary_are_cut_or_filled(tokens, divisor, rows, saved, tmp_path):
    keys = [f"model.vocab_size={tokens}", f"model.make_vocab_size_divisible_by={divisor}"]
    import_model(saved / "llama", tmp_path / "ours", *keys)
    there = CheckpointTensors(saved / "llama").read("output_layer.weight")
    ours = CheckpointTensors(tmp_path / "ours").read("output_layer.weight")
    assert ours.size(0) == rows
    assert torch.equal(ours[:256], there[:rows])
    torch.testing.assert_close(ours[256:], there[:tokens].mean(0).expand_as(ours[256:]))


def test_megatron_core_takes_it_with_other_padding(saved, tmp_path):
    import_model(saved / "llama", tmp_path / "ours")
    export_model(tmp_path / "ours", tmp_path / "back")
    padded = logits_of(load_gpt(tmp_path / "back" / "release", LLAMA, rows=384), TOKENS)
    assert torch.equal(padded[..., :256], plain_logits(saved / "llama", LLAMA))


@pytest.mark.parametrize(("name", "tp", "pp"), [("llama", 2, 1), ("gpt", 1, 2)])
def test_what_two_ranks_have_saved_is_read(name, tp, pp, saved, tmp_path):
    program = ["tests/programs/reshard_megatron.py", str(saved / name), str(tmp_path / "there"), name, str(tp), str(pp)]
    done = fork_ranks(2, program, timeout_s=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    import_model(tmp_path / "there", tmp_path / "ours")
    import_model(saved / name, tmp_path / "expected")
    assert_same(tmp_path / "ours", tmp_path / "expected")


LAYOUTS = {
    "tp2": ("llama", ["model.tensor_model_parallel_size=2"]),
    "pp2": ("llama", ["model.pipeline_model_parallel_size=2"]),
    "pp2, tied": ("gpt", ["model.pipeline_model_parallel_size=2"]),
    "fsdp": ("llama", ["parallelism=fsdp"]),
    "ep2": ("experts", ["model.expert_model_parallel_size=2"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_on_and_megatron_core_reads_what_they_saved(layout, saved, tmp_path):
    name, keys = LAYOUTS[layout]
    import_model(saved / name, tmp_path / "start")
    # At next to no rate every layout must leave the weights as it has read them.
    rate = [
        "model.optim.lr=1e-30",
        "model.optim.sched.min_lr=0",
        "model.optim.weight_decay=0",
        "trainer.precision=fp32",
    ]
    place = ["--config-dir", str(tmp_path / "start"), "experiment=imported", f"run_dir={tmp_path / 'run'}"]
    done = fork_ranks(2, ["-m", "gpt_pretrain", *place, *SHORT, *rate, *keys], timeout_s=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    export_model(checkpoint, tmp_path / "back")
    assert torch.equal(
        plain_logits(tmp_path / "back" / "release", MODELS[name]), plain_logits(saved / name, MODELS[name])
    )


def test_in_trained_out_and_in_again_is_exact(saved, tmp_path):
    import_model(saved / "llama", tmp_path / "start")
    place = ["--config-dir", str(tmp_path / "start"), "experiment=imported", f"run_dir={tmp_path / 'run'}"]
    done = fork_ranks(1, ["-m", "gpt_pretrain", *place, *SHORT, "model.optim.lr=1e-2"], timeout_s=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    export_model(checkpoint, tmp_path / "there")
    import_model(tmp_path / "there", tmp_path / "again")
    assert_same(tmp_path / "again", checkpoint)
    key = "decoder.layers.mlp.linear_fc2.weight"
    assert not torch.equal(weights_in(checkpoint)[key], weights_in(tmp_path / "start")[key])


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_of_each_family_mean_the_same_model(family):
    model = small_config(*FAMILIES[family]).model
    fields = fields_of(vars(arguments_of(model, torch.float32, "here")), "there")
    expected = {key: text for key, text in describe_weights(model).items() if key != "model.vocab_size"}
    assert {key: written(fields[key][0]) for key in expected} == expected


@pytest.mark.parametrize("family", ["gpt2, exact gelu, untied", "llama", "qwen3_moe", "smollm3", WINDOWS])
def test_megatron_lm_builds_the_model_from_what_is_exported_and_printed(family, tmp_path, capsys):
    config = small_config(*FAMILIES[family])
    export_model(save(tmp_path, config, build_trainable(config), {}), tmp_path / "there")
    printed = capsys.readouterr().out.partition("load with: ")[2]
    arguments, unknown = megatron_parser().parse_known_args(shlex.split(printed))
    assert not unknown
    assert checkpointing.read_metadata(str(tmp_path / "there" / "latest_checkpointed_iteration.txt")) == (0, True)
    arguments, _ = checkpointing.load_args_from_checkpoint(arguments)
    fields = fields_of(vars(arguments), "there")
    expected = {key: text for key, text in describe_weights(config.model).items() if key != "model.vocab_size"}
    assert {key: written(fields[key][0]) for key in expected} == expected


def test_multipliers_of_mup_move_into_weights(tmp_path):
    mup = ["model.use_mup=true", "model.mup_base_hidden_size=32", "model.mup_embedding_mult=3"]
    config = small_config(*FAMILIES["llama"], *mup, "model.layernorm_epsilon=1e-5")
    trainable = build_trainable(config)
    randomize(trainable.model.gpt_chunks[0])
    export_model(save(tmp_path, config, trainable, {}), tmp_path / "there")
    plain = plain_logits(tmp_path / "there" / "release", {**LLAMA, "num_layers": 3, "padded_vocab_size": 384})
    torch.testing.assert_close(plain, logits_of(trainable.model.gpt_chunks[0], TOKENS), rtol=1e-4, atol=1e-4)


def test_what_megatron_lm_has_no_arguments_for_is_refused():
    model = small_config("model=gpt2_124m", "model.bias=false").model
    with pytest.raises(UserError, match=r"model\.activation=gelu_tanh"):
        arguments_of(model, torch.float32, "here")


def rewritten(folder, change, common=None):
    """A checkpoint whose tensors `change` has replaced in a dict; megatron-core's writer is not asked."""
    state = weights_in(folder)
    change(state)
    shutil.rmtree(folder)
    folder.mkdir()
    planned = [
        PlannedTensor(
            key=key, layer=None, shape=tuple(value.shape), dtype=value.dtype, load=partial(torch.clone, value)
        )
        for key, value in state.items()
    ]
    write_weights(folder, planned, num_layers=4, common=common or {"args": argparse.Namespace(**LLAMA)})


def with_arguments(folder, **changed):
    torch.save({"args": argparse.Namespace(**{**LLAMA, **changed})}, folder / "common.pt")


def _cut(path):
    path.write_bytes(path.read_bytes()[:-2000])


def _largest(folder):
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def _as_mp_rank(folder):
    shutil.rmtree(folder)
    (folder / "mp_rank_00").mkdir(parents=True)


def _as_transformers(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def _track(text):
    return lambda folder: [
        (folder / "metadata.json").unlink(),
        (folder / "latest_checkpointed_iteration.txt").write_text(text),
    ]


def _to_float8(state):
    key = "decoder.layers.mlp.linear_fc1.weight"
    state[key] = state[key].to(torch.float8_e4m3fn)


# What is done to a whole checkpoint, and what the error must name.
WRONG = {
    "no index": (lambda folder: (folder / ".metadata").unlink(), [".metadata"]),
    "no metadata.json": (lambda folder: (folder / "metadata.json").unlink(), ["torch_dcp", "torch_dist"]),
    "a file is missing": (lambda folder: _largest(folder).unlink(), [".metadata", ".distcp"]),
    "a file is cut": (lambda folder: _cut(_largest(folder)), [".distcp", "does not have"]),
    "the index is cut": (lambda folder: _cut(folder / ".metadata"), [".metadata"]),
    "common.pt is garbled": (lambda folder: (folder / "common.pt").write_bytes(b"PK"), ["common.pt", "overrides"]),
    "another backend": (
        lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        ["zarr", "torch_dist"],
    ),
    "files of ranks": (_as_mp_rank, ["mp_rank_", "--ckpt-convert-format torch_dist"]),
    "a model of transformers": (_as_transformers, ["import_hf"]),
    "an iteration that is gone": (_track("12"), ["iter_0000012"]),
    "no iteration": (_track("../.."), ["latest_checkpointed_iteration.txt", "iter_"]),
    "no such folder": (shutil.rmtree, ["iter_"]),
    "FP8 codes": (lambda folder: rewritten(folder, _to_float8), ["linear_fc1.weight", "float8_e4m3fn"]),
    "no LM head": (lambda folder: rewritten(folder, lambda state: state.pop("output_layer.weight")), ["output_layer"]),
    "one more tensor": (
        lambda folder: rewritten(folder, lambda state: state.update({"mtp.layers.0.weight": torch.ones(2)})),
        ["mtp.layers.0.weight"],
    ),
    "no model": (
        lambda folder: rewritten(folder, lambda state: [state.pop(key) for key in list(state) if "embedding" in key]),
        ["embedding.word_embeddings.weight"],
    ),
    "other layers": (lambda folder: with_arguments(folder, num_layers=6), ["of 4 layers", "model.num_layers=6"]),
    "another shape": (lambda folder: with_arguments(folder, ffn_hidden_size=128), ["[192, 64]", "[256, 64]"]),
    "more tokens than rows": (lambda folder: with_arguments(folder, padded_vocab_size=512), ["512", "256"]),
    "latent attention": (
        lambda folder: with_arguments(folder, multi_latent_attention=True),
        ["multi_latent_attention"],
    ),
    "norms around zero": (lambda folder: with_arguments(folder, apply_layernorm_1p=True), ["zero_centered_gamma"]),
    "a text for a number": (lambda folder: with_arguments(folder, num_layers="four"), ["num_layers", "four"]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_such_checkpoint_is_refused_by_name(wrong, saved, tmp_path, capsys):
    damage, named = WRONG[wrong]
    folder = tmp_path / "there"
    shutil.copytree(saved / "llama", folder)
    damage(folder)
    assert main([f"path={folder}", f"out={tmp_path / 'ours'}"]) == 2
    told = capsys.readouterr().err
    assert [name for name in (str(folder), *named) if name not in told] == [], told
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([*LLAMA_KEYS, "model.num_layers=2"], ["model.num_layers=2", "num_layers=4"]),
        ([*LLAMA_KEYS, "model.rotary_base=10000"], ["model.rotary_base=10000", "rotary_base=500000"]),
        (["model.qk_layernorm=true"], ["model.qk_layernorm=true", "false"]),
        (["model.vocab_size=300"], ["model.vocab_size=300", "256"]),
        (["model.vocab_sise=3"], ["model.vocab_size"]),
    ],
)
def test_another_model_than_its_arguments_say_is_refused_with_both(overrides, named, saved, tmp_path, capsys):
    assert main([f"path={saved / 'llama'}", f"out={tmp_path / 'ours'}", f"overrides=[{','.join(overrides)}]"]) == 2
    told = capsys.readouterr().err
    assert [name for name in named if name not in told] == [], told


def _in_archive(path, content):
    """A file of torch.save whose pickle is `content`."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, content if name.endswith("data.pkl") else part)


class _Opens:
    def __init__(self, canary):
        self._canary = canary

    def __reduce__(self):
        return open, (str(self._canary), "w")


PLACES = {
    "common.pt": lambda folder, content: _in_archive(folder / "common.pt", content),
    "common.pt as a plain pickle": lambda folder, content: (folder / "common.pt").write_bytes(content),
    ".metadata": lambda folder, content: (folder / ".metadata").write_bytes(content),
}


@pytest.mark.parametrize("place", PLACES)
def test_nothing_in_its_files_runs(place, saved, tmp_path, capsys):
    canary = tmp_path / "canary"
    for number, content in enumerate(hostile_pickles(canary).values()):
        folder = tmp_path / f"there_{number}"
        shutil.copytree(saved / "llama", folder)
        PLACES[place](folder, content)
        assert main([f"path={folder}", f"out={tmp_path / 'ours'}"]) == 2
        assert place.split()[0] in capsys.readouterr().err
        assert not canary.exists()


def test_nothing_in_its_objects_runs(saved, tmp_path, capsys):
    folder, canary = tmp_path / "there", tmp_path / "canary"
    shutil.copytree(saved / "llama", folder)
    rewritten(folder, lambda state: None, common={"args": _Opens(canary)})
    assert main([f"path={folder}", f"out={tmp_path / 'ours'}"]) == 2
    assert "common_state" in capsys.readouterr().err
    assert not canary.exists()


def test_init_from_and_resume_say_how_it_comes_in(saved, tmp_path):
    shutil.copytree(saved / "llama", tmp_path / "run" / "iter_0000010")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(UserError, match="import_megatron"):
        verify_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("argument", ["architecture=llama", "max_shard_gib=1"])
def test_what_belongs_to_transformers_is_refused_for_megatron(argument, tmp_path, capsys):
    given = [f"checkpoint={tmp_path}", f"out={tmp_path / 'out'}", "format=megatron", argument]
    assert export_main(given) == 2
    assert argument.partition("=")[0] in capsys.readouterr().err
