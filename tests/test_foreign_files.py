"""Files of JSON and YAML that no program of ours wrote: one line, exit code 2 and at once, and nothing of them runs."""

import os
import re

import pytest

from gpt_pretrain.__main__ import main as train
from gpt_pretrain.checkpoint.manifest import MANIFEST, read_manifest
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import read_foreign_text
from gpt_pretrain.config.load import config_to_yaml, load_saved_config
from gpt_pretrain.data.tokenizer import load_tokenizer
from gpt_pretrain.import_hf import main as import_hf
from gpt_pretrain.report.metrics_file import MetricsFile, load_metrics
from tests.refusals import compose_quickly

pytestmark = [pytest.mark.usefixtures("no_launcher"), pytest.mark.timeout(60)]
RUN = "defaults:\n  - config\n  - _self_\n"


def zero(path):
    path.symlink_to("/dev/zero")


def text(content):
    return lambda path: path.write_bytes(content)


HOSTILE = {
    "deep": text(b"[" * 100_000),
    "deep object": text(b'{"a":' * 100_000),
    "pipe": os.mkfifo,
    "device": zero,
    "directory": os.mkdir,
    "not UTF-8": text(b'{"a": "\xff"}'),
    "NaN": text(b'{"format_version": NaN, "weight_map": NaN}'),
    "a number of 10,000 digits": text(b'{"format_version": ' + b"9" * 10_000 + b"}"),
    "a list": text(b"[1]"),
    "a string": text(b'"text"'),
    "wrong types": text(b'{"format_version": [], "weight_map": {"a": 3}, "variants": 3, "model_type": {}}'),
    "names elsewhere": text(b'{"weight_map": {"a": "../x", "b": "/dev/zero"}}'),
    "empty": text(b""),
}


