"""The steps of local training, at a client or repeated by an attacker."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedleak.models import LanguageModel, batch_loss, pad, target_counts
from fedleak.training.recipe import Recipe


class Batch(NamedTuple):
    """The examples of a step.

    Attributes:
        sequences: Token ids of each.
        labels: Class of each; not used by a causal model.
    """

    sequences: Sequence[Sequence[int]]
    labels: Sequence[int]

    def of(self, chosen: Sequence[int]) -> "Batch":
        """Returns the examples of these numbers, in this order."""
        return Batch([self.sequences[i] for i in chosen], [self.labels[i] for i in chosen])


def gradient(model: LanguageModel, batch: Batch, recipe: Recipe) -> dict[str, Tensor]:
    """Returns the gradient of the mean loss of a batch, by parameter name.

    Args:
        model: At the current weights.
        batch: Its examples.
        recipe: How many passes it takes, each of a part of the batch, and in which precision. A
            part counts by its share of what the loss is a mean over: tokens, or texts.
    """
    sequences, labels = batch
    size = -(-len(sequences) // recipe.accumulate)
    slices = [slice(start, start + size) for start in range(0, len(sequences), size)]
    parts = [Batch(sequences[part], labels[part]) for part in slices]
    if len(parts) == 1:
        return _gradient(model, batch, recipe, 1.0)
    counts = [sum(target_counts(model, part.sequences)) for part in parts]
    total: dict[str, Tensor] = {}
    for part, count in zip(parts, counts, strict=True):
        part_gradient = _gradient(model, part, recipe, count / sum(counts))
        if total:
            for name, value in part_gradient.items():
                total[name].add_(value)
        total = total or part_gradient
    return total


def _gradient(
    model: LanguageModel, batch: Batch, recipe: Recipe, share: float
) -> dict[str, Tensor]:
    """Returns the gradient of a batch's mean loss, times a share."""
    ids_BT, mask_BT = pad(batch.sequences, model.tokenizer.pad_token_id, model.device)
    labels = torch.tensor(batch.labels, device=model.device)
    mixed = recipe.precision == "bfloat16-mixed"
    # For each pass: autocast keeps rounded weights until it ends.
    with torch.autocast(model.device.type, torch.bfloat16, enabled=mixed):
        loss = batch_loss(model, ids_BT, mask_BT, labels)
    if share != 1.0:
        loss = share * loss
    trained = model.trained()
    gradients = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    return dict(zip(trained, gradients, strict=True))


def steps_(
    model: LanguageModel, gradients: Iterable[dict[str, Tensor]], recipe: Recipe, rate: float
) -> None:
    """Steps along gradients, each of which is computed at the weights that the last step left.

    Args:
        model: Is trained.
        gradients: Of all that is trained, by name; they are used up.
        recipe: How to step.
        rate: Learning rate, if the recipe has none for each step.
    """
    trained = model.trained()
    optimiser = recipe.made(trained.values(), rate)
    for number, step_gradient in enumerate(gradients):
        while step_gradient:  # nothing else may hold them, or `zero_grad` frees no memory
            name, value = step_gradient.popitem()
            trained[name].grad = value
        if recipe.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(trained.values(), recipe.max_grad_norm)
        if recipe.rates:
            for group in optimiser.param_groups:
                group["lr"] = recipe.rates[number]
        optimiser.step()
        optimiser.zero_grad()


def delta_(
    model: LanguageModel, gradients: Iterable[dict[str, Tensor]], recipe: Recipe, rate: float
) -> dict[str, Tensor]:
    """Makes steps as `steps_` does and returns weights after minus before in float32, by name."""
    before = {name: p.clone() for name, p in model.parameters().items()}
    steps_(model, gradients, recipe, rate)
    # In the place of the weights before: one model less in memory.
    wide = {name: value.float() for name, value in before.items()}
    after = model.parameters()
    return {name: torch.sub(value, wide[name], out=wide[name]) for name, value in after.items()}
