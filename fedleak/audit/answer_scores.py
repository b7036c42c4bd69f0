"""Scores one answer of an attack against what the client held.

Every row has what the attacker knew and the scores of two controls against the same truth: the same
attack's answer for another client's update, and held-out texts that were drawn without looking at
any update.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch

from fedleak.attacks.reconstruction import Status
from fedleak.audit.metrics import personal_data, rouge
from fedleak.audit.metrics.matching import Overlap, assign, overlap
from fedleak.audit.metrics.personal_data import Item
from fedleak.audit.metrics.rouge import Rouge
from fedleak.models import LanguageModel, text_of
from fedleak.store.records import UNSCORED, Answer, Fact, LeakageRow, PersonalItem, TextScore
from fedleak.training.truth import GroundTruth
from fedleak.util.rng import stream

Texts = Sequence[Sequence[int]]
"""Token ids of several texts."""

REFUTED = "it claims a proof of these texts, and they are not what the client trained on"
"""The reason of a row whose answer is proved and not exact."""

GUESSES = 10
"""The guess control is the mean over so many draws of held-out texts."""


_text = lru_cache(maxsize=rouge.PAIRS)(text_of)
"""Cached, because controls score the same texts many times."""


@dataclass(frozen=True)
class TextPair:
    """A private text and an attack's answer for it; None: the attack has no answer for it."""

    truth: str
    answer: str | None
    rougeL: float


@dataclass(frozen=True)
class Scored:
    """A row and its pairs of texts; an answer without truth has no pairs."""

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


class _Match(NamedTuple):
    """A private text and the answer that is meant for it, content only.

    Attributes:
        chosen: The index of the answer; None: there is none.
        pair: Both in words.
        score: The ROUGE of the text.
        exact: Whether both have the same tokens.
    """

    chosen: int | None
    pair: TextPair
    score: Rouge
    exact: bool


def _matched(answers: Texts, truths: Texts, model: LanguageModel) -> list[_Match]:
    """Returns each text with its answer, one to one."""
    answer_ids, truth_ids = ([model.content(ids) for ids in texts] for texts in (answers, truths))
    answer_texts, truth_texts = (
        [_text(model.tokenizer, ids) for ids in of_all] for of_all in (answer_ids, truth_ids)
    )

    def similarity(answer: int, truth: int) -> float:
        exact = 100.0 * (answer_ids[answer] == truth_ids[truth])
        return exact + sum(rouge.rouge(answer_texts[answer], truth_texts[truth]))

    matches = []
    for place, chosen in enumerate(assign(len(answers), len(truths), similarity)):
        answer = None if chosen is None else answer_texts[chosen]
        score = rouge.rouge(answer or "", truth_texts[place])
        exact = chosen is not None and answer_ids[chosen] == truth_ids[place]
        pair = TextPair(truth_texts[place], answer, score.rougeL)
        matches.append(_Match(chosen, pair, score, exact))
    return matches


def score_sequences(answers: Texts, truths: Texts, model: LanguageModel) -> Scores:
    """Scores sequences one-to-one, content only.

    Only the attack's first answers count, as many as there are texts, so that more answers do not
    give a better score.
    """
    answers = counted(answers, len(truths), model)
    matches = _matched(answers, truths, model)
    whole, true = (
        [_text(model.tokenizer, tuple(ids), special=True) for ids in texts]
        for texts in (answers, truths)
    )
    paper = [
        rouge.rouge("" if match.chosen is None else whole[match.chosen], text)
        for match, text in zip(matches, true, strict=True)
    ]
    scores = Scores(
        content=rouge.mean([match.score for match in matches]),
        paper=rouge.mean(paper),
        exact_match=sum(match.exact for match in matches) / len(matches),
        texts=tuple(
            TextScore(exact=match.exact, rougeL=match.score.rougeL, token_recall=None)
            for match in matches
        ),
        pairs=tuple(match.pair for match in matches),
    )
    return _with_tokens(scores, chain(*answers), truths, model)


