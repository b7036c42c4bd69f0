"""Tables of results in Markdown: attacks against settings, then every figure of each setting.

A result may be anybody's file, so whatever it says is escaped.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from fedleak.report.terminal.tables import INTERVALS, number
from fedleak.report.words import NOT_MEASURED, plain_interval
from fedleak.running.bench.results import RESULT, Cell, Entry, Result, SettingResult
from fedleak.store.summaries import AttackSummary, Estimate
from fedleak.util.errors import ConfigError
from fedleak.util.plain_files import settings_text
from fedleak.util.sanitise import printable

MARKER = "<!-- Below this line everything is written by `fedleak bench-table`. -->\n"

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Results of one table; more are refused."""


def read(paths: Sequence[Path]) -> list[Result]:
    """Reads results that can stand in one table.

    Raises:
        ConfigError: One cannot be read, or is of another suite, version, model or texts.
    """
    results: list[Result] = []
    for path in paths:
        try:
            results.append(RESULT.read(settings_text(path).encode()))
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"result {str(path)!r}: {said}: give a bench.json of `fedleak bench`"
            ) from error
        if reason := _apart(results[0], results[-1]):
            raise ConfigError(
                f"results {str(paths[0])!r} and {str(path)!r} cannot stand in one table: {reason}"
            )
    if len(results) > len(LETTERS):
        raise ConfigError(f"{len(results)} results: at most {len(LETTERS)} stand in one table")
    return results


def _apart(one: Result, other: Result) -> str | None:
    """Returns why two results cannot be compared, or None."""
    for what, a, b in (
        ("suite", one.suite, other.suite),
        ("version", one.version, other.version),
        ("fingerprint of the settings", one.fingerprint, other.fingerprint),
    ):
        if a != b:
            return f"their {what} differs ({printable(str(a))}, {printable(str(b))})"
    of_one = {each.name: each for each in one.settings if each.left_out is None}
    for each in other.settings:
        same = of_one.get(each.name)
        if same is not None and each.left_out is None:
            if each.model != same.model:
                return f"the weights of {each.name!r} differ"
            if each.texts != same.texts:
                return f"the texts of {each.name!r} differ"
    return None


def markdown(results: Sequence[Result]) -> str:
    """Returns the tables of results that `read` has accepted."""
    first = results[0]
    heading = f"\n## {_safe(first.suite)}, version {first.version}\n"
    return "\n".join(
        [
            heading,
            *_sources(results),
            *_overview(results),
            *chain.from_iterable(_setting(results, i) for i in range(len(first.settings))),
            f"*{INTERVALS[0].upper()}{INTERVALS[1:]}.*\n",
        ]
    )


def into(page: str, tables: str) -> str:
    """Returns a page with the tables below its marker.

    Raises:
        ConfigError: It has no marker.
    """
    written, marker, _ = page.partition(MARKER)
    if not marker:
        raise ConfigError(f"the page has no line {MARKER.strip()!r}: put it where the tables begin")
    return written + MARKER + tables


def _sources(results: Sequence[Result]) -> Iterator[str]:
    """Yields what each result was made with."""
    for letter, one in zip(LETTERS, results, strict=False):
        mark = f"**{letter}**: " if len(results) > 1 else ""
        on, machine = ", ".join(map(_safe, one.machine.devices)), one.machine
        used = ", ".join(f"{_safe(name)} {_safe(what)}" for name, what in one.versions.items())
        yield (
            f"{mark}{_safe(machine.system)} {_safe(machine.processor)}, {machine.cores} cores, "
            f"{machine.memory_gib:g} GiB; attacks on {on or 'nothing'}; {used}.\n"
        )
    for letter, one in zip(LETTERS, results, strict=False):
        for each in one.attacks:
            if each.outside:
                yield (
                    f"`{_code(each.name)}`{_from(results, letter)} is not fedleak's own: nothing "
                    f"here rules out that it read the truth from the disk. {_settings(each)}\n"
                )
        for reason in one.missing:
            yield f"Not complete{_from(results, letter)}: {_safe(reason)}\n"


def _overview(results: Sequence[Result]) -> Iterator[str]:
    """Yields exact texts, attacks against settings."""
    run = [
        i
        for i in range(len(results[0].settings))
        if any(one.settings[i].left_out is None for one in results)
    ]
    if not run:
        return
    yield "Texts read word for word, %; in brackets the ROUGE-L.\n"
    yield _line(["attack", *(f"{_safe(results[0].settings[i].name)}" for i in run)])
    yield _line(["---"] * (len(run) + 1))
    for letter, one in zip(LETTERS, results, strict=False):
        for entry in one.attacks:
            cells = [_of(one.settings[i], entry.name) for i in run]
            if any(cell is not None and _names_texts(cell) for cell in cells):
                name = f"`{_code(entry.name)}`{_from(results, letter)}"
                yield _line([name, *map(_short, cells)])
        together = [one.settings[i].together for i in run]
        figures = [
            _both(
                None if each is None or each.exact_match is None else each.exact_match.mean,
                None if each is None or each.rougeL is None else each.rougeL.mean,
            )
            for each in together
        ]
        yield _line([f"*any of them*{_from(results, letter)}", *figures])
    yield ""


