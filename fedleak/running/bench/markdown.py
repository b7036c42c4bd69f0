"""Tables of results in Markdown: attacks against settings, then every figure of each setting.

A result may be anybody's file, so all of its text is escaped.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, starmap
from pathlib import Path

from fedleak.report.markdown import code, escaped, lines
from fedleak.report.words import INTERVALS, NOT_MEASURED, interval, number
from fedleak.running.bench.results import RESULT, Cell, Result, Together
from fedleak.store.summaries import AttackSummary
from fedleak.util.errors import ConfigError
from fedleak.util.plain_files import settings_text
from fedleak.util.sanitise import printable

MARKER = "<!-- Below this line everything is written by `fedleak bench-table`. -->\n"

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Marks of the results in one table; more results are refused."""


HEADINGS = (
    *("attack", "answers", "exact, %", "ROUGE-L", "other update", "tokens found, %", "proved"),
    "seconds an update",
)

Marked = Sequence[tuple[str, Result]]
"""Results, each with the mark of its lines if there are several."""


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
        ("number of settings", len(first.settings), len(second.settings)),
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
    first, several = results[0], len(results) > 1
    lettered = zip(LETTERS, results, strict=False)
    marked = [(f" ({letter})" * several, result) for letter, result in lettered]
    return "\n".join(
        [
            f"\n## {escaped(first.suite)}, version {first.version}\n",
            *chain.from_iterable(starmap(_source, marked)),
            *chain.from_iterable(starmap(_remarks, marked)),
            *_overview(marked),
            *chain.from_iterable(_setting(marked, i) for i in range(len(first.settings))),
            f"*{INTERVALS[0].upper()}{INTERVALS[1:]}.*\n",
        ]
    )


def _source(mark: str, result: Result) -> Iterator[str]:
    """Yields what a result was made with."""
    letter, machine = f"**{mark[2:-1]}**: " if mark else "", result.machine
    used = ", ".join(f"{escaped(name)} {escaped(v)}" for name, v in result.versions.items())
    yield (
        f"{letter}{escaped(machine.system)} {escaped(machine.processor)}, {machine.cores} cores, "
        f"{machine.memory_gib:g} GiB; attacks on "
        f"{', '.join(map(escaped, machine.devices)) or 'nothing'}; {used}.\n"
    )


def _remarks(mark: str, result: Result) -> Iterator[str]:
    """Yields which attacks may have read the truth from the disk, and what is missing."""
    for attack in result.attacks:
        command = attack.settings.get("command")
        if attack.outside:
            yield (
                f"{code(attack.name)}{mark} is not fedleak's own: nothing here rules out that it "
                "read the truth from the disk. "
                f"It {f'is the command {code(str(command))}' if command else ''}"
                f"{'' if command else f'comes from {escaped(attack.origin)}'}.\n"
            )
    for reason in result.missing:
        yield f"Not complete{mark}: {escaped(reason)}\n"


def _overview(marked: Marked) -> Iterator[str]:
    """Yields exact texts, attacks against settings."""
    columns = zip(*(result.settings for _, result in marked), strict=False)
    settings = [column for column in columns if any(setting.left_out is None for setting in column)]
    if not settings:
        return
    rows = []
    for place, (mark, result) in enumerate(marked):
        here = [column[place] for column in settings]
        for entry in result.attacks:
            cells = [
                next((cell for cell in setting.cells if cell.attack == entry.name), None)
                for setting in here
            ]
            # Whether an attack looks for whole texts, as far as can be told from its answers.
            if any(cell and cell.figures and cell.figures.exact_match for cell in cells):
                rows.append([f"{code(entry.name)}{mark}", *map(_short, cells)])
        figures = [_exact_and_rouge(setting.together) for setting in here]
        rows.append([f"*any of them*{mark}", *figures])
    yield "Texts read word for word, %; in brackets the ROUGE-L.\n"
    yield from lines(["attack", *(escaped(column[0].name) for column in settings)], rows)
    yield ""


def _setting(marked: Marked, i: int) -> Iterator[str]:
    """Yields every figure of a setting."""
    setting = marked[0][1].settings[i]
    yield f"### {escaped(setting.name)}\n\n{escaped(setting.about)}\n"
    of_all = ((mark, result.settings[i]) for mark, result in marked)
    here = [(mark, of_result) for mark, of_result in of_all if of_result.left_out is None]
    if not here:
        yield f"Not run: {escaped(setting.left_out or '')}.\n"
        return
    yield f"{here[0][1].updates} updates, {here[0][1].sequences} texts.\n"
    cells = [
        (f"{code(cell.attack)}{mark}", cell) for mark, of_result in here for cell in of_result.cells
    ]
    ranked = sorted(cells, key=lambda named: _rank(named[1]))
    yield from lines(HEADINGS, [[name, *_figures(cell)] for name, cell in ranked])
    yield ""
    for name, cell in cells:
        for reason, count in cell.reasons.items():
            yield f"- {name}, {count} times: {escaped(reason)}"
    yield ""


def _rank(cell: Cell) -> tuple[float, ...]:
    """Returns what lines are sorted by: the best first."""
    if (figures := cell.figures) is None:
        return (1.0, 0.0, 0.0)
    best = (figures.exact_match, figures.rougeL, figures.token_recall)
    return tuple(1.0 if estimate is None else -estimate.mean for estimate in best)


def _figures(cell: Cell) -> list[str]:
    if (figures := cell.figures) is None:
        return [f"cannot work here: {escaped(cell.left_out or '')}", *[""] * 6]
    few = " (few)" if figures.warning and figures.exact_match is not None else ""
    control = figures.control_rougeL
    return [
        f"{figures.answers} of {figures.rows}",
        interval(figures.exact_match, 100) + few,
        interval(figures.rougeL),
        number(None if control is None else control.mean),
        interval(figures.token_recall, 100),
        f"{figures.verified} of {figures.rows}",
        number(figures.seconds_per_update, 2),
    ]


def _short(cell: Cell | None) -> str:
    """Returns a cell in a word: its figures, or why there are none."""
    if cell is None or (figures := cell.figures) is None:
        return "cannot" if cell is not None and cell.left_out is not None else NOT_MEASURED
    if figures.exact_match is None and not figures.answers:
        return "no answer"
    return _exact_and_rouge(figures)


def _exact_and_rouge(figures: AttackSummary | Together | None) -> str:
    if figures is None or figures.exact_match is None:
        return NOT_MEASURED
    rouge = None if figures.rougeL is None else figures.rougeL.mean
    return f"{number(100 * figures.exact_match.mean)} ({number(rouge)})"
