"""The list of texts that an attack on membership is asked about: the auditor makes it.

Without a file, each text of a batch stands in the list beside a held-out text of the same class.
The held-out texts were drawn with the experiment's seed before training, so each text of such a
pair was equally likely to be the one in the batch: a fair coin, which the attack does not see. A
text has its own order of preference among the held-out texts, so it has the same partner in every
round, unless another text of the batch has taken that one. Clients prefer different texts.

A list from a file has all texts of the file, for every update.

The attack gets the texts in a random order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedleak.audit.kept_texts import KeptTexts
from fedleak.training.observation import Candidates, Example
from fedleak.training.truth import GroundTruth
from fedleak.util.lists import grouped
from fedleak.util.rng import stream

PUBLIC = 200
"""The most held-out texts that are public; never more than half of them."""


@dataclass(frozen=True)
class Questions:
    """A list of texts, and what only the auditor knows of it.

    Attributes:
        asked: What the attack gets.
        inside: Whether each text of the list was in the batch.
        pairs: Places in the list of each text of the batch and of its held-out partner; empty if
            the list is from a file.
        lines: For a list from a file, the line of each text in the file, from 0; else None.
    """

    asked: Candidates
    inside: tuple[bool, ...]
    pairs: tuple[tuple[int, int], ...]
    lines: tuple[int, ...] | None


def questions(
    truth: GroundTruth,
    held_out: KeptTexts,
    seed: int,
    clients: int,
    from_file: KeptTexts | None = None,
) -> Questions:
    """Returns the list for one update: the same whenever it is asked for.

    Args:
        truth: The batch.
        held_out: Texts that no client trains on.
        seed: The experiment's seed.
        clients: How many clients the federation has.
        from_file: The list that a file gives; None: it is made of the batch and held-out texts.
    """
    labelled = bool(truth.labels)
    known = held_out.examples(labelled=labelled)
    order = torch.randperm(len(known), generator=stream(seed, "public")).tolist()
    count = min(PUBLIC, len(known) // 2)
    public, others = ([known[i] for i in some] for some in (order[:count], order[count:]))
    if from_file is None:
        texts = _pairs(truth, public, others, seed, clients)
    else:
        texts = from_file.examples(labelled=labelled)
        listed = {example.ids for example in texts}
        public = [example for example in public if example.ids not in listed]
    rng = stream(seed, "candidates", truth.round, truth.client)
    shuffled = torch.randperm(len(texts), generator=rng).tolist()
    place = {index: at for at, index in enumerate(shuffled)}
    batch, firsts = set(truth.sequences), range(0, len(texts), 2)
    return Questions(
        asked=Candidates(tuple(texts[index] for index in shuffled), tuple(public)),
        inside=tuple(texts[index].ids in batch for index in shuffled),
        pairs=() if from_file is not None else tuple((place[i], place[i + 1]) for i in firsts),
        lines=None if from_file is None else tuple(shuffled),
    )


def _pairs(
    truth: GroundTruth, public: list[Example], others: list[Example], seed: int, clients: int
) -> list[Example]:
    """Returns each text of a batch that has a partner, and behind it this held-out text."""
    labels: Sequence[int | None] = truth.labels or [None] * len(truth.sequences)
    own = dict(zip(truth.sequences, labels, strict=True))
    # A text of the batch that is held out, too, is left out on both sides, which reveals nothing.
    held = {example.ids for example in [*public, *others]}
    members = [Example(ids, label) for ids, label in sorted(own.items()) if ids not in held]
    taken = own.keys() | {example.ids for example in public}
    fresh = {example.ids: example for example in others if example.ids not in taken}
    free = grouped(fresh.values(), lambda example: example.label)
    texts, used = list[Example](), set[Example]()
    for member in members:
        choice = free.get(member.label, [])
        order = torch.randperm(len(choice), generator=stream(seed, "beside", *member.ids)).tolist()
        # First this client's share of them, so that clients seldom want the same text.
        order.sort(key=lambda i: i % clients != truth.client)
        control = next((choice[i] for i in order if choice[i] not in used), None)
        if control is not None:
            used.add(control)
            texts += [member, control]
    return texts
