"""One client's local work.

FedSGD and FedAvg: McMahan et al. 2017, algorithm 1 (FedSGD with the gradient on the wire).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedleak.models import LanguageModel, batch_loss, pad
from fedleak.models.parameter_selection import freezing
from fedleak.training.canaries import Planted
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.settings import LocalTraining, OnFigures
from fedleak.util.rng import stream, stream_seed


def _no_report(figures: Mapping[str, float]) -> None:
    """Drops what it is told."""


def local_update_(
    model: LanguageModel,
    sequences: Sequence[Sequence[int]],
    labels: Sequence[int],
    training: LocalTraining,
    *,
    seed: int,
    report: OnFigures = _no_report,
    planted: Planted | None = None,
) -> ClientUpdate:
    """Trains on the given examples from the model's weights and returns the update.

    Args:
        model: Holds the broadcast weights; FedAvg leaves it trained.
        sequences: Token ids of each example.
        labels: Class of each example; not used by a causal model.
        training: How to train.
        seed: For dropout, the order of local batches, and private steps.
        report: Is told how private steps went.
        planted: Canaries that take part in private steps.
    """
    model.module.train(training.dropout)
    with torch.random.fork_rng(devices=[]), freezing(model, training.frozen):
        torch.default_generator.manual_seed(stream_seed(seed, "dropout"))
        if training.private is not None:
            from fedleak.training import private_steps  # it takes seconds to import

            update = private_steps.private_update_(
                model, (sequences, labels), training, seed=seed, report=report, planted=planted
            )
        else:
            tensors = (
                mean_gradient(model, sequences, labels)
                if training.kind == UpdateKind.GRADIENT
                else _delta_(model, sequences, labels, training, seed)
            )
            update = ClientUpdate(training.kind, tensors, len(sequences))
    model.module.eval()
    return update


def mean_gradient(
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
            batch = [sequences[i] for i in chosen], [labels[i] for i in chosen]
            gradient = mean_gradient(model, *batch)
            while gradient:  # nothing else may hold them, or `zero_grad` frees no memory
                name, value = gradient.popitem()
                trained[name].grad = value
            optimiser.step()
            optimiser.zero_grad()
    # In the place of the broadcast weights: one model less in memory.
    return {name: before[name].neg_().add_(after) for name, after in model.parameters().items()}
