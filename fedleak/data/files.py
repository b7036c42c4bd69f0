"""Tables in files: csv, tsv, jsonl and parquet, and the reason why one cannot be read.

`datasets` reads them. If it fails, the file is read again, slowly, to find the line that is at
fault. No reason quotes what a file holds: it is private.
"""

import csv
import gzip
import io
import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any, Literal

from fedleak.util.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

DELIMITERS: Mapping[str, str] = {".csv": ",", ".tsv": "\t"}
_KINDS = (".csv", ".jsonl", ".parquet", ".tsv")
KNOWN = ", ".join(_KINDS)
_COMPRESSED = ".gz"
_PANDAS_INDEX = "__index_level_0__"
"""Where pandas puts the first column, if every row has a field more than the header."""


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """A file, and how it is to be read.

    Attributes:
        path: Where it is.
        bare: It has no header line; columns are numbered from 0.
        encoding: Of its characters; None: UTF-8.
        delimiter: Between fields; None: a comma, or a tab in tsv files.
    """

    path: Path
    bare: bool = False
    encoding: str | None = None
    delimiter: str | None = None

    @property
    def kind(self) -> str:
        """The ending of the name, without that of a compression."""
        return Path(self.path.name.removesuffix(_COMPRESSED)).suffix

    @property
    def known(self) -> bool:
        """Whether files of this kind can be read."""
        return self.kind in _KINDS and not self.path.name.endswith(f".parquet{_COMPRESSED}")

    @property
    def separated(self) -> bool:
        """Whether it is a csv or tsv file."""
        return self.kind in DELIMITERS

    @property
    def separator(self) -> str:
        """What stands between fields of a csv or tsv file."""
        return self.delimiter or DELIMITERS[self.kind]

    @property
    def quoting(self) -> Literal[0, 3]:
        """Whether quotes in a csv or tsv file are more than text."""
        return csv.QUOTE_NONE if self.kind == ".tsv" else csv.QUOTE_MINIMAL

    def open(self) -> IO[bytes]:
        """Opens the file for reading, decompressed."""
        if self.path.suffix == _COMPRESSED:
            return gzip.open(self.path)  # type: ignore[return-value]
        return self.path.open("rb")

    def read_dataset(self) -> "Dataset":
        """Returns the table; what csv and tsv files hold is strings.

        Raises:
            ConfigError: It cannot be read, and why.
        """
        if self.delimiter is not None and not self.separated:
            raise ConfigError(
                f"data.delimiter = {self.delimiter!r} is for csv and tsv files, and "
                f"{str(self.path)!r} is none: leave it out"
            )
        if self.encoding is not None and self.kind == ".parquet":
            raise ConfigError(
                f"data.encoding = {self.encoding!r} is for files of text, and {str(self.path)!r} "
                "is none: leave it out"
            )
        try:
            # Private data is not left behind in a cache.
            with _quiet(), TemporaryDirectory(prefix="fedleak-") as cache:
                rows = (_from_csv if self.separated else _from_typed)(self, cache)
            rows.data.validate(full=True)  # Arrow believes JSON and Parquet that they are UTF-8
        except Exception as error:
            fault = _fault(self) or f"cannot be read ({type(error.__cause__ or error).__name__})"
            raise ConfigError(f"data.name = {str(self.path)!r} {fault}") from error
        return rows

    def header(self) -> list[str]:
        """Returns the fields of the first line of a csv or tsv file that is not blank."""
        with io.TextIOWrapper(
            self.open(), self.encoding or "utf-8-sig", errors="replace", newline=""
        ) as text:
            records = csv.reader(text, delimiter=self.separator, quoting=self.quoting)
            fields = next(filter(None, records), [])
        return [field.removeprefix("\ufeff") for field in fields]


def _from_csv(file: TableFile, cache: str) -> "Dataset":
    from datasets import Dataset

    header = file.header()
    if not header or any("\0" in name for name in header):
        raise ValueError("no header")
    options: dict[str, Any] = {"header": None, "names": None} if file.bare else {}
    rows = Dataset.from_csv(
        str(file.path),
        keep_in_memory=True,
        cache_dir=cache,
        sep=file.separator,
        quoting=file.quoting,
        encoding=file.encoding,
        # "None" and "NA" are words like others, and 007 is no 7.
        keep_default_na=False,
        converters=dict.fromkeys(range(len(header)) if file.bare else header, str),
        **options,
    )
    if _PANDAS_INDEX in rows.column_names:
        raise ValueError("rows are longer than the header")
    return rows.rename_columns({c: str(c) for c in rows.column_names if not isinstance(c, str)})


