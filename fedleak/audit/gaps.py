"""What is not there that should be, in sentences that name the command that mends it."""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from fedleak.attacks.reconstruction import Status
from fedleak.config.experiment import Experiment
from fedleak.federation.schedule import expected_captures
from fedleak.store.info import Info
from fedleak.store.records import UNSCORED, Answer, LeakageRow
from fedleak.store.run import Key, Run
from fedleak.store.shards import Shard, Share, attacks_in, damaged, shares
from fedleak.store.summaries import SUMMARY
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import FedleakError

NAMED = 3
"""How many captures or reasons are named where there are more."""

MOST_SHARDS = 20
"""How many shards are named where there are more: a batch system starts them again."""


@dataclass
class Gaps:
    """What is not there that should be, in sentences.

    Attributes:
        missing: What makes the results incomplete, and the command that mends it.
        awaited: The part of `missing` that nodes keep by design, until their owners hand it over.
        notes: What else should be known.
        unscored: Answers that should have a score and have none.
    """

    missing: list[str] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unscored: int = 0


def refuse_gaps(*runs: Run, besides: Collection[str] = ()) -> None:
    """Refuses runs that are incomplete or wrong.

    Args:
        runs: That were just scored.
        besides: What may be missing, such as `RunSummary.awaited`.

    Raises:
        FedleakError: Answers failed, captures are damaged or could not be scored, or canaries
            contradict the ledger.
    """
    wrong = chain(*(run.read(SUMMARY).wrong for run in runs))
    if refused := [sentence for sentence in wrong if sentence not in besides]:
        raise FedleakError("; ".join(refused))


def find_gaps(
    run: Run,
    experiment: Experiment,
    attack_names: Sequence[str],
    answers: Mapping[tuple[Key, str], Answer],
    rows: Sequence[LeakageRow],
    truths: Mapping[Key, GroundTruth | None],
    gaps: Gaps,
) -> None:
    """Notes which answers failed, are missing, or could not be scored.

    Args:
        run: The run directory.
        experiment: What was prepared there.
        attack_names: Names of the attacks that should have answered.
        answers: All that there are.
        rows: All that leakage.jsonl will hold.
        truths: By capture; None where it is missing or damaged.
        gaps: What is extended.
    """
    info = run.info()
    gaps.missing += _failed(run, answers.values())
    gaps.missing += _refuted(answers, rows)
    gaps.notes += [*_no_answers(answers.values()), *_dropped_out(info), *_left_out(info)]
    if purged := info.get("purged"):
        if not info.get("purge_complete", True):
            gaps.missing.append(
                f"the purge that began on {purged} is not complete: `fedleak purge {run.path}` "
                "goes on"
            )
        gaps.notes.append(
            f"the private data was purged on {purged}: all {len(rows)} rows stay as they were, and "
            "nothing can be attacked or scored again"
        )
        return
    of_shards = shares(run)
    in_shards = chain.from_iterable(
        share.attacks if share else attacks_in(run, shard) for shard, share in of_shards.items()
    )
    names = dict.fromkeys(chain(attack_names, in_shards))
    expected = expected_captures(experiment)
    wanted = [(key, name) for key in expected for name in names]
    unanswered = [answer_id for answer_id in wanted if answer_id not in answers]
    finished = info["status"] == "finished"
    if not finished:
        gaps.missing.append(_unfinished(run, info["status"], expected))
    else:
        gaps.unscored += len(unanswered)
        gaps.missing += _gone_captures(run, expected)
        gaps.missing += _too_late(run, expected, unanswered)
        gaps.missing += _unanswered(run, of_shards, unanswered, len(wanted))
    gaps.missing += _unreadable_shards(run, of_shards)
    gaps.missing += _gone_answers(run, rows, answers, names)
    gaps.unscored += sum(row.status == UNSCORED for row in rows)
    _find_without_truth(run, experiment, answers, rows, truths, gaps)
    gaps.notes += [
        f"line {at.line} of {at.file} was damaged ({at.reason}): it is in damaged.jsonl now"
        for at in damaged(run)
    ]


