"""Which canaries a client has, how they enter its update, and what the client keeps of them.

There are four ways:

- as the gradients of further examples in steps of DP-SGD, in the update that is sent: they are
  negligible beside the noise. They are dummy records of the client's data set, and the client's own
  sampler draws them, for a round and for a local step;
- as the whole update, plus or minus a direction, where a defense protects all that a client has:
  any two updates are neighbours then, so each canary is in a copy of its own, with fresh noise;
- added to the update, where nothing bounds what an example contributes;
- as clients of their own, beside the round's, where a trusted server protects all that a client has
  (Andrew et al. 2024, "One-shot empirical privacy estimation for federated learning"). The canaries
  of a client are in or out in the rounds in which this client trains.

The last three are made in an audited copy that goes through the same defenses, with the same noise,
and is never sent or aggregated, because canaries would degrade the model.

Each canary's coin is flipped once for the run, and its places and directions are drawn anew in
every round. So a canary stands for an example that the client has from the first round to the last,
and bounds by it are about the whole run, as the ledger is.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from fedleak.config.experiment import Experiment
from fedleak.config.federation.protection import Protection
from fedleak.config.sent_parameters import sent_sizes
from fedleak.defenses import TrustedAggregator
from fedleak.models import LanguageModel
from fedleak.training.batches import Records, passes
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.planted import DUMMIES, Planted
from fedleak.training.privacy.canaries import Canaries, most_canaries
from fedleak.training.steps import Batch
from fedleak.training.truth import Coins
from fedleak.util.rng import stream, stream_seed

TOO_LONG = 10.0
"""The largest norm of a canary, in clipping norms: it shows a missing clip, and one too late."""

WITNESSES = 64
"""The most witnesses: directions that are the same for all updates and planted in none."""


@dataclass(frozen=True)
class ClientCanaries:
    """The canaries of one client's update.

    Attributes:
        canaries: Their places and directions.
        coins: Which of them are in, and what else the client keeps to itself.
        planted: The canaries as they enter private steps; None: they are in an audited copy.
        scale: What a canary adds to a number of the audited copy, per unit of its direction.
    """

    canaries: Canaries
    coins: Coins
    planted: Planted | None
    scale: float

    def drawn_in(self, steps: Sequence[Sequence[int]]) -> "ClientCanaries":
        """Returns the canaries with the number of steps that drew each, by the steps' records."""
        if (planted := self.planted) is None:
            return self
        drawn_TK = [planted.records.drawn_canaries(step) for step in steps]
        if planted.drawn_K is not None:  # one batch, in which all of them are
            drawn_TK = [planted.drawn_K]
        drawn_K = torch.stack(drawn_TK).sum(0)
        return replace(self, coins=replace(self.coins, drawn=tuple(drawn_K.tolist())))

    def copies(self, update: ClientUpdate) -> Iterator[tuple[slice, ClientUpdate]]:
        """Yields copies of the update as they would be with canaries, before defenses.

        Each copy comes with the slice of canaries in it: all, or the single one that the copy is.
        """
        inside_K = np.array(self.coins.inside, dtype=np.float32)
        if not self.coins.whole:
            copy, sizes_K = update.changed(torch.clone), self.scale * inside_K
            self.canaries.add_(copy.tensors, self.canaries.directions() * sizes_K)
            yield slice(None), copy
            return
        for canary, sign in enumerate(inside_K if self.coins.joined else 2 * inside_K - 1):
            copy, sizes_K = update.changed(torch.zeros_like), np.zeros_like(inside_K)
            sizes_K[canary] = self.scale * sign
            self.canaries.add_(copy.tensors, self.canaries.directions() * sizes_K)
            yield slice(canary, canary + 1), copy

    def differences(
        self, raw: ClientUpdate, sent: ClientUpdate, defend: Callable[..., ClientUpdate]
    ) -> Tensor:
        """Returns how defended copies differ from the update at the canaries' numbers [S, K].

        Args:
            raw: The update before defenses.
            sent: The update after defenses.
            defend: Defends a copy. If the copy has fresh noise, its number is a second argument.
        """
        sent_SK = self.canaries.taken(sent.tensors)
        audited_SK = np.empty_like(sent_SK)
        for canaries, copy in self.copies(raw):
            fresh = (canaries.start,) if self.coins.whole else ()
            audited = defend(copy, *fresh)
            audited_SK[:, canaries] = self.canaries.taken(audited.tensors)[:, canaries]
        return torch.from_numpy(audited_SK - sent_SK)


