"""What an attack returned, checked before it becomes a row.

An attack may be anybody's. A row is scored, printed and kept for good, so an answer that scoring
could not read is refused here, while it is still known whose fault it is.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.util.sanitise import printable

LONGEST_REASON = 2000
"""Characters of a reason that are kept."""

MOST_CHARACTERS = 10_000_000
"""Characters of an answer as JSON."""

_MOST_SEQUENCES = 100
"""Sequences that an answer may always hold. Of a large batch it may hold more: `_TIMES` as many as
the batch has."""
_TIMES = 10
_MOST_FACTS, _LONGEST_NAME = 100, 100
"""Facts of an answer, and characters of the name of one."""
_MOST_SCORES, _SCORE = 20, re.compile("[A-Za-z0-9_]{1,40}")
"""Statistics of an answer on membership, and the name of one."""
_DEEPEST = 20
_LARGEST = 2**63
"""Whole numbers stay below it: Python does not read back numbers of thousands of digits."""


class InvalidAnswerError(ValueError):
    """An attack's answer is not one; the text says what is wrong with it."""


def checked(
    answer: object, *, vocabulary: int, longest: int, examples: int, listed: int = 0
) -> Reconstruction:
    """Returns an answer in plain values, with null for each number that is not finite.

    Args:
        answer: What an attack returned.
        vocabulary: Token ids are below it.
        longest: Tokens that the model takes.
        examples: In the batch, as far as the attacker knows.
        listed: Texts that the attack was asked about.

    Raises:
        InvalidAnswerError: It is not a `Reconstruction`, or one that cannot be scored.
    """
    if not isinstance(answer, Reconstruction):
        raise InvalidAnswerError(f"it is {_type(answer)}, not a Reconstruction")
    if not isinstance(answer.status, Status):
        raise InvalidAnswerError(f"status is {_type(answer.status)}, not a Status")
    if not isinstance(answer.verified, bool):
        raise InvalidAnswerError(f"verified is {_type(answer.verified)}, not a bool")
    if not isinstance(answer.reason, str):
        raise InvalidAnswerError(f"reason is {_type(answer.reason)}, not a str")
    sequences = None
    if answer.sequences is not None:
        raw_sequences = _listed("sequences", answer.sequences)
        most = max(_MOST_SEQUENCES, _TIMES * examples)
        if len(raw_sequences) > most:
            raise InvalidAnswerError(
                f"{len(raw_sequences)} sequences for a batch of {examples}: at most {most} are "
                "taken"
            )
        sequences = tuple(
            _ids(f"sequences[{i}]", ids, vocabulary, longest) for i, ids in enumerate(raw_sequences)
        )
        if not all(sequences):
            raise InvalidAnswerError("a sequence is empty")
    tokens = answer.tokens
    if tokens is not None:
        tokens = _ids("tokens", tokens, vocabulary, vocabulary)
    evidence, margins = (
        tuple(_number(f"{name}[{i}]", number) for i, number in enumerate(_listed(name, values)))
        for name, values in (("evidence", answer.evidence), ("margins", answer.margins))
    )
    count = 0 if sequences is None else len(sequences)
    if len(evidence) != count:
        raise InvalidAnswerError(f"{len(evidence)} numbers of evidence for {count} sequences")
    if len(margins) not in (0, count):
        raise InvalidAnswerError(f"{len(margins)} margins for {count} sequences")
    scores = _scores(answer.scores, listed)
    facts, diagnostics = (
        _table(name, value)
        for name, value in (("facts", answer.facts), ("diagnostics", answer.diagnostics))
    )
    _check_facts(facts)
    _check_diagnostics(diagnostics)
    reason = one_line(answer.reason)
    plain = Reconstruction(
        status=answer.status,
        sequences=sequences,
        evidence=evidence,  # type: ignore[arg-type]  # null where there is no finite number
        margins=margins,
        tokens=tokens,
        scores=scores,
        facts=facts,
        diagnostics=diagnostics,
        verified=answer.verified,
        reason=reason,
    )
    size = len(json.dumps([sequences, tokens, evidence, margins, scores, facts, diagnostics]))
    if size > MOST_CHARACTERS:
        raise InvalidAnswerError(f"{size:,} characters as JSON: at most {MOST_CHARACTERS:,}")
    return plain


def one_line(text: str) -> str:
    """Returns a reason as it is kept: in one line, of bounded length, safe to print."""
    # Cut first: what is printable may be ten times as long.
    short = " ".join(text[: 2 * LONGEST_REASON].split())
    return printable(short[:LONGEST_REASON])