def score_control(
    answers: Texts | None, tokens: Iterable[int] | None, truths: Texts, model: LanguageModel
) -> Scores:
    """Returns what a control scores: ROUGE of its answers, and the recall of its tokens.

    Args:
        answers: Sequences that it names; None: it names none.
        tokens: Tokens that it names; None: those of its answers.
        truths: What the client trained on.
        model: For its tokenizer.
    """
    content = None
    if answers is not None:
        answers = counted(answers, len(truths), model)
        content = rouge.mean([match.score for match in _matched(answers, truths, model)])
        tokens = chain(*answers) if tokens is None else tokens
    recall = None if tokens is None else score_tokens(tokens, truths, model).recall
    return Scores(content=content, token_recall=recall)


def counted(answers: Texts, size: int, model: LanguageModel) -> Texts:
    """Returns the answers that count for a batch of `size` texts."""
    # An answer in the files of a run may have any length; no text of a client is longer than this.
    longest = model.max_length
    return _each_once([ids[:longest] for ids in answers], size)[:size]


def _each_once(answers: Texts, size: int) -> Texts:
    """Returns an answer without repetitions, if it has the whole batch several times over.

    If a client reports twice as many texts as it has, its mean gradient stays the same, and a proof
    finds each text twice.
    """
    times, rest = divmod(len(answers), size)
    counts = Counter(map(tuple, answers))
    if rest or times < 2 or any(count % times for count in counts.values()):
        return answers
    return [ids for ids, count in counts.items() for _ in range(count // times)]


def score_tokens(answer: Iterable[int], truths: Texts, model: LanguageModel) -> Overlap:
    """Scores a set of tokens, content only."""
    special = model.special_ids()
    return overlap(set(answer) - special, set(chain(*truths)) - special)


def score_answer(answer: Answer, truth: GroundTruth, model: LanguageModel) -> Scores:
    """Scores an answer by what its attack looks for."""
    scores = Scores()
    if answer.sequences is not None:
        scores = score_sequences(answer.sequences, truth.sequences, model)
    if answer.tokens is not None:
        scores = _with_tokens(scores, answer.tokens, truth.sequences, model)
    return scores


def _with_tokens(
    scores: Scores, answer: Iterable[int], truths: Texts, model: LanguageModel
) -> Scores:
    """Returns scores with those of a set of tokens, over the whole batch and for each text."""
    named = set(answer)
    tokens = score_tokens(named, truths, model)
    texts = scores.texts or [TextScore(exact=None, rougeL=None, token_recall=None)] * len(truths)
    recalls = (score_tokens(named, [truth], model).recall for truth in truths)
    return replace(
        scores,
        token_recall=tokens.recall,
        token_precision=tokens.precision,
        texts=tuple(
            text.model_copy(update={"token_recall": recall})
            for text, recall in zip(texts, recalls, strict=True)
        ),
    )


def guess(held_out: Texts, truth: GroundTruth, model: LanguageModel, seed: int) -> Scores:
    """Returns the mean scores of held-out texts, drawn without any update."""
    if not held_out:
        return Scores()
    rng = stream(seed, "guess", truth.round, truth.client)
    drawn = []
    for _ in range(GUESSES):
        picks = torch.randint(len(held_out), (len(truth.sequences),), generator=rng).tolist()
        drawn.append(score_control([held_out[i] for i in picks], None, truth.sequences, model))
    return Scores(
        content=rouge.mean([scores.content for scores in drawn if scores.content]),
        token_recall=sum(scores.token_recall or 0.0 for scores in drawn) / GUESSES,
    )


def compared(
    answer: Answer,
    truth: GroundTruth,
    model: LanguageModel,
    *,
    other: Answer | None,
    guessed: Scores,
) -> Scored:
    """Returns the row of an answer whose truth is known.

    Args:
        answer: What an attack answered.
        truth: What the client trained on.
        model: For its tokenizer; its weights are not used.
        other: The same attack's answer for another update, which is the first control.
        guessed: What held-out texts score against the same truth: the second control (`guess`).
    """
    control = Scores()
    if other is not None:
        control = score_control(other.sequences, other.tokens, truth.sequences, model)
    recovered = answer.status == Status.RECOVERED
    scores = score_answer(answer, truth, model) if recovered else Scores()
    only_tokens = recovered and answer.sequences is None
    # A proof is about all texts; if the truth contradicts it, the truth counts.
    refuted = answer.verified and scores.exact_match != 1
    row = unscored(answer, truth.facts(model.num_labels)).model_copy(
        update={
            "status": answer.status,
            **({"verified": False, "reason": REFUTED} if refuted else {}),
            "batch_size": len(truth.sequences),
            "num_tokens": sum(map(len, truth.sequences)),
            **_named("", scores.content),
            **_named("paper_", scores.paper),
            "exact_match": scores.exact_match,
            "token_recall": scores.token_recall,
            "token_precision": scores.token_precision,
            "control_rougeL": control.content and control.content.rougeL,
            "control_token_recall": control.token_recall,
            "guess_rougeL": guessed.content.rougeL if guessed.content and not only_tokens else None,
            "guess_token_recall": guessed.token_recall,
            "texts": scores.texts,
        }
    )
    return Scored(row, scores.pairs)


def of_empty_batch(answer: Answer) -> LeakageRow:
    """Returns the row of an answer to an update of no text: nothing was to be read, or proved."""
    row = unscored(answer, {})
    refuted = {"verified": False, "reason": REFUTED} if answer.verified else {}
    nothing = {"status": answer.status, "batch_size": 0, "num_tokens": 0, "texts": ()}
    return row.model_copy(update=refuted | nothing)


def with_personal_data(
    scored: Scored,
    items: Sequence[Item],
    answer: Answer,
    other: Answer | None,
    model: LanguageModel,
) -> Scored:
    """Returns a scored answer with the personal data of the truth that the answer contains.

    Args:
        scored: The answer, compared with the truth.
        items: Personal data of the truth.
        answer: What the attack answered.
        other: The same attack's answer for another client's update, which is the control.
        model: For its tokenizer.
    """
    size, texts = scored.row.batch_size or 0, list(scored.row.texts or ())

    def in_answer(given: Answer | None) -> Sequence[bool | None]:
        if given is None or given.status != Status.RECOVERED or given.sequences is None:
            return [None] * len(items)
        return personal_data.read(items, counted(given.sequences, size, model), model)

    personal = tuple(
        PersonalItem(kind=item.kind, text=item.place, read=read, control=control)
        for item, read, control in zip(items, in_answer(answer), in_answer(other), strict=True)
    )
    for place, text in enumerate(texts):
        read = [item.read for item in personal if item.text == place and item.read is not None]
        if read:
            texts[place] = text.model_copy(update={"personal_data": sum(read) / len(read)})
    update = {"personal": personal, "texts": tuple(texts) or scored.row.texts}
    return replace(scored, row=scored.row.model_copy(update=update))


def _named(prefix: str, scores: Rouge | None) -> dict[str, float]:
    """Returns ROUGE scores by the names that they have in a row."""
    return {} if scores is None else {prefix + name: f for name, f in scores._asdict().items()}


def unscored(answer: Answer, true: Mapping[str, Any]) -> LeakageRow:
    """Returns the row of an answer that is not compared: only what the attack itself reports.

    Args:
        answer: What an attack answered.
        true: What is known of the facts that attacks may read, by their names.
    """
    # A margin below 1 is a guess; null: there was no other answer to compare with.
    margins = [m for m in answer.margins if m is not None and m >= 1]
    own = {
        "status": UNSCORED if answer.status == Status.RECOVERED else answer.status,
        "facts": {n: Fact(claimed=value, true=true.get(n)) for n, value in answer.facts.items()},
        "margin": min(margins, default=None),
    }
    return LeakageRow(**{**dict(answer), **own})
