"""DP-FTRL: its noise is that of the matrices, and what it counts is never too little."""

import math
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tables

from fedleak.audit.vault import read_truth
from fedleak.config.federation.protection import protection
from fedleak.config.federation.schedule import rounds_of_clients
from fedleak.config.loading import parse
from fedleak.defenses import Noises
from fedleak.defenses.dp_ftrl import DpFtrl
from fedleak.flower.engines import train
from fedleak.running import preparation
from fedleak.store.run import EVERYONE, Key
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream

ROUNDS, NUMBERS = 8, 500


def matrix(bands: int, rounds: int = ROUNDS) -> np.ndarray:
    """Returns C: the square root of the matrix of prefix sums, with so many diagonals."""
    column, power = np.zeros(rounds), 1.0
    for row in range(min(bands, rounds)):
        column[row], power = power, power * (row + 0.5) / (row + 1)  # those of (1 - x) ** -0.5
    places = np.subtract.outer(range(rounds), range(rounds))
    return np.where(places >= 0, column[places], 0.0)


def noises(bands: int, *, goes_on: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Returns the noise of each round, and the independent noise that it is made of.

    With `goes_on` the server of a round is that of the round before; else it begins anew.
    """
    defense = DpFtrl(max_norm=1.0, noise_multiplier=2.0, bands=bands)
    seen, fresh = [], []
    kept: Noises = {}
    for round in range(1, ROUNDS + 1):
        nothing = ClientUpdate(UpdateKind.GRADIENT, {"a": torch.zeros(NUMBERS)}, 1)
        *earlier, rng = (stream(0, number) for number in range(1, round + 1))
        made = defense.combined([nothing] * 4, rng=rng)
        fresh.append(made.tensors["a"].double().numpy())
        kept = kept if goes_on else {}
        seen.append(defense.corrected(made, earlier, 4, kept).tensors["a"].double().numpy())
    return np.array(seen), np.array(fresh)


@pytest.mark.parametrize("bands", [1, 3, ROUNDS])
def test_the_noise_of_the_rounds_solves_the_banded_system(bands: int) -> None:
    seen, fresh = noises(bands)
    assert np.abs(matrix(bands) @ seen - fresh).max() < 1e-5
    assert np.std(fresh) == pytest.approx(2.0 / 4, rel=0.05)
    assert np.array_equal(seen, noises(bands, goes_on=False)[0]), "a run that was stopped"


@pytest.mark.parametrize("bands", [1, 3, ROUNDS])
def test_the_scale_of_a_round_is_that_of_its_row_of_the_inverse(bands: int) -> None:
    defense = DpFtrl(max_norm=1.0, noise_multiplier=2.0, bands=bands)
    scales = [defense.noise_on_mean(4, round) for round in range(1, ROUNDS + 1)]
    rows = np.linalg.norm(np.linalg.inv(matrix(bands)), axis=1)
    assert scales == pytest.approx(2.0 / 4 * rows)
    assert scales == sorted(scales), "the last is the largest"
    assert np.std(noises(bands)[0], axis=1) == pytest.approx(scales, rel=0.15)


def test_with_all_bands_the_sum_of_rounds_has_the_noise_of_the_square_root() -> None:
    """C C is the matrix of prefix sums, so the noise in the model is C times fresh noise."""
    root = matrix(ROUNDS)
    assert np.allclose(root @ root, np.tril(np.ones((ROUNDS, ROUNDS))))
    seen, fresh = noises(ROUNDS)
    assert np.abs(seen.cumsum(0) - root @ fresh).max() < 1e-5


@pytest.mark.parametrize(("bands", "separation"), [(1, 1), (3, 1), (3, 2), (4, 4), (8, 3), (6, 2)])
def test_no_participation_has_longer_columns_than_are_counted(bands: int, separation: int) -> None:
    defense = DpFtrl(max_norm=1.0, noise_multiplier=1.0, bands=bands, separation=separation)
    columns = matrix(bands, 10)
    worst = 0.0
    for count in range(1, 5):
        for rounds in combinations(range(10), count):
            if all(b - a >= separation for a, b in pairwise(rounds)):
                squared = float(np.square(columns[:, list(rounds)].sum(1)).sum())
                assert squared <= count * defense.charge * (1 + 1e-12)
                worst = max(worst, squared / count / defense.charge)
    assert worst > 0.45, "it is not counted many times"
    if separation >= bands <= 10:  # columns do not overlap
        assert defense.charge == pytest.approx(np.square(columns[:, 0]).sum())


def test_the_model_has_less_noise_than_with_fresh_noise_of_the_same_epsilon() -> None:
    rounds, bands = 32, 8
    inverse = np.linalg.inv(matrix(bands, rounds))
    carried = np.square(np.tril(np.ones((rounds, rounds))) @ inverse).sum(1).mean()
    defense = DpFtrl(max_norm=1.0, noise_multiplier=1.0, bands=bands, separation=bands)
    assert carried * defense.charge < 0.5 * (rounds + 1) / 2


def experiment(**federation: Any) -> Any:
    table = {"kind": "dp_ftrl", "max_norm": 0.5, "epsilon": 6.0, "bands": 3, "separation": 3}
    federation = {"clients": 6, "clients_per_round": 2, "rounds": 4, "batch_size": 1} | federation
    data = {"name": "builtin/notes", "samples": 12, "held_out": 4}
    return parse(tables({"defense": [table], "federation": federation, "data": data, "attack": []}))


def test_clients_that_take_turns_are_far_enough_apart() -> None:
    cyclic = experiment(participation="cyclic", rounds=7)
    rounds = rounds_of_clients(cyclic)
    assert all(b - a == 3 for own in rounds for a, b in pairwise(own))
    assert sorted(map(len, rounds)) == [2, 2, 2, 2, 3, 3]
    most = max(range(6), key=lambda client: len(rounds[client]))
    held = protection(cyclic, most, 2)
    events = [event for round in rounds[most] for event in held.events(round)]
    assert held.defenses[0].noise_multiplier == pytest.approx(
        events[0].noise_multiplier * held.defenses[0].charge ** 0.5
    )
    drawn = rounds_of_clients(experiment())
    close = next(c for c, own in enumerate(drawn) if any(b - a < 3 for a, b in pairwise(own)))
    with pytest.raises(ConfigError, match=r"separation = 3, and a client trains in rounds . and ."):
        protection(experiment(), close, 2)


def test_a_run_carries_noise_from_round_to_round(tmp_path: Path, monkeypatch: Any) -> None:
    """What is captured of a later round is that of fresh noise, less what is carried."""
    made = experiment(participation="cyclic")
    captured = {}
    for name in ("carried", "fresh"):
        if name == "fresh":
            monkeypatch.setattr(DpFtrl, "corrected", lambda self, update, *_: update)
        run = preparation.prepare(made, tmp_path / name)
        train(run, made, lambda: False)
        captured[name] = [
            run.captures.read_capture(Key(round, EVERYONE)).update.tensors for round in (1, 2)
        ]
    truths = [read_truth(run, Key(round, EVERYONE)) for round in (1, 2)]
    scales = [truth.noise_scale or 0.0 for truth in truths if truth is not None]
    assert scales[1] == pytest.approx(math.sqrt(1 + 0.5**2) * scales[0])
    (first, second), (fresh_first, fresh_second) = captured["carried"], captured["fresh"]
    assert all(torch.equal(first[name], fresh_first[name]) for name in first)
    noise = protection(made, 0, 2).defenses[0].noise_on_mean(2)
    rng = stream(made.seed, "combined", 1)
    for name in sorted(second):
        before = noise * torch.randn(second[name].shape, generator=rng)
        assert torch.allclose(second[name], fresh_second[name] - 0.5 * before, atol=1e-2 * noise)