def _type(value: object) -> str:
    return printable(type(value).__name__)[:100]


def _listed(name: str, values: object) -> Sequence[Any]:
    if not isinstance(values, tuple | list):
        raise InvalidAnswerError(f"{name} is {_type(values)}, not a tuple")
    return values


def _ids(name: str, values: object, vocabulary: int, most: int) -> tuple[int, ...]:
    """Returns token ids, all of which the model has."""
    ids = tuple(_listed(name, values))
    if len(ids) > most:
        raise InvalidAnswerError(f"{name} has {len(ids)} ids: at most {most} are possible")
    for i, token in enumerate(ids):
        if type(token) is not int:
            raise InvalidAnswerError(f"{name}[{i}] is {_type(token)}, not an int")
        if not 0 <= token < vocabulary:
            raise InvalidAnswerError(
                f"{name}[{i}] is no token id: the model has those from 0 to {vocabulary - 1}"
            )
    return ids


def _scores(values: object, listed: int) -> dict[str, tuple[float, ...]]:
    """Returns a finite number of each text that was asked about, by the name of a statistic."""
    if not isinstance(values, Mapping):
        raise InvalidAnswerError(f"scores is {_type(values)}, not a mapping")
    if len(values) > _MOST_SCORES:
        raise InvalidAnswerError(f"{len(values)} scores: at most {_MOST_SCORES} are taken")
    scores = {}
    for name, score_values in values.items():
        if type(name) is not str or not _SCORE.fullmatch(name):
            raise InvalidAnswerError("the name of a score is no word of letters, digits and _")
        numbers = tuple(
            _number(f"scores[{name}][{i}]", number)
            for i, number in enumerate(_listed(f"scores[{name}]", score_values))
        )
        if len(numbers) != listed:
            raise InvalidAnswerError(
                f"scores[{name}] has {len(numbers)} numbers for {listed} texts"
            )
        if None in numbers:
            raise InvalidAnswerError(f"scores[{name}] has a number that is not finite")
        scores[name] = tuple(float(number) for number in numbers if number is not None)
    return scores


def _number(name: str, value: object) -> float | int | None:
    """Returns a number, or None where it is not finite: JSON has no infinity."""
    if value is None:
        return None
    if type(value) is int and abs(value) < _LARGEST:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else None
    raise InvalidAnswerError(f"{name} is {_type(value)}, not a number")


def _json(name: str, value: object, depth: int = 0) -> Any:
    """Returns a value of plain JSON, or refuses it."""
    if depth > _DEEPEST:
        raise InvalidAnswerError(f"{name} is nested more than {_DEEPEST} times")
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return _text(name, value)
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise InvalidAnswerError(f"a key in {name} is {_type(key)}, not a str")
        return {_text(name, key): _json(name, inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_json(name, inner, depth + 1) for inner in value]
    return _number(f"a value in {name}", value)


def _text(name: str, value: str) -> str:
    """Returns a text, or refuses one with half a character: JSON is not read back with it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidAnswerError(f"a text in {name} has a lone surrogate") from error
    return value


def _table(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidAnswerError(f"{name} is {_type(value)}, not a mapping")
    table: dict[str, Any] = _json(name, value)
    return table


def _check_facts(facts: Mapping[str, Any]) -> None:
    """Refuses names that a report could not show. Any fact is kept, known or not."""
    if len(facts) > _MOST_FACTS:
        raise InvalidAnswerError(f"{len(facts)} facts: at most {_MOST_FACTS} are taken")
    for name in facts:
        if not 0 < len(name) <= _LONGEST_NAME:
            raise InvalidAnswerError(
                f"a fact's name has {len(name)} characters: from 1 to {_LONGEST_NAME} are taken"
            )


def _check_diagnostics(diagnostics: Mapping[str, Any]) -> None:
    """Refuses what reports cannot sum up."""
    if "budget" in diagnostics:
        budget = diagnostics["budget"]
        pair = budget if isinstance(budget, list) and len(budget) == 2 else [0, 0]
        used, available = pair
        if not ((used is None or _is_number(used)) and _is_number(available) and available > 0):
            raise InvalidAnswerError("diagnostics['budget'] is not [used or None, available]")
    if "candidates" in diagnostics:
        counts = diagnostics["candidates"]
        if not (isinstance(counts, dict) and all(map(_is_number, counts.values()))):
            raise InvalidAnswerError("diagnostics['candidates'] does not hold a count by name")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
