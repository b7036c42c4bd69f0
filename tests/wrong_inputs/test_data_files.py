"""Data files that are wrong: refused with the cause, and without a word of what is in them."""

import gzip
import logging
from pathlib import Path

import pytest

from fedleak.data import files
from fedleak.running import preparation
from fedleak.util.errors import ConfigError

SECRET = "gemma carries the gene"
ROWS = [f"{SECRET} number {i},{i % 2}" for i in range(40)]
GOOD = "\n".join(["text,label", *ROWS, ""])
LINES = "\n".join(f'{{"text": "{SECRET} {i}", "label": {i % 2}}}' for i in range(40))

WRONG: dict[str, tuple[str, bytes | None, dict[str, object], tuple[str, ...]]] = {
    "missing": ("d.csv", None, {}, ("d.csv", "no such file")),
    "empty": ("d.csv", b"", {}, ("d.csv", "empty")),
    "blank lines": ("d.csv", b"\n\n\n", {}, ("d.csv",)),
    "header only": ("d.csv", b"text,label\n", {}, ("d.csv", "header")),
    "no label column": ("d.csv", GOOD.encode(), {"data.label": "labl"}, ("'labl'", "text, label")),
    "no text column": ("d.csv", GOOD.encode(), {"data.text": "txt"}, ("'txt'", "text, label")),
    "text not named": ("d.csv", GOOD.encode(), {"data.text": None}, ("data.text is missing",)),
    "label not named": ("d.csv", GOOD.encode(), {"data.label": None}, ("data.label is missing",)),
    "some labels missing": (
        "d.csv",
        "\n".join(
            ["text,label", *(f"{SECRET} {i},{'' if i < 6 else 1}" for i in range(40))]
        ).encode(),
        {},
        ("6 of 40", "no label", "row 1"),
    ),
    "one class": ("d.csv", GOOD.replace(",0\n", ",1\n").encode(), {}, ("1 distinct", "2 to")),
    "one row": ("d.csv", f"text,label\n{ROWS[0]}\n".encode(), {}, ("data.label",)),
    "some texts missing": (
        "d.csv",
        "\n".join(["text,label", ",1", *ROWS]).encode(),
        {},
        ("1 of 41", "drop_empty"),
    ),
    "latin-1": (
        "d.csv",
        GOOD.replace("gemma", "gemm\xe1").encode("latin-1"),
        {},
        ("UTF-8", "encoding"),
    ),
    "utf-16": ("d.csv", GOOD.encode("utf-16"), {}, ("UTF-8", "encoding")),
    "unknown encoding": ("d.csv", GOOD.encode(), {"data.encoding": "utf-99"}, ("utf-99",)),
    "long delimiter": ("d.csv", GOOD.encode(), {"data.delimiter": ";;"}, ("delimiter",)),
    "empty delimiter": ("d.csv", GOOD.encode(), {"data.delimiter": ""}, ("delimiter",)),
    "a field too many": (
        "d.csv",
        "\n".join(["text,label", *ROWS[:5], f"{ROWS[5]},9", *ROWS[6:]]).encode(),
        {},
        ("line 7",),
    ),
    "a field too few": (
        "d.csv",
        "\n".join(["text,label", *ROWS[:5], SECRET, *ROWS[6:]]).encode(),
        {},
        ("1 of 40", "label"),
    ),
    "open quote": ("d.csv", GOOD.replace(ROWS[4], '"' + ROWS[4]).encode(), {}, ("quote",)),
    "semicolons": (
        "d.csv",
        GOOD.replace(",", ";").encode(),
        {},
        ("delimiter",),
    ),
    "tabs in a csv": ("d.csv", GOOD.replace(",", "\t").encode(), {}, ("delimiter",)),
    "commas in a tsv": ("d.tsv", GOOD.encode(), {}, ("delimiter",)),
    "another suffix": ("d.txt", GOOD.encode(), {}, ("d.txt", ".csv")),
    "no suffix": ("d", GOOD.encode(), {"data.name": "./d"}, (".csv",)),
    "excel": ("d.xlsx", b"PK\x03\x04", {"data.name": "./d.xlsx"}, (".csv",)),
    "a folder": ("dd/d.csv", GOOD.encode(), {"data.name": "./dd"}, (".csv",)),
    "a column beyond": ("d.csv", GOOD.encode(), {"data.text": 99}, ("'99'",)),
    "a negative column": ("d.csv", GOOD.encode(), {"data.text": -1}, ("-1",)),
    "broken line": (
        "d.jsonl",
        LINES.replace(f'"{SECRET} 3"', f'"{SECRET} 3').encode(),
        {},
        ("d.jsonl", "line 4"),
    ),
    "json array": ("d.jsonl", f"[{LINES.replace(chr(10), ',')}".encode(), {}, ("d.jsonl",)),
    "a word": ("d.jsonl", b"hello\n", {}, ("d.jsonl", "line 1")),
    "numbers only": ("d.jsonl", b"1\n2\n3\n", {}, ("d.jsonl",)),
    "missing key": (
        "d.jsonl",
        LINES.replace('"text"', '"txt"', 14).encode(),
        {},
        ("14 of 40", "text"),
    ),
    "null text": (
        "d.jsonl",
        LINES.replace(f'"{SECRET} 3"', "null").encode(),
        {},
        ("1 of 40",),
    ),
    "text is a list": (
        "d.jsonl",
        LINES.replace('"text": ', '"text": [').replace('", "label', '"], "label').encode(),
        {},
        ("text",),
    ),
    "empty jsonl": ("d.jsonl", b"", {}, ("d.jsonl", "empty")),
    "not parquet": ("d.parquet", b"PAR1 is not all", {}, ("d.parquet",)),
    "empty parquet": ("d.parquet", b"", {}, ("d.parquet", "empty")),
    "too few rows": ("d.csv", GOOD.encode(), {"data.samples": 400}, ("400", "40", "leave out")),
    "all held out": (
        "d.csv",
        GOOD.encode(),
        {"data.samples": None, "data.held_out": 40},
        ("held_out = 40", "nothing to train on", "lower it"),
    ),
    "none held out left": ("d.csv", GOOD.encode(), {"data.samples": 40}, ("held_out",)),
    "long text": (
        "d.csv",
        GOOD.replace(ROWS[4], f"{'gemma ' * 500},1").encode(),
        {"data.samples": 36},
        ("max_length",),
    ),
    "emoji alone": (
        "d.csv",
        "\n".join(
            ["text,label", *(f"\U0001f642\U0001f680 {chr(0x4E00 + i)},{i % 2}" for i in range(40))]
        ).encode(),
        {},
        ("unknown",),
    ),
    "a word in the place of a flag": (
        "d.csv",
        GOOD.encode(),
        {"data.drop_empty": "yes"},
        ("drop_empty",),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_data_file_that_is_wrong(run, refused, folder: Path, case: str) -> None:
    name, content, changes, says = WRONG[case]
    if content is not None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    columns = {"data.text": "text", "data.label": "label"}
    outcome = run({"data.name": name, **columns, **changes})
    refused(outcome, *says)
    for word in ("gemma", "carries", "gemm\xe1"):
        assert word not in outcome.err
    assert not (folder / "runs").exists()


RIGHT: dict[str, tuple[str, bytes, dict[str, object]]] = {
    "csv": ("d.csv", GOOD.encode(), {}),
    "byte order mark": ("d.csv", GOOD.encode("utf-8-sig"), {}),
    "windows lines": ("d.csv", GOOD.replace("\n", "\r\n").encode(), {}),
    "tsv": ("d.tsv", GOOD.replace(",", "\t").encode(), {}),
    "jsonl": ("d.jsonl", LINES.encode(), {}),
    "latin-1, said": (
        "d.csv",
        GOOD.replace("gemma", "gemm\xe1").encode("latin-1"),
        {"data.encoding": "latin-1"},
    ),
    "semicolons, said": ("d.csv", GOOD.replace(",", ";").encode(), {"data.delimiter": ";"}),
    "empty rows, dropped": (
        "d.csv",
        "\n".join(["text,label", ",1", *ROWS]).encode(),
        {"data.drop_empty": True},
    ),
    "words as labels": (
        "d.csv",
        GOOD.replace(",0\n", ",no\n").replace(",1\n", ",yes\n").encode(),
        {},
    ),
    "numbers as text": (
        "d.csv",
        "\n".join(["text,label", *(f"{1000 + i},{i % 2}" for i in range(40))]).encode(),
        {},
    ),
    "quoted line ends": ("d.csv", GOOD.replace(ROWS[3], '"two\nlines",1').encode(), {}),
    "a class of one number, for next tokens": (
        "d.csv",
        GOOD.replace(",0\n", ",1\n").encode(),
        {"model.name": "builtin/gpt2-tiny", "model.task": "causal-lm"},
    ),
    "no size named": (
        "d.csv",
        GOOD.encode(),
        {"data.samples": None, "data.held_out": None},
    ),
    "a share held out": ("d.csv", GOOD.encode(), {"data.samples": None, "data.held_out": 0.1}),
    "control characters": ("d.csv", GOOD.replace("gemma", "\x1b[31mgemma").encode(), {}),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_data_file_that_is_right(experiment, folder: Path, case: str) -> None:
    from fedleak.config.loading import load

    name, content, changes = RIGHT[case]
    (folder / name).write_bytes(content)
    columns = {"data.name": name, "data.text": "text", "data.label": "label"}
    (folder / "e.toml").write_text(experiment(columns | changes))
    assert preparation.plan(load(folder / "e.toml")).held_out["sequences"]


def test_a_packed_file_is_read_or_refused(run, refused, folder: Path) -> None:
    (folder / "d.csv.gz").write_bytes(gzip.compress(GOOD.encode())[:-20])
    columns = {"data.text": "text", "data.label": "label"}
    refused(run({"data.name": "d.csv.gz", **columns}), "d.csv.gz")


def test_the_reader_prints_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, level = logging.getLogger("datasets"), logging.getLogger("datasets").level
    path = tmp_path / "mine.csv"
    path.write_bytes(b"text\nna\xefve\n")
    # The first import sets the level.
    monkeypatch.setattr(files, "import_module", lambda name: logger.setLevel(logging.WARNING))
    levels: list[int] = []
    monkeypatch.setattr(files, "_from_csv", lambda *_: levels.append(logger.getEffectiveLevel()))
    with pytest.raises(ConfigError, match="is not UTF-8"):
        files.TableFile(path=path).read_dataset()
    assert levels == [logging.CRITICAL]
    logger.setLevel(level)
