"""The honest server's sum of updates (McMahan et al. 2017, algorithm 1)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim.adam import adam

from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.settings import ServerOptimiser


class WeightedSum:
    """Updates, each times its examples, summed by parameter over the clients that sent it.

    The last bits of a sum depend on the order in which updates are added. No update is kept.

    Args:
        precision: The type that a parameter is summed in, by its name; float32 by default.

    Attributes:
        kind: What the updates are.
        tensors: The sums, by parameter name.
        examples: Examples of the clients that sent a parameter, by its name.
        all_examples: Examples of all clients.
    """

    def __init__(
        self, precision: Callable[[str], torch.dtype] = lambda name: torch.float32
    ) -> None:
        self._precision = precision
        self.kind, self.all_examples = UpdateKind.GRADIENT, 0
        self.tensors: dict[str, Tensor] = {}
        self.examples: dict[str, int] = {}

    def add_(self, update: ClientUpdate) -> None:
        """Adds an update."""
        self.kind, self.all_examples = update.kind, self.all_examples + update.num_examples
        count = update.num_examples
        for name, tensor in update.tensors.items():
            wide = tensor.to(self._precision(name))
            if name not in self.tensors:
                self.tensors[name] = wide * count
            elif count.bit_count() == 1:  # no product is rounded, so one pass has the same sum
                self.tensors[name].add_(wide, alpha=count)
            else:
                self.tensors[name] += wide * count
            self.examples[name] = self.examples.get(name, 0) + update.num_examples

    def mean(self) -> ClientUpdate:
        """Returns the mean of the updates: an update of all their examples together.

        The mean of a parameter is over the clients that sent it.
        """
        mean = {name: value / self.examples[name] for name, value in self.tensors.items()}
        return ClientUpdate(self.kind, mean, self.all_examples)


def aggregate(
    broadcast: Mapping[str, Tensor],
    total: WeightedSum,
    optimiser: ServerOptimiser,
    moments: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the next global weights: the honest server's step, weighted by examples.

    A parameter that nobody shared stays as it is.

    Args:
        broadcast: The weights before.
        total: The updates.
        optimiser: How to step.
        moments: What this function returned beside the weights the last time; at first nothing.

    Returns:
        The weights, and what the next step needs besides: nothing for SGD.
    """
    if optimiser.kind == "adam":
        return _adam_step(broadcast, total, optimiser.learning_rate, moments)
    scale = -optimiser.learning_rate if total.kind == UpdateKind.GRADIENT else 1.0
    weights = dict(broadcast)
    for name, summed in total.tensors.items():
        weights[name] = broadcast[name] + scale * summed / total.examples[name]
    return weights, {}


def _adam_step(
    broadcast: Mapping[str, Tensor],
    total: WeightedSum,
    learning_rate: float,
    moments: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights after a step of FedAdam (Reddi et al. 2021, algorithm 2), and moments.

    Adam's gradient is the mean gradient, or minus the mean difference of weights.
    It is Adam of Kingma and Ba (2015) with PyTorch's defaults. Steps are counted by parameter.
    """
    weights, following = dict(broadcast), dict(moments)
    sign = 1.0 if total.kind == UpdateKind.GRADIENT else -1.0
    for name, summed in total.tensors.items():
        gradient = sign * summed.float() / total.examples[name]
        weight = broadcast[name].to(torch.float32, copy=True)
        keys = [f"{moment}.{name}" for moment in ("first", "second", "steps")]
        if keys[0] in moments:
            first, second, steps = (moments[key].clone() for key in keys)
        else:
            first, second = torch.zeros_like(gradient), torch.zeros_like(gradient)
            steps = torch.tensor(0.0)
        adam(
            *([weight], [gradient], [first], [second], [], [steps]),
            foreach=False,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=learning_rate,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )
        weights[name] = weight.to(broadcast[name].dtype)
        following.update(zip(keys, (first, second, steps), strict=True))
    return weights, following


def difference(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    total: WeightedSum,
    learning_rate: float,
) -> ClientUpdate:
    """Returns the mean update that two successive global models reveal.

    It undoes a plain step of `aggregate`: the result is the mean that moved the weights, up to
    their rounding. For gradients, the difference is divided by minus the learning rate.

    Args:
        before, after: The models.
        total: What was aggregated; it gives the kind, the names and the number of examples.
        learning_rate: The server's learning rate.
    """
    scale = -1 / learning_rate if total.kind == UpdateKind.GRADIENT else 1.0
    mean = {
        name: ((after[name].double() - before[name].double()) * scale).to(before[name].dtype)
        for name in total.tensors
    }
    return ClientUpdate(total.kind, mean, total.all_examples)
