"""Finds what is missing from a run, in sentences that name the command that repairs it."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from fedleak.attacks.reconstruction import Status
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import captures_of, dropped_out
from fedleak.config.federation.schedule import clients_of_round
from fedleak.defenses.secure_sum import hidden_among
from fedleak.store.records import UNSCORED, Answer, LeakageRow
from fedleak.store.run import Key, Run
from fedleak.store.shards import Shard, Share, attacks_in, damaged, shares
from fedleak.store.summaries import SUMMARY
from fedleak.store.vault import Notes
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import FedleakError
from fedleak.util.lists import first_of, in_rounds

Note = TypeVar("Note", bound=BaseModel)

_NO_ANSWER = (Status.ABSTAINED, Status.INADMISSIBLE)

NAMED = 3
"""The most captures or reasons that a sentence names."""

MOST_SHARDS = 20
"""The most shards that a sentence names: a batch system starts them again."""


@dataclass
class Gaps:
    """What is missing from a run, in sentences.

    Attributes:
        missing: What makes the results incomplete, and the command that repairs it.
        awaited: The part of `missing` that nodes keep by design, until their owners hand it over.
        notes: What else should be known.
        unscored: Answers that should have a score and have none.
    """

    missing: list[str] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unscored: int = 0


def read_notes(notes: Notes, kind: type[Note], gaps: Gaps) -> dict[Key, Note | None]:
    """Returns clients' notes on their updates; a damaged file gives None and a gap."""
    read: dict[Key, Note | None] = {}
    for key in notes.all_keys():
        try:
            read[key] = kind.model_validate(notes.read_note(key))
        except (FedleakError, ValidationError):
            read[key] = None
            gaps.missing.append(
                f"{notes.path(key)} is damaged: what was counted with it stays, and only `fedleak "
                "run FILE --fresh` writes such a file again"
            )
    return read


def refuse_gaps(*runs: Run, besides: Collection[str] = ()) -> None:
    """Refuses runs that are incomplete or wrong.

    Args:
        runs: Runs that were just scored.
        besides: What may be missing, such as `RunSummary.awaited`.

    Raises:
        FedleakError: Answers failed, captures are damaged or could not be scored, or canaries
            contradict the ledger.
    """
    wrong = chain(*(run.read_document(SUMMARY).wrong for run in runs))
    if refused := [sentence for sentence in wrong if sentence not in besides]:
        raise FedleakError("; ".join(refused))


def find_gaps(known: "Known", gaps: Gaps) -> None:
    """Notes which answers failed, are missing, or could not be scored.

    Args:
        known: What is known of a run.
        gaps: The gaps to extend.
    """
    run, experiment = known.run, known.experiment
    gaps.missing += [*_failed(known), *_refuted(known)]
    gaps.notes += [*_no_answers(known), *_without_a_score(known)]
    gaps.notes += [*_smallest_sum(known), *absences(run), *_left_out(known)]
    if purged := run.info().get("purged"):
        if not run.info().get("purge_complete", True):
            gaps.missing.append(
                f"the purge that began on {purged} is not complete: `fedleak purge {run.path}` "
                "goes on"
            )
        gaps.notes.append(
            f"the private data was purged on {purged}: all {len(known.rows)} rows stay as they "
            "were, and nothing can be attacked or scored again"
        )
        return
    for kind in (_captures, _too_late, _unanswered, _unreadable_shards, _gone_answers):
        gaps.missing += kind(known)
    without_truth = list(_without_truth(known))
    gaps.missing += without_truth
    gaps.awaited += without_truth if experiment.data.on_nodes else ()
    gaps.notes += _kept_without_truth(known)
    gaps.notes += [
        f"line {at.line} of {at.file} was damaged ({at.reason}): it is in damaged.jsonl now"
        for at in damaged(run)
    ]
    gaps.unscored += len(known.unanswered) + known.unscored


