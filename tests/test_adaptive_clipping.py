"""Adaptive clipping: the norm, its noise and what both noises spend, against plain loops."""

import math
import statistics
from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant
from tiny import Here, tables

from fedleak.audit import defense_checks
from fedleak.audit.vault import read_truth
from fedleak.config.federation.protection import protection
from fedleak.config.loading import parse
from fedleak.defenses.adaptive_clipping import AdaptiveClipping
from fedleak.flower.client.watching import movement
from fedleak.flower.engines import train
from fedleak.flower.server.strategy import CuriousServer
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.store.records import LEDGER
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.store.summaries import SUMMARY
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.wire import from_wire
from fedleak.util.rng import stream

TABLE = {"kind": "adaptive_clipping", "max_norm": 1e-3, "noise_multiplier": 0.5, "rate": 1.0}
ROUNDS, CLIENTS = 3, 3


def update(norm: float) -> ClientUpdate:
    return ClientUpdate(UpdateKind.GRADIENT, {"a": torch.tensor([0.0, norm])}, 1)


def adaptive(**settings: Any) -> AdaptiveClipping:
    return AdaptiveClipping(**{"max_norm": 2.0, "noise_multiplier": 0.5} | settings)


def test_the_norm_goes_to_the_quantile_of_the_clients_norms() -> None:
    updates = [update(1.05**n) for n in range(100)]
    for quantile in (0.2, 0.5, 0.9):
        defense = adaptive(max_norm=0.1, quantile=quantile, rate=0.5)
        for round in range(60):
            defense = defense.after(updates, rng=stream(0, round))
        assert math.log(defense.max_norm, 1.05) == pytest.approx(100 * quantile, abs=6)


@pytest.mark.parametrize(("clients", "noise"), [(4, 0.5), (4, 3.0), (100, 2.0), (1000, 1.0)])
def test_both_noises_together_are_one_use_of_the_noise_multiplier(
    clients: int, noise: float
) -> None:
    """A client moves the sum by the norm and the count by a half: one vector of sensitivities."""
    defense = adaptive(noise_multiplier=noise)
    on_sum = defense.noise_on_mean(clients) * clients / defense.max_norm
    on_count = defense._noise_on_count(clients)
    assert math.hypot(1 / on_sum, 0.5 / on_count) == pytest.approx(1 / noise)
    assert noise < on_sum <= 1.1548 * noise


def test_a_client_moves_the_logarithm_by_half_a_count_and_its_noise_is_the_count_s() -> None:
    defense, others = adaptive(rate=0.3), [update(1.0), update(9.0), update(3.0)]
    for norm in (0.0, 2.0, 2.1, math.inf, math.nan):
        there = defense.after([*others, update(norm)], rng=stream(1)).max_norm
        count = -0.5 + (0.5 if norm <= 2.0 else -0.5)  # 1 of the others is short, 2 are not
        noise = 0.5 * float(torch.randn((), generator=stream(1)))
        by_hand = 0.5 + (count + noise) / 4
        assert there == pytest.approx(2.0 * math.exp(-0.3 * (by_hand - 0.5)))
    logs = [math.log(defense.after(others, rng=stream(2, n)).max_norm) for n in range(2000)]
    assert statistics.stdev(logs) == pytest.approx(0.3 * 0.5 / 3, rel=0.08)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[Key, Any]]:
    """A run, and the updates that the server saw."""
    seen, original = {}, CuriousServer._capture

    def keep(server: CuriousServer, reply: Any, client: int) -> None:
        arrays = reply.content.array_records["update"]
        seen[Key(server._round, client)] = from_wire(arrays.to_torch_state_dict())
        original(server, reply, client)

    made = experiment()
    run = preparation.prepare(made, tmp_path_factory.mktemp("held") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defense_checks, "refuse_broken", lambda *_: None)
        patch.setattr(CuriousServer, "_capture", keep)
        pipeline.carry_out(run, made, train, Crew([Here()]))
    return run, seen


def experiment() -> Any:
    federation = {"clients": CLIENTS, "rounds": ROUNDS, "batch_size": 1, "learning_rate": 1.0}
    data = {"name": "builtin/notes", "samples": 6, "held_out": 2}
    more = {"canary": {"count": 4}, "attack": [], "utility": {"rounds": []}}
    return parse(tables({"defense": [TABLE], "federation": federation, "data": data} | more))


def test_a_run_is_a_loop_by_hand(held: tuple[Run, dict[Key, Any]]) -> None:
    run, seen = held
    norm, noise = 1e-3, 0.5 / math.sqrt(1 - 0.5**2)
    for round in range(1, ROUNDS + 1):
        total: dict[str, Any] = {}
        bits = 0
        for client in range(CLIENTS):
            tensors = seen[Key(round, client)]
            long = math.sqrt(sum(float((value.double() ** 2).sum()) for value in tensors.values()))
            bits += long <= norm
            for name, value in tensors.items():
                total[name] = total.get(name, 0.0) + value.double() * min(1.0, norm / long)
        rng = stream(experiment().seed, "combined", round)
        capture = run.captures.read_capture(Key(round, EVERYONE)).update.tensors
        for name in sorted(total):
            drawn = torch.randn(total[name].shape, generator=rng)
            by_hand = (total[name] + noise * norm * drawn) / CLIENTS
            torch.testing.assert_close(capture[name].double(), by_hand, rtol=1e-3, atol=1e-6)
        truth = read_truth(run, Key(round, EVERYONE))
        assert truth is not None
        assert truth.noise_scale == pytest.approx(noise * norm / CLIENTS)
        rng = stream(experiment().seed, "after", round)
        share = (bits + 0.5 * float(torch.randn((), generator=rng))) / CLIENTS
        norm *= math.exp(-1.0 * (share - 0.5))
    assert run.info()["clipping_norms"][str(ROUNDS + 1)] == pytest.approx(norm)


def test_a_client_does_not_know_how_far_the_next_norms_let_the_model_move() -> None:
    how = movement(experiment(), protection(experiment(), 0, 2))
    assert (how.most, how.noise) == (None, None)


def test_the_ledger_is_that_of_fixed_clipping_and_canaries_agree(
    held: tuple[Run, dict[Key, Any]],
) -> None:
    run, _ = held
    for row in run.rows(LEDGER):
        accountant = RDPAccountant()
        for _ in range(row.round):
            accountant.step(noise_multiplier=0.5, sample_rate=1.0)
        assert row.epsilon <= accountant.get_epsilon(1e-5)
        assert (row.noise_multiplier, row.unit, row.neighbouring) == (
            0.5,
            "client",
            "zero out one",
        )
    shown = run.read_document(SUMMARY).canary
    assert shown is not None
    assert not shown.alarms
