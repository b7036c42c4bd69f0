"""Makes checks of the gate."""

from collections.abc import Sequence

from fedleak.store.audits import Check, Outcome

__all__ = ["Check", "Outcome", "compared", "untold"]


def compared(name: str, sentence: str, *, holds: bool) -> Check:
    """Returns the check of a measured figure against its limit."""
    return Check(name, Outcome.WITHIN if holds else Outcome.EXCEEDED, sentence)


def untold(name: str, lacks: Sequence[str], sentence: str = "") -> Check:
    """Returns a check that fails if anything is lacking.

    Args:
        name: Of the check.
        lacks: What was not measured, in sentences.
        sentence: The sentence of the check if nothing is lacking; left out: something always is.
    """
    return Check(name, Outcome.UNTOLD if lacks else Outcome.WITHIN, "; ".join(lacks) or sentence)
