"""What a client of an experiment looks for before it trains, and what it does about it."""

import logging
import math
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedleak import models
from fedleak.config.experiment import Experiment
from fedleak.config.federation.protection import Protection
from fedleak.config.federation.watching import watch
from fedleak.defenses import TrustedAggregator
from fedleak.detectors import REFUSAL, Broadcast, Movement, Own
from fedleak.flower.client.context import Work
from fedleak.models import LanguageModel, loading
from fedleak.store.files import plain
from fedleak.store.memory import Board, Memory
from fedleak.store.run import Key
from fedleak.training.observation import UpdateKind
from fedleak.training.settings import PLAIN
from fedleak.training.steps import Batch, gradient
from fedleak.util.errors import FedleakError, RoundRefusedError

_log = logging.getLogger(__name__)


def refuse_suspect(work: Work, key: Key, sent: Mapping[str, Tensor], batch: Batch) -> None:
    """Looks at what the server sent, and notes beside the vault what the detectors found.

    Args:
        work: What the client is asked to do.
        key: The round and the client.
        sent: The broadcast.
        batch: What the client would train on: as many examples as in one step.

    Raises:
        RoundRefusedError: A detector alarms, and its action is to refuse.
        FedleakError: A detector failed.
    """
    experiment, detectors = work.experiment, work.experiment.detectors_of(key.client)
    if not detectors:
        return
    if work.private is None:
        raise FedleakError(
            "the experiment has detectors, and this node keeps nothing between rounds: give its "
            "configuration a vault"
        )
    model, _ = work.model_and_data
    promised = {name: tuple(value.shape) for name, value in model.parameters().items()}
    watched = watch(
        Memory(work.private.path / "kept" / f"c{key.client:02d}"),
        list(detectors.values()),
        Broadcast(key.round, _arrays(sent)),
        settings=_settings(experiment, work.protection),
        shapes=promised,
        movement=movement(experiment, work.protection),
        checkpoint=lambda: _checkpoint(experiment, model.num_labels),
        own=own(model, sent, batch) if batch[0] else None,
        board=Board((work.board or work.private).path / "published", f"c{key.client}"),
    )
    placed = zip(detectors, watched.to_json(), strict=True)
    findings = [{"place": place, **finding} for place, finding in placed]
    note = {"hash": watched.hash, "refused": watched.refuses, "findings": findings}
    work.private.detected.write(key, plain({"fingerprint": experiment.fingerprint, **note}))
    for detector, finding in watched.alarms:
        _log.warning("%s: %s: %s", key, detector.kind, finding.sentence)
    if watched.refuses:
        raise RoundRefusedError(REFUSAL)


def movement(experiment: Experiment, protection: Protection) -> Movement:
    """Returns how an honest server moves the model, as far as its clients agreed on that."""
    optimiser, local = experiment.server_optimiser, protection.local
    if optimiser.kind == "adam":
        return Movement(optimiser="adam", rate=optimiser.learning_rate)
    of_fedsgd = local.kind == UpdateKind.GRADIENT
    recipe = PLAIN if of_fedsgd else local.recipe
    # Parts of equal sizes differ by one example.
    steps = local.steps(protection.num_examples + 1)
    scale = optimiser.learning_rate if of_fedsgd else 1.0  # what an update is multiplied by
    rate = optimiser.learning_rate if of_fedsgd else local.learning_rate
    rate /= 1 - recipe.momentum
    most = None if recipe.max_grad_norm is None else rate * steps * recipe.max_grad_norm
    noises: list[float] = []
    scaled = False  # by a norm that the server alone knows before a round
    for defense in protection.defenses.values():
        claims = defense.update_claims(local, protection.num_examples)
        if (longest := claims.max_norm or claims.client_norm) is not None:
            most = scale * longest
        if claims.relative_noise or claims.levels or claims.step or claims.norm_noise:
            most = None
        scaled |= claims.norm_noise is not None
        noises.append(claims.noise_scale or 0.0)
        if isinstance(defense, TrustedAggregator):
            # The most noise: in the last round, if all others refuse it.
            noises.append(defense.noise_on_mean(1, experiment.federation.rounds))
    noise = scale * math.hypot(*noises) / (1 - recipe.momentum)
    unknown = scaled or protection.scales_with_update() or recipe.precision == "bfloat16"
    if len(experiment.unlike_clients) > 1:  # others may clip nothing
        most = None
    if recipe.optimiser != "sgd" and most is None:
        after_adam = noise and local.private is None
        if after_adam or unknown:
            return Movement(noise=None)
        decay = recipe.weight_decay if recipe.optimiser == "adamw" else 0.0
        return Movement(optimiser="adam", rate=rate, steps=steps, anew=True, weight_decay=decay)
    return Movement(
        rate=rate,
        steps=steps,
        weight_decay=recipe.weight_decay,
        most=most,
        noise=None if unknown else noise,
    )


def own(model: LanguageModel, sent: Mapping[str, Tensor], batch: Batch) -> Own:
    """Returns what can be computed on a batch at a broadcast, without dropout.

    If any of it is computed, the model keeps the broadcast's weights.
    """
    sequences, labels = batch

    def gradient_of(chosen: slice = slice(None)) -> dict[str, Tensor]:
        models.load_parameters_(model, sent)
        model.module.eval()
        return gradient(model, Batch(sequences[chosen], labels[chosen]), PLAIN)

    def loss() -> float:
        models.load_parameters_(model, sent)
        model.module.eval()
        ids_BT, mask_BT = models.pad(sequences, model.tokenizer.pad_token_id, model.device)
        with torch.no_grad():
            return float(models.batch_loss(model, ids_BT, mask_BT, torch.tensor(labels)))

    @cache
    def example_norms() -> dict[str, NDArray[Any]]:
        norms: dict[str, list[float]] = {}
        for i in range(len(sequences)):
            for name, value in gradient_of(slice(i, i + 1)).items():
                norms.setdefault(name, []).append(float(value.norm()))
        return {name: np.array(values) for name, values in norms.items()}

    return Own(loss=loss, gradient_norm=lambda: _norm(gradient_of()), example_norms=example_norms)


def _settings(experiment: Experiment, protection: Protection) -> dict[str, Any]:
    """Returns all that the server asks of a client's training."""
    fields = {"algorithm", "batch_size", "local_epochs", "learning_rate", "dropout"}
    return {
        **experiment.federation.model_dump(mode="json", include=fields),
        "client": experiment.client.model_dump(mode="json"),
        "frozen": list(protection.local.frozen),
        "share": experiment.update.share,
        "model": experiment.model.model_dump(mode="json"),
        "defense": experiment.defense,
    }


@lru_cache(maxsize=1)
def _checkpoint(experiment: Experiment, num_labels: int) -> dict[str, NDArray[Any]]:
    """Returns the public model, which training starts from; loaded once per process."""
    return _arrays(loading.load(experiment.model_spec(num_labels)).parameters())


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(math.fsum(float(value.double().square().sum()) for value in tensors.values()))


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: value.numpy() for name, value in tensors.items()}
