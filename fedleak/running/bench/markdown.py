"""Tables of results in Markdown: attacks against settings, then every figure of each setting.

A result may be anybody's file, so whatever it says is escaped.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from fedleak.report.words import INTERVALS, NOT_MEASURED, interval, number
from fedleak.running.bench.results import RESULT, Cell, Entry, Result, SettingResult, Together
from fedleak.store.summaries import AttackSummary
from fedleak.util.errors import ConfigError
from fedleak.util.plain_files import settings_text
from fedleak.util.sanitise import printable

MARKER = "<!-- Below this line everything is written by `fedleak bench-table`. -->\n"

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Marks of the results in one table; more results are refused."""


def read_results(paths: Sequence[Path]) -> list[Result]:
    """Reads results that can stand in one table.

    Raises:
        ConfigError: One cannot be read, or is of another suite, version, model or texts.
    """
    results: list[Result] = []
    for path in paths:
        try:
            results.append(RESULT.parse(settings_text(path).encode()))
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"result {str(path)!r}: {problem}: give a bench.json of `fedleak bench`"
            ) from error
        if reason := _difference(results[0], results[-1]):
            raise ConfigError(
                f"results {str(paths[0])!r} and {str(path)!r} cannot stand in one table: {reason}"
            )
    if len(results) > len(LETTERS):
        raise ConfigError(f"{len(results)} results: at most {len(LETTERS)} stand in one table")
    return results


def _difference(first: Result, second: Result) -> str | None:
    """Returns why two results cannot be compared, or None."""
    for field, first_value, second_value in (
        ("suite", first.suite, second.suite),
        ("version", first.version, second.version),
        ("fingerprint of the settings", first.fingerprint, second.fingerprint),
    ):
        if first_value != second_value:
            shown = f"{printable(str(first_value))}, {printable(str(second_value))}"
            return f"their {field} differs ({shown})"
    first_settings = {
        setting.name: setting for setting in first.settings if setting.left_out is None
    }
    for setting in second.settings:
        same = first_settings.get(setting.name)
        if same is not None and setting.left_out is None:
            if setting.model != same.model:
                return f"the weights of {setting.name!r} differ"
            if setting.texts != same.texts:
                return f"the texts of {setting.name!r} differ"
    return None


def markdown(results: Sequence[Result]) -> str:
    """Returns the tables of results that `read_results` has accepted."""
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
    for letter, result in zip(LETTERS, results, strict=False):
        mark = f"**{letter}**: " if len(results) > 1 else ""
        on, machine = ", ".join(map(_safe, result.machine.devices)), result.machine
        used = ", ".join(
            f"{_safe(name)} {_safe(version)}" for name, version in result.versions.items()
        )
        yield (
            f"{mark}{_safe(machine.system)} {_safe(machine.processor)}, {machine.cores} cores, "
            f"{machine.memory_gib:g} GiB; attacks on {on or 'nothing'}; {used}.\n"
        )
    for letter, result in zip(LETTERS, results, strict=False):
        for attack in result.attacks:
            if attack.outside:
                yield (
                    f"`{_code(attack.name)}`{_mark_of(results, letter)} is not fedleak's own: "
                    "nothing here rules out that it read the truth from the disk. "
                    f"{_settings(attack)}\n"
                )
        for reason in result.missing:
            yield f"Not complete{_mark_of(results, letter)}: {_safe(reason)}\n"


def _overview(results: Sequence[Result]) -> Iterator[str]:
    """Yields exact texts, attacks against settings."""
    run = [
        i
        for i in range(len(results[0].settings))
        if any(result.settings[i].left_out is None for result in results)
    ]
    if not run:
        return
    yield "Texts read word for word, %; in brackets the ROUGE-L.\n"
    yield _line(["attack", *(f"{_safe(results[0].settings[i].name)}" for i in run)])
    yield _line(["---"] * (len(run) + 1))
    for letter, result in zip(LETTERS, results, strict=False):
        for entry in result.attacks:
            cells = [_cell_of(result.settings[i], entry.name) for i in run]
            if any(cell is not None and _names_texts(cell) for cell in cells):
                name = f"`{_code(entry.name)}`{_mark_of(results, letter)}"
                yield _line([name, *map(_short, cells)])
        figures = [_exact_and_rouge(result.settings[i].together) for i in run]
        yield _line([f"*any of them*{_mark_of(results, letter)}", *figures])
    yield ""


