"""One client's local work, and the server's honest aggregation of what clients send.

FedSGD and FedAvg: McMahan et al. 2017, algorithm 1 (FedSGD with the gradient on the wire).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedleak.models import LanguageModel, batch_loss, pad
from fedleak.models.parameter_selection import matching, select
from fedleak.observation import ClientUpdate, UpdateKind
from fedleak.rng import stream, stream_seed

Report = Callable[[Mapping[str, float]], None]
"""Is told figures of a client's own, which it sends nobody."""


@dataclass(frozen=True)
class PrivateSteps:
    """DP-SGD's part of a step (Abadi et al. 2016, algorithm 1).

    Attributes:
        noise_multiplier: Standard deviation of the noise on the sum, in clipping norms.
        max_grad_norm: The L2 norm that an example's gradient is clipped to.
        sampling: "poisson" draws each example by itself; "fixed" takes the usual batches.
    """

    noise_multiplier: float
    max_grad_norm: float
    sampling: Literal["poisson", "fixed"]


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains.

    Attributes:
        kind: GRADIENT sends the gradient of one batch; DELTA trains and sends the difference.
        batch_size: Examples in a step.
        epochs: Passes over the client's data in a round, for DELTA.
        learning_rate: Of plain SGD.
        dropout: Train with the model's dropout on.
        frozen: Parts and patterns of parameters that it leaves alone (`models.parts.select`).
        private: Each step is one of DP-SGD; None: plain.
    """

    kind: UpdateKind
    batch_size: int
    epochs: int
    learning_rate: float
    dropout: bool
    frozen: tuple[str, ...] = ()
    private: PrivateSteps | None = None

    def steps(self, num_examples: int) -> int:
        """Returns the number of SGD steps over `num_examples` examples."""
        if self.kind == UpdateKind.GRADIENT:
            return 1
        return self.epochs * -(-num_examples // self.batch_size)


def round_clients(clients: int, per_round: int, *, seed: int, round: int) -> list[int]:
    """Returns the clients that train in a round, in order."""
    if per_round >= clients:
        return list(range(clients))
    order = torch.randperm(clients, generator=stream(seed, "clients", round))
    return sorted(order[:per_round].tolist())


def round_batch(
    num_examples: int, training: LocalTraining, *, seed: int, client: int, round: int
) -> list[int]:
    """Returns which of its examples a client trains on in a round.

    FedAvg uses all, and draws batches of its own. FedSGD takes the next batch of a shuffled pass;
    what is left over at the end of a pass, too little for a batch, waits for the next. With Poisson
    sampling it takes each example with the same probability, so a batch may be empty.
    """
    if training.kind == UpdateKind.DELTA:
        return list(range(num_examples))
    batch = min(training.batch_size, num_examples)
    if training.private is not None and training.private.sampling == "poisson":
        drawn = torch.rand(num_examples, generator=stream(seed, "poisson", client, round))
        return (drawn < batch / num_examples).nonzero()[:, 0].tolist()
    sweep, step = divmod(round - 1, passes(num_examples, training))
    order = torch.randperm(num_examples, generator=stream(seed, "batches", client, sweep)).tolist()
    chosen: list[int] = order[step * batch : (step + 1) * batch]
    return chosen


def passes(num_examples: int, training: LocalTraining) -> int:
    """Returns the rounds of FedSGD in which a client takes none of its examples twice."""
    return num_examples // min(training.batch_size, num_examples)


def _no_report(figures: Mapping[str, float]) -> None:
    """Drops what it is told."""


def local_update_(
    model: LanguageModel,
    sequences: Sequence[Sequence[int]],
    labels: Sequence[int],
    training: LocalTraining,
    *,
    seed: int,
    report: Report = _no_report,
) -> ClientUpdate:
    """Trains on the given examples from the model's weights and returns the update.

    Args:
        model: Holds the broadcast weights; FedAvg leaves it trained.
        sequences: Token ids of each example.
        labels: Class of each example; not used by a causal model.
        training: How to train.
        seed: For dropout, the order of local batches, and private steps.
        report: Is told how private steps went.
    """
    model.module.train(training.dropout)
    with torch.random.fork_rng(devices=[]), freezing(model, training.frozen):
        torch.default_generator.manual_seed(stream_seed(seed, "dropout"))
        if training.private is not None:
            from fedleak.training import private_steps  # it takes seconds to import

            update = private_steps.local_update_(
                model, sequences, labels, training, training.private, seed=seed, report=report
            )
        elif training.kind == UpdateKind.GRADIENT:
            gradient = _gradient(model, sequences, labels)
            update = ClientUpdate(training.kind, gradient, len(sequences))
        else:
            delta = _delta_(model, sequences, labels, training, seed)
            update = ClientUpdate(training.kind, delta, len(sequences))
    model.module.eval()
    return update


@contextmanager
def freezing(model: LanguageModel, patterns: Sequence[str]) -> Iterator[None]:
    """Leaves parameters out of what is trained, within the block."""
    trained = model.trained()
    frozen = [trained[name] for name in select(model, patterns, "freeze.parameters")]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def _gradient(
    model: LanguageModel, sequences: Sequence[Sequence[int]], labels: Sequence[int]
) -> dict[str, Tensor]:
    """Returns the gradient of the mean loss, by parameter name."""
    ids_BT, mask_BT = pad(sequences, model.tokenizer.pad_token_id, model.device)
    loss = batch_loss(model, ids_BT, mask_BT, torch.tensor(labels, device=model.device))
    trained = model.trained()
    gradients = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    return dict(zip(trained, gradients, strict=True))


def _delta_(
    model: LanguageModel,
    sequences: Sequence[Sequence[int]],
    labels: Sequence[int],
    training: LocalTraining,
    seed: int,
) -> dict[str, Tensor]:
    """Runs the local epochs and returns trained minus broadcast weights, by name."""
    before = {name: p.clone() for name, p in model.parameters().items()}
    trained = model.trained()
    optimiser = torch.optim.SGD(trained.values(), lr=training.learning_rate)
    shuffle = stream(seed, "order")
    for _ in range(training.epochs):
        order = torch.randperm(len(sequences), generator=shuffle)
        for start in range(0, len(order), training.batch_size):
            chosen = order[start : start + training.batch_size].tolist()
            gradients = _gradient(
                model, [sequences[i] for i in chosen], [labels[i] for i in chosen]
            )
            for name, parameter in trained.items():
                parameter.grad = gradients[name]
            optimiser.step()
    optimiser.zero_grad()  # frees a model's worth of memory
    return {name: after - before[name] for name, after in model.parameters().items()}


def share(update: ClientUpdate, patterns: Sequence[str]) -> ClientUpdate:
    """Returns the update with only the parameters that match; a whole name is a pattern too."""
    kept = matching(update.tensors, patterns)
    return replace(update, tensors={name: update.tensors[name] for name in kept})


def to_wire(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors that NumPy, and so Flower, can hold: bfloat16 as int16 of the same bits."""
    return {
        name: value.view(torch.int16) if value.dtype == torch.bfloat16 else value
        for name, value in tensors.items()
    }


