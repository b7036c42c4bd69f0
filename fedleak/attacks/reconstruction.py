"""What an attack returns: its answer, its own evidence, and whether that proves it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

Ids = tuple[int, ...]
"""Token ids of a text, without padding."""


class Status(StrEnum):
    """How an attack ended. A failure is a status with a reason, never a score of zero."""

    RECOVERED = "recovered"
    """The attack gave an answer, right or wrong."""
    ABSTAINED = "abstained"
    """The attack ran and found nothing that it trusts."""
    INADMISSIBLE = "inadmissible"
    """The update or the threat model lacks what the attack needs."""
    FAILED = "failed"
    """The attack crashed or outlived its time limit."""


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """An attack's answer for one observation.

    Attributes:
        status: How it ended.
        sequences: Token ids without padding, best evidence first. None: this attack does not
            look for sequences.
        evidence: For each sequence the attack's own statistic, lower is better.
        margins: For each sequence, how many times worse the best rejected answer in its place is by
            that statistic; below 1 for a guess. Empty: not known.
        tokens: The distinct tokens of the batch, as read. None: the attack does not look for them.
        scores: For each statistic, by name, one number for each text of `Candidates.listed`, in its
            order; the higher, the more likely the text was in the batch.
        facts: Other facts it read, by name, as plain JSON values. Facts that `GroundTruth.facts`
            has too, such as `longest_sequence`, are compared with it.
        diagnostics: How it went, as plain JSON values. Two are summed up in reports: `budget`,
            the rank [used, available], where None is unknown; and `candidates`, how many were left
            after each check, by the check's name.
        verified: A certificate proves the whole answer.
        reason: Why it is not `recovered`, or why it is proved or not.
    """

    status: Status
    sequences: tuple[Ids, ...] | None = None
    evidence: tuple[float, ...] = ()
    margins: tuple[float | None, ...] = ()
    tokens: tuple[int, ...] | None = None
    scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    verified: bool = False
    reason: str = ""

    def with_diagnostics(self, **more: Any) -> "Reconstruction":
        """Returns the answer with more diagnostics."""
        return replace(self, diagnostics={**self.diagnostics, **more})

    @classmethod
    def none(cls, status: Status, reason: str, **diagnostics: Any) -> "Reconstruction":
        """Returns an answer that holds nothing, and why."""
        return cls(status=status, diagnostics=diagnostics, reason=reason)

    @classmethod
    def abstained(cls, reason: str, **diagnostics: Any) -> "Reconstruction":
        """Returns the answer of an attack that found nothing that it trusts."""
        return cls.none(Status.ABSTAINED, reason, **diagnostics)


def tokens_of(sequences: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Returns the distinct tokens of sequences, in rising order."""
    return tuple(sorted({token for ids in sequences for token in ids}))