def _setting(results: Sequence[Result], i: int) -> Iterator[str]:
    """Yields every figure of a setting."""
    setting = results[0].settings[i]
    yield f"### {_safe(setting.name)}\n\n{_safe(setting.about)}\n"
    here = [
        (letter, result.settings[i])
        for letter, result in zip(LETTERS, results, strict=False)
        if result.settings[i].left_out is None
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
    lines = [(letter, cell) for letter, setting_result in here for cell in setting_result.cells]
    for letter, cell in sorted(lines, key=_rank):
        yield _line([f"`{_code(cell.attack)}`{_mark_of(results, letter)}", *_figures(cell)])
    yield ""
    for letter, cell in lines:
        for reason, count in cell.reasons.items():
            occurrences = f"{count} times: {_safe(reason)}"
            yield f"- `{_code(cell.attack)}`{_mark_of(results, letter)}, {occurrences}"
    yield ""


def _rank(line: tuple[str, Cell]) -> tuple[float, float, float]:
    """Returns what lines are sorted by: the best first."""
    figures = line[1].figures
    if figures is None:
        return (1.0, 0.0, 0.0)
    best = (figures.exact_match, figures.rougeL, figures.token_recall)
    exact, rouge, recall = (-1.0 if estimate is None else estimate.mean for estimate in best)
    return (-exact, -rouge, -recall)


def _figures(cell: Cell) -> list[str]:
    figures = cell.figures
    if figures is None:
        return [f"cannot work here: {_safe(cell.left_out or '')}", *[""] * 6]
    seconds = (
        NOT_MEASURED if figures.seconds_per_update is None else f"{figures.seconds_per_update:.2f}"
    )
    few = " (few)" if figures.warning and figures.exact_match is not None else ""
    return [
        f"{figures.answers} of {figures.rows}",
        interval(figures.exact_match, 100) + few,
        interval(figures.rougeL),
        NOT_MEASURED if figures.control_rougeL is None else number(figures.control_rougeL.mean),
        interval(figures.token_recall, 100),
        f"{figures.verified} of {figures.rows}",
        seconds,
    ]


def _cell_of(setting: SettingResult, attack: str) -> Cell | None:
    return next((cell for cell in setting.cells if cell.attack == attack), None)


def _names_texts(cell: Cell) -> bool:
    """Whether an attack looks for whole texts, as far as can be told from its answers."""
    return cell.figures is not None and cell.figures.exact_match is not None


def _short(cell: Cell | None) -> str:
    """Returns a cell in a word: its figures, or why there are none."""
    if cell is None or cell.figures is None:
        return "cannot" if cell is not None and cell.left_out is not None else NOT_MEASURED
    figures = cell.figures
    if figures.exact_match is None and not figures.answers:
        return "no answer"
    return _exact_and_rouge(figures)


def _exact_and_rouge(figures: AttackSummary | Together | None) -> str:
    if figures is None or figures.exact_match is None:
        return NOT_MEASURED
    rouge = None if figures.rougeL is None else figures.rougeL.mean
    return f"{number(100 * figures.exact_match.mean)} ({number(rouge)})"


def _settings(entry: Entry) -> str:
    """Returns how an attack was run."""
    if command := entry.settings.get("command"):
        return f"It is the command `{_code(str(command))}`."
    return f"It comes from {_safe(entry.origin)}."


def _mark_of(results: Sequence[Result], letter: str) -> str:
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
