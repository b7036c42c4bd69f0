"""What can be told of a batch before its text is: lengths, labels, and the tokens in it.

Facts that were granted are used; others are read out of the update, and what it leaves open is
supposed: a handful of shapes, of which the one that matches best is kept.

Shapes: B sequences, T tokens, C classes, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.analytic.embedding_rows import used_rows
from fedleak.attacks.analytic.label_counts import label_counts
from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.subspace.span import row_space
from fedleak.attacks.subspace.token_bag import read_factors
from fedleak.models import CAUSAL_LM, CLASSIFICATION, LanguageModel
from fedleak.observation import Observation

_LONGEST_TRIED = 24
"""Tokens of the longest sequence that is tried where the update does not tell."""


@dataclass(frozen=True)
class Shape:
    """How long the sequences of a batch are, longest first, and their classes.

    Attributes:
        lengths: With special tokens.
        labels: Of each; empty in next-token training.
    """

    lengths: tuple[int, ...]
    labels: tuple[int, ...]


class Frame(NamedTuple):
    """The special tokens that begin and end every sequence."""

    first: tuple[int, ...]
    last: tuple[int, ...]


class Shapes(NamedTuple):
    """The shapes that a batch may have.

    Attributes:
        each: One, if all is known.
        told: Lengths were granted, or stand in the update; else they are only tried.
    """

    each: list[Shape]
    told: bool


def frame(model: LanguageModel) -> Frame:
    """Returns the special tokens around every text."""
    (ids,) = model.encode(["a"])
    special = model.special_ids()
    content = [place for place, token in enumerate(ids) if token not in special]
    return Frame(tuple(ids[: content[0]]), tuple(ids[content[-1] + 1 :]))


def shapes(seen: Observation, model: LanguageModel, rng: torch.Generator, most: int) -> Shapes:
    """Returns at most so many shapes that a batch may have, and always one."""
    size = seen.update.num_examples
    known = seen.knowledge.lengths
    lengths = [known] if known is not None else list(islice(_told(seen, model, rng, size), most))
    told = bool(lengths)
    lengths = lengths or [(n,) * size for n in _tried(model, most)]
    labels = _labels(seen, model, rng, max(1, most // len(lengths)))
    each = [Shape(one, classes) for one in lengths for classes in labels]
    # A shape that differs by the order of equally long sequences is the same.
    distinct = {_canonical(one): one for one in each}
    return Shapes(list(distinct.values())[:most], told)


def bag(seen: Observation, model: LanguageModel, rng: torch.Generator) -> Tensor | None:
    """Returns the ids [V] of the distinct tokens in a batch, None if they cannot be told exactly.

    From the rows of the word embedding, else from the first layer's row space (`factors`).
    """
    family, tensors = model.family, seen.update.tensors
    if family.word_embedding in tensors:
        used = used_rows(tensors[family.word_embedding])
        if used is not None:
            return torch.tensor(used[0], device=model.device)
    attention = family.attention_gradients(as_gradient(seen), 0)
    span = row_space(attention) if attention else None
    if span is None or not span.exact or family.position_embedding is None:
        return None
    directions = family.token_table(model.module).directions()
    factors = read_factors(directions, span, rng)
    clear = factors is not None and factors.exact and len(factors.tokens_V)
    return factors.tokens_V if factors is not None and clear else None


def _canonical(shape: Shape) -> tuple[tuple[int, int], ...]:
    labels = shape.labels or (0,) * len(shape.lengths)
    return tuple(sorted(zip(shape.lengths, labels, strict=True)))


def _told(
    seen: Observation, model: LanguageModel, rng: torch.Generator, size: int
) -> Iterator[tuple[int, ...]]:
    """Yields the lengths that agree with the update: none if it does not tell the longest.

    The position rows tell the longest, or the only one. The rank of the second layer's gradients
    is the number of all tokens.
    """
    family, tensors = model.family, seen.update.tensors
    # In next-token training the last token is only a target.
    only_target = 1 if model.task == CAUSAL_LM else 0
    longest = None
    if family.position_embedding is not None and family.position_embedding in tensors:
        used = used_rows(tensors[family.position_embedding])
        longest = None if used is None else used[0][-1] + 1 + only_target
    # In a classifier's last layer only one token asks.
    layers = model.num_layers if model.task == CAUSAL_LM else model.num_layers - 1
    inner = family.attention_gradients(as_gradient(seen), 1) if layers > 1 else []
    span = row_space(inner) if inner else None
    total = span.rank + only_target * size if span is not None and span.exact else None
    least = sum(map(len, frame(model))) + 1
    if longest is None and total is not None and size == 1 and total >= least:
        longest = total
    if longest is None:
        return
    if total is None or total - longest > longest * (size - 1):
        yield (longest,) * size
        return
    # What is the same counts once: a decoder's texts that begin alike, any text that occurs twice.
    alike = total - longest < least * (size - 1)
    total = max(total, longest + least * (size - 1))
    most = longest * size if (family.causal or alike) and size > 1 else total
    for whole in range(total, most + 1):
        yield from _partitions(whole - longest, size - 1, least, longest, (longest,))


def _partitions(
    total: int, parts: int, least: int, most: int, so_far: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yields the ways to write `total` as a falling sum, the most even first."""
    if parts == 0:
        if total == 0:
            yield so_far
        return
    even = -(-total // parts)
    for part in range(max(even, least), most + 1):
        rest = total - part
        if least * (parts - 1) <= rest <= part * (parts - 1):
            yield from _partitions(rest, parts - 1, least, part, (*so_far, part))


def _tried(model: LanguageModel, most: int) -> list[int]:
    """Returns lengths to try, evenly spread."""
    least = sum(map(len, frame(model))) + 2
    longest = min(_LONGEST_TRIED, model.max_length)
    step = max(1, -(-(longest - least + 1) // most))
    return list(range(least, longest + 1, step)) or [longest]


def _labels(
    seen: Observation, model: LanguageModel, rng: torch.Generator, most: int
) -> list[tuple[int, ...]]:
    """Returns the classes that the sequences may have."""
    if model.task != CLASSIFICATION:
        return [()]
    if seen.knowledge.labels is not None:
        return [seen.knowledge.labels]
    size, classes = seen.update.num_examples, range(model.num_labels)
    counts = label_counts(seen, model, rng)
    # An estimate of the counts may be off by one, so that one example is tried with every class.
    if counts is None or size == 1:
        return _some(product(classes, repeat=size), most)
    sorted_labels = [label for label, count in enumerate(counts) for _ in range(count)]
    found = {tuple(sorted_labels): None}
    for _ in range(8 * most):
        order = torch.randperm(size, generator=rng).tolist()
        found[tuple(sorted_labels[i] for i in order)] = None
    return list(found)[:most]


def _some(all_of: Iterable[Sequence[int]], most: int) -> list[tuple[int, ...]]:
    return [tuple(one) for one in islice(all_of, most)]
