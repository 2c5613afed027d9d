"""The column of text of .parquet and .arrow files, nested in others or not.

A key names a column (`text`, also `meta.text` if it is called so) or, with dots, a field of one (`text` of `meta`).
"""

from collections.abc import Iterable, Iterator

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.remote import RemoteFile, SourceFile, size_of

_BATCH_ROWS = 256
_ARROW_FILE = b"ARROW1"

type Row = tuple[str | None, int]
"""Text of a row, and the bytes of the file that stand for it; a null, or a field of a null, is None."""


def read_parquet(path: SourceFile, key: str) -> Iterator[Row]:
    """Rows of a .parquet file.

    Raises:
        UserError: It has no such column, or something else than text in it.
        OSError, pyarrow.ArrowException: It cannot be read.
    """
    with pyarrow.parquet.ParquetFile(path.open("rb") if isinstance(path, RemoteFile) else path) as file:
        names = _find(path, file.schema_arrow, key)
        num_row_bytes = size_of(path) // max(1, file.metadata.num_rows)
        batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=[".".join(names)])
        yield from _rows(path, key, ((_column(batch, names), num_row_bytes) for batch in batches))


def read_arrow(path: SourceFile, key: str) -> Iterator[Row]:
    """Rows of a stream, as Hugging Face's `save_to_disk` writes it, or of a file of Arrow's other format, Feather.

    It raises what `read_parquet` does.
    """

    def checked(batch: pyarrow.RecordBatch) -> tuple[pyarrow.Array, int]:
        # Arrow reads a wrong offset of a mapped file without a check of its own.
        batch.column(names[0]).validate(full=True)
        return _column(batch, names), batch.nbytes // max(1, len(batch))

    is_remote = isinstance(path, RemoteFile)
    with pyarrow.PythonFile(path.open("rb"), "r") if is_remote else pyarrow.memory_map(str(path)) as file:
        is_stream = file.read(len(_ARROW_FILE)) != _ARROW_FILE
        file.seek(0)
        reader = pyarrow.ipc.open_stream(file) if is_stream else pyarrow.ipc.open_file(file)
        names = _find(path, reader.schema, key)
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        yield from _rows(path, key, map(checked, batches))


def _find(path: SourceFile, schema: pyarrow.Schema, key: str) -> list[str]:
    """Names of the column and of the fields in it, from the outside."""
    found = _names(list(schema), key)
    if found is None:
        columns = ", ".join(f"{field.name!r}" for field in schema)
        raise UserError(f"{path}: no column model.data.text_key={key!r}; it has {columns}")
    names, kind = found
    text = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    types = pyarrow.types
    # A column of nulls alone has a type of its own.
    if not any(
        is_text(text) for is_text in (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    ):
        raise UserError(f"{path}: column {key!r} is of type {kind}, not string")
    return names


def _names(fields: Iterable[pyarrow.Field], key: str) -> tuple[list[str], pyarrow.DataType] | None:
    by_name = {field.name: field.type for field in fields}
    if key in by_name:
        return [key], by_name[key]
    for name, kind in by_name.items():
        if key.startswith(f"{name}.") and pyarrow.types.is_struct(kind):
            inner = _names(kind, key.removeprefix(f"{name}."))
            if inner is not None:
                return [name, *inner[0]], inner[1]
    return None


def _column(batch: pyarrow.RecordBatch, names: list[str]) -> pyarrow.Array:
    column = batch.column(names[0])
    for name in names[1:]:
        # Unlike `field`, it makes what is below a null one, too.
        column = column.flatten()[column.type.get_field_index(name)]
    return column


def _rows(path: SourceFile, key: str, columns: Iterable[tuple[pyarrow.Array, int]]) -> Iterator[Row]:
    row = 0
    for column, num_row_bytes in columns:
        for value in column:
            row += 1
            try:
                yield value.as_py(), num_row_bytes
            except UnicodeDecodeError as error:
                raise UserError(f"{path}, row {row}: {key!r} is not UTF-8 ({error})") from error
