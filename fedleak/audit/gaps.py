"""What is not there that should be, in sentences that name the command that mends it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from fedleak.config.experiment import Experiment
from fedleak.errors import FedleakError
from fedleak.federation.schedule import expected_captures
from fedleak.reconstruction import Status
from fedleak.store.records import UNSCORED, Answer, LeakageRow
from fedleak.store.run import Key, Run
from fedleak.store.shards import Shard, Share, damaged, shares
from fedleak.store.summaries import SUMMARY
from fedleak.truth import GroundTruth

NAMED = 3
"""Of many captures or reasons so many are named."""

MOST_SHARDS = 20
"""Of many shards so many are named: a batch system is told which to start again."""


@dataclass
class Gaps:
    """What is not there that should be, in sentences.

    Attributes:
        missing: What makes the results incomplete, and the command that mends it.
        notes: What else should be known.
        unscored: Answers that should have a score and have none.
    """

    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unscored: int = 0


def refuse_gaps(*runs: Run) -> None:
    """Refuses to call runs that were just scored complete, or right, where they are not.

    Raises:
        FedleakError: Answers failed, captures are damaged or could not be scored, or canaries
            contradict the ledger.
    """
    if wrong := list(chain(*(run.read(SUMMARY).wrong for run in runs))):
        raise FedleakError("; ".join(wrong))


def find_gaps(
    run: Run,
    experiment: Experiment,
    asked: Sequence[str],
    answers: Mapping[tuple[Key, str], Answer],
    rows: Sequence[LeakageRow],
    truths: Mapping[Key, GroundTruth | None],
    gaps: Gaps,
) -> None:
    """Notes which answers failed, are missing, or could not be scored.

    Args:
        run: The run directory.
        experiment: What was prepared there.
        asked: Names of the attacks that should have answered.
        answers: All that there are.
        rows: All that leakage.jsonl will hold.
        truths: By capture; None where it is missing or damaged.
        gaps: What is extended.
    """
    info, missing, notes = run.info(), gaps.missing, gaps.notes
    failed = [each for each in answers.values() if each.status == Status.FAILED]
    if failed:
        reasons = list(dict.fromkeys(f"{each.attack}: {each.reason}" for each in failed))
        more = [f"and {len(reasons) - NAMED} more reasons"] * (len(reasons) > NAMED)
        missing.append(
            f"{len(failed)} of {len(answers)} answers failed "
            f"({'; '.join([*reasons[:NAMED], *more])}): `fedleak attack {run.path} --retry` "
            "tries them again"
        )
    rowed = {row.id: row for row in rows}
    refuted = [
        name
        for name, answer in answers.items()
        if answer.verified and name in rowed and not rowed[name].verified
    ]
    if refuted:
        attacks = ", ".join(sorted({attack for _, attack in refuted}))
        missing.append(
            f"{len(refuted)} of {len(answers)} answers claim a proof of what the client did not "
            f"train on (of {attacks}; for {_some(key for key, _ in refuted)}): they count as not "
            "proved, and no other proof of the attack can be trusted"
        )
    if not failed and answers and all(each.status in _NO_ANSWER for each in answers.values()):
        notes.append(f"no attack gave an answer: all {len(answers)} abstained or are inadmissible")
    absent = {round: clients for round, clients in info.get("dropped_out", {}).items() if clients}
    if absent:
        listed = [f"{', '.join(map(str, each))} in round {round}" for round, each in absent.items()]
        more = [f"and others in {len(listed) - NAMED} more rounds"] * (len(listed) > NAMED)
        notes.append(
            f"clients dropped out of the secure sum ({'; '.join([*listed[:NAMED], *more])}): their "
            "texts are not in it, and nothing is scored against them"
        )
    if left_out := info.get("left_out"):
        notes.append(f"{len(left_out)} messages were left out of the run when it was imported")
    if purged := info.get("purged"):
        notes.append(
            f"the private data was purged on {purged}: all {len(rows)} rows stay as they were, and "
            "nothing can be attacked or scored again"
        )
        return
    expected, here = expected_captures(experiment), set(run.captures())
    of_shards = shares(run)
    asked = list(dict.fromkeys(chain(asked, *(one.attacks for one in of_shards.values() if one))))
    wanted = [(key, name) for key in expected for name in asked]
    unanswered = [(key, name) for key, name in wanted if (key, name) not in answers]
    if info["status"] != "finished":
        notes.append(
            f"the run is not finished ({info['status']}): {len(here & set(expected))} of "
            f"{len(expected)} captures are here; `fedleak run` with the experiment's file goes on"
        )
    elif unanswered:
        gaps.unscored += len(unanswered)
        gone = sorted({key for key, _ in unanswered} - here)
        if gone:
            missing.append(
                f"{len(gone)} of {len(expected)} captures are missing ({_some(gone)}): `fedleak "
                "run` with the experiment's file trains their rounds again"
            )
        deleted = run.deleted()
        if late := sorted({key for key, _ in unanswered} & deleted):
            asked_late = sorted({name for key, name in unanswered if key in deleted})
            missing.append(
                f"{', '.join(asked_late)} came after {len(late)} of {len(expected)} captures were "
                f"deleted ({_some(late)}; audit.keep): only `fedleak run FILE --fresh` with "
                "audit.keep = 'all' captures them again"
            )
        if left := [key for key, _ in unanswered if key in here - deleted]:
            missing.append(
                f"{len(left)} of {len(wanted)} answers are missing (for {_some(left)}): "
                f"{_remedy(run, of_shards)}"
            )
    others = sorted({row.attack for row in rows if row.id not in answers} - set(asked))
    if others:
        missing.append(
            f"answers of {', '.join(others)} are gone: their rows stay as they were, and `fedleak "
            f"attack {run.path} --set 'attack=[...]'` gives them again"
        )
    untrue = [key for key, truth in truths.items() if truth is None]
    scored = {row.id for row in rows if row.batch_size is not None}
    without = [key for key, name in answers if key in untrue and (key, name) not in scored]
    unscored = sum(row.status == UNSCORED for row in rows)
    gaps.unscored += unscored
    if bare := sorted(set(without)):
        remedy = (
            f"`fedleak score {run.path} --vault FOLDER` takes it from the vault of a node, whose "
            "owner has to hand it over; else only `fedleak run FILE --fresh`, with the vault on, "
            "writes it"
            if experiment.tapped is None
            else f"where you have it, name it in truth.file, and `fedleak import {info['tapped']} "
            f"--about FILE --out {run.path}` adds it"
        )
        missing.append(
            f"{len(bare)} of {len(truths)} captures have no truth in {run.path / 'vault'} "
            f"({_some(bare)}), so {unscored} answers are unscored: {remedy}"
        )
    if kept := sorted(set(untrue) - set(bare)):
        notes.append(
            f"{len(kept)} of {len(truths)} captures have no truth: {_some(kept)}: their rows stay "
            "as they were"
        )
    for at in damaged(run):
        notes.append(
            f"line {at.line} of {at.file} was damaged ({at.reason}): it is in damaged.jsonl now"
        )


_NO_ANSWER = (Status.ABSTAINED, Status.INADMISSIBLE)


def _remedy(run: Run, of_shards: Mapping[Shard, Share | None]) -> str:
    """Returns which command gives the answers that are missing: shards that are not complete."""
    complete = [shard for shard, said in of_shards.items() if said is not None and said.complete]
    open_ = [
        str(shard)
        for of in dict.fromkeys(shard.of for shard in of_shards)
        for shard in (Shard(of, number) for number in range(1, of + 1))
        if shard not in complete
    ]
    if not open_:
        return f"`fedleak attack {run.path}` gives them"
    more = [f"and {len(open_) - MOST_SHARDS} more"] * (len(open_) > MOST_SHARDS)
    return (
        f"not complete: shard {', '.join([*open_[:MOST_SHARDS], *more])}; the command that started "
        f"it gives them, or `fedleak attack {run.path}` on one machine"
    )


def _some(keys: Iterable[Key]) -> str:
    """Returns the first few keys, and how many more there are."""
    names = list(dict.fromkeys(map(str, keys)))
    more = [f"and {len(names) - NAMED} more"] * (len(names) > NAMED)
    return ", ".join([*names[:NAMED], *more])