def differences_of_sum(
    experiment: Experiment,
    aggregator: TrustedAggregator,
    round: int,
    model: LanguageModel,
    combined: ClientUpdate,
    clients: Sequence[int],
    updates: Iterable[ClientUpdate],
) -> Iterator[tuple[int, Tensor]]:
    """Yields for each client by how much the sum differs at its canaries' numbers [S, K].

    In the audited copy the canaries of all clients join the round together, with the same noise on
    the sum.

    Args:
        experiment: Sets how many canaries each client has.
        aggregator: Makes the sum.
        round: The round.
        model: Has the parameters that canaries are added to.
        combined: The sum without canaries.
        clients: The clients in the sum.
        updates: Their updates.
    """
    alone = Protection(experiment.local_training, {0: aggregator}, 1)
    made_of = {
        client: made
        for client in clients
        if (made := client_canaries(experiment, alone, client, round, model, Batch([], [])))
    }
    if not made_of:
        return
    joining = (copy for made in made_of.values() for _, copy in made.copies(combined))
    rng = stream(experiment.seed, "combined", round)
    audited = aggregator.combined(chain(updates, joining), rng=rng)
    share = len(clients) / (len(clients) + sum(made.canaries.count for made in made_of.values()))
    for client, made in made_of.items():
        audited_SK = made.canaries.taken(audited.tensors) / share
        yield client, torch.from_numpy(audited_SK - made.canaries.taken(combined.tensors))


def places(experiment: Experiment, client: int, round: int, model: LanguageModel) -> Canaries:
    """Returns where the canaries of an update are: what the auditor knows of them."""
    table = experiment.canary
    assert table is not None
    seed = experiment.seed if table.seed is None else table.seed
    return Canaries(
        sent_sizes(experiment, client, model),
        table.count,
        stream_seed(seed, "canaries", client, round),
    )


def witnesses(experiment: Experiment, sizes: Mapping[str, int]) -> Canaries:
    """Returns directions that are in no update: equal scores in two betray the same noise."""
    count = max(1, min(WITNESSES, most_canaries(sum(sizes.values()))))
    return Canaries(sizes, count, stream_seed(experiment.seed, "witnesses"))


def client_canaries(
    experiment: Experiment,
    protection: Protection,
    client: int,
    round: int,
    model: LanguageModel,
    texts: Batch,
) -> ClientCanaries | None:
    """Returns the canaries of a client in a round; None: it has none.

    Args:
        experiment: Sets how many.
        protection: What the client's defenses do.
        client: The client.
        round: The round.
        model: Has the parameters that canaries are added to.
        texts: The client's examples: dummies are copies of the shortest and the longest.
    """
    if experiment.canary is None or not experiment.carries_canaries(client):
        return None
    local, held = protection.local, protection.num_examples
    of_fedsgd = local.kind == UpdateKind.GRADIENT
    whole = any(event.unit == "client" for event in protection.events(round))
    private = None if whole else local.private
    poisson = local.poisson and not whole
    size = min(local.batch_size, held)
    batches = passes(held, local) if of_fedsgd and not poisson and not whole else 1
    slot = (round - 1) % batches
    canaries = places(experiment, client, round, model)
    rng = stream(experiment.seed, "coins", client, slot)
    inside_K = torch.rand(canaries.count, generator=rng) < 0.5
    steps = local.steps(held) if private is not None else 1
    coins = Coins(
        inside=tuple(inside_K.tolist()),
        slot=slot,
        copy=private is None,
        whole=whole,
        rate=size / held if poisson else None,
        steps=steps,
        uses=steps if poisson or private is None or of_fedsgd else local.epochs,
        drawn=(1,) * canaries.count,
        alike=local.recipe.plain and local.schedule.shape == "constant",
        joined=any(
            isinstance(defense, TrustedAggregator) and defense.noisy
            for defense in protection.defenses.values()
        ),
    )
    if private is not None:
        records = Records(held, canaries.count, poisson)
        # Each batch of a pass has a set of canaries of its own.
        drawn_K = torch.ones_like(inside_K) if of_fedsgd and not poisson else None
        lengths = list(map(len, texts.sequences))
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        dummies = texts.of([by_length[0], by_length[-1]])
        loudnesses = _spread(stream(experiment.seed, "loudness", client), round)
        norms = [private.max_grad_norm * TOO_LONG**loudness for loudness in loudnesses]
        planted = Planted(canaries, inside_K, dummies, tuple(norms), records, drawn_K)
        return ClientCanaries(canaries, coins, planted, 0.0)
    scale = TOO_LONG * _longest(protection) if whole else experiment.canary.norm / size
    if not of_fedsgd:
        # A step goes against the gradient, once in each epoch.
        scale *= -1.0 if whole else -local.learning_rate * local.epochs
    return ClientCanaries(canaries, coins, None, scale)


def _spread(rng: torch.Generator, round: int) -> list[float]:
    """Returns a number between 0 and 1 for each dummy; over the rounds they are evenly spaced.

    They are multiples of the golden ratio, modulo 1, so a clip that is wrong for some norms meets
    such a norm in the first rounds.
    """
    first = float(torch.rand((), generator=rng))
    golden = (math.sqrt(5) - 1) / 2
    return [(first + golden * (DUMMIES * round + dummy)) % 1.0 for dummy in range(DUMMIES)]


def _longest(protection: Protection) -> float:
    """Returns the L2 norm that the defense of a client's whole update allows."""
    norms = [(claim.max_norm, claim.client_norm) for claim in protection.claims()]
    return max(filter(None, chain.from_iterable(norms)), default=1.0)
