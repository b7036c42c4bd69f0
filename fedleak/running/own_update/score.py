"""Scores an answer against the texts that the update was computed on."""

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import InstanceOf, SkipValidation

from fedleak.audit.answer_scores import Scored, compared, guess
from fedleak.data.notes import notes
from fedleak.models import LanguageModel
from fedleak.running.own_update.attack import AttackResult, Seed, checked, numbers_between
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import ConfigError
from fedleak.util.sanitise import is_whole

_HELD_OUT, _HELD_OUT_SEED = 100, 20
"""How many built-in notes serve as held-out texts if none are given, and their seed."""


@checked
def score(
    result: InstanceOf[AttackResult],
    texts: Annotated[Sequence[str] | Sequence[Sequence[int]], SkipValidation],
    *,
    labels: Annotated[Sequence[int], SkipValidation] = (),
    other: InstanceOf[AttackResult] | None = None,
    held_out: Annotated[Sequence[str] | None, SkipValidation] = None,
    seed: Seed = 0,
) -> Scored:
    """Scores an answer against the texts that the update was computed on.

    Args:
        result: What `attack` returned.
        texts: The private texts; or their token ids, if they were cut or tokenised in another way.
        labels: The class of each text, for attacks that read how many texts each class has; whole
            numbers, in a list, an array or a tensor.
        other: The answer of the same attack for an update of other texts: the first control. A
            score is a leak only as far as it exceeds the score of this control.
        held_out: Texts like these that were not in the batch. Some are drawn without the update:
            their score is the second control. Left out: fedleak's built-in notes, in English.
        seed: Decides which held-out texts are drawn.

    Returns:
        `row`, with the figures of `leakage.jsonl`, and `pairs`, each text with what was read of it.

    Raises:
        ConfigError: These cannot be the texts of the update.
    """
    model = result.model
    sequences = _token_ids("texts", texts, model)
    if len(sequences) != result.sent.num_examples:
        # An attack answers with num_examples texts, so fewer or more texts cannot be matched.
        raise ConfigError(
            f"texts: there are {len(sequences)}, but the attack was told num_examples = "
            f"{result.sent.num_examples}: give all texts of the update"
        )
    classes = numbers_between("labels", labels, 0, model.num_labels - 1)
    if classes and len(classes) != len(sequences):
        raise ConfigError(f"labels: {len(classes)} for {len(sequences)} texts: give one for each")
    if held_out is None:
        held_out = [note.text for note in notes(_HELD_OUT, _HELD_OUT_SEED)]
    others = [ids for ids in _token_ids("held_out", held_out, model) if ids not in sequences]
    truth = GroundTruth(
        round=result.answer.round,
        client=result.answer.client,
        sequences=tuple(sequences),
        labels=classes,
        batch_size=len(sequences),
    )
    control = None if other is None else other.answer
    guessed = guess(others, truth, model, seed)
    return compared(result.answer, truth, model, other=control, guessed=guessed)


def _token_ids(
    name: str, texts: Sequence[str] | Sequence[Sequence[int]], model: LanguageModel
) -> list[tuple[int, ...]]:
    """Returns the token ids that a client feeds to the model for each text, cut to `max_length`.

    Raises:
        ConfigError: These are not texts or token ids.
    """
    if isinstance(texts, str):
        raise ConfigError(f"{name} is one text: give a list of texts")
    if not isinstance(texts, Iterable):
        raise ConfigError(f"{name} is {type(texts).__name__}: give a list of texts")
    most, token_ids = model.vocabulary - 1, []
    for number, text in enumerate(texts):
        at = f"{name}[{number}]"
        if isinstance(text, str):
            if not is_whole(text):
                raise ConfigError(f"{at} is damaged: it has half of a character: write it again")
            ids = tuple(model.encode([text])[0]) if text.strip() else ()
        else:
            ids = numbers_between(at, text, 0, most)
        if not ids:
            raise ConfigError(f"{at} is empty: give each text a token")
        token_ids.append(ids[: model.max_length])
    return token_ids
