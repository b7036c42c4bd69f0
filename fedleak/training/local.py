"""One client's local work.

FedSGD and FedAvg: McMahan et al. 2017, algorithm 1 (FedSGD with the gradient on the wire).
"""

from collections.abc import Sequence

import torch

from fedleak.models import LanguageModel
from fedleak.models.parameter_selection import freezing
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.planted import Planted
from fedleak.training.recipe import in_weights_of
from fedleak.training.settings import LocalTraining, OnFigures
from fedleak.training.steps import Batch, delta_, gradient
from fedleak.util.rng import stream_seed


def local_update_(
    model: LanguageModel,
    sequences: Sequence[Sequence[int]],
    labels: Sequence[int],
    training: LocalTraining,
    *,
    seed: int,
    report: OnFigures = lambda figures: None,
    planted: Planted | None = None,
) -> ClientUpdate:
    """Trains on the given examples from the model's weights and returns the update.

    Args:
        model: Holds the broadcast weights; FedAvg leaves it trained, unless it trains copies of
            the weights in half precision.
        sequences: Token ids of each example.
        labels: Class of each example; not used by a causal model.
        training: How to train.
        seed: For dropout, the order of local batches, and private steps.
        report: Called with figures of the private steps.
        planted: Canaries that take part in private steps.
    """
    model.module.train(training.dropout)
    examples = Batch(sequences, labels)
    with torch.random.fork_rng(devices=[]), freezing(model, training.frozen):
        torch.default_generator.manual_seed(stream_seed(seed, "dropout"))
        if training.private is not None:
            from fedleak.training import private_steps  # it takes seconds to import

            update = private_steps.private_update_(
                model, examples, training, seed=seed, report=report, planted=planted
            )
        else:
            with in_weights_of(model.module, training.recipe.precision):
                if training.kind == UpdateKind.GRADIENT:
                    tensors = gradient(model, examples, training.recipe)
                else:
                    batches = training.batches(len(sequences), seed)
                    parts = map(examples.of, batches)
                    gradients = (gradient(model, part, training.recipe) for part in parts)
                    tensors = delta_(model, gradients, training.recipe, training.learning_rate)
            update = ClientUpdate(training.kind, tensors, len(sequences))
    model.module.eval()
    return update
