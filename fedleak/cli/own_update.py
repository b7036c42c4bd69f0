"""What `fedleak attack-update` reads, shows and writes."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from fedleak.attacks import Progress
from fedleak.attacks.reconstruction import Status
from fedleak.audit.answer_scores import Scored
from fedleak.running.own_update.attack import AttackResult
from fedleak.store.files import replace
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.plain_files import content
from fedleak.util.sanitise import printable

_LARGEST = 10_000_000
"""Bytes of a file of texts: one batch has no more."""


def text_lines(option: str, path: Path | None) -> list[str] | None:
    """Returns the texts of a file, one a line; None without a file.

    Raises:
        ConfigError: There is no such file, it is not UTF-8, or it has no text.
    """
    if path is None:
        return None
    named = f"{option} {str(path)!r}"
    try:
        # The file may be a link of the user's own; a device may have no end.
        text = content(path, _LARGEST, linked=True).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{named}: {error.strerror}: give a file with one text a line") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} is not UTF-8: save it as UTF-8") from error
    texts = [line.strip() for line in re.split(r"\r\n?|\n", text) if line.strip()]
    if not texts:
        raise ConfigError(f"{named} has no text: give a file with one text a line")
    return texts


@contextmanager
def working(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Shows on a terminal how far the attack is, and yields the function that takes it."""
    with console.status("attacking") as status:
        yield lambda at: status.update(
            printable(f"attacking: {at.step}/{at.steps} {at.phase}").rstrip()
        )


def show(result: AttackResult, scored: Scored | None, console: Console, *, chance: str) -> None:
    """Prints an answer, and its scores beside what chance scores.

    Args:
        result: What was read.
        scored: Its scores; None: there is nothing to compare it with.
        console: Where to print.
        chance: The data set that chance draws texts from; empty: the user's texts.
    """
    lines = str(result).splitlines()
    if scored is not None:
        lines += _scores(scored, chance)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def write(result: AttackResult, scored: Scored | None, path: Path) -> None:
    """Writes an answer and its scores as JSON, for its owner alone.

    Raises:
        FedleakError: The file cannot be written.
    """
    pairs = () if scored is None else scored.pairs
    table = {
        "answer": result.answer.model_dump(mode="json"),
        "texts": result.texts,
        "words": result.words,
        "score": None if scored is None else scored.row.model_dump(mode="json"),
        "pairs": [{"text": pair.truth, "read": pair.answer} for pair in pairs],
    }
    replace(path, (json.dumps(table, indent=1, allow_nan=False) + "\n").encode())


def refuse_failure(result: AttackResult) -> None:
    """Raises an error if an attack failed or could not start.

    Raises:
        ConfigError: The attack cannot work on such an update.
        FedleakError: It crashed.
    """
    if result.status == Status.INADMISSIBLE:
        raise ConfigError(f"--attack {result.answer.attack}: {result.reason}")
    if result.status == Status.FAILED:
        raise FedleakError(f"the attack {result.answer.attack} failed: {result.reason}")


def _scores(scored: Scored, chance: str) -> list[str]:
    """Returns the figures in lines."""
    row = scored.row
    texts = row.texts or ()
    drawn = f"texts of {chance}" if chance else "held-out texts"
    lines = [f"compared with {len(scored.pairs) or row.batch_size} private texts"]
    if row.exact_match is not None:
        read = sum(text.exact is True for text in texts)
        lines.append(f"  read word for word: {read} of {row.batch_size}")
    figures = (
        ("ROUGE-L", row.rougeL, row.guess_rougeL),
        ("words found, %", _percent(row.token_recall), _percent(row.guess_token_recall)),
    )
    for name, value, guessed in figures:
        if value is not None:
            beside = "" if guessed is None else f", by chance {guessed:.0f}"
            lines.append(f"  {name}: {value:.0f}{beside}")
    if row.token_recall is not None:
        lines.append(f"  chance: {drawn}, drawn without the update")
    return lines


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
