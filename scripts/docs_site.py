"""Hooks of mkdocs for `make docs`, named in mkdocs.yml.

They add the pages outside of docs/ (README.md as the home page, CONTRIBUTING.md, benchmarks/), point links at them, and
write these references from the source in place of comments:

    <!-- keys -->           every key with its type, default and meaning
    <!-- records -->        every kind of record in metrics.jsonl with its fields
    <!-- comparisons -->    every comparison of the proof that FP8 is on, with its bound
    <!-- families -->       every class of transformers that models come from and go to, and what is refused by name
"""

import ast
import dataclasses
import inspect
import re
import typing
from itertools import groupby
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from gpt_pretrain.config.errors import written
from gpt_pretrain.config.keys import flatten, schema_keys, schema_sections
from gpt_pretrain.config.load import config_to_dict
from gpt_pretrain.fp8.comparisons import COMPARISONS
from gpt_pretrain.huggingface.architectures import FIELDS, Architecture
from gpt_pretrain.huggingface.published_config import NOT_HERE
from gpt_pretrain.report import records
from gpt_pretrain.rules.jobs import load_config

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# A link or picture to a file of the repository: its text, the path, the heading.
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)#:]+)(#[^)]*)?\)")
_JSON_TYPES = {int: "integer", float: "number", str: "string"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside of docs/."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    for path in (ROOT / "CONTRIBUTING.md", ROOT / "LICENSE", *sorted((ROOT / "benchmarks").glob("*.*"))):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Writes the references and points links at the site's pages."""
    for name, write in REFERENCES.items():
        if name in markdown:
            markdown = markdown.replace(name, write())
    source = Path(page.file.abs_src_path or "")

    def to_site(link: re.Match[str]) -> str:
        shown, target, heading = link.groups(default="")
        path = (source.parent / target).resolve()
        place = "index.md" if path == ROOT / "README.md" else path.relative_to(DOCS if DOCS in path.parents else ROOT)
        if files.get_file_from_path(str(place)) is None and path.exists():
            # A file outside of the site, such as a test: its name is enough.
            return shown.strip("[]")
        return f"{shown}({'../' * (page.file.src_uri.count('/'))}{place}{heading})"

    return _LINK.sub(to_site, markdown)


def key_reference() -> str:
    """Every key by section, with its default."""
    values = dict(flatten(config_to_dict(load_config([]))))
    lines: list[str] = []
    for section, keys in groupby(schema_keys().values(), key=lambda key: key.path.rpartition(".")[0]):
        about = (schema_sections()[section].__doc__ or "" if section else "").partition(": ")[2]
        lines += [f"## {section or 'The run'}", "", about[:1].upper() + about[1:], ""]
        lines += ["| key | type | default | meaning |", "|:--|:--|:--|:--|"]
        for key in keys:
            kind, value = key.type_text.replace(" | ", ", "), written(values[key.path])
            lines.append(f"| `{key.path}` | {kind} | {f'`{value}`' if value else ''} | {_cell(key.doc)} |")
        lines.append("")
    return "\n".join(lines)


def record_reference() -> str:
    """Every kind of record with its fields, in the order of their declaration."""
    kinds: dict[str, type] = {
        **records.RECORD_KINDS,
        "fp8.tensors": records.Fp8Tensor,
        "rank_times.slowest": records.RankTime,
        "sources.sources": records.ConsumedSource,
    }
    lines: list[str] = []
    for kind, record in kinds.items():
        lines += [f"## `{kind}`", "", inspect.getdoc(record) or "", "", "| field | type | meaning |", "|:--|:--|:--|"]
        meanings, hints = _field_docs(record), typing.get_type_hints(record)
        for field in dataclasses.fields(record):
            lines.append(f"| `{field.name}` | {_json_type(hints[field.name])} | {_cell(meanings[field.name])} |")
        lines.append("")
    return "\n".join(lines)


def comparison_reference() -> str:
    """Every comparison of the proof, with its bound and what a difference does."""
    lines = ["| what | how near | a difference |", "|:--|:--|:--|"]
    for each in COMPARISONS:
        lines.append(f"| {_cell(each.what)} | {_cell(each.bound)} | {'stops' if each.stops else 'warns'} |")
    return "\n".join(lines)


def family_reference() -> str:
    """Every class of `transformers` with what a model of it may be, and the models that are refused by name."""
    lines = ["| `model_type` | class | keys of `model.` that it restricts |", "|:--|:--|:--|"]
    for family in Architecture:
        rules = (f"`{name}={' or '.join(map(written, values))}`" for name, values in FIELDS[family].items())
        lines.append(f"| `{family.name}` | {family.value} | {_cell(', '.join(rules))} |")
    lines += ["", "| refused | by | why |", "|:--|:--|:--|"]
    lines += [f"| `{kind}` | `{part}` | {_cell(why)} |" for kind, (part, why) in NOT_HERE.items()]
    return "\n".join(lines)


REFERENCES = {
    "<!-- keys -->": key_reference,
    "<!-- records -->": record_reference,
    "<!-- comparisons -->": comparison_reference,
    "<!-- families -->": family_reference,
}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _field_docs(record: type) -> dict[str, str]:
    """Field → the string below it in the source, base classes included."""
    docs: dict[str, str] = {}
    for cls in filter(dataclasses.is_dataclass, reversed(record.__mro__)):
        (declared,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(declared, ast.ClassDef)
        for field, below in zip(declared.body, declared.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                docs[ast.unparse(field.target)] = str(ast.literal_eval(below.value))
    return docs


def _json_type(hint: typing.Any) -> str:
    """A field's type in JSON."""
    if typing.get_origin(hint) is tuple:
        (item, _) = typing.get_args(hint)
        return f"list of {_JSON_TYPES.get(item, 'object')}s"
    if typing.get_origin(hint) is typing.Literal:
        return "string"
    names = [_JSON_TYPES.get(part, "null") for part in typing.get_args(hint) or (hint,)]
    return " or ".join(names)
