"""What the gate judges: the answers of a run, scored anew, and whether they are complete.

It reads only what training and attacks wrote: captures, answers, the vault, notes on defenses and
the experiment. It compares what scoring wrote with the new scores, and writes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedleak.audit import positive_control, score_files, scoring
from fedleak.audit.answered import answered
from fedleak.audit.estimates import Largest, largest_client
from fedleak.audit.gaps import NAMED
from fedleak.audit.gate.check import Check, untold
from fedleak.audit.ladder import rows_of
from fedleak.audit.worst_case import worst_case
from fedleak.config.experiment import Experiment
from fedleak.config.federation.schedule import expected_captures
from fedleak.store.lines import Record
from fedleak.store.provenance import unsealed
from fedleak.store.records import Answer, LeakageRow, ScoredRows, TextScore
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY, RunSummary
from fedleak.util.errors import CaptureError, ConfigError, FedleakError
from fedleak.util.lists import first_of
from fedleak.util.nested import digest

AGREEMENT = 1e-9
"""Relative difference that another order of additions on another machine may cause."""

NOTHING = TextScore(exact=False, rougeL=0.0, token_recall=0.0)
"""The score of a text of which nothing was read."""

SENTENCES = {"status", "fedleak", "looked_for", "missing", "notes", "unscored"}
"""Fields of a summary that depend on when, and by which command, a run was scored."""


@dataclass(frozen=True)
class Evidence:
    """A run, scored anew.

    Attributes:
        run: The run directory.
        experiment: What was prepared there.
        purged: When the private data was deleted, so that rows stay as they were; None: it is here.
        answers: The answers of its attacks; empty if the run was purged.
        rows, summary: The scores of the answers, and the figures.
        largest: The most texts and updates of a client of the federation.
    """

    run: Run
    experiment: Experiment
    purged: str | None
    answers: Sequence[Answer]
    rows: ScoredRows
    summary: RunSummary
    largest: Largest

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each attack, by its name."""
        kinds = {answer.attack: str(answer.settings.get("kind")) for answer in self.answers}
        return kinds | {named.name: named.attack.kind for named in self.experiment.attacks}

    @property
    def mark(self) -> str:
        """A mark of all rows."""
        return score_files.mark(self.rows, self.summary.positive_control)

    def digest(self, limits: Any) -> str:
        """Returns a mark of the experiment, the limits and all figures, in 16 hex digits."""
        value = [self.experiment.fingerprint, limits, self.mark, _figures(self.summary)]
        return digest(value)[:16]


def gather(run: Run) -> Evidence:
    """Scores a run anew, and writes nothing.

    Raises:
        ConfigError: There is no run here.
        FedleakError: A file that figures are computed from cannot be read.
    """
    purged = run.info().get("purged")
    recorded = score_files.primary(run)
    experiment = recorded.experiment
    if purged:
        recorded = replace(recorded, earlier=ScoredRows.read_files(run.rows))
    # An attack with any answer has to have answered for all captures.
    names = [named.name for named in experiment.attacks]
    names += sorted({answer.attack for answer in recorded.answers} - {*names})
    scores, largest = scoring.score(run, recorded, names), largest_client(run, experiment)
    answers = recorded.answers
    return Evidence(run, experiment, purged, answers, scores.rows, scores.summary, largest)


def recounted(evidence: Evidence, rows: Sequence[LeakageRow]) -> Evidence:
    """Returns the run with other rows of leakage.jsonl, and with the worst cases of these rows."""
    finished = {answer.id: place for place, answer in enumerate(evidence.answers)}

    def read(of_attacks: Sequence[LeakageRow]) -> dict[str, Any]:
        return {"worst_case": worst_case(of_attacks, finished, evidence.largest)}

    changed = read(rows)
    if (ladder := evidence.summary.ladder) is not None:
        rungs = [
            rung.model_copy(update=read(rows_of(rows, rung.attacks.values())))
            for rung in ladder.rungs
        ]
        changed["ladder"] = ladder.model_copy(update={"rungs": tuple(rungs)})
    summary = evidence.summary.model_copy(update=changed)
    return replace(evidence, rows=replace(evidence.rows, leakage=rows), summary=summary)


