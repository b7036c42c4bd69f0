"""Refuses an experiment whose attacks or defenses cannot work on its model."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from fedleak.attacks import AttackSetting, Batched
from fedleak.attacks.server_modes import ModeSetting, ServerMode
from fedleak.config.components import listed_as
from fedleak.config.experiment import Experiment
from fedleak.config.sent_parameters import captured_parameters, sent_by, sent_sizes
from fedleak.config.tables import CANARY_OF_EVERY_CLIENT, GateTable
from fedleak.models import CAUSAL_LM, LanguageModel
from fedleak.models.parameter_selection import freezing
from fedleak.training.privacy.canaries import FEWEST_NUMBERS, most_canaries
from fedleak.util.errors import ConfigError, unknown


def check_dropout(experiment: Experiment) -> None:
    """Refuses dropout of adapters that nobody trains with.

    Raises:
        ConfigError: There is such dropout.
    """
    lora, table = experiment.model.lora, experiment.federation
    if lora is not None and lora.dropout and not table.dropout:
        raise ConfigError(
            f"model.lora.dropout = {lora.dropout:g} is off, because federation.dropout is: set "
            "federation.dropout = true, or model.lora.dropout = 0"
        )


def check_defenses(experiment: Experiment, model: LanguageModel) -> None:
    """Refuses defenses that cannot work on this model.

    Raises:
        ConfigError: The first such defense, with the reason.
    """
    for number, placed in enumerate(experiment.defenses):
        obstacle = placed.part.obstacle(experiment.local_training, model)
        if obstacle is not None:
            raise ConfigError(f"defense[{number}] ({placed.part.kind}): {obstacle}")
    for client in experiment.unlike_clients:
        with freezing(model, experiment.local_training_of(client).frozen):
            if not model.trained():
                raise ConfigError(
                    f"defense: client {client} has nothing left to train: freeze less"
                )
    if (aggregator := experiment.aggregator) is not None:
        sent = {sent_by(experiment, client, model) for client in experiment.unlike_clients}
        obstacle = aggregator.round_obstacle(experiment.clients_per_round, sent)
        if obstacle is not None:
            raise ConfigError(f"defense ({aggregator.kind}): {obstacle}")


def check_server(experiment: Experiment, model: LanguageModel) -> None:
    """Refuses a malicious server that cannot do what it is to do.

    Raises:
        ConfigError: The reason.
    """
    mode = experiment.server_built.mode
    if not experiment.server_built.malicious:
        return
    where = f"server.mode = {mode.kind!r}"
    if experiment.sees == "models":
        raise ConfigError(
            f"{where}: the attacker of threat.sees = 'models' sees no more than published models, "
            "and a server that changes what it sends sees updates or their sum: choose one of both"
        )
    setting = ModeSetting(
        sees=experiment.sees,
        local=experiment.local_training,
        sent=frozenset().union(*captured_parameters(experiment, model)),
    )
    if (obstacle := mode.obstacle(setting, model)) is not None:
        raise ConfigError(f"{where}: {obstacle}")
    if experiment.tapped is not None and mode.isolated(setting.sent, model) is not None:
        raise ConfigError(
            f"{where} sends clients different models, and of a tap's round one model is known: "
            "leave [server] out"
        )
    if experiment.canary is not None and mode.isolated(setting.sent, model) is not None:
        raise ConfigError(
            f"{where} takes one client's update out of a sum, and [canary] measures whole sums: "
            "leave one of them out"
        )


def check_gate(gate: GateTable, names: Collection[str], kinds: Collection[str]) -> None:
    """Refuses names in a gate that no attack has.

    Args:
        gate: The gate of an experiment, or of the command line.
        names: The names of the attacks.
        kinds: The kinds of the attacks.

    Raises:
        ConfigError: The first such name.
    """
    listed = {*names, *map(listed_as, names)}
    for name in gate.may_abstain:
        if name not in listed:
            raise ConfigError(f"gate.may_abstain: {unknown('attack', name, listed)}")
    measured = {*kinds, CANARY_OF_EVERY_CLIENT}
    for requirement in gate.require:
        if requirement not in measured:
            raise ConfigError(f"gate.require: {unknown('kind of attack', requirement, measured)}")


def check_canaries(experiment: Experiment, model: LanguageModel) -> None:
    """Refuses canaries that nobody could score, or more than an update has room for.

    Raises:
        ConfigError: What is wrong.
    """
    if (table := experiment.canary) is None:
        return
    local, aggregator = experiment.local_training, experiment.aggregator
    if aggregator is not None and aggregator.update_claims(local, 1).carried:
        raise ConfigError(
            f"canary: the noise of {aggregator.kind} is correlated over rounds, and canaries would "
            "see it in one round at a time: leave [canary] out; `fedleak check-defense` tests this "
            "noise over several rounds"
        )
    changed = next(iter(experiment.client.changed), None)
    protected = [
        any(e is not None and e.unit == "client" for e in (d.event(local, 1, 1) for d in used))
        for used in (experiment.defenses_of(c).values() for c in experiment.unlike_clients)
    ]
    if changed and not all(protected):
        raise ConfigError(
            f"canary: canaries are scored in sums of gradients, and client.{changed} changes "
            "these: leave one of them out; canaries can stay where each is a whole update, as with "
            "local_dp"
        )
    for client in experiment.unlike_clients:
        numbers = sum(sent_sizes(experiment, client, model).values())
        if table.count > (most := most_canaries(numbers)):
            raise ConfigError(
                f"canary.count = {table.count}: client {client} sends {numbers:,} numbers, and a "
                f"canary takes {FEWEST_NUMBERS}: at most {most}"
            )


def check_published(experiment: Experiment) -> None:
    """Refuses secrets that no published model could be asked for.

    Raises:
        ConfigError: What is wrong.
    """
    if (table := experiment.published) is None:
        return
    if experiment.model.task != CAUSAL_LM:
        raise ConfigError(
            f"published: a model is asked how a text goes on, and model.task = "
            f"{experiment.model.task!r} cannot say: set {CAUSAL_LM!r}, or leave [published] out"
        )
    if experiment.data.on_nodes:
        raise ConfigError(
            "published: secrets are planted in data that this machine divides, and with "
            "data.on_nodes each node has its own: leave one of them out"
        )
    if experiment.model.response_template not in table.beginning:
        raise ConfigError(
            "published.beginning lacks model.response_template = "
            f"{experiment.model.response_template!r}, behind which texts are learnt: end it so"
        )


def attack_settings(experiment: Experiment, model: LanguageModel) -> list[AttackSetting]:
    """Returns the setting of an attack on each kind of capture that the server gets to see.

    In these settings an attack knows only what the server itself set: `grant` adds granted facts.

    Raises:
        ConfigError: A client sends nothing.
    """
    return [
        setting_of(experiment, sent, model, mode)
        for mode in experiment.modes_attacked
        for sent in captured_parameters(experiment, model, mode)
    ]


def setting_of(
    experiment: Experiment,
    sent: frozenset[str],
    model: LanguageModel,
    mode: ServerMode | None = None,
) -> AttackSetting:
    """Returns the setting of an attack on what was sent, as far as the server set it."""
    return AttackSetting(
        update=experiment.local_training.kind,
        shared=sent,
        knows=experiment.server_facts | ({"server_mode"} if mode else set()),
        server_mode=None if mode is None else mode.kind,
        family=model.family,
        num_layers=model.num_layers,
        task=model.task,
        response=bool(model.response_template),
    )


def grant(settings: Sequence[AttackSetting], facts: Iterable[str]) -> list[AttackSetting]:
    """Returns the settings of an attack that is granted facts."""
    return [replace(setting, knows=setting.knows.union(facts)) for setting in settings]


def check_attacks(experiment: Experiment, model: LanguageModel) -> None:
    """Refuses attacks that can work on no update that the server gets to see.

    An attack that can work on some rung of the ladder is only inadmissible on the others.

    Raises:
        ConfigError: An attack has an obstacle or lacks its equipment, or a client sends nothing.
    """
    settings = attack_settings(experiment, model)
    obstacles: dict[str, list[str | None]] = defaultdict(list)
    for named in experiment.attacks:
        named.check_equipment()
        granted = grant(settings, named.threat.knows)
        obstacles[named.listed_as] += map(named.attack.obstacle, granted)
    for name, of_attack in obstacles.items():
        # If it works on some clients, the others' updates are inadmissible.
        if all(of_attack):
            raise ConfigError(f"attack {name!r}: {of_attack[0]}")


def check_waiting(experiment: Experiment) -> None:
    """Refuses to let fewer captures wait than one call of an attack takes.

    The attack would wait for more captures, and training would wait for its answer.

    Raises:
        ConfigError: An attack takes more.
    """
    waiting, at_once = experiment.audit.waiting, experiment.workers.at_once
    if waiting is None:
        return
    for named in experiment.attacks:
        size = named.attack.at_once if isinstance(named.attack, Batched) else 1
        size = min(size, at_once or size, experiment.clients_per_round)
        if size > waiting:
            raise ConfigError(
                f"audit.waiting = {waiting}, but the attack {named.name!r} takes {size} captures "
                f"at once: raise it, or set workers.at_once = {waiting}"
            )
