"""The structure of a batch, inferred before its text: lengths, labels, and the tokens in it.

Facts that were granted are used. Others are read out of the update. If the update leaves them open,
several shapes are tried, and the one that matches best is kept.

Shapes: R rows, B sequences, T tokens, M tokens of a bag, S chosen rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.analytic.facts import label_counts, longest_sequence, used_rows
from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.span import row_space
from fedleak.attacks.subspace.token_bag import read_token_bag
from fedleak.models import CAUSAL_LM, CLASSIFICATION, Frame, LanguageModel, frame
from fedleak.training.observation import Observation

_LONGEST_TRIED = 24
"""Tokens of the longest sequence that is tried if the update leaves the lengths open."""


@dataclass(frozen=True)
class Clues:
    """What another search found out about a batch, right or wrong.

    Attributes:
        tokens: Tokens among which those of the batch are likely to be; None: unknown.
        sequences: Guesses of its sequences, special tokens included, best first.
    """

    tokens: tuple[int, ...] | None = None
    sequences: tuple[Ids, ...] = ()


NO_CLUES = Clues()


@dataclass(frozen=True)
class Shape:
    """How long the sequences of a batch are, longest first, and their classes.

    Attributes:
        lengths: With special tokens.
        labels: Of each; empty in next-token training.
        begin: A guess of each sequence, from which a descent may begin; () where there is none.
    """

    lengths: tuple[int, ...]
    labels: tuple[int, ...]
    begin: tuple[Ids, ...] = ()


class Shapes(NamedTuple):
    """The shapes that a batch may have.

    Attributes:
        each: One, if all is known.
        lengths_known: The lengths were granted, or stand in the update; else they are only tried.
    """

    each: list[Shape]
    lengths_known: bool


def shapes(
    seen: Observation,
    model: LanguageModel,
    rng: torch.Generator,
    most: int,
    clues: Clues = NO_CLUES,
) -> Shapes:
    """Returns at most so many shapes that a batch may have, and always one."""
    size = seen.update.num_examples
    known = seen.knowledge.lengths
    lengths = [known] if known is not None else list(islice(_lengths(seen, model), most))
    certain = bool(lengths)
    lengths = lengths or [(n,) * size for n in _lengths_to_try(model, most)]
    if known is None and len(clues.sequences) >= size:
        guessed_lengths = sorted(map(len, clues.sequences[:size]), reverse=True)
        # Guesses that are longer or shorter than the update admits are wrong.
        if not certain or guessed_lengths[0] == lengths[0][0]:
            lengths = list(dict.fromkeys([tuple(guessed_lengths), *lengths]))
    labels = _labels(seen, model, rng, max(1, most // len(lengths)))
    candidates = [Shape(batch_lengths, classes) for batch_lengths in lengths for classes in labels]
    # The order of equally long sequences makes no other shape.
    distinct = {_canonical(shape): shape for shape in candidates}
    begun = [_with_guesses(shape, clues.sequences) for shape in list(distinct.values())[:most]]
    return Shapes(begun, certain)


def _with_guesses(shape: Shape, sequences: Sequence[Ids]) -> Shape:
    """Returns a shape that begins with guesses of its lengths, each used once."""
    waiting, begin = list(sequences), []
    for length in shape.lengths:
        fitting = next((sequence for sequence in waiting if len(sequence) == length), ())
        begin.append(fitting)
        if fitting:
            waiting.remove(fitting)
    return replace(shape, begin=tuple(begin)) if any(begin) else shape


def bag(seen: Observation, model: LanguageModel, rng: torch.Generator) -> Tensor | None:
    """Returns the ids [M] of the distinct tokens in a batch; None if the update leaves them open.

    They come from the rows of the word embedding, else from the row space of the first layer.
    """
    family, tensors = model.family, seen.update.tensors
    if family.word_embedding in tensors:
        used = used_rows(tensors[family.word_embedding])
        # Noise hides small rows, and those of the tokens that begin every text are among them.
        if used is not None and used.complete and set(frame(model).first) <= set(used.rows):
            return torch.tensor(used.rows, device=model.device)
    span = row_space(family.attention_gradients(as_gradient(seen), 0))
    if span is None or not span.exact or family.position_embedding is None:
        return None
    directions = family.token_table(model.module).directions()
    read = read_token_bag(directions, span, rng)
    return read.tokens_N if read is not None and read.exact and len(read.tokens_N) else None


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Shapes as tensors, a row for each, padded to the largest.

    Attributes:
        mask_RBT: 1 on the tokens of a sequence.
        fixed_RBT: Where the token is known: special tokens and padding.
        ids_RBT: The known tokens; 0 elsewhere.
        labels_RB: Classes.
        weights_RB: The weight of each sequence in the loss; 0 for sequences that only pad a batch.
        begin_RBT: Tokens from which a descent begins; -1 in sequences without a guess.
    """

    mask_RBT: Tensor
    fixed_RBT: Tensor
    ids_RBT: Tensor
    labels_RB: Tensor
    weights_RB: Tensor
    begin_RBT: Tensor

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        """Returns the rows with each of the tensors changed."""
        return Rows(**{name: change(value) for name, value in vars(self).items()})

    def take(self, chosen_S: Tensor) -> "Rows":
        """Returns some of the rows."""
        return self.changed(lambda value: value[chosen_S])

    @property
    def length(self) -> int:
        """T: tokens of the longest sequence, or more."""
        return self.mask_RBT.shape[2]

    def sequences_of(self, chosen: Sequence[int]) -> "Rows":
        """Returns only some sequences of each row, as long as the longest of them."""
        length = int(self.mask_RBT[:, list(chosen)].sum(-1).max())
        some = self.changed(lambda value: value[:, list(chosen)])
        return some.changed(lambda value: value[..., :length] if value.dim() == 3 else value)

    def content(self, r: int, b: int) -> list[int]:
        """Returns the places of sequence b of row r whose tokens are to be found."""
        return (~self.fixed_RBT[r, b]).nonzero()[:, 0].tolist()

    def sequences(self, r: int, ids_BT: Tensor) -> list[Ids]:
        """Returns the token ids of row r without padding."""
        lengths = (self.mask_RBT[r].sum(-1) * (self.weights_RB[r] > 0)).tolist()
        return [tuple(ids_T[:n].tolist()) for ids_T, n in zip(ids_BT, lengths, strict=True) if n]


