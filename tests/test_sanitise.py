"""Text of others reaches no terminal as something to obey."""

import doctest
import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from built import run_of
from rich.console import Console
from rich.text import Text
from tiny import tables

from fedleak.attacks.reconstruction import Status
from fedleak.audit.answer_scores import Scored, TextPair
from fedleak.cli.mistakes import mended
from fedleak.config.loading import parse
from fedleak.report.drawings.chart import write
from fedleak.report.drawings.sweeps import along_first_key, frontier, tradeoff
from fedleak.report.tables.sweep import attacks_table
from fedleak.report.terminal.run import print_run
from fedleak.report.terminal.table import print_table
from fedleak.store.records import DefenseFigures, Guarantee, LeakageRow, Utility
from fedleak.store.summaries import (
    SUMMARY,
    AttackSummary,
    CellSummary,
    Circumstances,
    Estimate,
    RunSummary,
    SweepSummary,
    WorstCase,
)
from fedleak.util import sanitise
from fedleak.util.errors import FedleakError
from fedleak.util.sanitise import markup, printable

C0_AND_C1 = [chr(i) for i in [*range(0x20), *range(0x7F, 0xA0)]]
BIDI = list("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
BREAKS = list("\u2028\u2029\ufeff\ud800\udfff")
ANSI = [
    "\x1bc",  # reset
    "\x1b[2J",  # clear
    "\x1b[31m",
    "\x9b31m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\",
    "\x1bP+q544e\x1b\\",
]


@pytest.mark.parametrize("hostile", C0_AND_C1 + BIDI + BREAKS + ANSI, ids=ascii)
def test_what_a_terminal_obeys_is_shown_instead(hostile: str) -> None:
    shown = printable(f"before {hostile} after")
    assert shown.isprintable()
    assert shown.startswith("before ")
    assert shown.endswith(" after")
    assert "\\" in shown


def test_texts_of_all_scripts_stay_as_they_are() -> None:
    for text in (
        "plain",
        "Grüße",
        "日本語",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "👩\u200d🚀",
        "a [red]b[/] \\x",
    ):
        assert printable(text) == text
    assert printable("a\u00a0b\u2003c") == "a b c"


def test_its_example_is_right() -> None:
    assert doctest.testmod(sanitise).failed == 0


@pytest.mark.parametrize("text", ["a[/]b", "[bold]x", "\\[/]", "a\\", "[a]\\[/a]\\"])
def test_no_text_is_a_tag(text: str) -> None:
    assert Text.from_markup(f"[red]{markup(text)}[/]").plain == text


# --- what others wrote ----------------------------------------------------------------------

MARKUP = ["a[/]b", "[bold]", "[link=http://example.org]x[/link]", "\\[/]", "a\\", ":skull:", "<&>'"]
HOSTILE = " ".join([*C0_AND_C1, *BIDI, *BREAKS, *ANSI, *MARKUP])
STORED = HOSTILE.replace("\ud800", "").replace("\udfff", "")  # no file has these
TRUTH, ANSWER = f"true {HOSTILE} words", f"read {HOSTILE} words"
MEAN = Estimate(mean=50.0, low=10.0, high=90.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def row(**values):
    fields = dict.fromkeys(LeakageRow.model_fields)
    texts = {"attack": "dager", "status": Status.RECOVERED, "reason": "", "knows": ()}
    numbers = {"round": 1, "client": 0, "batch_size": 2, "num_tokens": 9, "rougeL": 50.0}
    rest = {"verified": False, "apart": False, "facts": {}, "diagnostics": {}, "personal": ()}
    return LeakageRow(**fields | texts | numbers | rest | values)


def summary_of(warning=None, **values):
    fields = dict.fromkeys(AttackSummary.model_fields, MEAN)
    rest = {
        "rows": 2, "status": {Status.RECOVERED: 1}, "verified": 0, "knows": (), "sequences": 2,
        "clients": 1, "facts": {STORED: None}, "budget": None, "candidates": {STORED: 2.0},
        "margin": None, "seconds": 1.0, "seconds_per_update": 0.5, "warning": warning,
        "personal": None,
    }  # fmt: skip
    return AttackSummary(**fields | rest | values)


@pytest.fixture
def hostile(tmp_path):
    """A run in which everything that others can write is hostile, and its scores."""
    run = run_of(tmp_path / "a[/]b", parse(tables()))
    summary = RunSummary(
        name=STORED,
        status="finished",
        fedleak=None,
        model_fingerprint=None,
        captures=2,
        attacks={STORED: summary_of(STORED), "dager": summary_of()},
        defenses=Circumstances(defense=({"kind": STORED, STORED: STORED},), share=[STORED]),
        defended=(DefenseFigures(defense=0, kind=STORED, clipped=0.5, **{STORED: 1.0}),),
        privacy=Guarantee(
            epsilon=1.0,
            delta=1e-5,
            noise_multiplier=1.0,
            unit=STORED,
            neighbouring=STORED,
            accountant=STORED,
        ),
        utility_before=None,
        utility=Utility(round=1, **{STORED: 0.5}),
        held_out=0,
        utility_reference=None,
        missing=(),
        notes=(STORED,),
        unscored=0,
    )
    run.write(SUMMARY, summary)
    recovered = Scored(row(attack=HOSTILE), (TextPair(TRUTH, ANSWER, 100.0),))
    failed = row(attack=HOSTILE, status=Status.FAILED, reason=HOSTILE, client=1)
    return run, [recovered, Scored(failed, ())]


def without_colours(text: str) -> str:
    """Returns a text without those that Rich adds."""
    return re.sub("\x1b\\[[0-9;]*m", "", text)


def assert_inert(text: str) -> None:
    assert [c for c in without_colours(text) if c != "\n" and not c.isprintable()] == []


@pytest.mark.parametrize("file", [Terminal, io.StringIO])
@pytest.mark.parametrize("width", [40, 10_000])
def test_what_others_wrote_is_inert_in_a_report(hostile, file, width):
    run, scored = hostile
    console = Console(file=file(), width=width, emoji=False)
    print_run(run, scored, console, texts=True)
    text = console.file.getvalue()
    assert_inert(text)
    if width > 40:
        plain = without_colours(text)
        for words in (r"true \x00 \x01", r"read \x00", r"\x1bc", "a[/]b", "[link=", ":skull:"):
            assert words in plain


def cells_of(*values, name="grid"):
    cells = [
        CellSummary(
            cell="a",
            values={f"table.{HOSTILE}": value, "seed": HOSTILE},
            status="finished",
            attacks={HOSTILE: summary_of(HOSTILE), "b": summary_of(rougeL=None)},
            utility=Utility(round=1, mcc=0.5),
            privacy=Guarantee(
                epsilon=epsilon,
                delta=1e-5,
                accountant=HOSTILE,
                unit=HOSTILE,
                neighbouring=HOSTILE,
                noise_multiplier=1.0,
            ),
        )
        for value, epsilon in zip(values, ("none", 1.0, 2.0), strict=False)
    ]
    other = {f"table.{HOSTILE}": values[0], "seed": 2}
    cells.append(CellSummary(cell="b", values=other, status=HOSTILE))
    axes = {f"table.{HOSTILE}": list(values), "seed": [HOSTILE, 2]}
    return SweepSummary(name=name, axes=axes, cells=tuple(cells))


def test_what_others_wrote_is_inert_in_the_table_of_a_sweep():
    sweep_summary = cells_of(HOSTILE, [{"kind": HOSTILE, HOSTILE: HOSTILE}], name=HOSTILE)
    for file in (Terminal(), io.StringIO()):
        print_table(Console(file=file, width=200, emoji=False), attacks_table(sweep_summary))
        assert_inert(file.getvalue())


def test_what_others_wrote_is_inert_in_drawings(tmp_path):
    sweep_summary = cells_of(HOSTILE, [{"kind": HOSTILE, HOSTILE: HOSTILE}], 3)
    write(along_first_key(sweep_summary), tmp_path / "sweep.svg")
    write(tradeoff(sweep_summary), tmp_path / "tradeoff.svg")
    families = {"family": [{"kind": HOSTILE, "strength": HOSTILE}]}
    read = WorstCase(
        **dict.fromkeys(WorstCase.model_fields)
        | {
            "attacks": (HOSTILE,),
            "texts": 1,
            "clients": 1,
            "unattacked": 0,
            "nearly": 0,
            "first": {HOSTILE: 1},
        }
    )
    cell = sweep_summary.cells[0].model_copy(
        update={"values": {"family": families["family"][0]}, "worst_case": read}
    )
    of_families = SweepSummary(name=HOSTILE, axes=families, cells=(cell,), units={HOSTILE: HOSTILE})
    write(frontier(of_families), tmp_path / "frontier.svg")
    for name in ("sweep.svg", "tradeoff.svg", "frontier.svg"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert_inert(text)
        words = "".join(ET.fromstring(text).itertext())  # else it is no XML
        assert r"\x1bc" in words
        assert "a[/]b" in words


def test_what_a_client_wrote_is_inert_in_an_error(capsys):
    with pytest.raises(BaseException), mended():  # noqa: B017, PT011 - Typer's own way out
        raise FedleakError(f"client 1 failed: {HOSTILE}")
    errors = capsys.readouterr().err
    assert_inert(errors)
    assert errors.count("\n") == 1


# --- private texts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "texts", "shown"),
    [
        (Terminal, False, True),
        (Terminal, True, True),
        (io.StringIO, False, False),
        (io.StringIO, True, True),
    ],
)
def test_private_texts_are_for_a_terminal_or_those_who_ask(
    hostile, file, texts, shown, monkeypatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which has Rich take a pipe for a terminal
    run, scored = hostile
    pair = TextPair("the secret of lars", "the secret of lars", 100.0)
    console = Console(file=file(), width=200)
    print_run(run, [replace(scored[0], pairs=(pair,)), scored[1]], console, texts=texts)
    text = without_colours(console.file.getvalue())
    assert ("secret" in text) == shown
    assert (f"fedleak score {run.path} --texts" in text) != shown


def test_nothing_is_said_of_texts_where_none_was_read(hostile):
    run, scored = hostile
    console = Console(file=io.StringIO(), width=200)
    print_run(run, [replace(scored[0], pairs=()), scored[1]], console)
    assert "--texts" not in console.file.getvalue()
