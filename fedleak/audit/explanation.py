"""What an experiment lets the server see and know, and which attacks can read it.

Nothing is trained and nothing is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedleak import attacks
from fedleak.attacks import AttackSetting, Equipped, Planned, Step
from fedleak.config import checks
from fedleak.config.components import NamedAttack, build_attack
from fedleak.config.experiment import Experiment
from fedleak.config.federation.trainable import trainable
from fedleak.config.federation.workload import outline
from fedleak.models import LanguageModel
from fedleak.training.observation import GRANTABLE
from fedleak.util.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Applicability:
    """Whether an attack can work on what the server sees.

    Attributes:
        name: The attack's name in the experiment; if the experiment does not list it, its kind.
        listed: Whether the experiment runs it.
        obstacles: For each kind of capture why the attack cannot work on it, or None.
        problem: Why it can work on no capture at all; None: nothing is missing.
        plans: For each kind of capture the attacks that it would run; () if it runs none.
    """

    name: str
    listed: bool
    obstacles: tuple[str | None, ...]
    problem: str | None
    plans: tuple[tuple[Step, ...], ...] = ()

    @property
    def reason(self) -> str | None:
        """Why the attack can work on no capture; None: it can work on some."""
        return self.problem or (self.obstacles[0] if all(self.obstacles) else None)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What an experiment lets the server see and know, and which attacks can read it.

    Attributes:
        captured: For each kind of capture how many parameters are in it.
        parameters: How many parameters are trained.
        knows, unknown: Facts that the attacker has, and facts that it could be granted.
        attacks: Every attack that there is, and whether it can work.
    """

    captured: tuple[int, ...]
    parameters: int
    knows: tuple[str, ...]
    unknown: tuple[str, ...]
    attacks: tuple[Applicability, ...]


def explain(experiment: Experiment) -> Explanation:
    """Explains an experiment.

    Raises:
        ConfigError: `fedleak run` would refuse it, for what is not about attacks.
    """
    model = _model(experiment)
    settings = checks.attack_settings(experiment, model)
    knows = experiment.server_facts.union(experiment.threat.knows)
    listed = {named.attack.kind for named in experiment.attacks}
    by_default = checks.grant(settings, experiment.threat.knows)
    return Explanation(
        captured=tuple(len(setting.shared) for setting in settings),
        parameters=len(model.trained()),
        knows=tuple(sorted(knows)),
        unknown=tuple(sorted(GRANTABLE - knows)),
        attacks=(
            *(_applicability(named, settings, listed=True) for named in experiment.attacks),
            *(
                _applicability_by_default(kind, by_default)
                for kind in sorted(attacks.kinds().keys() - listed)
            ),
        ),
    )


def _model(experiment: Experiment) -> LanguageModel:
    """Returns the model, without weights, of what is to be trained or was trained elsewhere."""
    if experiment.tapped is None:
        return trainable(experiment).model
    model = outline(experiment, experiment.tapped.labels)
    checks.check_defenses(experiment, model)
    checks.check_server(experiment, model)
    return model


def _applicability(
    named: NamedAttack, settings: Sequence[AttackSetting], *, listed: bool
) -> Applicability:
    attack, problem = named.attack, None
    settings = checks.grant(settings, named.threat.knows)
    if isinstance(attack, Equipped):
        try:
            attack.check_equipment()
        except ConfigError as error:
            problem = str(error)
    plans = [tuple(attack.plan(s)) for s in settings] if isinstance(attack, Planned) else []
    return Applicability(
        name=named.name,
        listed=listed,
        obstacles=tuple(attack.obstacle(setting) for setting in settings),
        problem=problem,
        plans=tuple(plans),
    )


def _applicability_by_default(kind: str, settings: Sequence[AttackSetting]) -> Applicability:
    """Returns whether an attack can work with its default settings."""
    try:
        return _applicability(build_attack(0, {"kind": kind}), settings, listed=False)
    except ConfigError as error:
        return Applicability(
            name=kind, listed=False, obstacles=(), problem=f"has no defaults: {error}"
        )