def rows_of(shapes: Sequence[Shape], around: Frame, model: LanguageModel) -> Rows:
    """Returns a row per shape."""
    rows, batch = len(shapes), max(len(shape.lengths) for shape in shapes)
    longest = max(max(shape.lengths) for shape in shapes)
    none_RBT = torch.zeros(rows, batch, longest, dtype=torch.long)
    made = Rows(
        mask_RBT=none_RBT.clone(),
        fixed_RBT=torch.ones_like(none_RBT, dtype=torch.bool),
        ids_RBT=none_RBT,
        labels_RB=torch.zeros(rows, batch, dtype=torch.long),
        weights_RB=torch.zeros(rows, batch),
        begin_RBT=torch.full_like(none_RBT, -1),
    )
    # Attention needs something to look at, also where there is no sequence.
    made.mask_RBT[:, :, 0] = 1
    for r, shape in enumerate(shapes):
        for b, length in enumerate(shape.lengths):
            first, last = len(around.first), length - len(around.last)
            made.mask_RBT[r, b, :length] = 1
            made.fixed_RBT[r, b, first:last] = False
            ids_T = made.ids_RBT[r, b]
            ids_T[:first] = torch.tensor(around.first, dtype=torch.long)
            ids_T[last:length] = torch.tensor(around.last, dtype=torch.long)
            ids_T[length:] = model.tokenizer.pad_token_id
            made.weights_RB[r, b] = _weight(shape, model)
            if shape.labels:
                made.labels_RB[r, b] = shape.labels[b]
            if shape.begin and shape.begin[b]:
                made.begin_RBT[r, b] = ids_T
                made.begin_RBT[r, b, :length] = torch.tensor(shape.begin[b])
    return made.changed(lambda value: value.to(model.device))


def _weight(shape: Shape, model: LanguageModel) -> float:
    """Returns the weight of one example, or of one target, in the mean loss."""
    if model.task == CLASSIFICATION:
        return 1 / len(shape.lengths)
    return 1 / max(sum(length - 1 for length in shape.lengths), 1)


def _canonical(shape: Shape) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(zip_longest(shape.lengths, shape.labels, fillvalue=0)))


def _lengths(seen: Observation, model: LanguageModel) -> Iterator[tuple[int, ...]]:
    """Yields the lengths that agree with the update: none if it does not tell the longest.

    The position rows give the longest length, or the only one. The rank of the second layer's
    gradients is the number of all tokens.
    """
    family, size = model.family, seen.update.num_examples
    longest = longest_sequence(model, seen.update.tensors)
    # In next-token training the last token is only a target.
    only_target = 1 if model.task == CAUSAL_LM else 0
    # In a classifier's last layer only one token's query counts.
    layers = model.num_layers if model.task == CAUSAL_LM else model.num_layers - 1
    span = row_space(family.attention_gradients(as_gradient(seen), 1) if layers > 1 else [])
    total = span.rank + only_target * size if span is not None and span.exact else None
    shortest = sum(map(len, frame(model))) + 1
    if longest is None and total is not None and size == 1 and total >= shortest:
        longest = total
    if longest is None:
        return
    if total is None or total - longest > longest * (size - 1):
        yield (longest,) * size
        return
    # Equal inputs of a layer add only one to the rank: texts of a decoder that begin alike, or a
    # text that occurs twice.
    alike = total - longest < shortest * (size - 1)
    total = max(total, longest + shortest * (size - 1))
    most = longest * size if (family.causal or alike) and size > 1 else total
    for whole in range(total, most + 1):
        yield from _partitions(whole - longest, size - 1, shortest, longest, (longest,))


def _partitions(
    total: int, parts: int, shortest: int, most: int, so_far: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yields the ways to write `total` as a falling sum, the most even first."""
    if parts == 0:
        if total == 0:
            yield so_far
        return
    even = -(-total // parts)
    for part in range(max(even, shortest), most + 1):
        rest = total - part
        if shortest * (parts - 1) <= rest <= part * (parts - 1):
            yield from _partitions(rest, parts - 1, shortest, part, (*so_far, part))


def _lengths_to_try(model: LanguageModel, most: int) -> list[int]:
    """Returns lengths to try, evenly spread."""
    shortest = sum(map(len, frame(model))) + 2
    longest = min(_LONGEST_TRIED, model.max_length)
    step = max(1, -(-(longest - shortest + 1) // most))
    return list(range(shortest, longest + 1, step)) or [longest]


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
        return list(islice(product(classes, repeat=size), most))
    sorted_labels = [label for label, count in enumerate(counts) for _ in range(count)]
    orders = (torch.randperm(size, generator=rng).tolist() for _ in range(8 * most))
    shuffled = (tuple(sorted_labels[i] for i in order) for order in orders)
    return list(dict.fromkeys([tuple(sorted_labels), *shuffled]))[:most]
