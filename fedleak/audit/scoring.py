"""Scores what attacks answered against what clients held. Only the audit opens the vault.

Every row says what the attacker knew and what two controls score against the same truth: the same
attack's answer for another client's update, and held-out texts that were drawn without looking
at any update.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

import torch

from fedleak.attacks import unchecked
from fedleak.attacks.reconstruction import Status
from fedleak.audit import positive_control
from fedleak.audit.gaps import Gaps, find_gaps
from fedleak.audit.kept_texts import read_candidates, read_held_out
from fedleak.audit.metrics import rouge
from fedleak.audit.metrics.matching import assign
from fedleak.audit.metrics.rouge import Rouge
from fedleak.audit.metrics.tokens import Overlap, overlap
from fedleak.audit.privacy import canaries, ledger, membership
from fedleak.audit.summary import summarise
from fedleak.audit.vault import read_truth
from fedleak.config.experiment import Experiment
from fedleak.federation.lookup import stored
from fedleak.models import LanguageModel, loading
from fedleak.store import records
from fedleak.store.records import (
    CANARIES,
    DEFENSES,
    LEAKAGE,
    LEDGER,
    MEMBERSHIP,
    UNSCORED,
    UTILITY,
    Answer,
    Fact,
    LeakageRow,
    ScoredRows,
    TextScore,
    Utility,
)
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.store.shards import read_answers, salvage_answers
from fedleak.store.summaries import SUMMARY, PositiveControl, RunSummary
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import CaptureError, FedleakError
from fedleak.util.rng import stream

REFUTED = "it claims a proof of these texts, and they are not what the client trained on"
"""The reason of a row whose answer is proved and not exact."""

GUESSES = 10
"""Draws of held-out texts that the guess control is the mean of."""


@dataclass(frozen=True)
class TextPair:
    """A private text and what an attack made of it; None where it has no answer for it."""

    truth: str
    answer: str | None
    rougeL: float


@dataclass(frozen=True)
class Scored:
    """A row and the texts behind it; of an answer without truth there are none."""

    row: LeakageRow
    pairs: tuple[TextPair, ...]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """An answer's scores against one truth."""

    content: Rouge | None = None
    paper: Rouge | None = None
    exact_match: float | None = None
    token_recall: float | None = None
    token_precision: float | None = None
    texts: tuple[TextScore, ...] | None = None
    pairs: tuple[TextPair, ...] = ()


