import bz2
import codecs
import gzip
import json
import random
import re
import struct

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.sources.stdlib import StdlibSource
from gpt_pretrain.data.sources.text import FileSource


def pieces(source):
    return (piece for path in source.files for piece in source.read_file(path))


def documents(source):
    text, result = "", []
    for piece in pieces(source):
        text += piece.text
        if piece.ends_document:
            result.append(text)
            text = ""
    assert text == ""
    return result


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_a_txt_file_is_one_document_in_the_order_of_the_patterns(tmp_path):
    (tmp_path / "b.txt").write_bytes("bé\r\nb".encode())
    (tmp_path / "a1.txt").write_bytes(codecs.BOM_UTF8 + b"one")
    (tmp_path / "a2.txt").write_text("")
    source = FileSource([f"{tmp_path}/b.txt", f"{tmp_path}/*.txt"], "text")
    assert documents(source) == ["bé\r\nb", "one", ""]


def test_jsonl_rows_are_documents_and_blank_lines_are_none(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "a\\nb", "n": 1}\n\n{"body": ""}\n{"body": "\\ud83d\\ude00"}')
    assert documents(FileSource([str(path)], "body")) == ["a\nb", "", "😀"]


def test_parquet_rows_are_documents_and_nulls_are_empty(tmp_path):
    write_parquet(tmp_path / "x.parquet", text=["a", None, "c"], other=[1, 2, 3])
    assert documents(FileSource([f"{tmp_path}/*.parquet"], "text")) == ["a", "", "c"]


