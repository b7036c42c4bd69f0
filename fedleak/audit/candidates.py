"""The list of texts that an attack on membership is asked about: the auditor makes it.

Each text of a batch stands in the list beside a held-out text of the same class. Which texts are
held out was drawn with the experiment's seed before anybody trained, so each of two such texts was
as likely to be the one in the batch: a fair coin, which the attack does not see. It gets the texts
of all pairs in one random order.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedleak.audit.held_out import HeldOut
from fedleak.observation import Candidates, Example
from fedleak.rng import stream
from fedleak.truth import GroundTruth

PUBLIC = 30
"""Held-out texts that anybody has, at most; and no more than half of all that there are."""


@dataclass(frozen=True)
class Questions:
    """A list of texts, and what only the auditor knows of it.

    Attributes:
        asked: What the attack gets.
        inside: Whether each text of the list was in the batch.
        pairs: Places in the list of a text of the batch and of the text that stands beside it.
    """

    asked: Candidates
    inside: tuple[bool, ...]
    pairs: tuple[tuple[int, int], ...]


def questions(truth: GroundTruth, held_out: HeldOut, seed: int) -> Questions:
    """Returns the list for one update: the same whenever it is asked for.

    A text that is twice in the batch is in the list once; one that is also held out is not in it,
    nor is one beside which no held-out text of its class is left.

    Args:
        truth: The batch.
        held_out: What no client trains on.
        seed: Of the experiment.
    """
    known = _examples(held_out.sequences, held_out.labels if truth.labels else ())
    order = torch.randperm(len(known), generator=stream(seed, "public")).tolist()
    count = min(PUBLIC, len(known) // 2)
    public = [known[i] for i in order[:count]]
    rng = stream(seed, "candidates", truth.round, truth.client)
    rest = [known[order[count + i]] for i in torch.randperm(len(known) - count, generator=rng)]
    batch = {one.ids: one for one in _examples(truth.sequences, truth.labels)}
    # A text on both sides is neither: leaving it out on both does not tell them apart.
    known_ids, shown = {one.ids for one in known}, {one.ids for one in public} | batch.keys()
    free: dict[int | None, dict[tuple[int, ...], Example]] = defaultdict(dict)
    for one in rest:
        if one.ids not in shown:
            free[one.label].setdefault(one.ids, one)
    drawn: list[tuple[Example, Example]] = []
    for member in batch.values():
        if member.ids not in known_ids and free[member.label]:
            _, control = free[member.label].popitem()
            drawn.append((member, control))
    texts = [one for pair in drawn for one in pair]
    shuffled = torch.randperm(len(texts), generator=rng).tolist()
    place = {which: at for at, which in enumerate(shuffled)}
    return Questions(
        asked=Candidates(tuple(texts[which] for which in shuffled), tuple(public)),
        inside=tuple(which % 2 == 0 for which in shuffled),
        pairs=tuple((place[2 * i], place[2 * i + 1]) for i in range(len(drawn))),
    )


def _examples(sequences: Sequence[Sequence[int]], labels: Sequence[int]) -> list[Example]:
    """Returns texts with their classes, where they have any."""
    classes: Sequence[int | None] = labels or [None] * len(sequences)
    return [Example(tuple(ids), label) for ids, label in zip(sequences, classes, strict=True)]
