"""A registered data source is tokenized, cached and resumed like ours, and its mistakes name it."""

import shutil

import pytest

from gpt_pretrain.report.metrics_file import load_metrics
from tests.extensions import TINY, run_extended, write_module
from tests.launching import REPOSITORY

SOURCE = """
    from pathlib import Path
    from gpt_pretrain import extend

    @extend.data_source("{name}")
    class Lines:
        def __init__(self, config):
            self.files = {files}

        def documents(self, path):
            for line in path.read_text().splitlines():
                yield {document}

        def identity(self):
            return {identity}
"""
TEXT = "\n".join(f"line {number}: " + " ".join(str(number * k) for k in range(20)) for number in range(300))
ON_TEXT = [
    *(each for each in TINY if not each.startswith(("data=", "model.vocab_size"))),
    "model.vocab_size=320",
    "model.tokenizer.vocab_size=320",
    "model.data.splits_string='700,300,0'",
    "sample.max_new_tokens=0",
]


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "lines.txt").write_text(TEXT)
    return tmp_path


def arguments(folder, run, *overrides):
    places = [f"model.data.cache_dir={folder / 'cache'}", f"run_dir={folder / run}"]
    return [*ON_TEXT, *places, "trainer.max_steps=2", *overrides]


def write_source(folder, *, name="lines", files=None, document="line", identity="None"):
    files = f"[Path({str(folder / 'lines.txt')!r})]" if files is None else files
    write_module(folder, SOURCE.format(name=name, files=files, document=document, identity=identity))


def own(name="lines"):
    return ["extensions=[lab]", f"model.data.data_impl={name}"]


def test_an_extensions_documents_train_as_the_same_documents_of_ours(corpus):
    (corpus / "lines.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in TEXT.splitlines()))
    write_source(corpus)
    ours = run_extended(
        corpus, *arguments(corpus, "ours", "data=text", f"model.data.text_files=[{corpus / 'lines.jsonl'}]")
    )
    theirs = run_extended(corpus, *arguments(corpus, "theirs", *own()))
    assert (ours.returncode, theirs.returncode) == (0, 0), ours.stderr + theirs.stderr
    losses = [[record.loss for record in load_metrics(corpus / run).train] for run in ("ours", "theirs")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


@pytest.mark.parametrize(("identity", "entries"), [("None", 1), ("config.name", 2)])
def test_its_tokens_are_cached_as_long_as_its_text_is_the_same(identity, entries, corpus):
    write_source(corpus, identity=identity.replace("config", "self.config"))
    path = corpus / "lab.py"
    path.write_text(path.read_text().replace("self.files =", "self.config = config; self.files ="))
    for name in ("one", "two"):
        done = run_extended(corpus, *arguments(corpus, name, f"name={name}", *own()))
        assert done.returncode == 0, done.stderr
    assert len(list((corpus / "cache/corpora").glob("lines-*[0-9a-f]"))) == entries


def test_the_examples_mails_train_and_resume(corpus):
    shutil.copytree(REPOSITORY / "examples/my_lab/my_lab", corpus / "my_lab")
    mails = "".join(f"From a@b Thu Jan  1 00:00:00 1970\nSubject: {n}\n\n{TEXT[n : n + 99]}\n\n" for n in range(200))
    (corpus / "mails.mbox").write_text(mails)
    given = ["extensions=[my_lab.data]", "model.data.data_impl=lab_mails", f"my_lab.mails=[{corpus / 'mails.mbox'}]"]
    for steps in (1, 2):
        done = run_extended(corpus, *arguments(corpus, "run", *given, f"trainer.max_steps={steps}"))
        assert done.returncode == 0, done.stderr
    assert [record.step for record in load_metrics(corpus / "run").train] == [1, 2]

    done = run_extended(corpus, *arguments(corpus, "none", *given[:2]))
    assert done.returncode == 2
    for part in ("my_lab.mails=[]", "my_lab.data"):
        assert part in done.stderr


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"files": "[]"}, ["'lines'", "no files"]),
        ({"files": "['/nowhere.txt']"}, ["'lines'", "/nowhere.txt"]),
        ({"files": "config.nothing"}, ["'lines'", "lab.py", "line 8", "AttributeError"]),
        ({"document": "1"}, ["'lines'", "lines.txt", "int"]),
        ({"document": "line[10**6]"}, ["'lines'", "lab.py", "line 12", "IndexError", "lines.txt"]),
        ({"identity": "{1, 2}"}, ["'lines'", "identity"]),
        ({"name": "stdlib"}, ["'stdlib'", "its own"]),
    ],
)
def test_a_mistake_in_a_data_source_names_it(changes, parts, corpus):
    write_source(corpus, **changes)
    done = run_extended(corpus, *arguments(corpus, "run", *own()))
    assert done.returncode in (1, 2), done.stdout
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


