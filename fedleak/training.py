"""One client's local work, and the server's honest aggregation of what clients send.

FedSGD and FedAvg: McMahan et al. 2017, algorithm 1 (FedSGD with the gradient on the wire).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedleak.models import LanguageModel, batch_loss, pad
from fedleak.observation import ClientUpdate, UpdateKind
from fedleak.streams import stream, stream_seed


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains.

    Attributes:
        kind: GRADIENT sends the gradient of one batch; DELTA trains and sends the difference.
        batch_size: Examples in a step.
        epochs: Passes over the client's data in a round, for DELTA.
        learning_rate: Of plain SGD.
        dropout: Train with the model's dropout on.
    """

    kind: UpdateKind
    batch_size: int
    epochs: int
    learning_rate: float
    dropout: bool

    def steps(self, num_examples: int) -> int:
        """Returns the number of SGD steps over `num_examples` examples."""
        if self.kind == UpdateKind.GRADIENT:
            return 1
        return self.epochs * -(-num_examples // self.batch_size)


def round_clients(clients: int, per_round: int, *, seed: int, round: int) -> list[int]:
    """Returns the clients that train in a round, in order."""
    order = torch.randperm(clients, generator=stream(seed, "clients", round))
    return sorted(order[:per_round].tolist())


def round_batch(
    num_examples: int, training: LocalTraining, *, seed: int, client: int, round: int
) -> list[int]:
    """Returns which of its examples a client trains on in a round.

    FedAvg uses all. FedSGD takes the next batch of a shuffled pass; what is left over at the end of
    a pass, too little for a batch, waits for the next.
    """
    if training.kind == UpdateKind.DELTA:
        return list(range(num_examples))
    batch = min(training.batch_size, num_examples)
    per_pass = num_examples // batch
    sweep, step = divmod(round - 1, per_pass)
    order = torch.randperm(num_examples, generator=stream(seed, "batches", client, sweep)).tolist()
    chosen: list[int] = order[step * batch : (step + 1) * batch]
    return chosen


def local_update_(
    model: LanguageModel,
    sequences: Sequence[Sequence[int]],
    labels: Sequence[int],
    training: LocalTraining,
    *,
    seed: int,
) -> ClientUpdate:
    """Trains on the given examples from the model's weights and returns the update.

    Args:
        model: Holds the broadcast weights; FedAvg leaves it trained.
        sequences: Token ids of each example.
        labels: Class of each example; not used by a causal model.
        training: How to train.
        seed: For dropout and the order of local batches.
    """
    model.module.train(training.dropout)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream_seed(seed, "dropout"))
        if training.kind == UpdateKind.GRADIENT:
            tensors = _gradient(model, sequences, labels)
        else:
            tensors = _delta_(model, sequences, labels, training, seed)
    model.module.eval()
    return ClientUpdate(training.kind, tensors, len(sequences))


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


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Returns the names that contain one of the patterns (`*` is a wildcard)."""
    return [name for name in names if any(fnmatchcase(name, f"*{p}*") for p in patterns)]


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


def aggregate(
    broadcast: Mapping[str, Tensor], updates: Iterable[ClientUpdate], learning_rate: float
) -> dict[str, Tensor]:
    """Returns the next global weights: the honest server's step, weighted by examples.

    `updates` is read once and in order, so one update is in memory at a time and the sum does
    not depend on who answered first. It is summed in the weights' precision, whatever the
    clients' is. A parameter that nobody shared stays as it is.
    """
    sums: dict[str, Tensor] = {}
    weights: dict[str, int] = {}
    scale = 1.0
    for update in updates:
        scale = -learning_rate if update.kind == UpdateKind.GRADIENT else 1.0
        for name, tensor in update.tensors.items():
            weighted = tensor.to(broadcast[name].dtype) * update.num_examples
            sums[name] = sums[name].add_(weighted) if name in sums else weighted
            weights[name] = weights.get(name, 0) + update.num_examples
    return {
        name: value + scale * sums[name] / weights[name] if name in sums else value
        for name, value in broadcast.items()
    }
