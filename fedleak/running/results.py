"""The results of a run, read back."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedleak.running import reports
from fedleak.store.records import LEAKAGE, MEMBERSHIP, LeakageRow, MembershipRow
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY, RunSummary
from fedleak.util.errors import ConfigError

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Results:
    """The results of a run, as its run directory has them.

    Attributes:
        path: The run directory.
        rows: A row per update and attack, of leakage.jsonl.
        membership: A row per update and attack on membership, of membership.jsonl.
        summary: The figures of the run, with intervals.
    """

    path: Path
    rows: tuple[LeakageRow, ...] = field(repr=False)
    membership: tuple[MembershipRow, ...] = field(repr=False)
    summary: RunSummary = field(repr=False)

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns the rows as a table, a column per field; tables and lists stay what they are."""
        import pandas  # it takes a second

        return pandas.DataFrame([row.model_dump() for row in self.rows])

    def membership_to_pandas(self) -> "pandas.DataFrame":
        """Returns what attacks on membership say of each text of each update, as a table.

        Its columns are round, client, attack, text (its number, see `MembershipRow`), inside, and
        a column per score.
        """
        import pandas

        return pandas.DataFrame(
            [
                {"round": row.round, "client": row.client, "attack": row.attack, "text": number}
                | {"inside": inside}
                | {score: values[place] for score, values in row.scores.items()}
                for row in self.membership
                for place, (number, inside) in enumerate(zip(row.texts, row.inside, strict=True))
            ]
        )

    def write_report(
        self, out: str | os.PathLike[str] | None = None, *, redact: bool = False
    ) -> Path:
        """Writes the report of the run for a browser, and returns the file.

        Args:
            out: The file; left out: report.html in the run directory.
            redact: Leave private texts out.

        Raises:
            FedleakError: A file is missing or damaged, or the report cannot be written.
        """
        file = None if out is None else as_path("out", out)
        return reports.report_run(Run(self.path), file, redact=redact)


def read_results(folder: str | os.PathLike[str]) -> Results:
    """Reads the results of a run that was scored.

    Args:
        folder: The run directory, such as runs/NAME.

    Raises:
        ConfigError: There is no run.
        FedleakError: It was not scored, or a file is damaged.
    """
    at = Run(as_path("folder", folder))
    at.info()  # refuses a folder that is no run
    return Results(
        at.path, tuple(at.rows(LEAKAGE)), tuple(at.rows(MEMBERSHIP)), at.read_document(SUMMARY)
    )


def as_path(name: str, value: str | os.PathLike[str]) -> Path:
    """Returns a path that somebody gave; the error of anything else names the argument."""
    try:
        return Path(value)
    except TypeError as error:
        raise ConfigError(f"{name} is {type(value).__name__}: give a path") from error
