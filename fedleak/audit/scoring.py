"""Scores what the attacks of a run answered against what clients held.

Only the audit opens the vault. `score_files` reads and writes, `answer_scores` scores one answer,
`gaps` says what is missing, and `summary` sums up.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from fedleak.attacks import unchecked
from fedleak.attacks.reconstruction import Status
from fedleak.audit import answer_scores, detection, positive_control
from fedleak.audit.answer_scores import Scored, Scores
from fedleak.audit.gaps import Gaps, Known, find_gaps, read_notes
from fedleak.audit.kept_texts import read_candidates, read_held_out
from fedleak.audit.metrics import personal_data
from fedleak.audit.privacy import canaries, ledger, membership
from fedleak.audit.score_files import Recorded, primary, salvaged, write
from fedleak.audit.summary import summarise
from fedleak.audit.vault import own_truth, read_truth
from fedleak.models import LanguageModel
from fedleak.store import records
from fedleak.store.records import Answer, LeakageRow, MembershipRow, ScoredRows
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.store.summaries import SUMMARY, PositiveControl, RunSummary
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import CaptureError, FedleakError

Answers = Mapping[tuple[Key, str], Answer]
"""Answers by the update that they are about and the name of the attack."""

Truths = Mapping[Key, GroundTruth | None]
"""What clients trained on; None where that is missing or damaged."""


@dataclass(frozen=True)
class RunScores:
    """The scores of a run's answers.

    Attributes:
        scored: The rows of leakage.jsonl, and the texts behind them.
        rows: The rows of all files that scoring writes.
        summary: The figures.
    """

    scored: list[Scored]
    rows: ScoredRows
    summary: RunSummary


def score_run(run: Run, attack_names: Iterable[str] | None = None) -> list[Scored]:
    """Scores every reconstruction of a run and writes leakage.jsonl and summary.json.

    What was scored earlier is never replaced by less: a row whose truth or whose answer is gone
    stays as it was. An answer whose truth was never here has a row without scores. Whoever calls
    this holds the lock.

    Args:
        run: The run directory.
        attack_names: Names of the attacks that should have answered; None: those of its experiment.

    Raises:
        ConfigError: There is no run here.
        FedleakError: run.json, held_out.json, a list of candidates or a list of names cannot be
            read; nothing was changed then.
    """
    scores = score(run, salvaged(run), attack_names)
    write(run, scores.rows, scores.summary)
    return scores.scored


def score(run: Run, recorded: Recorded, attack_names: Iterable[str] | None = None) -> RunScores:
    """Scores the answers of a run, and writes nothing.

    Args:
        run: The run directory.
        recorded: What its files of rows contain.
        attack_names: Names of the attacks that should have answered; None: those of its experiment.

    Raises:
        FedleakError: held_out.json, a list of candidates or one of names cannot be read.
    """
    experiment, gaps = recorded.experiment, Gaps()
    if attack_names is None:
        attack_names = [attack.name for attack in experiment.attacks]
    answers = {answer.id: answer for answer in recorded.answers}
    truths = _truths(run, sorted({key for key, _ in answers}), recorded.model, gaps)
    scored = _scored(run, recorded, answers, truths)
    leakage = [scored_answer.row for scored_answer in scored]
    find_gaps(Known(run, experiment, list(attack_names), answers, leakage, truths), gaps)
    gaps.notes += [*_noise_notes(run, truths), *_of_no_text(truths)]
    gaps.notes += unchecked(str(answer.settings.get("kind")) for answer in answers.values())
    notes = read_notes(run.defended, ledger.ClientNote, gaps)
    earlier = recorded.earlier
    rows = ScoredRows(
        leakage=leakage,
        ledger=ledger.ledger(run, experiment, notes, gaps, earlier.ledger),
        defended=ledger.defense_rows(notes, earlier.defended),
        canary=canaries.canary_rows(run, recorded, gaps),
        members=_members(run, recorded, answers, truths),
        detected=detection.detection_rows(run, gaps, earlier.detected),
    )
    summary = summarise(run, recorded, gaps, rows, _copies(run, recorded, gaps))
    return RunScores(scored, rows, summary)


def _truths(
    run: Run, keys: Iterable[Key], model: LanguageModel, gaps: Gaps
) -> dict[Key, GroundTruth | None]:
    """Returns what clients trained on; None where that is missing or damaged."""
    truths: dict[Key, GroundTruth | None] = {}
    for key in keys:
        try:
            truths[key] = _readable_truth(run, key, model)
        except CaptureError as error:
            truths[key] = None
            gaps.missing.append(
                f"{error}: what was scored with it stays, and only `fedleak run FILE --fresh` "
                "writes such a file again"
            )
    return truths


def _noise_notes(run: Run, truths: Truths) -> list[str]:
    """Returns what noise is on updates that a malicious server took out of sums, by round."""
    notes = []
    for key, truth in truths.items():
        if truth is None or truth.noise_scale is None:
            continue
        own = own_truth(run, key)
        if own is None or own.noise_scale is None or own == truth:
            continue
        notes.append(
            f"round {key.round}: the noise of all clients of the sum stays on the update of client "
            f"{key.client}: its standard deviation is {truth.noise_scale:.3g}, "
            f"{truth.noise_scale / own.noise_scale:.3g} times that of its own"
        )
    return notes


def _of_no_text(truths: Truths) -> Iterator[str]:
    """Says how many of the attacked updates have no text."""
    empty = sum(truth is not None and not truth.sequences for truth in truths.values())
    if empty:
        yield f"{empty} of {len(truths)} updates have no text: nothing could be read of them"


def _readable_truth(run: Run, key: Key, model: LanguageModel) -> GroundTruth | None:
    """Returns what a client trained on, if the model can take it as input.

    Raises:
        CaptureError: The file is damaged.
    """
    truth = read_truth(run, key)
    sequences = () if truth is None else truth.sequences
    if not records.within(chain(*sequences), model.vocabulary):
        reason = "token ids outside the vocabulary"
    elif any(len(ids) > model.max_length for ids in sequences):
        reason = f"a text of more than the {model.max_length} tokens that the model takes"
    else:
        return truth
    raise CaptureError(f"{run.vault.path(key)} is damaged ({reason})")


def _scored(run: Run, recorded: Recorded, answers: Answers, truths: Truths) -> list[Scored]:
    """Returns the rows of leakage.jsonl: new ones if answer and truth are here."""
    earlier = {row.id: row for row in recorded.earlier.leakage}
    recovered: dict[str, dict[int, list[Answer]]] = defaultdict(lambda: defaultdict(list))
    for (key, attack), answer in answers.items():
        if answer.status == Status.RECOVERED:
            recovered[attack][key.round].append(answer)
    # Poisson sampling may draw nobody, and then there is nothing to find.
    known = {key: truth for key, truth in truths.items() if truth is not None and truth.sequences}
    guesses, model, shared = _guesses(run, recorded, known), recorded.model, _in_other_sums(known)
    controls = recorded.experiment.audit.controls
    recognise = personal_data.recogniser(recorded.experiment.audit, model)
    items = {
        key: personal_data.find(truth.sequences, model, recognise) for key, truth in known.items()
    }
    scored = []
    for key, attack in sorted({*answers, *earlier}):
        given, before = answers.get((key, attack)), earlier.get((key, attack))
        has_scores = before is not None and before.batch_size is not None
        if given is not None and truths[key] is None and not has_scores:
            scored.append(Scored(answer_scores.unscored(given, {}), ()))
        elif given is not None and key in known and not _would_lose_scores(given, before):
            truth, other = known[key], _other_client(key, recovered[attack]) if controls else None
            new = answer_scores.compared(given, truth, model, other=other, guessed=guesses[key])
            new = answer_scores.with_personal_data(new, items[key], given, other, model)
            update = {"apart": key.client == EVERYONE and shared.isdisjoint(truth.sequences)}
            if controls and other is None and before is not None:  # the other's answer is gone
                update |= _control_of(before, new.row)
            scored.append(replace(new, row=new.row.model_copy(update=update)))
        elif given is not None and truths[key] is not None and key not in known:
            scored.append(Scored(answer_scores.of_empty_batch(given), ()))
        # A failed answer measured nothing, so without the answer there is nothing to keep.
        elif before is not None and (given is not None or before.status != Status.FAILED):
            scored.append(Scored(before, ()))
    return scored


def _in_other_sums(known: Mapping[Key, GroundTruth]) -> set[tuple[int, ...]]:
    """Returns the texts that are in more than one sum."""
    in_sums = Counter(
        chain.from_iterable(
            {*truth.sequences} for key, truth in known.items() if key.client == EVERYONE
        )
    )
    return {text for text, count in in_sums.items() if count > 1}


def _guesses(
    run: Run, recorded: Recorded, known: Mapping[Key, GroundTruth]
) -> Mapping[Key, Scores]:
    """Returns what held-out texts score against each truth."""
    model, experiment = recorded.model, recorded.experiment
    held_out: answer_scores.Texts = ()
    if experiment.audit.controls and known:
        held_out = read_held_out(run, model.vocabulary).sequences
    return {
        key: answer_scores.guess(held_out, truth, model, experiment.seed)
        for key, truth in known.items()
    }


def _control_of(before: LeakageRow, row: LeakageRow) -> dict[str, Any]:
    """Returns the figures of the control in the earlier row of an answer."""
    names = ("control_rougeL", "control_token_recall")
    kept: dict[str, Any] = {name: getattr(before, name) for name in names}
    if len(before.personal) == len(row.personal):
        pieces = zip(row.personal, before.personal, strict=True)
        kept["personal"] = tuple(
            item.model_copy(update={"control": earlier.control}) for item, earlier in pieces
        )
    return kept


def _would_lose_scores(answer: Answer, before: LeakageRow | None) -> bool:
    """Whether a failed try would replace something that was measured earlier."""
    measured = before is not None and before.status != Status.FAILED
    return measured and answer.status == Status.FAILED


def _other_client(key: Key, recovered: Mapping[int, Sequence[Answer]]) -> Answer | None:
    """Returns the attack's answer for the next other client, of the same round if there is one.

    Args:
        key: The update that needs a control.
        recovered: The attack's answers, by their round.
    """
    for distance in sorted({abs(round - key.round) for round in recovered}):
        others = [
            answer
            for round in sorted({key.round - distance, key.round + distance})
            for answer in recovered.get(round, ())
            if answer.client != key.client or (answer.client == EVERYONE and answer.key != key)
        ]
        if others:
            return min(others, key=lambda answer: (answer.client - key.client) % 10**6)
    return None


def _members(run: Run, recorded: Recorded, answers: Answers, truths: Truths) -> list[MembershipRow]:
    """Returns the rows of membership.jsonl."""
    vocabulary = recorded.model.vocabulary
    on_lists = {answer_id: answer for answer_id, answer in answers.items() if answer.scores}
    from_file = {
        attack for (_, attack), answer in on_lists.items() if answer.settings.get("candidates")
    }
    return membership.membership_rows(
        recorded.experiment,
        read_held_out(run, vocabulary) if on_lists else None,
        {attack: read_candidates(run, attack, vocabulary) for attack in from_file},
        on_lists,
        truths,
        recorded.earlier.members,
    )


def _copies(run: Run, recorded: Recorded, gaps: Gaps) -> PositiveControl | None:
    """Scores the positive control; None where there is none, or it is not finished."""
    if run.info().get("purged"):
        with suppress(FedleakError):  # without a summary nobody knows
            return run.read_document(SUMMARY).positive_control
        return None
    try:
        control = positive_control.control_of(run)
        if not control.exists() or control.info()["status"] != "finished":
            return None
        positive_control.check_copies(run, recorded.experiment)
        of_copies = primary(control, recorded.model)
        scores = score(control, of_copies)
    except FedleakError as error:
        gaps.missing.append(f"positive control: {error}")
        return None
    gaps.missing += [f"positive control: {wrong}" for wrong in scores.summary.wrong]
    return positive_control.summarised(scores.rows.leakage, of_copies.answers, recorded.answers)
