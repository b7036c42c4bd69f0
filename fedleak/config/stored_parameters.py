"""Which parameters captures hold: `[audit] store`."""

from fedleak.attacks import AttackSetting, read_by
from fedleak.attacks.server_modes import ServerMode
from fedleak.config.checks import attack_settings, grant, setting_of
from fedleak.config.experiment import Experiment
from fedleak.models import LanguageModel
from fedleak.util.errors import ConfigError


def stored_parameters(
    experiment: Experiment,
    sent: frozenset[str],
    model: LanguageModel,
    mode: ServerMode | None = None,
) -> frozenset[str]:
    """Returns the parameters that a capture holds, of those that were sent.

    Args:
        experiment: What is run.
        sent: The parameters that were sent.
        model: The model, which names its parameters.
        mode: What a malicious server does in the round; None: it is honest.
    """
    if experiment.audit.store == "all":
        return sent
    read = _parameters_read(experiment, setting_of(experiment, sent, model, mode))
    return frozenset().union(*read.values())


def check_stored(made: Experiment, wanted: Experiment, model: LanguageModel) -> None:
    """Refuses attacks that read what the captures of a run do not hold.

    Args:
        made: The experiment that made the run.
        wanted: The experiment that attacks it now.
        model: The model, which names its parameters.

    Raises:
        ConfigError: The first such attack.
    """
    if made.audit.store == "all":
        return
    for setting in attack_settings(wanted, model):
        mode = None if setting.server_mode is None else made.server_built.mode
        held = stored_parameters(made, setting.shared, model, mode)
        for name, names_read in _parameters_read(wanted, setting).items():
            if missing := sorted(names_read - held):
                raise ConfigError(
                    f"attack {name!r} reads {len(missing)} tensors that the captures do not hold "
                    f"(audit.store = 'read'), such as {missing[0]}: run the experiment anew with "
                    "this attack in its file, or with audit.store = 'all'"
                )


def read_whole(experiment: Experiment, model: LanguageModel) -> list[str]:
    """Returns the names of the attacks that read all that some client sends."""
    names: set[str] = set()
    for setting in attack_settings(experiment, model):
        read = _parameters_read(experiment, setting)
        names |= {name for name, names_read in read.items() if names_read == setting.shared}
    return sorted(names)


def _parameters_read(experiment: Experiment, setting: AttackSetting) -> dict[str, frozenset[str]]:
    """Returns what each attack reads, by its name: nothing if it cannot work."""
    return {
        named.name: read_by(named.attack, known)
        if named.attack.obstacle(known) is None
        else frozenset()
        for named in experiment.attacks
        for known in grant([setting], named.threat.knows)
    }
