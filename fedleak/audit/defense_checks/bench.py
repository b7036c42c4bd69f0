"""Makes updates of a client with one defense and of a client without it, to test the defense.

Texts are of random tokens. In a loud batch, the first example has a gradient ten thousand times too
large.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedleak import models
from fedleak.config.federation.protection import Protection
from fedleak.defenses import Claims, Defense, TrustedAggregator
from fedleak.defenses.clip import norm_of
from fedleak.models import CLASSIFICATION, LanguageModel, pad
from fedleak.training.local import local_update_
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.planted import Planted
from fedleak.training.settings import LocalTraining
from fedleak.training.steps import Batch
from fedleak.training.wire import from_wire, to_wire
from fedleak.util.rng import stream, stream_seed

EXAMPLES, TOKENS = 4, 8
LOUD = 1e4
"""Factor of the loud example's logits, and so of its gradient."""

ROUNDING = 1e-3
"""Relative error of a norm: half of the numbers of a large model may round the same way."""

DEVIATIONS = 5.0
"""Standard deviations by which a figure that chance decides may be off: once in two million."""

Test = tuple[str, bool, str]
"""Claim, whether it holds, and the figures."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where one defense is tested.

    Attributes:
        model: The model at the weights that are broadcast; tests do not change it.
        texts: What clients train on.
        plain: How a client without defenses trains; dropout is off, because it is random too.
        defense: The defense, with its noise computed.
        num_examples: Examples that its client has.
        seed: The seed of all random numbers.
        sends: What clients of the experiment send; a test always takes a single step.
    """

    model: LanguageModel
    texts: Batch
    plain: LocalTraining
    defense: Defense
    num_examples: int
    seed: int
    sends: UpdateKind

    @property
    def local(self) -> LocalTraining:
        """How a client with only this defense trains."""
        return self.defense.training(self.plain)

    @property
    def claims(self) -> Claims:
        """What the defense claims of the update of a single step."""
        return self.defense.update_claims(self.local, self.num_examples)

    def raw(self, *, loud: bool = False) -> ClientUpdate:
        """Returns the update of a client without the defense."""
        return self.trained(loud=loud, local=self.plain)

    def sent(
        self, chosen: Sequence[int] = range(EXAMPLES), *, loud: bool = False, noise: int = 0
    ) -> ClientUpdate:
        """Returns the update that arrives at the server.

        Args:
            chosen: Which of the examples the client has.
            loud: The first example of all is loud.
            noise: Another number draws other noise.
        """
        return self.defended(self.trained(chosen, loud=loud, noise=noise), noise)

    def defended(self, update: ClientUpdate, noise: int = 0) -> ClientUpdate:
        """Returns an update as the defense leaves it and the wire delivers it."""
        client = Protection(self.local, {0: self.defense}, self.num_examples)
        update, _ = client.defend(update, lambda _: stream(self.seed, "check", noise))
        return replace(update, tensors=from_wire(to_wire(update.tensors)))

    @property
    def aggregator(self) -> TrustedAggregator:
        """The defense, if it combines the updates of several clients into one."""
        assert isinstance(self.defense, TrustedAggregator)
        return self.defense

    def combined(self, updates: Sequence[ClientUpdate], noise: int = 0) -> ClientUpdate:
        """Returns the update that is captured in place of several clients' updates."""
        return self.aggregator.combined(updates, rng=self.combining(noise))

    def combining(self, noise: int) -> torch.Generator:
        """Returns the random stream for combining the updates of several clients."""
        return stream(self.seed, "check", "combined", noise)

    def trained(
        self,
        chosen: Sequence[int] = range(EXAMPLES),
        *,
        loud: bool = False,
        noise: int = 0,
        local: LocalTraining | None = None,
        planted: Planted | None = None,
    ) -> ClientUpdate:
        """Returns the update before the defense is applied.

        Args:
            chosen, loud, noise: As in `sent`.
            local: How to train; None: as a client with only this defense.
            planted: Canaries.
        """
        return trained_on(
            _with_logits(self.model, _loud) if loud else self.model,
            self.texts.of(chosen),
            local or self.local,
            seed=stream_seed(self.seed, "check", noise),
            planted=planted,
        )


