"""What the model could have learnt: the same data in one place, without defenses."""

from dataclasses import replace

import torch
from torch import Tensor

from fedleak import models
from fedleak.audit.metrics.utility import evaluate
from fedleak.config.experiment import Experiment
from fedleak.config.federation.schedule import updates
from fedleak.config.federation.workload import divide, read_data
from fedleak.models import loading
from fedleak.store.files import plain
from fedleak.store.run import Run
from fedleak.store.summaries import Baseline
from fedleak.training.aggregation import WeightedSum, aggregate
from fedleak.training.local import local_update_
from fedleak.training.observation import UpdateKind
from fedleak.util.rng import stream, stream_seed


def central(experiment: Experiment, run: Run) -> Baseline:
    """Returns the utility of a model that one party trained on all clients' data.

    It starts from the weights of round 1 and takes as many steps of the same batch size as all
    clients together: under FedSGD by the server's optimiser, under FedAvg by the clients' SGD, both
    with their learning rate.
    """
    model = loading.load(experiment.model_spec(run.info()["num_labels"]), weights=False)
    models.load_parameters_(model, run.models.read_model(1))
    workload = divide(experiment, read_data(experiment), model)
    local = experiment.local_training
    steps = sum(local.steps(len(workload.parts[key.client])) for key in updates(experiment))
    one_step = replace(local, epochs=1)
    rng, moments = stream(experiment.seed, "reference"), dict[str, Tensor]()
    for step in range(steps):
        chosen = torch.randperm(len(workload.sequences), generator=rng)[: local.batch_size].tolist()
        update = local_update_(
            model,
            [workload.sequences[i] for i in chosen],
            [workload.labels[i] for i in chosen],
            one_step,
            seed=stream_seed(experiment.seed, "reference", step),
        )
        if update.kind == UpdateKind.GRADIENT:  # else `local_update_` has moved the model
            before = model.parameters()
            total = WeightedSum({name: value.dtype for name, value in before.items()}.__getitem__)
            total.add_(update)
            after, moments = aggregate(before, total, experiment.server_optimiser, moments)
            models.load_parameters_(model, after)
    scores = evaluate(model, workload.held_out, workload.held_out_labels)
    return Baseline(steps=steps, **plain(scores))