def _failed(run: Run, answers: Collection[Answer]) -> list[str]:
    """Returns which answers failed, and why."""
    failed = [answer for answer in answers if answer.status == Status.FAILED]
    if not failed:
        return []
    reasons = list(dict.fromkeys(f"{answer.attack}: {answer.reason}" for answer in failed))
    more = [f"and {len(reasons) - NAMED} more reasons"] * (len(reasons) > NAMED)
    return [
        f"{len(failed)} of {len(answers)} answers failed "
        f"({'; '.join([*reasons[:NAMED], *more])}): `fedleak attack {run.path} --retry` "
        "tries them again"
    ]


def _refuted(answers: Mapping[tuple[Key, str], Answer], rows: Sequence[LeakageRow]) -> list[str]:
    """Returns which answers claim a proof that the truth refutes."""
    rowed = {row.id: row for row in rows}
    refuted = [
        name
        for name, answer in answers.items()
        if answer.verified and name in rowed and not rowed[name].verified
    ]
    if not refuted:
        return []
    attacks = ", ".join(sorted({attack for _, attack in refuted}))
    return [
        f"{len(refuted)} of {len(answers)} answers claim a proof of what the client did not "
        f"train on (of {attacks}; for {_named(key for key, _ in refuted)}): they count as not "
        "proved, and no other proof of the attack can be trusted"
    ]


def _no_answers(answers: Collection[Answer]) -> list[str]:
    """Returns that no attack stands by anything, if so."""
    if not answers or not all(answer.status in _NO_ANSWER for answer in answers):
        return []
    return [f"no attack gave an answer: all {len(answers)} abstained or are inadmissible"]


def _dropped_out(info: Info) -> list[str]:
    """Returns which clients are not in a secure sum."""
    absent = {round: clients for round, clients in info.get("dropped_out", {}).items() if clients}
    if not absent:
        return []
    listed = [f"{', '.join(map(str, who))} in round {round}" for round, who in absent.items()]
    more = [f"and others in {len(listed) - NAMED} more rounds"] * (len(listed) > NAMED)
    return [
        f"clients dropped out of the secure sum ({'; '.join([*listed[:NAMED], *more])}): their "
        "texts are not in it, and nothing is scored against them"
    ]


def _left_out(info: Info) -> list[str]:
    """Returns how many messages an import could not read."""
    if not (left_out := info.get("left_out")):
        return []
    return [f"{len(left_out)} messages were left out of the run when it was imported"]


def _unfinished(run: Run, status: str, expected: Sequence[Key]) -> str:
    """Returns how far an unfinished run has come."""
    return (
        f"the run is not finished ({status}): {len({*run.captures.all_keys()} & {*expected})} of "
        f"{len(expected)} captures are here; `fedleak run` with the experiment's file goes on"
    )


def _gone_captures(run: Run, expected: Sequence[Key]) -> list[str]:
    """Returns which captures are missing that nobody was to delete."""
    gone = sorted({*expected} - {*run.captures.all_keys()})
    if not gone:
        return []
    return [
        f"{len(gone)} of {len(expected)} captures are missing ({_named(gone)}): `fedleak run` with "
        "the experiment's file trains their rounds again"
    ]


def _too_late(
    run: Run, expected: Sequence[Key], unanswered: Sequence[tuple[Key, str]]
) -> list[str]:
    """Returns which attacks came after captures were deleted."""
    deleted = run.captures.deleted()
    late = [(key, name) for key, name in unanswered if key in deleted]
    if not late:
        return []
    keys = sorted({key for key, _ in late})
    return [
        f"{', '.join(sorted({name for _, name in late}))} came after {len(keys)} of "
        f"{len(expected)} captures were deleted ({_named(keys)}; audit.keep): only `fedleak run "
        "FILE --fresh` with audit.keep = 'all' captures them again"
    ]