def from_wire(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undoes `to_wire`: no update holds whole numbers, so what looks like int16 is bfloat16."""
    return {
        name: value.view(torch.bfloat16) if value.dtype == torch.int16 else value
        for name, value in tensors.items()
    }


class _Sum(NamedTuple):
    """Updates, each times its examples, summed by parameter over the clients that sent it."""

    kind: UpdateKind
    tensors: dict[str, Tensor]
    examples: dict[str, int]
    all_examples: int


def _weighted_sum(updates: Iterable[ClientUpdate], precision: Callable[[str], torch.dtype]) -> _Sum:
    """Sums updates in order, one in memory at a time, each parameter in its precision."""
    sums: dict[str, Tensor] = {}
    examples: dict[str, int] = {}
    kind, all_examples = UpdateKind.GRADIENT, 0
    for update in updates:
        kind, all_examples = update.kind, all_examples + update.num_examples
        for name, tensor in update.tensors.items():
            weighted = tensor.to(precision(name)) * update.num_examples
            sums[name] = sums[name].add_(weighted) if name in sums else weighted
            examples[name] = examples.get(name, 0) + update.num_examples
    return _Sum(kind, sums, examples, all_examples)


def mean_update(updates: Iterable[ClientUpdate]) -> ClientUpdate:
    """Returns the mean of updates, weighted by examples: what secure aggregation reveals.

    Of a parameter it is the mean over the clients that sent it, in float32. It is an update of all
    their examples together.
    """
    total = _weighted_sum(updates, lambda name: torch.float32)
    mean = {name: value / total.examples[name] for name, value in total.tensors.items()}
    return ClientUpdate(total.kind, mean, total.all_examples)


def aggregate(
    broadcast: Mapping[str, Tensor], updates: Iterable[ClientUpdate], learning_rate: float
) -> dict[str, Tensor]:
    """Returns the next global weights: the honest server's step, weighted by examples.

    `updates` is read once and in order, so one update is in memory at a time and the sum does
    not depend on who answered first. It is summed in the weights' precision, whatever the
    clients' is. A parameter that nobody shared stays as it is.
    """
    total = _weighted_sum(updates, lambda name: broadcast[name].dtype)
    scale = -learning_rate if total.kind == UpdateKind.GRADIENT else 1.0
    return {
        name: value + scale * total.tensors[name] / total.examples[name]
        if name in total.tensors
        else value
        for name, value in broadcast.items()
    }
