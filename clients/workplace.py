"""What an experiment's clients need, loaded once per process."""

import json
from functools import cache, lru_cache

import torch

from fedleak import models
from fedleak.config import Experiment, parse
from fedleak.federation import Protection, Workload, divide, protection, read_data
from fedleak.models import LanguageModel


@lru_cache(maxsize=1)
def workplace(experiment_json: str) -> tuple[Experiment, LanguageModel, Workload]:
    """Loads what an experiment's clients need, once per process."""
    # One thread, so that sums come out bit for bit the same under every engine.
    torch.set_num_threads(1)
    experiment = parse(json.loads(experiment_json))
    split = read_data(experiment)
    model = models.load(experiment.model_spec(len(split.train.label_names)), weights=False)
    return experiment, model, divide(experiment, split, model)


@cache
def protected(experiment_json: str, client: int) -> Protection:
    """Works out what a client does for its privacy, once per process."""
    experiment, _, workload = workplace(experiment_json)
    return protection(experiment, client, len(workload.parts[client]))
