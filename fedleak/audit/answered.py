"""Which answers of a run come from an experiment's attacks."""

from collections.abc import Iterable

from fedleak.attacks import settings
from fedleak.config.experiment import Experiment
from fedleak.config.wording import difference
from fedleak.store.records import Answer
from fedleak.store.run import Key
from fedleak.util.errors import ConfigError


def answered(answers: Iterable[Answer], experiment: Experiment) -> set[tuple[Key, str]]:
    """Returns the ids of the answers that this experiment's attacks have given already.

    Raises:
        ConfigError: An attack of this name answered with other settings or other granted facts.
    """
    known = {named.name: named for named in experiment.attacks}
    answered_ids = set()
    for answer in answers:
        named = known.get(answer.attack)
        if named is None:
            continue
        changed = difference(answer.settings, settings(named.attack))
        # Facts that an attack does not use cannot change its answer.
        before, now = (named.attack.uses & set(g) for g in (answer.granted, named.threat.knows))
        changed += difference(sorted(before), sorted(now), "threat.knows.")
        if changed:
            raise ConfigError(
                f"attack {named.name!r} already ran here with other settings "
                f"({'; '.join(changed)}): give this one another name = ..."
            )
        answered_ids.add(answer.id)
    return answered_ids
