"""Paired texts: which of the pairs of a batch belong together, by the span of pooled inputs.

The span of the first layer's inputs shows which word stands where in a batch (`atoms`). `keyspan`
groups these pairs by the gradients at queries and keys. If pruning left too few of these gradients,
the last block groups the pairs: a text of the batch leaves nothing outside the span of what reaches
the loss (`pooled_span`). A climb begins at random words, one for each place, preferably words that
no text has yet. It changes one word at a time, until nothing is left outside, or nothing helps.

Limits: pairs must be few at each place, or climbs are long.
"""

from collections import Counter

import torch

from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.answer import Judged, OnJudged
from fedleak.attacks.subspace.atoms import Atoms
from fedleak.attacks.subspace.pooled_span import SIGMAS, PooledSpan

_STALE = 40
"""Climbs in a row that find no new text, before the search ends."""

_USED = 3
"""How much rarer a climb begins with a word for each text that has it there."""


def read_pairs(
    atoms: Atoms, span: PooledSpan, size: int, rng: torch.Generator, clock: Clock, tell: OnJudged
) -> list[Judged]:
    """Returns the texts of a batch whose pooled inputs lie in the span.

    Args:
        atoms: The pairs.
        span: Distinguishes texts of the batch from others.
        size: Texts of the batch.
        rng: For starts.
        clock: Ends after a climb.
        tell: Called with the number of texts found, the number of all, and the last text.
    """
    slots = [atoms.token_A[atoms.position_A == place].tolist() for place in range(atoms.positions)]
    marks = {atoms.first, atoms.last}
    inner = [[token for token in tokens if token not in marks] for tokens in slots]
    begin, end = (() if mark is None else (mark,) for mark in (atoms.first, atoms.last))
    lengths = [
        place
        for place in range(len(begin) + 1, len(slots) + 1)
        if all(inner[len(begin) : place]) and (not end or atoms.last in [*slots, []][place])
    ]
    texts: list[Judged] = []
    used: Counter[tuple[int, int]] = Counter()
    stale = 0
    while lengths and len(texts) < size and stale < _STALE and not clock.up():
        length = lengths[int(torch.randint(len(lengths), (1,), generator=rng))]
        choices = inner[len(begin) : length]
        words = tuple(
            _drawn(tokens, place, used, rng) for place, tokens in enumerate(choices, len(begin))
        )
        text, excess = _climbed((*begin, *words, *end), choices, len(begin), span, clock)
        known = any(other.ids == text for other in texts)
        stale = 0 if excess < SIGMAS and not known else stale + 1
        if not stale:
            texts.append(Judged(text, max(excess, 0.0), float("inf")))
            used.update(enumerate(text))
            tell(len(texts), size, texts[-1])
    return texts


def _drawn(
    tokens: list[int], place: int, used: Counter[tuple[int, int]], rng: torch.Generator
) -> int:
    weights = torch.tensor([1 / (1 + _USED * used[place, token]) for token in tokens])
    return tokens[int(torch.multinomial(weights, 1, generator=rng))]


def _climbed(
    text: Ids, choices: list[list[int]], begin: int, span: PooledSpan, clock: Clock
) -> tuple[Ids, float]:
    """Returns the best text that changes of one word lead to, and its excess."""
    (fit,) = span.of([text])
    while not fit.excess < SIGMAS and not clock.up():
        changed = [
            (*text[:place], token, *text[place + 1 :])
            for place, tokens in enumerate(choices, begin)
            for token in tokens
            if token != text[place]
        ]
        fits = dict(zip(changed, span.of(changed), strict=True))
        best = max(changed, key=lambda ids: fits[ids].score, default=text)
        if best == text or not fits[best].score > fit.score:
            break
        text, fit = best, fits[best]
    return text, fit.excess