def _unanswered(
    run: Run,
    of_shards: Mapping[Shard, Share | None],
    unanswered: Sequence[tuple[Key, str]],
    wanted: int,
) -> list[str]:
    """Returns how many answers are missing to captures that are here."""
    here = run.captures.stored()
    left = [key for key, _ in unanswered if key in here]
    if not left:
        return []
    return [
        f"{len(left)} of {wanted} answers are missing (for {_named(left)}): "
        f"{_remedy(run, of_shards)}"
    ]


def _unreadable_shards(run: Run, of_shards: Mapping[Shard, Share | None]) -> list[str]:
    """Returns which shards do not say what they were asked for."""
    lost = [shard for shard, share in of_shards.items() if share is None]
    if not lost:
        return []
    names = ", ".join(map(str, lost[:MOST_SHARDS]))
    return [
        f"shard.json of shard {names} is missing or damaged, so nobody knows what it was asked "
        "for: the command that started the shard writes it anew, and gives no answer twice"
    ]


def _gone_answers(
    run: Run,
    rows: Sequence[LeakageRow],
    answers: Container[tuple[Key, str]],
    names: Collection[str],
) -> list[str]:
    """Returns which attacks have rows, but no answers any more."""
    others = sorted({row.attack for row in rows if row.id not in answers} - {*names})
    if not others:
        return []
    return [
        f"answers of {', '.join(others)} are gone: their rows stay as they were, and `fedleak "
        f"attack {run.path} --set 'attack=[...]'` gives them again"
    ]


def _find_without_truth(
    run: Run,
    experiment: Experiment,
    answers: Collection[tuple[Key, str]],
    rows: Sequence[LeakageRow],
    truths: Mapping[Key, GroundTruth | None],
    gaps: Gaps,
) -> None:
    """Notes which captures have no truth here."""
    untrue = {key for key, truth in truths.items() if truth is None}
    scored = {row.id for row in rows if row.batch_size is not None}
    bare = {key for key, name in answers if key in untrue and (key, name) not in scored}
    if bare:
        remedy = (
            f"`fedleak score {run.path} --vault FOLDER` takes it from the vault of a node, whose "
            "owner has to hand it over; else only `fedleak run FILE --fresh`, with the vault on, "
            "writes it"
            if experiment.tapped is None
            else "where you have it, name it in truth.file, and `fedleak import "
            f"{run.info()['tapped']} --about FILE --out {run.path}` adds it"
        )
        unscored = sum(row.status == UNSCORED for row in rows)
        gaps.missing.append(
            f"{len(bare)} of {len(truths)} captures have no truth in {run.path / 'vault'} "
            f"({_named(sorted(bare))}), so {unscored} answers are unscored: {remedy}"
        )
        if experiment.data.on_nodes:
            gaps.awaited.append(gaps.missing[-1])
    if kept := sorted(untrue - bare):
        gaps.notes.append(
            f"{len(kept)} of {len(truths)} captures have no truth: {_named(kept)}: their rows stay "
            "as they were"
        )


_NO_ANSWER = (Status.ABSTAINED, Status.INADMISSIBLE)


def _remedy(run: Run, of_shards: Mapping[Shard, Share | None]) -> str:
    """Returns which command gives the missing answers, and which shards are not complete."""
    complete = [shard for shard, share in of_shards.items() if share is not None and share.complete]
    open_ = [
        str(shard)
        for count in dict.fromkeys(shard.count for shard in of_shards)
        for shard in (Shard(count, number) for number in range(1, count + 1))
        if shard not in complete
    ]
    if not open_:
        return f"`fedleak attack {run.path}` gives them"
    more = [f"and {len(open_) - MOST_SHARDS} more"] * (len(open_) > MOST_SHARDS)
    return (
        f"not complete: shard {', '.join([*open_[:MOST_SHARDS], *more])}; the command that started "
        f"it gives them, or `fedleak attack {run.path}` on one machine"
    )


def _named(keys: Iterable[Key]) -> str:
    """Returns the first few keys, and how many more there are."""
    names = list(dict.fromkeys(map(str, keys)))
    more = [f"and {len(names) - NAMED} more"] * (len(names) > NAMED)
    return ", ".join([*names[:NAMED], *more])