def told_by(command, arguments, capsys):
    assert command(arguments) == 2
    return capsys.readouterr().err.removeprefix("error: ").splitlines()


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_told_in_a_line_by_who_reads_it(kind, tmp_path, capsys):
    files = [tmp_path / name for name in (MANIFEST, "config.json", "model.safetensors.index.json", "tokenizer.json")]
    for path in files:
        HOSTILE[kind](path)
    manifest, config, _, tokenizer = files
    with pytest.raises(UserError, match=str(manifest)):
        read_manifest(tmp_path)
    with pytest.raises(UserError, match=str(tokenizer)):
        load_tokenizer(tokenizer)
    line, *rest = told_by(import_hf, [f"path={tmp_path}", f"out={tmp_path}/out"], capsys)
    assert str(config) in line
    assert len(rest) <= 12, "a line for each field that is missing"


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "not UTF-8"])
def test_a_file_that_is_refused_is_closed(kind, tmp_path):
    HOSTILE[kind](tmp_path / "file")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(UserError):
            read_foreign_text(tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", [os.mkfifo, zero])
def test_a_log_that_is_no_file_is_told(kind, tmp_path):
    kind(tmp_path / "metrics.jsonl")
    for read in (load_metrics, MetricsFile):
        with pytest.raises(UserError, match=r"metrics\.jsonl .* not a regular file"):
            read(tmp_path)


ALIASES = "a: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
SAVED = {
    "the environment": lambda saved: saved.replace("name: gpt", "name: ${oc.env:HOME}"),
    "in a list": lambda saved: saved.replace("text_files: []", "text_files: ['${oc.env:HOME}']"),
    "itself": lambda saved: saved.replace("name: gpt", "name: ${name}"),
    "deep": lambda _: "[" * 100_000,
    "aliases of aliases": lambda _: ALIASES,
    "NaN": lambda saved: re.sub(r"\blr: \S+", "lr: .nan", saved),
    "a tag": lambda saved: saved.replace("name: gpt", "name: !!python/object/apply:os.getcwd []"),
}


@pytest.mark.parametrize("kind", SAVED)
def test_a_saved_configuration_looks_nothing_up(kind, tmp_path):
    saved = config_to_yaml(compose_quickly([]))
    hostile = SAVED[kind](saved)
    assert hostile != saved
    (tmp_path / "config.yaml").write_text(hostile)
    with pytest.raises(UserError, match=str(tmp_path)) as refused:
        load_saved_config(tmp_path / "config.yaml")
    assert os.environ["HOME"] + "'" not in str(refused.value)


CALLED = "    mine: {'()': os.mkdir, path: CANARY}\n"
PLACES = {
    "callbacks": ("hydra.callbacks", "hydra:\n  callbacks:\n    mine: {_target_: os.mkdir, path: CANARY}\n"),
    "a formatter": ("hydra.job_logging", f"hydra:\n  job_logging:\n   formatters:\n{CALLED}"),
    "a handler": (
        "hydra.hydra_logging",
        "hydra:\n  hydra_logging:\n    handlers: {mine: {class: os.mkdir, path: CANARY}}\n",
    ),
    "a directory": ("hydra.run.dir", "hydra:\n  run: {dir: CANARY}\n"),
    "a directory of sweeps": ("hydra.sweep.dir", "hydra:\n  sweep: {dir: CANARY}\n"),
    "a directory of Hydra's": ("hydra.output_subdir", "hydra:\n  output_subdir: CANARY\n"),
    "a log": (
        "hydra.job_logging",
        "hydra:\n  job_logging:\n    handlers: {mine: {class: logging.FileHandler, filename: CANARY, mode: w}}\n",
    ),
    "a function of logging": (
        "hydra.hydra_logging",
        "hydra:\n  hydra_logging:\n    handlers: {mine: {class: logging.config.listen}}\n",
    ),
    "the environment": ("hydra.job.env_set", "hydra:\n  job: {env_set: {LD_PRELOAD: CANARY}}\n"),
    "a launcher": ("hydra.launcher", "hydra:\n  launcher: {_target_: os.mkdir, path: CANARY}\n"),
    "a sweeper": ("hydra.sweeper", "hydra:\n  sweeper: {_target_: os.mkdir, path: CANARY}\n"),
    "a job's script": ("hydra.launcher.script", "hydra:\n  launcher: {script: CANARY}\n"),
    # Hydra would import it, before it composes anything.
    "a package": ("hydra.searchpath", "hydra:\n  searchpath: ['pkg://antigravity']\n"),
    "nothing": ("hydra=null", "hydra: null\n"),
    "aliases of aliases": ("mine.yaml", ALIASES),
    "deep": ("mine.yaml", "[" * 100_000),
    "no YAML": ("mine.yaml", "a: b: c"),
    "itself": ("itself", "model:\n  seed: ${trainer.max_steps}\ntrainer:\n  max_steps: ${model.seed}\n"),
}


@pytest.mark.parametrize("arguments", [["trainer.max_steps=1"], ["--cfg", "job"], ["--info", "config"], ["-m"]])
@pytest.mark.parametrize("place", [place for place in PLACES if place != "itself"])
def test_hydra_calls_and_makes_nothing_that_a_file_names(place, arguments, tmp_path, capsys):
    named, content = PLACES[place]
    canary = tmp_path / "canary"
    (tmp_path / "mine.yaml").write_text(RUN + content.replace("CANARY", str(canary)))
    (line, *_) = told_by(train, ["--config-dir", str(tmp_path), "--config-name", "mine", *arguments], capsys)
    assert named in line
    assert not canary.exists()


@pytest.mark.parametrize("place", ["override hydra/job_logging: mine", "logging@hydra.job_logging: mine"])
def test_a_file_is_not_hydras_own_by_its_place(place, tmp_path, capsys):
    canary = tmp_path / "canary"
    (tmp_path / "mine.yaml").write_text(f"defaults:\n  - config\n  - {place}\n  - _self_\n")
    for folder in ("hydra/job_logging", "logging"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "mine.yaml").write_text(
            f"version: 1\nhandlers: {{mine: {{class: logging.FileHandler, filename: {canary}}}}}\n"
        )
    for arguments in ([], ["-m"], ["--cfg", "hydra"]):
        (line, *_) = told_by(train, ["--config-dir", str(tmp_path), "--config-name", "mine", *arguments], capsys)
        assert "hydra.job_logging.version" in line
    assert not canary.exists()


def test_what_a_sweep_varies_and_where_its_jobs_run_may_stand_in_a_file(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - config\n  - override hydra/launcher: slurm\n  - _self_\n"
        "hydra:\n  launcher: {nodes: 2}\n  sweeper: {params: {model.seed: '1,2'}}\n"
    )
    assert train(["--config-dir", str(tmp_path), "--config-name", "mine", "--cfg", "hydra"]) == 0
    assert "nodes: 2" in capsys.readouterr().out


def test_defaults_that_name_themselves_end(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - mine\n")
    (line, *_) = told_by(train, ["--config-dir", str(tmp_path), "--config-name", "mine"], capsys)
    assert "itself" in line or "mine" in line


def test_values_that_name_each_other_end(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(RUN + PLACES["itself"][1])
    lines = told_by(train, ["--config-dir", str(tmp_path), "--config-name", "mine"], capsys)
    assert any("model.seed" in line for line in lines)
