"""Checks what an attack returned, before it becomes a row.

An attack may be anybody's. A row is scored, printed and kept for good, so an answer that scoring
could not read is refused here, while it is known which attack is at fault. The answer is checked as
JSON, because it is kept as JSON.
"""

import json
from typing import Any

from fedleak.attacks.reconstruction import Reconstruction
from fedleak.store.files import plain
from fedleak.store.lines import validated
from fedleak.store.records import Reconstructed, within
from fedleak.util.sanitise import printable

LONGEST_REASON = 2000
"""Characters of a reason that are kept."""

MOST_BYTES = 10_000_000
"""Bytes of an answer as JSON."""

_MOST_SEQUENCES = 100
"""Sequences that an answer may always hold. For a large batch it may hold more: `_TIMES` times as
many as the batch has."""
_TIMES = 10
_DEEPEST = 20


class InvalidAnswerError(ValueError):
    """An attack's answer is not valid; the text says what is wrong with it."""


def checked(
    answer: object, *, vocabulary: int, longest: int, examples: int, listed: int = 0
) -> Reconstruction:
    """Returns an answer in plain values, with null for each number that is not finite.

    Args:
        answer: What an attack returned.
        vocabulary: Token ids are below it.
        longest: The most tokens that the model takes.
        examples: How many are in the batch, as far as the attacker knows.
        listed: Texts that the attack was asked about.

    Raises:
        InvalidAnswerError: It is not a `Reconstruction`, or one that cannot be scored.
    """
    if not isinstance(answer, Reconstruction):
        raise InvalidAnswerError(f"it is {printable(type(answer).__name__)}, not a Reconstruction")
    try:
        table = plain(vars(answer))
        if _depth(table) > _DEEPEST:
            raise InvalidAnswerError(f"it is nested more than {_DEEPEST} times")
        # As text and not as escapes: half a character is refused.
        content = json.dumps(table, ensure_ascii=False).encode()
        if len(content) > MOST_BYTES:
            raise InvalidAnswerError(f"{len(content):,} bytes as JSON: at most {MOST_BYTES:,}")
        kept = validated(Reconstructed, content)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidAnswerError(one_line(str(error))) from error
    sequences = kept.sequences or ()
    most = max(_MOST_SEQUENCES, _TIMES * examples)
    if len(sequences) > most:
        raise InvalidAnswerError(
            f"{len(sequences)} sequences for a batch of {examples}: at most {most} are taken"
        )
    numbered = [(f"sequences[{i}]", ids, longest) for i, ids in enumerate(sequences)]
    for name, ids, many in (("tokens", kept.tokens or (), vocabulary), *numbered):
        if len(ids) > many:
            raise InvalidAnswerError(f"{name} has {len(ids)} ids: at most {many} are possible")
        if not within(ids, vocabulary):
            raise InvalidAnswerError(
                f"{name} has what is no token id: the model has those from 0 to {vocabulary - 1}"
            )
    if len(kept.evidence) != len(sequences) or len(kept.margins) not in (0, len(sequences)):
        raise InvalidAnswerError(
            f"{len(kept.evidence)} numbers of evidence and {len(kept.margins)} margins for "
            f"{len(sequences)} sequences"
        )
    if wrong := [name for name, numbers in kept.scores.items() if len(numbers) != listed]:
        raise InvalidAnswerError(
            f"scores[{wrong[0]}] has not one number for each of {listed} texts"
        )
    return Reconstruction(**{**dict(kept), "reason": one_line(kept.reason)})


def one_line(text: str) -> str:
    """Returns a reason as it is kept: in one line, of bounded length, safe to print."""
    # Cut first: the printable text may be ten times as long.
    short = " ".join(text[: 2 * LONGEST_REASON].split())
    return printable(short[:LONGEST_REASON])


def _depth(value: Any) -> int:
    """Returns how deep lists and tables are nested."""
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0
