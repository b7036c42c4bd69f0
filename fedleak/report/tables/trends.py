"""What was read over the runs of a folder, by their dates, and over their rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedleak.audit.pairing import Text, best
from fedleak.report.table import Table, cells, figures, words
from fedleak.report.tables.attacks import FIGURES, shown
from fedleak.report.words import INTERVALS, NOT_MEASURED, few_digits, number, starred
from fedleak.store.records import LEAKAGE, LeakageRow
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY, RunSummary
from fedleak.util.lists import grouped

READ = ("exact_match", "rougeL", "personal_data")
"""Figures of what was read in a run."""


@dataclass(frozen=True)
class Dated:
    """A scored run.

    Attributes:
        name: The name of its folder.
        begun: The day on which it began; empty: an older version wrote it.
        commit: The version of the code that made it.
        summary: Its figures.
        rows: What was read of each update.
    """

    name: str
    begun: str
    commit: str
    summary: RunSummary
    rows: Sequence[LeakageRow]

    @classmethod
    def read(cls, run: Run) -> "Dated":
        """Returns a run from its files.

        Raises:
            FedleakError: It was not scored, or a file is damaged.
        """
        info, summary = run.info(), run.read_document(SUMMARY)
        commit = str(info.get("git_commit") or summary.fedleak or NOT_MEASURED)
        begun = str(info.get("begun") or "")
        return cls(run.path.name, begun, commit[:8], summary, run.rows(LEAKAGE))


def trend_tables(runs: Sequence[Dated]) -> list[Table]:
    """Returns a line for each run, the oldest first, and one for each round."""
    runs = sorted(runs, key=lambda run: (run.begun, run.name))
    return [_over_runs(runs), _over_rounds(runs)]


def _over_runs(runs: Sequence[Dated]) -> Table:
    rows = []
    for run in runs:
        worst, utility, privacy = run.summary.worst_case, run.summary.utility, run.summary.privacy
        useful = {} if utility is None else utility.figures
        rows.append(
            [
                starred(run.name, None if worst is None else worst.warning),
                run.begun[:10] or NOT_MEASURED,
                run.commit,
                *(shown(worst, figure) for figure in READ),
                *(few_digits(useful.get(name)) for name in ("accuracy", "perplexity")),
                few_digits(None if privacy is None else privacy.epsilon),
            ]
        )
    return Table(
        "runs by their dates: what all attacks together read, and what the model is worth",
        [
            *words("run", "begun", "code"),
            *figures(*(FIGURES[figure][0] for figure in READ)),
            *figures("accuracy", "perplexity", "epsilon"),
        ],
        cells(rows),
        [
            f"mean and 95 % {INTERVALS}; *: few texts or clients, so an example and not a rate",
            "Runs of other settings are other tests: `fedleak compare RUN RUN` pairs texts.",
        ],
        kept=1,
    )


def _over_rounds(runs: Sequence[Dated]) -> Table:
    of_runs = [
        grouped(best(run.rows, "exact").items(), lambda read: read[0].key.round) for run in runs
    ]
    means = [
        [str(round), *(number(_mean(of_rounds.get(round, ()))) for of_rounds in of_runs)]
        for round in sorted({round for of_rounds in of_runs for round in of_rounds})
    ]
    return Table(
        "texts read word for word in each attacked round, %",
        figures("round", *(run.name for run in runs)),
        cells(means),
        kept=1,
    )


def _mean(read: Sequence[tuple[Text, float]]) -> float | None:
    return sum(100 * exact for _, exact in read) / len(read) if read else None
