"""The files that scoring works on: what it can read of a run, and what it writes."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import stored
from fedleak.config.federation.workload import outline
from fedleak.models import LanguageModel
from fedleak.store import records
from fedleak.store.records import Answer, ScoredRows
from fedleak.store.run import Run
from fedleak.store.shards import read_answers, salvage_answers
from fedleak.store.summaries import SUMMARY, PositiveControl, RunSummary
from fedleak.util.nested import digest


@dataclass(frozen=True)
class Recorded:
    """What a run directory contains beside its vault and its captures.

    Attributes:
        experiment: What was prepared there.
        model: Its model without weights, for its tokenizer.
        answers: The answers of attacks, in the order in which they came.
        utility: The utility of the model, after each round in which it was measured.
        published: What each published model gives away of planted secrets.
        earlier: Rows of the last scoring. They stay where their answers or truths are gone.
    """

    experiment: Experiment
    model: LanguageModel
    answers: Sequence[Answer]
    utility: Sequence[records.Utility]
    published: Sequence[records.PublishedRow]
    earlier: ScoredRows


def salvaged(run: Run) -> Recorded:
    """Reads what can be read, and moves damaged lines to damaged.jsonl.

    Whoever calls this holds the lock.

    Raises:
        ConfigError: There is no run here.
        FedleakError: run.json is damaged.
    """
    experiment = stored(run)
    model = outline(experiment, run.info()["num_labels"])
    answers = salvage_answers(run, model.vocabulary)
    utility, published = run.salvage(records.UTILITY), run.salvage(records.PUBLISHED)
    earlier = ScoredRows.read_files(run.salvage)
    return Recorded(experiment, model, answers, utility, published, earlier)


def primary(run: Run, model: LanguageModel | None = None) -> Recorded:
    """Reads what attacks answered and training measured, and nothing that scoring made of it.

    Args:
        run: The run directory.
        model: Its model, if it is at hand: making one takes a while.

    Raises:
        ConfigError: There is no run here.
        FedleakError: A line cannot be read.
    """
    experiment = stored(run)
    model = model or outline(experiment, run.info()["num_labels"])
    answers = read_answers(run, model.vocabulary)
    utility, published = run.rows(records.UTILITY), run.rows(records.PUBLISHED)
    return Recorded(experiment, model, answers, utility, published, ScoredRows())


def write(run: Run, rows: ScoredRows, summary: RunSummary) -> None:
    """Writes scores into the run directory; whoever calls this holds the lock."""
    for lines, of_file in rows.by_file():
        if of_file or lines not in (records.CANARIES, records.DETECTIONS, records.MEMBERSHIP):
            run.write_rows(lines, of_file)
    run.write(SUMMARY, summary)


def mark(rows: ScoredRows, copies: PositiveControl | None) -> str:
    """Returns a SHA-256 of rows and positive control, which tells later whether they changed."""
    plain = [
        [row.model_dump(mode="json") for row in of_file]
        for lines, of_file in rows.by_file()
        if of_file or lines is not records.DETECTIONS  # which runs of an older version lack
    ]
    return digest([*plain, copies and copies.model_dump(mode="json")])