@dataclass(frozen=True)
class Known:
    """What there is of a run.

    Attributes:
        run: The run directory.
        experiment: What was prepared there.
        attack_names: Names of the attacks that should have answered.
        answers: All answers of the run.
        rows: All rows that leakage.jsonl will hold.
        truths: The truth of each capture; None: it is missing or damaged.
    """

    run: Run
    experiment: Experiment
    attack_names: Sequence[str]
    answers: Mapping[tuple[Key, str], Answer]
    rows: Sequence[LeakageRow]
    truths: Mapping[Key, GroundTruth | None]

    @cached_property
    def expected(self) -> Sequence[Key]:
        """What should be captured."""
        return captures_of(self.run, self.experiment)

    @cached_property
    def shards(self) -> Mapping[Shard, Share | None]:
        """What each shard was last asked for; None: its shard.json cannot be read."""
        return shares(self.run)

    @cached_property
    def attacks(self) -> Collection[str]:
        """Names of the attacks that should have answered, also in shards."""
        in_shards = chain.from_iterable(
            share.attacks if share else attacks_in(self.run, shard)
            for shard, share in self.shards.items()
        )
        return dict.fromkeys(chain(self.attack_names, in_shards))

    @cached_property
    def unanswered(self) -> Sequence[tuple[Key, str]]:
        """Answers that a finished run should have and has not."""
        if self.run.info()["status"] != "finished":
            return ()
        wanted = product(self.expected, self.attacks)
        return [answer_id for answer_id in wanted if answer_id not in self.answers]

    @property
    def unscored(self) -> int:
        """How many answers have no truth to be compared with."""
        return sum(row.status == UNSCORED for row in self.rows)

    @cached_property
    def without_truth(self) -> tuple[Sequence[Key], Sequence[Key]]:
        """Captures without truth: those with an answer that was never scored, then the others."""
        untrue = {key for key, truth in self.truths.items() if truth is None}
        scored = {row.id for row in self.rows if row.batch_size is not None}
        bare = {key for key, attack in self.answers.keys() - scored if key in untrue}
        return sorted(bare), sorted(untrue - bare)


def _failed(known: Known) -> Iterator[str]:
    """Says which answers failed, and why."""
    failed = [answer for answer in known.answers.values() if answer.status == Status.FAILED]
    if failed:
        yield (
            f"{len(failed)} of {len(known.answers)} answers failed ({_reasons(failed)}): "
            f"`fedleak attack {known.run.path} --retry` tries them again"
        )


def _refuted(known: Known) -> Iterator[str]:
    """Says which answers claim a proof that the truth refutes."""
    rowed = {row.id: row for row in known.rows}
    refuted = [
        name
        for name, answer in known.answers.items()
        if answer.verified and name in rowed and not rowed[name].verified
    ]
    if refuted:
        attacks = ", ".join(sorted({attack for _, attack in refuted}))
        yield (
            f"{len(refuted)} of {len(known.answers)} answers claim a proof of what the client did "
            f"not train on (of {attacks}; for {_listed(key for key, _ in refuted)}): they count as "
            "not proved, and no other proof of the attack can be trusted"
        )


def _no_answers(known: Known) -> Iterator[str]:
    """Says that no attack gave an answer."""
    answers = known.answers.values()
    if answers and all(answer.status in _NO_ANSWER for answer in answers):
        yield f"no attack gave an answer: all {len(answers)} abstained or are inadmissible"


def _without_a_score(known: Known) -> Iterator[str]:
    """Says which answers lack a score that was asked for, and why."""
    answers = known.answers.values()
    lacking = [answer for answer in answers if answer.scores and answer.reason]
    if lacking:
        yield f"{len(lacking)} of {len(answers)} answers lack a score ({_reasons(lacking)})"


def _reasons(answers: Iterable[Answer]) -> str:
    """Returns the first few reasons of answers, each with the attack."""
    reasons = dict.fromkeys(f"{answer.attack}: {answer.reason}" for answer in answers)
    return first_of(reasons, NAMED, "; ", "; and {} more reasons")


def _smallest_sum(known: Known) -> Iterator[str]:
    """Says among how few clients an update of the run is hidden, if the server sees sums."""
    run, experiment = known.run, known.experiment
    sums = [
        len({*clients_of_round(experiment, key.round)} - dropped_out(run, key.round))
        for key in run.captures.all_keys()
    ]
    if experiment.sees == "sum" and sums:
        yield f"the smallest sum: {hidden_among(min(sums))}"


def absences(run: Run) -> Iterator[str]:
    """Says which clients are in no sum, which refused a round, and which rounds were skipped."""
    info = run.info()
    refused, skipped = info.get("refused", {}), info.get("skipped", [])
    lost = {
        round: sorted({*clients} - {*refused.get(round, ())})
        for round, clients in info.get("dropped_out", {}).items()
        if round not in map(str, skipped)
    }
    if listed := in_rounds(lost, NAMED, "and others"):
        yield (
            f"clients dropped out of the secure sum ({listed}): their "
            "texts are not in it, and nothing is scored against them"
        )
    if listed := in_rounds(refused, NAMED, "and others"):
        yield (
            f"clients refused what they were sent ({listed}): they sent nothing in these rounds, "
            "and nothing is scored against them"
        )
    if skipped:
        rounds = _listed(skipped, most=MOST_SHARDS)
        yield (
            f"too few clients were left to sum in the rounds {rounds}, which were skipped: the "
            "model stayed as it was"
        )