def write_arrow(path, new_stream, batches, **columns):
    table = pyarrow.table(columns)
    with new_stream(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=-(-len(table) // batches))


@pytest.mark.parametrize("new_stream", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_arrow_rows_are_documents_and_nulls_are_empty(new_stream, kind, tmp_path):
    texts = ["a", None, "cé", "", "e", "f" * 1000, "g"]
    columns = {"other": range(7), "text": pyarrow.array(texts, kind)}
    write_arrow(tmp_path / "x.arrow", new_stream, 3, **columns)
    source = FileSource([f"{tmp_path}/*.arrow"], "text")
    assert documents(source) == [text or "" for text in texts]
    assert 1000 < sum(piece.num_source_bytes for piece in pieces(source)) <= source.num_bytes


def test_the_data_of_a_saved_hugging_face_folder_are_named(tmp_path):
    """It holds its data in numbered files, and caches beside them, which are no data."""
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        for number in range(2):
            name = f"data-0000{number}-of-00002.arrow"
            write_arrow(tmp_path / part / name, pyarrow.ipc.new_stream, 1, text=[f"{part} {number}"])
        write_arrow(tmp_path / part / "cache-1f.arrow", pyarrow.ipc.new_stream, 1, text=["of a cache"])
        (tmp_path / part / "state.json").write_text("{}")
    with pytest.raises(UserError, match=" is a directory; ") as refused:
        FileSource([str(tmp_path)], "text")
    pattern = str(refused.value).rpartition(": ")[2]
    assert documents(FileSource([pattern], "text")) == ["test 0", "test 1", "train 0", "train 1"]


def save_data_set(folder, texts):
    """What `datasets.Dataset.save_to_disk` writes, with the files in the order of state.json."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(texts):05}.arrow" for number in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        write_arrow(folder / name, pyarrow.ipc.new_stream, 1, text=[text])
    write_arrow(folder / "cache-1f.arrow", pyarrow.ipc.new_stream, 1, text=["of a cache"])
    state = {"_data_files": [{"filename": name} for name in reversed(names)], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))


def test_a_saved_data_set_is_its_folder_and_one_of_splits_names_them(tmp_path):
    save_data_set(tmp_path / "web" / "train", ["one", "two"])
    save_data_set(tmp_path / "web" / "test", ["three"])
    assert documents(FileSource([f"{tmp_path}/web/train"], "text")) == ["two", "one"]
    (tmp_path / "web" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"web is a directory; .* test, train: .*web/NAME$"):
        FileSource([f"{tmp_path}/web"], "text")
    (tmp_path / "web" / "train" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"state\.json names data-00001-of-00002\.arrow"):
        FileSource([f"{tmp_path}/web/train"], "text")


def zstd(content):
    with pyarrow.BufferOutputStream() as out:
        with pyarrow.CompressedOutputStream(out, "zstd") as stream:
            stream.write(content)
        return out.getvalue().to_pybytes()


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd}


@pytest.mark.parametrize("codec", COMPRESS)
def test_compressed_files_are_read_as_what_they_hold(codec, tmp_path):
    texts = [f"document {number}: " + random.Random(number).randbytes(9000).hex() for number in range(30)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    # Two parts one after the other, as `cat a.gz b.gz` and parallel compressors make them.
    (tmp_path / f"x.jsonl{codec}").write_bytes(COMPRESS[codec](lines[:70_000]) + COMPRESS[codec](lines[70_000:]))
    (tmp_path / f"x.txt{codec}").write_bytes(COMPRESS[codec](codecs.BOM_UTF8 + "né".encode()))
    rows = FileSource([f"{tmp_path}/*.jsonl*"], "text")
    assert documents(rows) == texts
    assert rows.num_bytes < len(lines)
    assert sum(piece.num_source_bytes for piece in pieces(rows)) == rows.num_bytes
    assert documents(FileSource([f"{tmp_path}/*.txt*"], "text")) == ["né"]
    # One that was not copied to its end.
    whole = (tmp_path / f"x.jsonl{codec}").read_bytes()
    (tmp_path / f"x.jsonl{codec}").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(UserError, match=rf"x\.jsonl{codec} cannot be read: "):
        documents(rows)


BOM = "\ufeff"


def write_rows(folder, suffix, rows):
    """Rows {"meta": {"text": …}, "meta.title": …} as a file of a format."""
    path = folder / f"x{suffix}"
    if suffix.startswith(".json"):
        # As of two files that were joined.
        path.write_bytes(codecs.BOM_UTF8 + f"\n{BOM}".join(map(json.dumps, rows)).encode())
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow"])
def test_nested_and_dotted_names_nulls_and_byte_order_marks_are_alike_in_all_formats(suffix, tmp_path):
    rows = [
        {"meta": {"text": "\ufeffone", "n": 1}, "meta.title": "I"},
        {"meta": None, "meta.title": "II"},
        {"meta": {"text": None, "n": 3}, "meta.title": None},
        {"meta": {"text": "four \ufeff", "n": 4}, "meta.title": "\ufeff"},
    ]
    path = write_rows(tmp_path, suffix, rows)
    assert documents(FileSource([path], "meta.text")) == ["one", "", "", "four \ufeff"]
    assert documents(FileSource([path], "meta.title")) == ["I", "II", "", ""]
    with pytest.raises(UserError, match=r"model\.data\.text_key='meta\.body'; .*'meta', 'meta\.title'"):
        documents(FileSource([path], "meta.body"))
    with pytest.raises(UserError, match=r"'meta\.n' is .*int"):
        documents(FileSource([path], "meta.n"))


def test_columns_of_nulls_alone_are_empty_documents(tmp_path):
    write_parquet(tmp_path / "x.parquet", text=[None, None])
    write_arrow(tmp_path / "x.arrow", pyarrow.ipc.new_stream, 1, text=[None, None])
    assert documents(FileSource([f"{tmp_path}/x.*"], "text")) == [""] * 4


@pytest.mark.parametrize("kind", ["dictionary", "string_view", "large_string"])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_every_type_of_text_is_read(suffix, kind, tmp_path):
    texts = ["a", None, "longer than what fits into a view é", "a"]
    column = pyarrow.array(texts, pyarrow.string() if kind == "dictionary" else getattr(pyarrow, kind)())
    column = column.dictionary_encode() if kind == "dictionary" else column
    if suffix == ".parquet":
        if kind == "string_view":
            column = column.cast(pyarrow.string())
        write_parquet(tmp_path / "x.parquet", text=column)
    else:
        write_arrow(tmp_path / "x.arrow", pyarrow.ipc.new_file, 1, text=column)
    assert documents(FileSource([f"{tmp_path}/x{suffix}"], "text")) == [text or "" for text in texts]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet", ".arrow", ".jsonl.gz", ".txt.zst", ".json.gz"])
def test_a_directory_is_answered_with_the_files_that_it_has(suffix, tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / f"x{suffix}").touch()
    (tmp_path / "settings.json").touch()
    with pytest.raises(UserError, match=re.escape(f": {tmp_path}/**/*{suffix}") + "$"):
        FileSource([str(tmp_path)], "text")


def test_an_arrow_file_whose_offsets_point_elsewhere_is_refused(tmp_path):
    path = tmp_path / "x.arrow"
    write_arrow(path, pyarrow.ipc.new_stream, 1, text=["abcdefgh", "ijklmnop"])
    offsets = struct.pack("<3i", 0, 8, 16)
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, struct.pack("<3i", 0, 8, 1 << 30)))
    with pytest.raises(UserError, match=r"x\.arrow cannot be read: "):
        documents(FileSource([str(path)], "text"))


def test_long_documents_come_in_pieces_that_join_to_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(FileSource, "piece_size", 50)
    text = "".join(f"line {i} – äöü\n\n    indented\n" for i in range(100))
    (tmp_path / "x.txt").write_text(text)
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "short"}))
    txt, jsonl = (FileSource([f"{tmp_path}/x.{suffix}"], "text") for suffix in ("txt", "jsonl"))
    assert documents(txt) == [text]
    assert documents(jsonl) == [text, "short"]
    for source in (txt, jsonl):
        found = list(pieces(source))
        assert max(len(piece.text) for piece in found) < 150
        assert sum(piece.num_source_bytes for piece in found) == source.num_bytes


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', "line 2: .*model.data.text_key='text'.*'txt'"),
        ("x.jsonl", b'{"text": "a"}\n{"text": 3}\n', "line 2: 'text' .*int"),
        ("x.jsonl", b'{"text": "a"}\n["a"]\n', "line 2: .*list"),
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: .*JSON"),
        ("x.jsonl", b'{"text": "\\ud800"}\n', "line 1: 'text' .*surrogate"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "UTF-8: .*0xff .*offset 24;"),
        ("x.txt", b"abc\xe4def", "UTF-8: .*0xe4 .*offset 3;.* LATIN1"),
        ("x.jsonl", '{"text": "a"}'.encode("utf-16"), "UTF-8: .*0xff .*offset 0;.* UTF-16"),
        ("x.json", b'[{"text": "a"}]', "line 1: .*list"),
        ("x.txt", b"abc\xe2\x82", "UTF-8: .*0xe2 .*offset 3;"),
        ("x.parquet", b"PAR1 no parquet", "cannot be read: "),
        ("x.arrow", b"ARROW1 no arrow", "cannot be read: "),
        ("x.arrow", b"no arrow", "cannot be read: "),
        ("x.arrow", b"", "cannot be read: "),
        ("x.csv", b"a,b", r"'\.csv'; .*\.txt, \.jsonl, \.parquet, \.arrow"),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(tmp_path, name, content, named):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}\b.*{named}"):
        documents(FileSource([str(tmp_path / name)], "text"))


def test_the_offset_of_bad_utf8_counts_from_the_start_of_a_long_file(tmp_path, monkeypatch):
    monkeypatch.setattr(FileSource, "piece_size", 7)
    (tmp_path / "x.txt").write_bytes("äö ".encode() * 20 + b"\xff")
    with pytest.raises(UserError, match="offset 100;"):
        documents(FileSource([f"{tmp_path}/x.txt"], "text"))


@pytest.mark.parametrize(
    ("column", "named"),
    [({"body": ["a"]}, "model.data.text_key='text'; .*'body'"), ({"text": [1]}, "'text' .*int64.*string")],
)
def test_a_parquet_or_arrow_file_without_text_is_refused(tmp_path, column, named):
    write_parquet(tmp_path / "x.parquet", **column)
    write_arrow(tmp_path / "x.arrow", pyarrow.ipc.new_stream, 1, **column)
    for suffix in ("parquet", "arrow"):
        with pytest.raises(UserError, match=rf"x\.{suffix}: .*{named}"):
            documents(FileSource([f"{tmp_path}/x.{suffix}"], "text"))


def test_a_pattern_without_files_and_a_directory_are_refused(tmp_path):
    with pytest.raises(UserError, match=re.escape(f"model.data.text_files: {tmp_path}/*.txt ")):
        FileSource([f"{tmp_path}/*.txt"], "text")
    with pytest.raises(UserError, match=re.escape(f"{tmp_path} is a directory; ") + r".*\*\.jsonl"):
        FileSource([str(tmp_path)], "text")


def test_a_file_whose_name_looks_like_a_pattern_is_itself(tmp_path):
    (tmp_path / "a[1].txt").write_text("brackets")
    assert documents(FileSource([f"{tmp_path}/a[1].txt"], "text")) == ["brackets"]


def test_identity_changes_with_size_and_time_of_a_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abc")
    before = FileSource([str(path)], "text").identity()
    assert FileSource([str(path)], "text").identity() == before
    path.write_text("abcd")
    assert FileSource([str(path)], "text").identity() != before


def test_a_sample_takes_the_same_share_of_every_file(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    texts = list(FileSource([f"{tmp_path}/*.txt"], "text").sample(60))
    assert "".join(texts) == "a" * 20 + "b" * 20 + "c" * 20


def test_the_standard_library_is_code_without_tests_and_always_the_same():
    source = StdlibSource()
    names = [path.relative_to(source.root).as_posix() for path in source.files]
    assert "ast.py" in names
    assert "json/decoder.py" in names
    assert not any(re.search(r"(^|/)(tests?|site-packages|idle_test)/", name) for name in names)
    assert 5e6 < source.num_bytes < 25e6
    assert StdlibSource().identity() == source.identity()


def test_a_line_that_is_nested_without_end_is_named(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"text": "a"}\n' + "[" * 100_000)
    with pytest.raises(UserError, match=r"deep\.jsonl, line 2"):
        list(pieces(FileSource([str(path)], "text")))