def trained_on(
    model: LanguageModel,
    texts: Batch,
    local: LocalTraining,
    *,
    seed: int,
    planted: Planted | None = None,
) -> ClientUpdate:
    """Returns the update of a client that trains; the model stays as it is.

    Args:
        model: At the weights that are broadcast.
        texts: The texts that the client has.
        local: How the client trains.
        seed: The seed of the training.
        planted: Canaries.
    """
    before = {name: value.clone() for name, value in model.parameters().items()}
    update = local_update_(model, texts.sequences, texts.labels, local, seed=seed, planted=planted)
    models.load_parameters_(model, before)
    return update


def random_texts(
    model: LanguageModel, seed: int, lengths: Sequence[int] = (TOKENS,) * EXAMPLES
) -> Batch:
    """Returns texts to train on, of about the given numbers of tokens.

    Their classes are the least likely ones for the model, so that there is a gradient.
    """
    rng, special = stream(seed, "check"), model.special_ids()
    usable = [i for i in range(len(model.tokenizer)) if i not in special]
    longest = model.max_length - len(special)
    rows = [
        torch.randint(len(usable), (min(length, longest),), generator=rng).tolist()
        for length in lengths
    ]
    encoded = model.encode([model.decode([usable[i] for i in row]) for row in rows])
    sequences = [ids[: model.max_length] for ids in encoded]
    if model.task != CLASSIFICATION:
        return Batch(sequences, [0] * len(sequences))
    ids_BT, mask_BT = pad(sequences, model.tokenizer.pad_token_id, model.device)
    with torch.no_grad():
        logits_BC = model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
    return Batch(sequences, logits_BC.argmin(-1).tolist())


def scaled(model: LanguageModel, scales: Sequence[float]) -> LanguageModel:
    """Returns a model with the same logits, and each example's gradient times a factor."""

    def change(logits: Tensor) -> Tensor:
        factors = torch.tensor(scales).to(logits).view(-1, *[1] * (logits.dim() - 1))
        return logits.detach() + factors * (logits - logits.detach())

    return _with_logits(model, change)


def _with_logits(model: LanguageModel, change: Callable[[Tensor], Tensor]) -> LanguageModel:
    """Returns a model of which only the logits are changed."""
    family: Any = copy(model.family)
    family.logits = lambda *args, **kwargs: change(model.family.logits(*args, **kwargs))
    return replace(model, family=family)


def _loud(logits: Tensor) -> Tensor:
    """Returns logits with larger ones for the first example, and so with a larger gradient."""
    return torch.cat([LOUD * logits[:1], logits[1:]])


def all_numbers(update: ClientUpdate) -> Tensor:
    """Returns all numbers of an update [N]."""
    return torch.cat([update.tensors[name].flatten() for name in sorted(update.tensors)])


def zeroed(update: ClientUpdate) -> ClientUpdate:
    """Returns the update with all numbers set to zero."""
    return update.changed(torch.zeros_like)


def dense(like: ClientUpdate, norm: float, seed: int) -> ClientUpdate:
    """Returns an update of the same parameters, without zeros and with about this norm."""
    rng = stream(seed, "check", "dense")
    scale = norm / math.sqrt(sum(value.numel() for value in like.tensors.values()))
    return like.changed(lambda value: scale * torch.randn(value.shape, generator=rng))


def rounded(first: ClientUpdate, second: ClientUpdate) -> float:
    """Returns the distance that rounding alone may cause between two updates summed in float32."""
    return 4 * torch.finfo(torch.float32).eps * (norm_of(first) + norm_of(second))


def distance(first: ClientUpdate, second: ClientUpdate) -> float:
    """Returns the L2 distance, over the tensors that both have."""
    apart = [
        (value.double() - second.tensors[name].double()).norm()
        for name, value in first.tensors.items()
        if name in second.tensors
    ]
    return float(torch.stack(apart).norm())