def _left_out(known: Known) -> Iterator[str]:
    """Says how many messages an import could not read."""
    if left_out := known.run.info().get("left_out"):
        yield f"{len(left_out)} messages were left out of the run when it was imported"


def _captures(known: Known) -> Iterator[str]:
    """Says which captures are not there yet, or are missing without having been deleted."""
    here, status = set(known.run.captures.all_keys()), known.run.info()["status"]
    gone = sorted({*known.expected} - here)
    if status != "finished":
        yield (
            f"the run is not finished ({status}): {len(known.expected) - len(gone)} of "
            f"{len(known.expected)} captures are here; the command that began it goes on"
        )
    elif gone:
        yield (
            f"{len(gone)} of {len(known.expected)} captures are missing ({_listed(gone)}): "
            "`fedleak run` with the experiment's file trains their rounds again"
        )


def _too_late(known: Known) -> Iterator[str]:
    """Says which attacks came after captures were deleted."""
    deleted = known.run.captures.deleted()
    late = [(key, name) for key, name in known.unanswered if key in deleted]
    if late:
        keys = sorted({key for key, _ in late})
        yield (
            f"{', '.join(sorted({name for _, name in late}))} came after {len(keys)} of "
            f"{len(known.expected)} captures were deleted ({_listed(keys)}; audit.keep): only "
            "`fedleak run FILE --fresh` with audit.keep = 'all' captures them again"
        )


def _unanswered(known: Known) -> Iterator[str]:
    """Says how many answers for existing captures are missing."""
    here = known.run.captures.stored()
    left = [key for key, _ in known.unanswered if key in here]
    if left:
        wanted = len(known.expected) * len(known.attacks)
        yield f"{len(left)} of {wanted} answers are missing (for {_listed(left)}): {_remedy(known)}"


def _unreadable_shards(known: Known) -> Iterator[str]:
    """Says which shards have no readable shard.json."""
    lost = [shard for shard, share in known.shards.items() if share is None]
    if lost:
        yield (
            f"shard.json of shard {first_of(lost, MOST_SHARDS)} is missing or damaged, so nobody "
            "knows what it was asked for: the command that started the shard writes it anew, and "
            "gives no answer twice"
        )


def _gone_answers(known: Known) -> Iterator[str]:
    """Says which attacks have rows, but no answers any more."""
    others = {row.attack for row in known.rows if row.id not in known.answers} - {*known.attacks}
    if others:
        yield (
            f"answers of {', '.join(sorted(others))} are gone: their rows stay as they were, and "
            f"`fedleak attack {known.run.path} --set 'attack=[...]'` gives them again"
        )


def _without_truth(known: Known) -> Iterator[str]:
    """Says which captures have answers and no truth."""
    run, (bare, _) = known.run, known.without_truth
    if bare:
        remedy = (
            f"`fedleak score {run.path} --vault FOLDER` takes it from the vault of a node, whose "
            "owner has to hand it over; else only `fedleak run FILE --fresh`, with the vault on, "
            "writes it"
            if known.experiment.tapped is None
            else "where you have it, name it in truth.file, and `fedleak import "
            f"{run.info()['tapped']} --about FILE --out {run.path}` adds it"
        )
        yield (
            f"{len(bare)} of {len(known.truths)} captures have no truth in {run.path / 'vault'} "
            f"({_listed(bare)}), so {known.unscored} answers are unscored: {remedy}"
        )


def _kept_without_truth(known: Known) -> Iterator[str]:
    """Says which captures have lost their truth, and keep rows that were scored with it."""
    _, kept = known.without_truth
    if kept:
        yield (
            f"{len(kept)} of {len(known.truths)} captures have no truth: {_listed(kept)}: their "
            "rows stay as they were"
        )


def _remedy(known: Known) -> str:
    """Returns which command gives the missing answers, and which shards are not complete."""
    complete = {shard for shard, share in known.shards.items() if share and share.complete}
    open_ = [
        shard
        for count in dict.fromkeys(shard.count for shard in known.shards)
        for shard in (Shard(count, number) for number in range(1, count + 1))
        if shard not in complete
    ]
    if not open_:
        return f"`fedleak attack {known.run.path}` gives them"
    return (
        f"not complete: shard {_listed(open_, most=MOST_SHARDS)}; the command that started "
        f"it gives them, or `fedleak attack {known.run.path}` on one machine"
    )


def _listed(values: Iterable[object], most: int = NAMED) -> str:
    """Returns the first few distinct values, and how many more there are."""
    return first_of(dict.fromkeys(values), most, more=", and {} more")