def test_a_text_in_place_of_documents_is_refused(corpus):
    write_source(corpus)
    path = corpus / "lab.py"
    path.write_text(path.read_text().replace("yield line", "return line"))
    done = run_extended(corpus, *arguments(corpus, "run", *own()))
    assert done.returncode == 2, done.stdout
    assert all(part in done.stderr for part in ("'lines'", "lines.txt", "returned a str", "yield"))


def test_a_source_in_place_of_a_group_of_files_is_told_its_key(corpus):
    write_source(corpus)
    done = run_extended(corpus, "--cfg", "job", "extensions=[lab]", "data=lines")
    assert done.returncode == 2, done.stdout
    assert "model.data.data_impl=lines" in done.stderr


def test_the_examples_tokenizer_trains_is_saved_and_generates(corpus):
    shutil.copytree(REPOSITORY / "examples/my_lab/my_lab", corpus / "my_lab")
    text = ["data=text", f"model.data.text_files=[{corpus / 'lines.txt'}]"]
    bytes_ = ["extensions=[my_lab.tokens]", "model.tokenizer.library=lab_bytes", "model.data.splits_string='1,0,0'"]
    without = ("model.tokenizer.vocab_size", "model.data.splits_string", "trainer.val_check_interval")
    given = [each for each in arguments(corpus, "run", *text) if not each.startswith((*without, "trainer.limit"))]
    done = run_extended(corpus, *given, *bytes_, "trainer.limit_val_batches=0")
    assert done.returncode == 0, done.stderr
    # Each byte is a token, and one ends the document.
    assert f"{len(TEXT) + 1:,} tokens" in done.stdout

    asked = [f"checkpoint={corpus / 'run/checkpoints/step_00000002'}", "prompt=line", "max_new_tokens=3"]
    # The saved file is all that it needs.
    for extensions in (["extensions=[my_lab.tokens]"], []):
        done = run_extended(corpus, *asked, *extensions, module="gpt_pretrain.generate")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("line")


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("return 3", ["'own'", "int", "tokenizers.Tokenizer"]),
        ("return 1 / 0", ["'own'", "lab.py", "line 6", "ZeroDivisionError"]),
        ("import tokenizers; return tokenizers.Tokenizer(tokenizers.models.BPE())", ["'own'", "<|endoftext|>"]),
    ],
)
def test_a_mistake_in_a_tokenizer_names_it(body, parts, corpus):
    source = f"""
    from gpt_pretrain import extend

    @extend.tokenizer("own")
    def build(config):
        {body}
    """
    write_module(corpus, source)
    text = ["data=text", f"model.data.text_files=[{corpus / 'lines.txt'}]", "extensions=[lab]"]
    given = [each for each in arguments(corpus, "run", *text) if not each.startswith("model.tokenizer")]
    done = run_extended(corpus, *given, "model.tokenizer.library=own")
    assert done.returncode in (1, 2), done.stdout
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr
