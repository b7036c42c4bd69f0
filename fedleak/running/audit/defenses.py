"""Which defenses `fedleak audit --defend` tries, and the experiment in which each is tried."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedleak.audit.estimates import FEW_CLIENTS, FEW_TEXTS
from fedleak.audit.gate.limits import LEAKS, MEMBERSHIP
from fedleak.audit.metrics import intervals
from fedleak.config import checks, families, loading
from fedleak.config.experiment import Experiment
from fedleak.config.families import FamilyTable, Setting
from fedleak.config.federation.lookup import client_sizes, most_examples
from fedleak.config.federation.schedule import expected_captures
from fedleak.config.federation.workload import outline
from fedleak.config.loading import parse
from fedleak.models import LanguageModel
from fedleak.report.words import in_words
from fedleak.running import preparation
from fedleak.running.audit.plan import with_threat
from fedleak.store.run import Run
from fedleak.training.batches import passes
from fedleak.util.errors import ConfigError


def _family(name: str, strengths: list[Any] | None = None, **changes: Any) -> FamilyTable:
    return FamilyTable(name=name, strengths=strengths, set=changes)


def free_families(experiment: Experiment, model: LanguageModel, smallest: int) -> list[FamilyTable]:
    """Returns families that add nothing to an update and remove no more than a frozen part.

    Args:
        experiment: What is defended.
        model: Without weights.
        smallest: Texts of the smallest client.
    """
    table, size = experiment.federation, experiment.federation.batch_size
    epochs = table.local_epochs if table.algorithm == "fedavg" else 1
    positions = filter(None, [model.family.position_embedding])  # rotary positions have none
    larger = [*dict.fromkeys(min(times * size, smallest) for times in (4, 16))]
    batches = [_family("texts in a batch", larger, federation={"batch_size": families.STRENGTH})]
    local: dict[str, Any] = {"federation": {"algorithm": "fedavg", "local_epochs": "<strength>"}}
    if table.algorithm == "fedsgd" and table.server_optimiser == "adam":  # clients step by it now
        local["federation"]["server_optimiser"] = "sgd"
        local["client"] = {"optimiser": "adam"}
    adapters = {"lora": {"rank": families.STRENGTH}}
    return [
        *(_family("frozen position rows", defense=[_frozen(name)]) for name in positions),
        _family("frozen embeddings", defense=[_frozen("embeddings")]),
        _family("frozen embeddings and first layer", defense=[_frozen("embeddings", "t1")]),
        *([_family("LoRA, rank", [8], model=adapters)] if experiment.model.lora is None else []),
        _family("secure sum", defense=[{"kind": "secure_sum"}]),
        _family(
            "secure sum and frozen embeddings",
            defense=[_frozen("embeddings"), {"kind": "secure_sum"}],
        ),
        *(batches if smallest > size else []),
        _family("local epochs", [2 * epochs, 4 * epochs], **local),
    ]


COSTLY = [
    _family("Gaussian noise, sigma / rms", [0.3, 3.0], defense=[
        {"kind": "gaussian_noise", "relative": families.STRENGTH},
    ]),
    _family("random mask, share masked", [0.9, 0.99], defense=[
        {"kind": "mask", "fraction": families.STRENGTH},
    ]),
    # Fixed batches are the batches of the run; Poisson sampling would draw others.
    _family("DP-SGD, epsilon", [8.0, 1.0], defense=[
        {"kind": "dp_sgd", "epsilon": families.STRENGTH, "sampling": "fixed"},
    ]),
]  # fmt: skip
"""Families that make updates worse: they count as dearer than all free families."""


def _frozen(*parameters: str) -> dict[str, Any]:
    return {"kind": "freeze", "parameters": [*parameters]}


@dataclass(frozen=True)
class Candidate:
    """A defense on the setting of a run.

    Attributes:
        setting: What it sets.
        free: As in `Tried`.
    """

    setting: Setting
    free: bool

    @property
    def name(self) -> str:
        """What it is, with its strength."""
        strength = self.setting.value.get("strength")
        kind = str(self.setting.value["kind"])
        return kind if strength is None else f"{kind} {in_words(strength)}"


def candidates(experiment: Experiment, model: LanguageModel, smallest: int) -> list[Candidate]:
    """Returns the defenses to try, the cheaper ones first, with arguments as `free_families`."""
    free = families.settings(free_families(experiment, model, smallest))
    costly = families.settings(COSTLY)
    return [*(Candidate(s, free=True) for s in free), *(Candidate(s, free=False) for s in costly)]


def refuse_without_limits(experiment: Experiment) -> int:
    """Refuses an experiment that no defense can help; returns the clients, or sums, of its gate.

    With fewer of them, limits on what is read are exceeded even if nothing is read.

    Raises:
        ConfigError: It has no such limits, its clients are not here, or they are so few that a
            limit is exceeded even if nothing is read.
    """
    preparation.refuse_data_on_nodes(experiment)
    if experiment.tapped is not None:
        raise ConfigError(
            f"{experiment.name!r} was trained by another app, and defenses are tried by training "
            "again: describe its setting in an experiment file"
        )
    limits = {
        name: limit for name in LEAKS if (limit := getattr(experiment.gate, name)) is not None
    }
    if not limits:
        raise ConfigError(
            "there is no limit that a defense has to keep: add [gate], such as exact = 0.3 "
            f"({', '.join(LEAKS)})"
        )
    clients, needed = experiment.federation.clients, fewest_units(limits)
    if needed is None or (needed > clients and experiment.sees == "updates"):
        name, limit = min(limits.items(), key=lambda item: _share(*item))
        more = "raise the limit" if needed is None else f"have {needed} clients, or raise the limit"
        raise ConfigError(
            f"{name} = {limit:g} cannot be kept: where nothing is read of {clients} clients, its "
            f"interval still reaches further: {more}"
        )
    return needed


def fewest_units(limits: Mapping[str, float]) -> int | None:
    """Returns the fewest clients, or sums, with which limits hold if nothing is read; None: never.

    Args:
        limits: Limits on what is read, by their names.
    """
    share = min(_share(name, limit) for name, limit in limits.items())
    if share <= 0:
        return None
    # Clopper and Pearson's; what is drawn at random may differ in the last digit.
    exactly = math.log(intervals.MISS) / math.log1p(-share) if share < 1 else 0.0
    count = max(FEW_CLIENTS, math.ceil(exactly))
    while intervals.clustered_mean([0.0] * count, range(count), most=1.0).high > share:
        count += 1
    return count


def _share(name: str, limit: float) -> float:
    return limit / 100 if name == "rougeL" else limit


def defended(
    run: Run, experiment: Experiment, setting: Setting, model: LanguageModel, needed: int
) -> Experiment:
    """Returns the experiment with a defense, with as few updates as the gate can judge.

    Attacks that cannot work on these updates are left out, and so are those whose figures have no
    limit.

    Args:
        run: The audit's.
        experiment: What was run there.
        setting: The defense.
        model: Without weights.
        needed: Clients, or sums, that the gate needs.

    Raises:
        ConfigError: The experiment and the defense do not go together, no attack is left, or there
            are too few texts for the sums.
    """
    table = experiment.model_dump(mode="json") | {"preset": None}
    table["model"] = {key: value for key, value in table["model"].items() if value is not None}
    table["threat"]["clients"] = None  # those of the audit; here as many are chosen as needed
    for key, value in setting.changes.items():
        added = [*table["defense"], *value] if key == "defense" else value
        loading.set_(table, key, added, "audit --defend")
    gate, smallest = experiment.gate, min(client_sizes(run) or [0])
    limited = any(getattr(gate, name) is not None for name in MEMBERSHIP)
    limited |= "membership" in gate.require
    table["attack"] = [
        {key: value for key, value in attack.items() if key != "seconds"}  # the search sets it
        for attack in table["attack"]
        if limited or attack["kind"] != "membership"
    ]
    changed = parse(table | {"gate": {}})
    if changed.model != experiment.model:
        model = outline(changed, run.info()["num_labels"])
    obstacles = [_obstacle(table, attack, model) for attack in changed.attack]
    if changed.attack and all(obstacles):
        raise ConfigError(obstacles[0])
    able = zip(changed.attack, obstacles, strict=True)
    table["attack"] = [attack for attack, obstacle in able if obstacle is None]
    names = {named.name for named in parse(table | {"gate": {}}).attacks}
    table["gate"]["may_abstain"] = [name for name in gate.may_abstain if name in names]
    if changed.sees == "updates":
        return _few_updates(run, parse(table), needed)
    # Under FedAvg, and by Poisson sampling, a text is in many sums.
    once = changed.federation.algorithm == "fedsgd" and not changed.trains_privately
    sums = passes(smallest, changed.local_training) if once and smallest else 1
    if sums < needed:
        raise ConfigError(
            f"a sum is judged over {needed} sums of different texts, and there are texts for "
            f"{sums}: give clients more texts (data.samples), and gradients of one batch"
        )
    table["federation"]["rounds"] = max(needed, changed.federation.rounds)
    table["threat"]["rounds"] = None
    return parse(table)


def _few_updates(run: Run, experiment: Experiment, needed: int) -> Experiment:
    """Returns an experiment in which enough clients are attacked, in as few rounds as possible.

    The last round is tried first: the first gradients of adapters are not like the others.
    """
    first = experiment.unlike_clients
    for rounds in ([experiment.federation.rounds], experiment.threat.rounds, None):
        keys = expected_captures(with_threat(experiment, rounds, None))
        here = sorted({key.client for key in keys}, key=lambda client: client not in first)
        chosen = [key for key in keys if key.client in here[:needed]]
        texts = sum(most_examples(experiment, run, key.client) for key in chosen)
        if len(here) >= needed and texts >= FEW_TEXTS:
            break
    return with_threat(experiment, rounds, here[:needed])


def _obstacle(
    table: Mapping[str, Any], attack: Mapping[str, Any], model: LanguageModel
) -> str | None:
    """Returns why an attack cannot work on the updates of an experiment."""
    try:
        checks.check_attacks(parse({**table, "attack": [attack], "gate": {}}), model)
    except ConfigError as error:
        return str(error)
    return None
