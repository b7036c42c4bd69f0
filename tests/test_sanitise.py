"""Text of others reaches no terminal as something to obey."""

import doctest

import pytest

from fedleak import sanitise
from fedleak.sanitise import printable

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
