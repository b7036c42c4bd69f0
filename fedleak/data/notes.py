"""`builtin/notes`: invented sentences of the kind that people would not want others to read.

Everything is made up: common first and last names put together by chance, phone numbers from the
range that is kept free for fiction (555-0100 to 555-0199), no companies, no real towns.

The grammar is in notes.toml. `{slot}` stands for one of that slot's phrases, `{this|that}` for one
of these, `#` for a digit and `^` for a digit other than 0.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

OTHER, HEALTH = 0, 1

LIMIT = 100_000
"""Notes that one seed can write: far below what the grammar holds, so that drawing stays quick."""

_GRAMMAR = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_DIGITS = {"#": "0123456789", "^": "123456789"}


class Note(NamedTuple):
    """A sentence, and whether it is about somebody's health (1) or not (0)."""

    text: str
    label: int


def notes(count: int, seed: int = 0) -> list[Note]:
    """Writes distinct notes, every other one about health.

    Args:
        count: How many; fewer notes of the same seed are the beginning of more.
        seed: Of the choice of words.

    Raises:
        ValueError: More than `LIMIT` are asked for.
    """
    if not 0 <= count <= LIMIT:
        raise ValueError(f"asked for {count} notes, can write 0 to {LIMIT}: ask for fewer")
    rng = Random(seed)
    health, other = _distinct(_GRAMMAR["health"], rng), _distinct(_GRAMMAR["other"], rng)
    return [Note(next(health), HEALTH) if i % 2 else Note(next(other), OTHER) for i in range(count)]


def _distinct(templates: Sequence[str], rng: Random) -> Iterator[str]:
    written: set[str] = set()
    while True:
        text = _sentence(rng.choice(templates), rng)
        if text not in written and 6 <= len(text.split()) <= 18:
            written.add(text)
            yield text


def _sentence(template: str, rng: Random) -> str:
    used: set[str] = set()

    def draw(slot: re.Match[str]) -> str:
        phrases = slot[1].split("|") if "|" in slot[1] else _GRAMMAR["slots"][slot[1]]
        # "Mina lied to Mina" reads wrong, so no phrase comes twice while there are others.
        phrase: str = rng.choice([p for p in phrases if p not in used] or phrases)
        used.add(phrase)
        return phrase

    text = template
    while "{" in text:
        text = re.sub(r"\{([^{}]*)\}", draw, text)
    text = re.sub(r"[#^]", lambda sign: rng.choice(_DIGITS[sign[0]]), text)
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return text[0].upper() + text[1:]
