"""Makes the page of a folder of runs: what was read over their dates and over rounds."""

from collections.abc import Sequence

from fedleak.report.html.page import Entry, Level, TrendsPage, Verdict
from fedleak.report.tables.trends import Dated, trend_tables
from fedleak.report.words import NOT_MEASURED, counted, interval


def trends_page(name: str, runs: Sequence[Dated], missing: Sequence[str]) -> TrendsPage:
    """Returns the page of runs.

    Args:
        name: The name of their folder.
        runs: At least one.
        missing: Why other runs are not shown.
    """
    runs = sorted(runs, key=lambda run: (run.begun, run.name))
    worst = [run.summary.worst_case for run in runs]
    figures = [None if case is None else case.exact_match for case in worst]
    read = [figure.mean > 0 for figure in figures if figure is not None]
    level = Level.READ if any(read) else Level.PARTLY if read else Level.UNKNOWN
    first, last = (interval(figure, 100) for figure in (figures[0], figures[-1]))
    days = [run.begun[:10] or NOT_MEASURED for run in runs]
    paragraphs = [
        Entry(
            "Read",
            f"In the first run ({runs[0].name}, {days[0]}) {first} % of the texts were read word "
            f"for word, in the last ({runs[-1].name}, {days[-1]}) {last} %.",
        ),
        Entry(
            "How sure",
            "Runs of other settings, clients or texts are other tests, and a difference between "
            "them is no proof of a trend: `fedleak compare RUN RUN` pairs texts and tests it.",
        ),
    ]
    headline = f"{counted(len(runs), 'run')}, of which {sum(read)} had texts read word for word"
    return TrendsPage(
        name=name,
        redacted=False,
        verdict=Verdict(level, headline, tuple(paragraphs)),
        missing=missing,
        tables=trend_tables(runs),
    )
