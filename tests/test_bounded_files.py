"""Files that stand for far more than they hold: read or refused in seconds and little memory, whoever wrote them."""

import json
import resource
import time
from contextlib import contextmanager

import pytest

from gpt_pretrain.__main__ import main as train
from gpt_pretrain.checkpoint.manifest import MANIFEST, read_manifest
from gpt_pretrain.compare.sources import read_runs
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import read_foreign_json
from gpt_pretrain.config.load import config_to_yaml, load_saved_config
from gpt_pretrain.data.cache import fingerprint
from gpt_pretrain.import_hf import main as import_hf
from gpt_pretrain.report.metrics_file import load_metrics
from tests.refusals import compose_quickly

pytestmark = [pytest.mark.usefixtures("no_launcher"), pytest.mark.timeout(120)]
RUN = "defaults:\n  - config\n  - _self_\n"
# Of one core. Most take a tenth of a second.
MOST_S, MOST_MIB = 5, 500


@contextmanager
def soon():
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - start < MOST_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MIB << 10


def doubling(line, first):
    return first + "".join(line.replace("NEW", f"a{n}").replace("OLD", f"a{n - 1}") for n in range(1, 30))


VALIDATION = {"loss": 2.0, "perplexity": 7.4, "num_samples": 8, "time_s": 1.0}


def lookups(look_up):
    """Each value of a list looks the next one up twice."""
    values = ",".join(f"'{look_up.replace('N', str(n + 1)) * 2}'" for n in range(40))
    return f"model:\n  data:\n    text_files: [{values}, x]\n"


LONG = ",".join(f"f{n}" for n in range(5000))
HUGE = {
    "aliases": doubling("NEW: &NEW [*OLD, *OLD]\n", "a0: &a0 [1]\n"),
    "an alias of a long text": f"name: &a {'x' * 500_000}\nrun_dir: *a\nsample: {{prompt: *a}}\n",
    "merge keys": doubling("NEW: &NEW {<<: [*OLD, *OLD]}\n", "a0: &a0 {seed: 1}\n"),
    "an alias of itself": "model: &a {seed: *a}\n",
    "levels": "model: {seed: " + "[" * 500 + "]" * 500 + "}\n",
    "many keys": "model:\n" + "".join(f"  fp8_margn{n}: 1\n" for n in range(4000)),
    "a long key": f"? {'x' * 500_000}\n: 1\n",
    "a long text": f"name: {'x ' * 1_000_000}\n",
    "a number of base 60": f"model: {{seed: {'1:' * 300_000}1}}\n",
    "a tagged number of base 60": f"model: {{seed: !!int '{'1:' * 300_000}1'}}\n",
    "a large number": f"model: {{seed: 0x{'f' * 5000}}}\n",
    "a tag that fails": "model: {bias: !!bool maybe}\n",
    "a date": "model: {seed: !!timestamp x}\n",
    "look-ups": lookups("${model.data.text_files[N]}"),
    "look-ups in a resolver": lookups("${oc.decode:${model.data.text_files[N]}}"),
    "long look-ups": "name: '" + "${a:" + "b:" * 40_000 + "}'\n",
    "deep look-ups": "name: '" + "${" * 8000 + "'\n",
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_file_that_stands_for_more_is_refused_at_once(kind, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(RUN + HUGE[kind])
    with soon():
        assert train(["--config-dir", str(tmp_path), "--config-name", "mine", "--cfg", "job"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert len(told) < 200_000
    (tmp_path / "config.yaml").write_text(config_to_yaml(compose_quickly([])) + HUGE[kind])
    with soon(), pytest.raises(UserError, match=str(tmp_path)):
        load_saved_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("kind", [kind for kind in HUGE if "alias" in kind or "base 60" in kind or "level" in kind])
def test_a_comparison_refuses_it_at_once(kind, run_dir, capsys):
    (run_dir / "config.yaml").write_text(HUGE[kind])
    with soon(), pytest.raises(UserError, match=r"config\.yaml"):
        read_runs([str(run_dir)])


def test_files_with_a_few_aliases_are_read(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        RUN + "model:\n  seed: &seed 3\n  max_position_embeddings: &length 64\n  encoder_seq_length: *length\n"
        f"  optim: {{lr: !!float 1, betas: [0.9, 0.95]}}\n  data: {{data_impl: text, text_files: [{LONG}]}}\n"
        "trainer: {max_steps: *seed}\nname: ${model.tokenizer.library}_${model.seed}\n"
    )
    assert train(["--config-dir", str(tmp_path), "--config-name", "mine", "--cfg", "job", "--resolve"]) == 0
    shown = capsys.readouterr().out
    assert "max_steps: 3" in shown
    assert "encoder_seq_length: 64" in shown
    assert "f4999" in shown


def test_a_list_of_thousands_of_files_is_read(tmp_path):
    files = "".join(
        f"      - /data/corpora/a/long/name/of/a/shard/part-{number:05}-of-09900.jsonl\n" for number in range(9900)
    )
    (tmp_path / "mine.yaml").write_text(f"{RUN}model:\n  data:\n    text_files:\n{files}")
    assert train(["--config-dir", str(tmp_path), "--config-name", "mine", "--cfg", "job"]) == 0


def test_defaults_that_double_end(tmp_path, capsys):
    for level in range(20):
        names = f"[config{level + 1}@a, config{level + 1}@b]"
        (tmp_path / f"config{level}.yaml").write_text(f"defaults: {names}\n")
    (tmp_path / "config20.yaml").write_text("seed: 1\n")
    with soon():
        assert train(["--config-dir", str(tmp_path), "--config-name", "config0", "--cfg", "job"]) == 2
    assert "defaults lists" in capsys.readouterr().err


@pytest.mark.parametrize("unit", ["[],", "{},", "0,", '"a",'])
def test_json_with_many_values_takes_little_memory(unit, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": [' + unit * 2_000_000 + "0]}")
    with soon():
        with pytest.raises(UserError, match=str(path)):
            read_foreign_json(path)
        assert import_hf([f"path={tmp_path}", f"out={tmp_path}/out"]) == 2
    assert len(capsys.readouterr().err) < 10_000


@pytest.mark.parametrize("value", [[0] * 200_000, [[[]]] * 20_000, "x" * 2_000_000, ["${a}"] * 20_000])
def test_a_manifest_holds_no_huge_configuration(value, run_dir):
    (checkpoint,) = (run_dir / "checkpoints").glob("step_*2")
    values = json.loads((checkpoint / MANIFEST).read_text())
    values["config"]["name"] = value
    values.pop("sha256")
    (checkpoint / MANIFEST).write_text(json.dumps({**values, "sha256": fingerprint(values)}))
    with soon(), pytest.raises(UserError, match="garbled"):
        read_manifest(checkpoint)


def test_many_restarts_are_read_in_time(tmp_path):
    steps, start = 20_000, json.dumps({"kind": "start", "step": 20_000, "time_unix": 1.0})
    lines = [json.dumps({"kind": "validation", "step": step, "time_unix": 1.0, **VALIDATION}) for step in range(steps)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, *[start, lines[-1]] * steps]) + "\n")
    with soon():
        metrics = load_metrics(tmp_path)
    assert [record.step for record in metrics.validation] == list(range(steps))
    assert len(metrics.starts) == 1
