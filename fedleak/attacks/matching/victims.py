"""Victims of gradient matching: what an update shows before its text is searched for.

Shapes: D hidden size, M tokens of a bag.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.matching.batch_structure import Clues, Shapes, bag, shapes
from fedleak.models import LanguageModel
from fedleak.training.observation import Observation
from fedleak.util.lists import grouped

PASS = {"cpu": 32, "cuda": 1024}
"""The fixed cost of a pass over the model, in tokens.

Measured on a CPU for a step of gradient matching on a model of 6 x 384; for GPUs a guess.
"""

_NOTHING = 1e-15
"""A tensor of no larger norm, or inverse of it, is left out: float32 cannot square it."""


@dataclass(frozen=True, kw_only=True)
class Victim:
    """One observation, and what it shows about its batch before the search.

    Attributes:
        seen: The observation.
        observed: Its mean gradient, by parameter name, without the word embedding.
        shapes: The shapes that the batch may have.
        bag_M: Its distinct tokens; None if the update leaves them open.
        complete: All tokens of the bag occur; else it only holds those that may.
        words_MD: The word embedding's gradient at these tokens; None if it was not shared.
        left_out: Number of shared tensors that are not compared.
    """

    seen: Observation
    observed: Mapping[str, Tensor]
    shapes: Shapes
    bag_M: Tensor | None
    complete: bool
    words_MD: Tensor | None
    left_out: int


def victim_of(
    seen: Observation,
    model: LanguageModel,
    rng: torch.Generator,
    *,
    most_shapes: int,
    faithful: bool,
    clues: Clues,
) -> Victim:
    """Returns an observation as a victim.

    Args:
        seen: The observation.
        model: The model at the weights of its round.
        rng: Random numbers of this observation.
        most_shapes: Shapes that are tried at most.
        faithful: As LAMP's authors do it: all tensors count, and the token bag is not used.
        clues: What another search found out; its tokens count if the update leaves them open.
    """
    family = model.family
    steps = seen.knowledge.local_steps or 1
    # Several local steps send the sum of their gradients.
    gradients = {name: tensor / steps for name, tensor in as_gradient(seen).items()}
    null = frozenset() if faithful else family.null_parameters(gradients)
    observed = {
        name: tensor
        for name, tensor in gradients.items()
        if name != family.word_embedding
        and name not in null
        and _NOTHING < tensor.norm() < 1 / _NOTHING
    }
    possible_shapes = shapes(seen, model, rng, most_shapes, clues)
    bag_M = None if faithful else _content(bag(seen, model, rng), model)
    complete = bag_M is not None
    if bag_M is None and clues.tokens is not None:
        bag_M = _content(torch.tensor(clues.tokens, device=model.device), model)
    words = gradients.get(family.word_embedding)
    # The rows of a tied embedding also hold the output layer's gradient.
    words_MD = words[bag_M] if words is not None and bag_M is not None and not model.tied else None
    return Victim(
        seen=seen,
        observed=observed,
        shapes=possible_shapes,
        bag_M=bag_M,
        complete=complete,
        words_MD=words_MD,
        left_out=len(gradients) - len(observed) - (family.word_embedding in gradients),
    )


def _content(bag_M: Tensor | None, model: LanguageModel) -> Tensor | None:
    """Returns the tokens of a bag that are not special; None if there are none."""
    if bag_M is None:
        return None
    special = torch.tensor(sorted(model.special_ids()), device=bag_M.device)
    content_M = bag_M[~torch.isin(bag_M, special)]
    return content_M if len(content_M) else None


class Size(NamedTuple):
    """How much of a batch a victim takes.

    Attributes:
        length: Tokens of its longest sequence.
        sequences: Sequences of its largest row.
        rows: Its rows: shapes and starts that are tried side by side.
    """

    length: int
    sequences: int
    rows: int


def alike(victims: Mapping[int, Victim], starts: int, device: torch.device) -> list[list[int]]:
    """Returns the victims in groups of the same parameters and parametrization, and similar length.

    Args:
        victims: By number.
        starts: Random starts that are optimised for each shape.
        device: The device they are optimised on.
    """

    def kind(number: int) -> tuple[object, ...]:
        victim = victims[number]
        parametrization = (victim.bag_M is None, victim.complete, victim.words_MD is None)
        return (*victim.observed, *parametrization)

    sizes = {i: _size(victim, starts) for i, victim in victims.items()}
    a_pass = PASS.get(device.type, PASS["cpu"])
    groups = grouped(victims, kind).values()
    return [part for group in groups for part in parts(group, sizes, a_pass)]


def _size(victim: Victim, starts: int) -> Size:
    candidates = victim.shapes.each
    longest = max(max(shape.lengths) for shape in candidates)
    return Size(longest, max(len(shape.lengths) for shape in candidates), starts * len(candidates))


def cost(sizes: Sequence[Size], a_pass: int) -> int:
    """Returns the cost of a pass over victims together, in tokens."""
    largest = max(size.length for size in sizes) * max(size.sequences for size in sizes)
    return a_pass + largest * sum(size.rows for size in sizes)


def parts(group: Sequence[int], sizes: Mapping[int, Size], a_pass: int) -> list[list[int]]:
    """Returns the cheapest partition of victims into parts of neighbours in length."""
    order = sorted(group, key=lambda i: sizes[i])
    # The least cost of the first 0, 1, 2, ... victims, and their parts.
    best: list[tuple[int, list[list[int]]]] = [(0, [])]
    for stop in range(1, len(order) + 1):
        ways = []
        for start, (so_far, before) in enumerate(best):
            part = order[start:stop]
            ways.append((so_far + cost([sizes[i] for i in part], a_pass), [*before, part]))
        best.append(min(ways, key=lambda way: way[0]))
    return [sorted(part) for part in best[-1][1]]
