"""Which parameters captures hold: `[audit] store`."""

from fedleak.attacks import AttackSetting, read_by
from fedleak.config.checks import attack_settings, setting_of, told
from fedleak.config.experiment import Experiment
from fedleak.models import LanguageModel
from fedleak.util.errors import ConfigError


def stored_parameters(
    experiment: Experiment, sent: frozenset[str], model: LanguageModel
) -> frozenset[str]:
    """Returns which of the parameters that were sent a capture holds."""
    if experiment.audit.store == "all":
        return sent
    return frozenset().union(*_read(experiment, setting_of(experiment, sent, model)).values())


def check_stored(made: Experiment, asked: Experiment, model: LanguageModel) -> None:
    """Refuses attacks that read what the captures of a run do not hold.

    Args:
        made: What the run was made with.
        asked: What attacks it now.
        model: With its parameters' names.

    Raises:
        ConfigError: The first such attack.
    """
    if made.audit.store == "all":
        return
    for setting in attack_settings(asked, model):
        held = stored_parameters(made, setting.shared, model)
        for name, read in _read(asked, setting).items():
            if missing := sorted(read - held):
                raise ConfigError(
                    f"attack {name!r} reads {len(missing)} tensors that the captures do not hold "
                    f"(audit.store = 'read'), such as {missing[0]}: run the experiment anew with "
                    "this attack in its file, or with audit.store = 'all'"
                )


def read_whole(experiment: Experiment, model: LanguageModel) -> list[str]:
    """Returns the names of the attacks that read all that some client sends."""
    found = {
        name
        for setting in attack_settings(experiment, model)
        for name, read in _read(experiment, setting).items()
        if read == setting.shared
    }
    return sorted(found)


def _read(experiment: Experiment, setting: AttackSetting) -> dict[str, frozenset[str]]:
    """Returns what each attack reads, by its name; one that cannot work there reads nothing."""
    found: dict[str, frozenset[str]] = {}
    for each in experiment.attacks:
        [known] = told([setting], each.threat)
        admissible = each.attack.obstacle(known) is None
        found[each.name] = read_by(each.attack, known) if admissible else frozenset()
    return found