def _setting(results: Sequence[Result], i: int) -> Iterator[str]:
    """Yields every figure of a setting."""
    setting = results[0].settings[i]
    yield f"### {_safe(setting.name)}\n\n{_safe(setting.about)}\n"
    here = [
        (letter, one.settings[i])
        for letter, one in zip(LETTERS, results, strict=False)
        if one.settings[i].left_out is None
    ]
    if not here:
        yield f"Not run: {_safe(setting.left_out or '')}.\n"
        return
    updates = f"{here[0][1].updates} updates, {here[0][1].sequences} texts"
    yield f"{updates}.\n"
    heading = ["attack", "answers", "exact, %", "ROUGE-L", "other update", "tokens found, %"]
    heading += ["proved", "seconds an update"]
    yield _line(heading)
    yield _line(["---"] * len(heading))
    lines = [(letter, cell) for letter, one in here for cell in one.cells]
    for letter, cell in sorted(lines, key=_rank):
        yield _line([f"`{_code(cell.attack)}`{_from(results, letter)}", *_figures(cell)])
    yield ""
    for letter, cell in lines:
        for reason, count in cell.reasons.items():
            said = f"{count} times: {_safe(reason)}"
            yield f"- `{_code(cell.attack)}`{_from(results, letter)}, {said}"
    yield ""


def _rank(line: tuple[str, Cell]) -> tuple[float, float, float]:
    """Returns what lines are sorted by: the best first."""
    of = line[1].figures
    if of is None:
        return (1.0, 0.0, 0.0)
    best = (of.exact_match, of.rougeL, of.token_recall)
    exact, rouge, recall = (-1.0 if each is None else each.mean for each in best)
    return (-exact, -rouge, -recall)


def _figures(cell: Cell) -> list[str]:
    of = cell.figures
    if of is None:
        return [f"cannot work here: {_safe(cell.left_out or '')}", *[""] * 6]
    seconds = NOT_MEASURED if of.seconds_per_update is None else f"{of.seconds_per_update:.2f}"
    few = " (few)" if of.warning and of.exact_match is not None else ""
    return [
        f"{of.answers} of {of.rows}",
        _interval(of.exact_match, 100) + few,
        _interval(of.rougeL),
        NOT_MEASURED if of.control_rougeL is None else number(of.control_rougeL.mean),
        _interval(of.token_recall, 100),
        f"{of.verified} of {of.rows}",
        seconds,
    ]


def _of(setting: SettingResult, attack: str) -> Cell | None:
    return next((each for each in setting.cells if each.attack == attack), None)


def _names_texts(cell: Cell) -> bool:
    """Whether an attack looks for whole texts, as far as can be told from its answers."""
    return cell.figures is not None and cell.figures.exact_match is not None


def _short(cell: Cell | None) -> str:
    """Returns a cell in a word: its figures, or why there are none."""
    if cell is None or cell.figures is None:
        return "cannot" if cell is not None and cell.left_out is not None else NOT_MEASURED
    of: AttackSummary = cell.figures
    if of.exact_match is None:
        return "no answer" if not of.answers else NOT_MEASURED
    return _both(of.exact_match.mean, None if of.rougeL is None else of.rougeL.mean)


def _both(exact: float | None, rouge: float | None) -> str:
    if exact is None:
        return NOT_MEASURED
    return f"{number(100 * exact)} ({number(rouge)})"


def _interval(value: Estimate | None, scale: float = 1) -> str:
    return NOT_MEASURED if value is None else plain_interval(value, scale)


def _settings(entry: Entry) -> str:
    """Returns how an attack was run."""
    command = entry.settings.get("command")
    said = f"command `{_code(str(command))}`" if command else f"from {_safe(entry.origin)}"
    return f"It is the {said}." if command else f"It comes {said}."


def _from(results: Sequence[Result], letter: str) -> str:
    """Returns the mark of a result where there are several."""
    return f" ({letter})" if len(results) > 1 else ""


def _safe(text: str) -> str:
    """Returns a text as Markdown that shows it."""
    return re.sub(r"([\\`*_\[\]<>|#!&~$])", r"\\\1", printable(text))


def _code(text: str) -> str:
    """Returns a text for between backticks, in a table too."""
    return printable(text).replace("`", "'").replace("|", r"\|")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