def complete(evidence: Evidence) -> Check:
    """Checks that the run is finished and that nothing of it is missing.

    What is missing is counted, not quoted: reasons of attacks may have private texts, and checks
    leave the machine.
    """
    summary, lacks = evidence.summary, list[str]()
    if missing := len(summary.missing):
        things = "1 thing is" if missing == 1 else f"{missing} things are"
        lacks.append(f"{things} missing or wrong: `fedleak score {evidence.run.path}` says what")
    if summary.unscored:
        lacks.append(f"{summary.unscored} answers have no score")
    return untold("complete", lacks, "the run is finished and nothing is missing")


def own(evidence: Evidence) -> Check:
    """Checks that captures and answers belong to this experiment and its attacks' settings."""
    run, lacks = evidence.run, list[str]()
    if not evidence.purged:
        for key in expected_captures(evidence.experiment):
            try:
                if run.captures.has(key):  # a missing capture is a gap, which `complete` names
                    run.captures.about(key)
            except CaptureError as error:
                lacks.append(str(error))
    try:
        answered(evidence.answers, evidence.experiment)
    except ConfigError as error:
        lacks.append(str(error))
    return untold("own", lacks, "captures and answers are of this experiment and its settings")


def genuine(evidence: Evidence) -> Check:
    """Checks that fedleak wrote the files behind the figures on this machine, unchanged since."""
    changed = [*unsealed(evidence.run), *positive_control.unsealed_copies(evidence.run)]
    lacks = [
        f"{first_of(changed, NAMED)}: fedleak did not write that on this machine, or "
        "somebody changed it since: run the experiment here, or share the key of the machine that "
        "did (FEDLEAK_SEAL_KEY)"
    ]
    sentence = "fedleak wrote on this machine all that figures rest on, and nobody changed it"
    return untold("written here", lacks if changed else (), sentence)


def figures(evidence: Evidence, *, accept_purged: bool) -> Check:
    """Checks that the files of scoring agree with the answers, scored anew.

    Args:
        evidence: The run.
        accept_purged: Accept the rows of a run as they are if its answers were deleted.
    """
    run, name = evidence.run, "figures"
    if evidence.purged:
        sentence = (
            f"not checked again: the private data was purged on {evidence.purged}, and the figures "
            "rest on the rows that were written before"
        )
        lacks = [] if accept_purged else [f"{sentence}: --purged takes them as they are"]
        if run.info().get("figures") != evidence.mark:
            lacks.append("rows are not those that were there when the run was purged")
        return untold(name, lacks, f"{sentence}; --purged takes them as they are")
    try:
        rows, summary = ScoredRows.read_files(run.rows), run.read_document(SUMMARY)
    except FedleakError as error:
        return untold(name, [str(error)])
    changed = [
        lines.name
        for (lines, written), (_, scored) in zip(
            rows.by_file(), evidence.rows.by_file(), strict=True
        )
        if not _agree(_plain(written), _plain(scored))
    ]
    if not _agree(_figures(summary), _figures(evidence.summary)):
        changed.append(SUMMARY.name)
    lacks = [
        f"{', '.join(changed)}: not what the answers, the captures and the vault give: "
        f"`fedleak score {run.path}` writes it anew, once you know who changed what"
    ]
    return untold(name, lacks if changed else (), "scored anew, and the files say the same")


def _plain(rows: Sequence[Record]) -> Any:
    return [row.model_dump(mode="json") for row in rows]


def _figures(summary: RunSummary) -> Any:
    return summary.model_dump(mode="json", exclude=SENTENCES)


def _agree(first: Any, second: Any) -> bool:
    """Returns whether two values of JSON are the same but for rounding."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _agree(first[key], second[key]) for key in first
        )
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_agree, first, second))
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=AGREEMENT, abs_tol=AGREEMENT)
    return bool(first == second)