def _from_typed(file: TableFile, cache: str) -> "Dataset":
    from datasets import Dataset

    read = Dataset.from_json if file.kind == ".jsonl" else Dataset.from_parquet
    options = {} if file.encoding is None else {"encoding": file.encoding}
    return read(str(file.path), keep_in_memory=True, cache_dir=cache, **options)


def shown(names: list[str]) -> str:
    """Returns column names for a message.

    If there is no header, they are fields of the first line, so only single words are shown.
    """
    return ", ".join(
        name if re.fullmatch(r"[\w.:-]{1,32}", name) else f"(column {i})"
        for i, name in enumerate(names)
    )


def hidden_delimiter(names: list[str]) -> str | None:
    """Returns the delimiter of a header that was read as one field; None if it was not."""
    if len(names) != 1:
        return None
    return next((mark for mark in ";\t|," if mark in names[0]), None)


def _fault(file: TableFile) -> str | None:
    """Returns what is wrong with a file that could not be read, and what to do, if that shows."""
    try:
        with file.open() as stream:
            content = stream.read()
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return "is not a gzip file, or is cut off: compress it again"
    except OSError as error:
        return f"cannot be opened ({error.strerror}): see to its permissions"
    if not content.strip():
        return "is empty: give a file with rows"
    if file.kind == ".parquet":
        return _parquet_fault(content)
    # Every line end would have a zero in it.
    if (wide := re.match("utf.?(16|32)", file.encoding or "", re.I)) and b"\0" not in content:
        return f"is not UTF-{wide[1]}, as data.encoding says: leave that out"
    try:
        text = content.decode(file.encoding or "utf-8-sig")
    except UnicodeError as error:
        return _encoding_fault(content, file.encoding, error)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        return (
            f"has a NUL byte in line {line}: if it is UTF-16, set data.encoding = 'utf-16-le'; "
            "else it is damaged: remove that byte"
        )
    return _json_fault(text) if file.kind == ".jsonl" else _csv_fault(text, file)


def _encoding_fault(content: bytes, encoding: str | None, error: UnicodeError) -> str:
    """Says which byte is not of the encoding, and what to try."""
    marks = {b"\xff\xfe\0\0": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
    for mark, codec in marks.items():
        if content.startswith(mark) and encoding is None:
            return f"is not UTF-8 but {codec.upper()}: set data.encoding = {codec!r}"
    where = ""
    if isinstance(error, UnicodeDecodeError):
        line = content.count(b"\n", 0, error.start) + 1
        where = f": line {line} has the byte 0x{content[error.start]:02x}"
    return (
        f"is not {encoding or 'UTF-8'}{where}: save it as UTF-8, or set data.encoding to what it "
        "is in, such as 'cp1252', 'latin-1' or 'utf-16'"
    )


def _csv_fault(text: str, file: TableFile) -> str | None:
    """Returns what is wrong with the lines of a csv or tsv file."""
    # Behind an open quote, the last line is not a line of its own.
    records = csv.reader(
        io.StringIO(f"{text}\nend", newline=""), delimiter=file.separator, quoting=file.quoting
    )
    width, first, count, line, record = 0, 0, 0, 0, [""]
    try:
        for line, record in _numbered(records):
            if not width and record:
                width, first = len(record), line
            if len(record) > width:
                return (
                    f"has {len(record)} fields in line {line}, and {width} in line {first}: quote "
                    f'texts that hold a {file.separator!r}, as in "so, this", or set '
                    "data.delimiter"
                )
            count += bool(record)
    except csv.Error:  # a field of more than 128 KiB
        record = []
    if record != ["end"]:
        return f'has a quote in line {line} that nothing closes: add a ", or write "" for one'
    return None if file.bare or count > 2 else "has a header line and no rows: add some"


def _numbered(records: Any) -> Iterator[tuple[int, list[str]]]:
    """Yields the records of a `csv.reader`, each with the line that it begins in."""
    line = 1
    for record in records:
        yield line, record
        line = records.line_num + 1


def _json_fault(text: str) -> str | None:
    """Returns which line of a jsonl file is not an object."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            fault = error.msg if isinstance(error, json.JSONDecodeError) else "too deep"
            return f"is not JSON in line {number} ({fault}): write an object in every line"
        if not isinstance(value, dict):
            return f'has no object in line {number}: write {{"text": ..., "label": ...}}'
    return None


def _parquet_fault(content: bytes) -> str:
    """Says what is wrong with the bytes of a Parquet file."""
    if not content.startswith(b"PAR1"):
        return "is not a Parquet file: write it again, or name it after what it is"
    if not content.endswith(b"PAR1"):
        return "is cut off, because the end of a Parquet file is missing: write or copy it again"
    return "is a damaged Parquet file: write or copy it again"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps `datasets` from printing an error that is to be explained."""
    import_module("datasets")  # which sets the level of its own
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