def score_sequences(
    answers: Sequence[Sequence[int]], truths: Sequence[Sequence[int]], model: LanguageModel
) -> Scores:
    """Scores sequences one-to-one, content only.

    Only as many answers count as there are sequences, in the attack's own order, so that more
    answers do not buy a better score.
    """
    special = model.special_ids()

    def content(sequences: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
        return [tuple(t for t in sequence if t not in special) for sequence in sequences]

    # Whoever wrote a run may have put a book into an answer; clients train on none.
    answers = [ids[: model.max_length] for ids in answers]
    answers = _each_once(answers, len(truths))[: len(truths)]
    answer_ids, truth_ids = content(answers), content(truths)
    answer_texts = [model.decode(ids) for ids in answer_ids]
    truth_texts = [model.decode(ids) for ids in truth_ids]

    def similarity(answer: int, truth: int) -> float:
        exact = 100.0 * (answer_ids[answer] == truth_ids[truth])
        return exact + sum(rouge.rouge(answer_texts[answer], truth_texts[truth]))

    chosen = assign(range(len(answers)), range(len(truths)), similarity)
    texts = [None if a is None else answer_texts[a] for a in chosen]
    scores = [rouge.rouge(a or "", t) for a, t in zip(texts, truth_texts, strict=True)]
    paper = [
        rouge.rouge("" if a is None else model.decode(answers[a], special=True), true)
        for a, true in zip(chosen, (model.decode(t, special=True) for t in truths), strict=True)
    ]
    exact = [a is not None and answer_ids[a] == t for a, t in zip(chosen, truth_ids, strict=True)]
    tokens = score_tokens(chain(*answers), truths, model)
    answered_tokens = set(chain(*answers))
    scored = zip(truth_texts, texts, scores, strict=True)
    return Scores(
        content=rouge.mean(scores),
        paper=rouge.mean(paper),
        exact_match=sum(exact) / len(exact),
        token_recall=tokens.recall,
        token_precision=tokens.precision,
        texts=tuple(
            TextScore(
                exact=e,
                rougeL=s.rougeL,
                token_recall=score_tokens(answered_tokens, [t], model).recall,
            )
            for e, s, t in zip(exact, scores, truths, strict=True)
        ),
        pairs=tuple(TextPair(t, a, s.rougeL) for t, a, s in scored),
    )


def _each_once(answers: Sequence[Sequence[int]], size: int) -> Sequence[Sequence[int]]:
    """Returns what is left of an answer that has every text of a batch several times over.

    A client that reports twice as many texts as it has sends the same mean, and each of its texts
    is proved to be in the batch twice.
    """
    times, rest = divmod(len(answers), size)
    counts = Counter(map(tuple, answers))
    if rest or times < 2 or any(count % times for count in counts.values()):
        return answers
    return [ids for ids, count in counts.items() for _ in range(count // times)]


def score_tokens(
    answer: Iterable[int], truths: Iterable[Sequence[int]], model: LanguageModel
) -> Overlap:
    """Scores a set of tokens, content only."""
    special = model.special_ids()
    return overlap(set(answer) - special, set(chain(*truths)) - special)


def score_answer(answer: Answer, truth: GroundTruth, model: LanguageModel) -> Scores:
    """Scores an answer by what its attack looks for."""
    scores = Scores()
    if answer.sequences is not None:
        scores = score_sequences(answer.sequences, truth.sequences, model)
    if answer.tokens is not None:
        tokens = score_tokens(answer.tokens, truth.sequences, model)
        texts = scores.texts or [TextScore(exact=None, rougeL=None, token_recall=None)] * len(
            truth.sequences
        )
        scores = replace(
            scores,
            token_recall=tokens.recall,
            token_precision=tokens.precision,
            texts=tuple(
                text.model_copy(
                    update={"token_recall": score_tokens(answer.tokens, [true], model).recall}
                )
                for text, true in zip(texts, truth.sequences, strict=True)
            ),
        )
    return scores


def guess(
    held_out: Sequence[Sequence[int]], truth: GroundTruth, model: LanguageModel, seed: int
) -> Scores:
    """Returns the mean scores of held-out texts, drawn without any update."""
    if not held_out:
        return Scores()
    rng = stream(seed, "guess", truth.round, truth.client)
    drawn = []
    for _ in range(GUESSES):
        picks = torch.randint(len(held_out), (len(truth.sequences),), generator=rng).tolist()
        drawn.append(score_sequences([held_out[i] for i in picks], truth.sequences, model))
    return Scores(
        content=rouge.mean([scores.content for scores in drawn if scores.content]),
        token_recall=sum(scores.token_recall or 0.0 for scores in drawn) / GUESSES,
    )


def score_one(
    answer: Answer,
    truth: GroundTruth,
    model: LanguageModel,
    *,
    other: Answer | None = None,
    held_out: Sequence[Sequence[int]] = (),
    seed: int = 0,
) -> Scored:
    """Scores one answer, as `score_run` scores those of a run.

    Args:
        answer: What an attack answered.
        truth: What the client trained on.
        model: For its tokenizer; its weights are not used.
        other: The same attack's answer for the update of another client, for the first control.
        held_out: Token ids of texts that the client did not have, for the second control.
        seed: Decides which of them are drawn.
    """
    control = score_answer(other, truth, model) if other is not None else Scores()
    return _row(answer, truth, control, guess(held_out, truth, model, seed), model)


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
        FedleakError: run.json, held_out.json or a list of candidates is damaged; nothing was
            changed then.
    """
    scores = score(run, salvaged(run), attack_names)
    write(run, scores)
    return scores.scored


@dataclass(frozen=True)
class Recorded:
    """What the files of rows in a run directory say; the vault and the captures say the rest.

    Attributes:
        answers: Of attacks, in the order in which they came.
        utility: Of the model, after each round in which it was measured.
        earlier: Rows of the last scoring. They stay where their answers or truths are gone.
    """

    answers: Sequence[Answer]
    utility: Sequence[Utility]
    earlier: ScoredRows


def salvaged(run: Run) -> Recorded:
    """Reads what can be read, and moves damaged lines to damaged.jsonl.

    Whoever calls this holds the lock.
    """
    return Recorded(
        salvage_answers(run, _vocabulary_of(run)),
        run.salvage(UTILITY),
        ScoredRows(
            leakage=run.salvage(LEAKAGE),
            ledger=run.salvage(LEDGER),
            defended=run.salvage(DEFENSES),
            canary=run.salvage(CANARIES),
            members=run.salvage(MEMBERSHIP),
        ),
    )


def primary(run: Run) -> Recorded:
    """Reads what attacks answered and training measured, and nothing that scoring made of it.

    Raises:
        ConfigError: There is no run here.
        FedleakError: A line cannot be read.
    """
    return Recorded(read_answers(run, _vocabulary_of(run)), run.rows(UTILITY), ScoredRows())


def scored_rows(run: Run) -> ScoredRows:
    """Reads what scoring wrote the last time.

    Raises:
        FedleakError: A line cannot be read.
    """
    return ScoredRows(
        leakage=run.rows(LEAKAGE),
        ledger=run.rows(LEDGER),
        defended=run.rows(DEFENSES),
        canary=run.rows(CANARIES),
        members=run.rows(MEMBERSHIP),
    )


@dataclass(frozen=True)
class RunScores:
    """What the answers of a run are worth.

    Attributes:
        scored: The rows of leakage.jsonl, and the texts behind them.
        rows: Of all files that scoring writes.
        summary: The figures.
    """

    scored: list[Scored]
    rows: ScoredRows
    summary: RunSummary


def score(run: Run, recorded: Recorded, attack_names: Iterable[str] | None = None) -> RunScores:
    """Scores the answers of a run, and writes nothing.

    Args:
        run: The run directory.
        recorded: What its files of rows say.
        attack_names: Names of the attacks that should have answered; None: those of its experiment.

    Raises:
        ConfigError: There is no run here.
        FedleakError: run.json, held_out.json or a list of candidates is damaged.
    """
    experiment, gaps = stored(run), Gaps()
    model = _outline(run, experiment)
    vocabulary = vocabulary_of(model)
    answers = {answer.id: answer for answer in recorded.answers}
    earlier = {row.id: row for row in recorded.earlier.leakage}
    truths = _truths(run, sorted({key for key, _ in answers}), model, gaps)
    scored = _score(run, experiment, model, answers, earlier, truths)
    fresh = {scored_row.row.id for scored_row in scored}
    for name, answer in answers.items():
        before = earlier.get(name)
        if truths[answer.key] is None and (before is None or before.batch_size is None):
            scored.append(Scored(_unscored(answer), ()))
            fresh.add(name)
    for name, row in earlier.items():
        # What failed was not measured, so without its answer there is nothing to keep.
        if name not in fresh and (name in answers or row.status != Status.FAILED):
            scored.append(Scored(row, ()))
    scored.sort(key=lambda scored_row: scored_row.row.id)
    leakage = [scored_row.row for scored_row in scored]
    names = (
        [attack.name for attack in experiment.attacks]
        if attack_names is None
        else list(attack_names)
    )
    find_gaps(run, experiment, names, answers, leakage, truths, gaps)
    gaps.notes += unchecked(str(answer.settings.get("kind")) for answer in answers.values())
    notes = ledger.client_notes(run, gaps)
    on_lists = {name: answer for name, answer in answers.items() if answer.scores}
    files = {name for (_, name), answer in on_lists.items() if answer.settings.get("candidates")}
    rows = ScoredRows(
        leakage=leakage,
        ledger=ledger.ledger(run, experiment, notes, gaps, recorded.earlier.ledger),
        defended=ledger.defense_rows(notes, recorded.earlier.defended),
        canary=canaries.canary_rows(run, experiment, model, gaps, recorded.earlier.canary),
        members=membership.membership_rows(
            experiment,
            read_held_out(run, vocabulary) if on_lists else None,
            {name: read_candidates(run, name, vocabulary) for name in files},
            on_lists,
            truths,
            recorded.earlier.members,
        ),
    )
    finished = {name: place for place, name in enumerate(answers)}
    copies = _copies(run, experiment, recorded.answers, gaps)
    summary = summarise(run, experiment, gaps, rows, finished, recorded.utility, copies)
    return RunScores(scored, rows, summary)


def _copies(
    run: Run, experiment: Experiment, answers: Iterable[Answer], gaps: Gaps
) -> PositiveControl | None:
    """Scores the positive control; None where there is none, or it is not finished."""
    if run.info().get("purged"):
        with suppress(FedleakError):  # without a summary nobody knows
            return run.read(SUMMARY).positive_control
        return None
    try:
        control = positive_control.control_of(run)
        if not control.exists() or control.info()["status"] != "finished":
            return None
        positive_control.check_copies(run, experiment)
        recorded = primary(control)
        scores = score(control, recorded)
    except FedleakError as error:
        gaps.missing.append(f"positive control: {error}")
        return None
    gaps.missing += [f"positive control: {wrong}" for wrong in scores.summary.wrong]
    return positive_control.summarised(scores.rows.leakage, recorded.answers, answers)


def mark(rows: ScoredRows, copies: PositiveControl | None) -> str:
    """Returns a SHA-256 of rows and positive control, which tells later whether they changed."""
    files = (rows.leakage, rows.ledger, rows.defended, rows.canary, rows.members)
    plain: list[object] = [[row.model_dump(mode="json") for row in file] for file in files]
    plain.append(copies and copies.model_dump(mode="json"))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def write(run: Run, scores: RunScores) -> None:
    """Writes scores into the run directory; whoever calls this holds the lock."""
    rows = scores.rows
    run.write_rows(LEAKAGE, rows.leakage)
    run.write_rows(LEDGER, rows.ledger)
    run.write_rows(DEFENSES, rows.defended)
    if rows.canary:
        run.write_rows(CANARIES, rows.canary)
    if rows.members:
        run.write_rows(MEMBERSHIP, rows.members)
    run.write(SUMMARY, scores.summary)


def _outline(run: Run, experiment: Experiment) -> LanguageModel:
    """Returns the model of a run, for its tokenizer."""
    return loading.outline(experiment.model_spec(run.info()["num_labels"]))


def _vocabulary_of(run: Run) -> int:
    return vocabulary_of(_outline(run, stored(run)))


def _score(
    run: Run,
    experiment: Experiment,
    model: LanguageModel,
    answers: Mapping[tuple[Key, str], Answer],
    earlier: Mapping[tuple[Key, str], LeakageRow],
    truths: Mapping[Key, GroundTruth | None],
) -> list[Scored]:
    """Scores the answers whose truth is known."""
    # Poisson sampling may draw nobody, and then there is nothing to find.
    known = {key: truth for key, truth in truths.items() if truth is not None and truth.sequences}
    controls, guesses = experiment.audit.controls, {key: Scores() for key in known}
    if controls and known:
        held_out = read_held_out(run, vocabulary_of(model)).sequences
        guesses = {
            key: guess(held_out, truth, model, experiment.seed) for key, truth in known.items()
        }
    by_attack: dict[str, dict[Key, Answer]] = defaultdict(dict)
    for (key, attack), answer in answers.items():
        by_attack[attack][key] = answer
    scored = []
    for attack, of_attack in by_attack.items():
        for key, answer in sorted(of_attack.items()):
            before = earlier.get((key, attack))
            if key not in known or _would_lose_scores(answer, before):
                continue
            other = _other_client(key, of_attack) if controls else None
            control = score_answer(other, known[key], model) if other else Scores()
            scored_row = _row(answer, known[key], control, guesses[key], model)
            if controls and other is None and before is not None:  # the other's answer is gone
                kept = {
                    "control_rougeL": before.control_rougeL,
                    "control_token_recall": before.control_token_recall,
                }
                scored_row = Scored(scored_row.row.model_copy(update=kept), scored_row.pairs)
            scored.append(scored_row)
    return scored


def _would_lose_scores(answer: Answer, before: LeakageRow | None) -> bool:
    """Whether a failed try would replace something that was measured earlier."""
    measured = before is not None and before.status != Status.FAILED
    return measured and answer.status == Status.FAILED


def vocabulary_of(model: LanguageModel) -> int:
    """Returns how many token ids a text may have; a model may have more than its tokenizer."""
    return max(int(model.module.config.vocab_size), len(model.tokenizer))  # type: ignore[union-attr,arg-type]


def _truths(
    run: Run, keys: Iterable[Key], model: LanguageModel, gaps: Gaps
) -> dict[Key, GroundTruth | None]:
    """Returns what clients trained on; None where that is missing or damaged."""
    vocabulary = vocabulary_of(model)
    truths: dict[Key, GroundTruth | None] = {}
    for key in keys:
        try:
            truths[key] = truth = read_truth(run, key)
            sequences = () if truth is None else truth.sequences
            wrong = ""
            if not records.within(chain(*sequences), vocabulary):
                wrong = "token ids outside the vocabulary"
            elif any(len(ids) > model.max_length for ids in sequences):
                wrong = f"a text of more than the {model.max_length} tokens that the model takes"
            if wrong:
                file = run.path / "vault" / f"{key}.json"
                raise CaptureError(f"{file} is damaged ({wrong})")
        except CaptureError as error:
            truths[key] = None
            gaps.missing.append(
                f"{error}: what was scored with it stays, and only `fedleak run FILE --fresh` "
                "writes such a file again"
            )
    return truths


def _other_client(key: Key, of_attack: Mapping[Key, Answer]) -> Answer | None:
    """Returns the attack's answer for the next other client, of the same round if there is one."""
    others = [
        k
        for k, answer in of_attack.items()
        if (k.client != key.client or (k.client == EVERYONE and k != key))
        and answer.status == Status.RECOVERED
    ]
    if not others:
        return None
    after = sorted(
        others, key=lambda k: (abs(k.round - key.round), (k.client - key.client) % 10**6)
    )
    return of_attack[after[0]]


def _row(
    answer: Answer,
    truth: GroundTruth,
    control: Scores,
    guessed: Scores,
    model: LanguageModel,
) -> Scored:
    recovered = answer.status == Status.RECOVERED
    scores = score_answer(answer, truth, model) if recovered else Scores()
    true = truth.facts(model.num_labels)
    content, paper = scores.content, scores.paper
    only_tokens = recovered and answer.sequences is None
    measured = {
        "batch_size": len(truth.sequences),
        "num_tokens": sum(map(len, truth.sequences)),
        "rouge1": content.rouge1 if content else None,
        "rouge2": content.rouge2 if content else None,
        "rougeL": content.rougeL if content else None,
        "paper_rouge1": paper.rouge1 if paper else None,
        "paper_rouge2": paper.rouge2 if paper else None,
        "paper_rougeL": paper.rougeL if paper else None,
        "exact_match": scores.exact_match,
        "token_recall": scores.token_recall,
        "token_precision": scores.token_precision,
        "control_rougeL": control.content.rougeL if control.content else None,
        "control_token_recall": control.token_recall,
        "guess_rougeL": guessed.content.rougeL if guessed.content and not only_tokens else None,
        "guess_token_recall": guessed.token_recall,
        "texts": scores.texts,
        "facts": {
            name: Fact(found=value, true=true.get(name)) for name, value in answer.facts.items()
        },
    }
    claimed = _unscored(answer)
    # A proof covers all texts, and the truth outweighs it.
    if answer.verified and scores.exact_match != 1:
        claimed = claimed.model_copy(update={"verified": False, "reason": REFUTED})
    row = claimed.model_copy(update={"status": answer.status, **measured})
    return Scored(row, scores.pairs)


def _unscored(answer: Answer) -> LeakageRow:
    """Returns the row of an answer that is compared with nothing: what the attack itself says."""
    # Below 1 is a guess; null had nothing to be compared with.
    margins = [m for m in answer.margins if m is not None and m >= 1]
    return LeakageRow(
        round=answer.round,
        client=answer.client,
        attack=answer.attack,
        status=UNSCORED if answer.status == Status.RECOVERED else answer.status,
        reason=answer.reason,
        verified=answer.verified,
        facts={name: Fact(found=value) for name, value in answer.facts.items()},
        margin=min(margins, default=None),
        diagnostics=answer.diagnostics,
        seconds=answer.seconds,
        device=answer.device,
        granted=answer.granted,
        knows=answer.knows,
    )
