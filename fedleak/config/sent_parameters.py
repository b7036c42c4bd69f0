"""Which parameters of the model clients send."""

from fedleak.attacks.server_modes import ServerMode
from fedleak.config.experiment import Experiment
from fedleak.models import LanguageModel
from fedleak.models.parameter_selection import freezing, select
from fedleak.util.errors import ConfigError


def selected_parameters(experiment: Experiment, model: LanguageModel) -> list[str]:
    """Returns the parameters that a client without defenses sends, in the model's order.

    Raises:
        ConfigError: `update.share` names something that the model does not train, or that
            cannot be sent alone.
    """
    if experiment.update.share == "all":
        return list(model.trained())
    return select(model, experiment.update.share, "update.share")


def sent_by(experiment: Experiment, client: int, model: LanguageModel) -> frozenset[str]:
    """Returns the parameters that a client sends: selected, and not frozen by a defense."""
    selected = selected_parameters(experiment, model)
    with freezing(model, experiment.local_training_of(client).frozen):
        trained = model.trained()
    return frozenset(name for name in selected if name in trained)


def sent_sizes(experiment: Experiment, client: int, model: LanguageModel) -> dict[str, int]:
    """Returns the size of each parameter that a client sends, by name."""
    parameters = model.parameters()
    return {name: parameters[name].numel() for name in sorted(sent_by(experiment, client, model))}


def captured_parameters(
    experiment: Experiment, model: LanguageModel, mode: ServerMode | None = None
) -> list[frozenset[str]]:
    """Returns the different sets of parameters that are captured: clients' defenses may differ.

    Args:
        experiment: What is run.
        model: With names; no weights are needed.
        mode: What a malicious server does in the round; None: it is honest.

    Raises:
        ConfigError: What `selected_parameters` raises, or a client has nothing left to send.
    """
    sent_sets = []
    for client in experiment.unlike_clients:
        sent_sets.append(sent_by(experiment, client, model))
        if not sent_sets[-1]:
            raise ConfigError(
                f"update.share: all that client {client} shares is frozen: share or train "
                "something else"
            )
    if experiment.sees != "updates":
        together = frozenset().union(*sent_sets)
        isolated = None if mode is None else mode.isolated(together, model)
        return [together if isolated is None else isolated]
    return list(dict.fromkeys(sent_sets))
