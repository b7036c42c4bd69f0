"""Which answers of a run are those of an experiment's attacks."""

from collections.abc import Iterable

from fedleak.attacks import settings
from fedleak.config.experiment import Experiment
from fedleak.config.wording import difference
from fedleak.store.records import Answer
from fedleak.store.run import Key
from fedleak.util.errors import ConfigError


def answered(answers: Iterable[Answer], experiment: Experiment) -> set[tuple[Key, str]]:
    """Returns what this experiment's attacks have answered already.

    Raises:
        ConfigError: An attack of this name answered with other settings, or was told other facts.
    """
    known = {each.name: each for each in experiment.attacks}
    found = set()
    for answer in answers:
        each = known.get(answer.attack)
        if each is None:
            continue
        changed = difference(answer.settings, settings(each.attack))
        # An attack that uses none of the facts answers alike, whatever is granted.
        before, now = (each.attack.uses & set(g) for g in (answer.granted, each.threat.knows))
        changed += difference(sorted(before), sorted(now), "threat.knows.")
        if changed:
            raise ConfigError(
                f"attack {each.name!r} already ran here with other settings "
                f"({'; '.join(changed)}): give this one another name = ..."
            )
        found.add(answer.id)
    return found
