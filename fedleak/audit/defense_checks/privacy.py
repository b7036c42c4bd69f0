"""Tests of a defense's guarantee: rounds add up, and a step spends no more than its event says."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import torch
from pydantic import TypeAdapter

from fedleak.audit.defense_checks.bench import Bench, Test
from fedleak.audit.privacy.canaries import ALARM
from fedleak.config.experiment import Experiment
from fedleak.config.federation.canaries import ClientCanaries, client_canaries
from fedleak.config.federation.protection import Protection
from fedleak.config.sent_parameters import sent_sizes
from fedleak.config.tables import CanaryTable
from fedleak.defenses import TrustedAggregator
from fedleak.training.batches import passes
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.privacy import accounting, lower_bounds
from fedleak.training.privacy.accounting import Event
from fedleak.training.privacy.canaries import most_canaries

CANARIES, COPIES, UPDATES = 64, 4, 4
"""Canaries of an update; canaries if each is in a copy of its own, to which the defense is applied;
and updates with canaries."""


def guarantees(bench: Bench) -> Iterator[Test]:
    """Tests that two rounds with the same example cost more than one, and the same in two runs."""
    local = replace(bench.local, kind=bench.sends)
    again = 1 + (passes(bench.num_examples, local) if bench.sends == UpdateKind.GRADIENT else 1)
    first, second = (bench.defense.event(local, bench.num_examples, round) for round in (1, again))
    if first is None and second is None:
        return

    def epsilon(events: Sequence[Event | None]) -> float:
        return sum(
            spent.epsilon
            for spent in accounting.compose([event for event in events if event], 1e-5, "rdp")
        )

    noted = first and TypeAdapter(Event).validate_python(asdict(first))  # as the ledger does
    single, whole, later = epsilon([first]), epsilon([first, second]), epsilon([noted, second])
    yield (
        "two runs of one round spend what one run of two does, and more than one round",
        whole == later and whole > single > 0,
        f"epsilon {whole:.4g} and {later:.4g} at delta 1e-5; one round {single:.4g}",
    )


def counts(bench: Bench) -> Iterator[Test]:
    """Tests that the ledger counts no more noise than there is, and no sampling that is not there.

    Other tests measure the noise itself, and how far an example or a client moves the update,
    against the same claims.
    """
    event, claims = bench.defense.event(bench.local, bench.num_examples, 1), bench.claims
    if event is None:
        return
    scale, moved = claims.noise_scale or 0.0, claims.example_norm
    if event.unit == "client":
        # Two updates that are no longer than the norm are at most twice the norm apart.
        moved = (2.0 if event.neighbouring.startswith("replace") else 1.0) * (claims.max_norm or 0)
    if isinstance(bench.defense, TrustedAggregator):
        scale, moved = 2 * bench.defense.noise_on_mean(2), claims.client_norm
    there = scale / moved if moved else 0.0
    unsampled = event.unit == "example" or event.sampling_rate == 1.0
    yield (
        "the ledger counts no more noise than there is, and clients in every round",
        event.noise_multiplier <= there * (1 + 1e-9) and unsampled,
        f"a noise multiplier of {event.noise_multiplier:.4g} of {there:.4g}, a sampling rate of "
        f"{event.sampling_rate:.3g}",
    )


def measured(bench: Bench, experiment: Experiment, client: int) -> Iterator[Test]:
    """Tests by canaries that a step spends no more than its event says.

    Every canary takes part in the step, so its epsilon is computed without sampling.
    """
    event = bench.defense.event(bench.local, bench.num_examples, 1)
    room = most_canaries(sum(sent_sizes(experiment, client, bench.model).values()))
    if event is None or not room:
        return
    count = min(COPIES if event.unit == "client" else CANARIES, room)
    table = CanaryTable(count=count)
    with_canaries = experiment.model_copy(update={"canary": table})
    client_alone = Protection(bench.local, {0: bench.defense}, bench.num_examples)
    inside: list[float] = []
    for noise in range(UPDATES):
        made = client_canaries(
            with_canaries, client_alone, client, 1 + noise, bench.model, bench.texts
        )
        assert made is not None
        # Plus or minus here, whose sign is known: each of the few copies is used.
        made = replace(made, coins=replace(made.coins, joined=False))
        for number, (canaries, update) in enumerate(_with_canaries(bench, made, noise)):
            fresh = noise * count + number
            captured = bench.defended(update, fresh)
            if isinstance(bench.defense, TrustedAggregator):
                captured = bench.combined([captured], fresh)
            scores = made.canaries.score(captured.tensors)[canaries]
            pairs = zip(scores.tolist(), made.coins.inside[canaries], strict=True)
            inside += [z if coin else -z for z, coin in pairs if coin or made.coins.whole]
    delta = experiment.privacy.delta
    # Plus and minus are as far apart as any two updates, and twice as far as one and nothing.
    apart = 2.0 if event.neighbouring.startswith("replace") else 1.0
    bound = lower_bounds.gaussian_bound(inside, ALARM, delta, per_score=apart)
    step = replace(event, steps=1, sampling_rate=1.0, sampling="none", disjoint=None)
    (spent,) = accounting.compose([step], delta, accounting.BOTH_ACCOUNTANTS)
    yield (
        f"a step without sampling spends no more than epsilon {spent.epsilon:.4g} at delta "
        f"{delta:g}",
        bound <= spent.epsilon,
        f"{len(inside)} canaries show at least {bound:.4g} (p < {ALARM:g})",
    )


def _with_canaries(
    bench: Bench, made: ClientCanaries, noise: int
) -> Iterator[tuple[slice, ClientUpdate]]:
    """Yields updates before the defense is applied, each with the canaries that are in it."""
    if made.planted is None:
        yield from made.copies(bench.raw())
        return
    in_every_step = torch.ones(made.canaries.count, dtype=torch.bool)
    planted = replace(made.planted, drawn_K=in_every_step)
    yield slice(None), bench.trained(noise=noise, planted=planted)
