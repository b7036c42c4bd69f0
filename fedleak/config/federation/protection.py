"""What one client does for its privacy: its defenses, with all noise worked out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedleak.config.experiment import Experiment
from fedleak.config.federation.schedule import rounds_of_clients
from fedleak.defenses import Budget, Claims, Defense, TrustedAggregator, measured
from fedleak.defenses.secure_sum import SecureSum
from fedleak.training.observation import ClientUpdate
from fedleak.training.privacy import accounting
from fedleak.training.privacy.accounting import Event
from fedleak.training.settings import LocalTraining
from fedleak.util.errors import ConfigError, about, blaming


@dataclass(frozen=True)
class Protection:
    """What one client does for its privacy.

    Attributes:
        local: How it trains.
        defenses: Its defenses by their place in the experiment file, with all noise worked out.
        num_examples: Examples that it has.
    """

    local: LocalTraining
    defenses: Mapping[int, Defense]
    num_examples: int

    def defend(
        self, update: ClientUpdate, rng: Callable[[int], torch.Generator]
    ) -> tuple[ClientUpdate, list[dict[str, Any]]]:
        """Returns the defended update, and what each defense did to it.

        Args:
            update: As training left it.
            rng: The random stream of each defense, by its place in the file.

        Raises:
            FedleakError: A defense failed; the message names it.
        """
        effects = []
        for number, defense in self.defenses.items():
            with blaming(f"defense[{number}] ({defense.kind}) failed on an update"):
                after = defense(update, rng=rng(number))
            # A defense that only changes training leaves the update as it is.
            did = {} if after is update else measured(update, after)
            effects.append({"defense": number, "kind": defense.kind, **did})
            update = after
        return update, effects

    def events(self, round: int) -> list[Event]:
        """Returns what a round adds to the ledger."""
        events = (d.event(self.local, self.num_examples, round) for d in self.defenses.values())
        return [event for event in events if event is not None]

    def claims(self) -> list[Claims]:
        """Returns what its defenses say of an update of this client."""
        return [d.update_claims(self.local, self.num_examples) for d in self.defenses.values()]

    def noise_scale(self) -> float | None:
        """Returns the standard deviation of all noise on a number of the update.

        None: there is no noise, or its scale depends on the update.
        """
        scales = [claim.noise_scale for claim in self.claims() if claim.noise_scale is not None]
        return math.hypot(*scales) if scales and not self.scales_with_update() else None

    def scales_with_update(self) -> bool:
        """Returns whether the scale of some noise depends on the update."""
        return any(defense.scales_with_update for defense in self.defenses.values())


def protocol_of(experiment: Experiment) -> SecureSum | None:
    """Returns the secure sum that a protocol computes; None: no sum, or one without a protocol."""
    aggregator = experiment.aggregator
    runs = isinstance(aggregator, SecureSum) and aggregator.protocol is not None
    return aggregator if runs else None  # type: ignore[return-value]


def aggregator_of(experiment: Experiment) -> TrustedAggregator | None:
    """Returns the trusted aggregator, with all noise worked out; None: there is none.

    There is one for all clients, so its noise suffices for the client that takes part most often.

    Raises:
        ConfigError: An epsilon that no noise reaches.
    """
    if (aggregator := experiment.aggregator) is None:
        return None
    budget = _budget(experiment, 1, max(rounds_of_clients(experiment), key=len))
    return aggregator.solved(experiment.local_training, budget)


def _budget(experiment: Experiment, num_examples: int, rounds: Sequence[int]) -> Budget:
    """Returns a client's privacy budget; a client that never trains gets that of one round."""
    return Budget(
        **experiment.privacy.model_dump(), num_examples=num_examples, rounds=rounds or [1]
    )


def protection(experiment: Experiment, client: int, num_examples: int) -> Protection:
    """Returns what a client with so many examples does for its privacy.

    Raises:
        ConfigError: An epsilon that no noise reaches, or a noise scale that is granted and depends
            on the update.
    """
    rounds = rounds_of_clients(experiment)[client]
    table, local = experiment.privacy, experiment.local_training
    local = replace(local, batch_size=min(local.batch_size, num_examples))
    budget = _budget(experiment, num_examples, rounds)
    solved = {}
    for number, defense in experiment.defenses_of(client).items():
        with about(f"defense[{number}] ({defense.kind})"):
            of_all = aggregator_of(experiment) if isinstance(defense, TrustedAggregator) else None
            solved[number] = of_all or defense.solved(local, budget)
    for defense in solved.values():
        local = defense.training(local)
    client_protection = Protection(local, solved, num_examples)
    if "noise_scale" in experiment.threat.knows and client_protection.scales_with_update():
        raise ConfigError(
            "threat.knows has noise_scale, and noise that is relative to an update has another "
            "scale in each: do not grant it, or give gaussian_noise a sigma"
        )
    for number, defense in solved.items():
        if (obstacle := defense.schedule_obstacle(rounds)) is not None:
            raise ConfigError(f"defense[{number}] ({defense.kind}): {obstacle}")
    # Refuses now what the accountant could not count after training.
    events = [event for round in budget.rounds for event in client_protection.events(round)]
    accounting.compose(events, table.delta, table.accountant)
    return client_protection
