"""A trusted server's noise on the mean of clipped updates, and what the published models tell."""

import dataclasses
import io
import math
import statistics
from itertools import chain, product

import pytest
import torch
from cases import some
from opacus.accountants import PRVAccountant
from rich.console import Console
from tiny import Here, call, toml

from fedleak.audit import defense_checks, explanation, grants, vault
from fedleak.config.checks import check_canaries, check_defenses
from fedleak.config.federation.canaries import places
from fedleak.config.federation.protection import aggregator_of, protection
from fedleak.config.federation.schedule import rounds_of_clients
from fedleak.config.loading import parse
from fedleak.defenses.central_dp import CentralDp
from fedleak.flower.engines import train
from fedleak.flower.server.strategy import CuriousServer
from fedleak.models import loading
from fedleak.report.terminal import explanation as shown
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.running.reports import report_run
from fedleak.store.records import CANARIES, LEAKAGE, LEDGER
from fedleak.store.run import EVERYONE, Key
from fedleak.store.summaries import SUMMARY
from fedleak.training.observation import ClientUpdate, ThreatModel, UpdateKind
from fedleak.training.wire import from_wire
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream

CENTRAL = {"kind": "central_dp", "max_norm": 0.5, "noise_multiplier": 0.8}
SECURE_SUM = {"kind": "secure_sum"}
MODELS = {"sees": "models"}
SMALL = {"name": "smaller than builtin/bert-tiny: `folder`"}
TABLE = {
    "name": "central",
    "seed": 7,
    "model": SMALL,
    "data": {"name": "builtin/notes", "samples": 10, "held_out": 2},
    "federation": {"clients": 3, "rounds": 2, "batch_size": 2, "learning_rate": 0.1},
    "utility": {"rounds": []},
    "attack": [],
    "workers": {"devices": ["cpu"]},
}


@pytest.fixture(scope="module", autouse=True)
def folder(saved):
    """Makes a model of the built-in one's vocabulary that costs a tenth."""
    SMALL["name"] = saved("bert")


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Leaves out what tests/audit/test_defense_checks.py tests."""
    monkeypatch.setattr(defense_checks, "refuse_broken", lambda *_: None)


def experiment_of(*defense, federation=(), **tables):
    federation = TABLE["federation"] | dict(federation)
    return parse(TABLE | tables | {"defense": list(defense), "federation": federation})


def carried_out(path, experiment):
    run = preparation.prepare(experiment, path)
    pipeline.carry_out(run, experiment, train, Crew([Here()]))
    return run


def update_of(seed, *, norm=1.0, num_examples=2):
    rng = torch.Generator().manual_seed(seed)
    tensors = {"a": torch.randn(20, 10, generator=rng), "b": torch.randn(7, generator=rng)}
    length = float(torch.cat([value.flatten() for value in tensors.values()]).norm())
    tensors = {name: value * norm / length for name, value in tensors.items()}
    return ClientUpdate(UpdateKind.GRADIENT, tensors, num_examples)


def flat(update):
    return torch.cat([update.tensors[name].double().flatten() for name in sorted(update.tensors)])


# --- the mechanism --------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [1e-6, 0.3, 1.0, 1e8, math.inf, math.nan])
@pytest.mark.parametrize("num_examples", [1, 1000])
def test_a_client_moves_the_sum_by_no_more_than_the_norm(norm, num_examples):
    """Its update there, and zeros in its place, the noise being the same."""
    defense = CentralDp(max_norm=0.5, noise_multiplier=2.0)
    others = [update_of(n, norm=10.0**n, num_examples=n) for n in (1, 2, 3)]
    update = update_of(9, norm=1.0, num_examples=num_examples)
    update = dataclasses.replace(update, tensors={n: v * norm for n, v in update.tensors.items()})
    zeros = {name: torch.zeros_like(value) for name, value in update.tensors.items()}
    gone = dataclasses.replace(update, tensors=zeros)
    there, without = (
        flat(defense.combined([*others, contribution], rng=stream(1)))
        for contribution in (update, gone)
    )
    moved = 4 * float((there - without).norm())
    assert moved <= 0.5 * (1 + 1e-5)
    if norm in (1.0, 1e8):
        assert moved == pytest.approx(0.5, rel=1e-4)  # so it is no looser than it has to be


def test_the_noise_is_on_the_mean_and_of_the_round():
    defense = CentralDp(max_norm=3.0, noise_multiplier=2.0)
    updates = [dataclasses.replace(update_of(1), tensors={"a": torch.zeros(300, 300)})] * 4
    noise, same, other = (
        flat(defense.combined(updates, rng=stream(0, "central", round))) for round in (1, 1, 2)
    )
    assert torch.equal(noise, same)
    assert float(noise.std()) == pytest.approx(2.0 * 3.0 / 4, rel=0.02)
    assert abs(float((noise * other).mean())) < 6 * float(noise.std()) ** 2 / 300


@pytest.fixture(scope="module")
def held(folder, tmp_path_factory):
    """A run with the noise, and the updates that the server saw of its rounds."""
    seen, original = {}, CuriousServer._capture

    def keep(server, reply, client):
        arrays = reply.content.array_records["update"]
        seen[Key(server._round, client)] = from_wire(arrays.to_torch_state_dict())
        original(server, reply, client)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defense_checks, "refuse_broken", lambda *_: None)
        patch.setattr(CuriousServer, "_capture", keep)
        run = carried_out(tmp_path_factory.mktemp("held") / "run", experiment_of(CENTRAL))
    return run, seen


@pytest.mark.parametrize("round", [1, 2])
def test_a_capture_is_the_noisy_mean_of_clipped_updates_by_hand(held, round):
    run, seen = held
    total = {}
    for client in range(3):
        tensors = seen[Key(round, client)]
        squares = sum(float((value.double() ** 2).sum()) for value in tensors.values())
        factor = min(1.0, 0.5 / math.sqrt(squares))
        assert factor < 1
        for name, value in tensors.items():
            total[name] = total.get(name, 0.0) + value.double() * factor
    rng = stream(TABLE["seed"], "combined", round)
    capture = run.captures.read_capture(Key(round, EVERYONE)).update
    assert capture.tensors.keys() == total.keys()
    assert capture.num_examples == 6
    assert capture.kind == UpdateKind.GRADIENT
    before, after = run.models.read_model(round), run.models.read_model(round + 1)
    for name in sorted(total):
        noise = 0.8 * 0.5 / 3 * torch.randn(total[name].shape, generator=rng)
        mean = total[name] / 3 + noise
        # The model is right to 2^-24 of a weight, which the division by the rate makes larger.
        rounding = 2**-23 * float(before[name].abs().max() + mean.abs().max()) / 0.1
        torch.testing.assert_close(
            capture.tensors[name].double(), mean, rtol=1e-5, atol=2 * rounding
        )
        moved = (before[name].double() - after[name].double()) / 0.1
        torch.testing.assert_close(capture.tensors[name].double(), moved, rtol=1e-6, atol=1e-9)


def test_a_run_that_goes_on_draws_the_same_noise(held, tmp_path):
    run, _ = held
    once = carried_out(tmp_path / "run", experiment_of(CENTRAL))
    (once.path / "captures" / f"{Key(2, EVERYONE)}.safetensors").unlink()
    (once.path / "models" / "r0003.safetensors").unlink()
    again = carried_out(once.path, experiment_of(CENTRAL))
    for key in run.captures.all_keys():
        for name, value in run.captures.read_capture(key).update.tensors.items():
            assert torch.equal(value, again.captures.read_capture(key).update.tensors[name])


# --- what it guarantees ---------------------------------------------------------------------


def accountant_s(noise_multiplier, steps):
    accountant = PRVAccountant()
    for _ in range(steps):
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=1.0)
    return accountant.get_epsilon(1e-5)


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_epsilon_is_the_accountants_called_directly(held):
    run, _ = held
    rows = run.rows(LEDGER)
    assert {(row.round, row.client) for row in rows} == {(r, c) for r in (1, 2) for c in range(3)}
    for row in rows:
        assert row.epsilon == pytest.approx(accountant_s(0.8, row.round), rel=1e-9)
        assert (row.unit, row.neighbouring, row.sampling) == ("client", "zero out one", "none")


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_one_noise_suffices_for_the_client_that_takes_part_most_often():
    reach = {"kind": "central_dp", "max_norm": 0.5, "epsilon": 6.0}
    federation = {"clients": 4, "clients_per_round": 2, "rounds": 5}
    experiment = experiment_of(reach, federation=federation)
    rounds = rounds_of_clients(experiment)
    assert len(set(map(len, rounds))) > 1
    (noise,) = {
        protection(experiment, client, 3).defenses[0].noise_multiplier for client in range(4)
    }
    assert aggregator_of(experiment).noise_multiplier == noise
    most = max(map(len, rounds))
    assert 0.99 * 6.0 < accountant_s(noise, most) <= 6.0
    assert accountant_s(noise, most - 1) < 0.99 * 6.0


def test_what_is_said_of_whose_epsilon_it_is(held):
    run, _ = held
    summary = run.read_document(SUMMARY)
    assert summary.privacy.unit == "client"
    assert [note for note in summary.notes if "the server itself sees each client's update" in note]
    assert summary.defenses.settings["sees"] == "models"
    page = report_run(run, None).read_text()
    assert "publishes; not the server itself" in page
    assert "Mind that epsilon holds for those who see the models" in page


def test_the_noise_scale_that_is_granted_is_the_servers(held):
    run, _ = held
    threat = ThreatModel(frozenset({"noise_scale", "batch_size"}))
    known = grants.knowledge(run, Key(1, EVERYONE), threat)
    assert known.noise_scale == pytest.approx(0.8 * 0.5 / 3)
    assert known.batch_size == 6
    assert (known.learning_rate, known.local_steps) == (0.1, 1)


def test_noise_of_clients_that_is_clipped_has_no_known_scale(tmp_path):
    noise = {"kind": "gaussian_noise", "sigma": 0.01}
    run = carried_out(tmp_path / "run", experiment_of(noise, CENTRAL, federation={"rounds": 1}))
    assert vault.read_truth(run, Key(1, EVERYONE)).noise_scale is None


# --- published models without noise ---------------------------------------------------------


@pytest.mark.parametrize(
    ("defense", "algorithm"), some(product([(), (SECURE_SUM,)], ["fedsgd", "fedavg"]), every=3)
)
def test_a_difference_of_models_is_the_mean_of_updates(tmp_path, algorithm, defense):
    federation = {"algorithm": algorithm, "rounds": 2}
    apart = carried_out(tmp_path / "apart", experiment_of(SECURE_SUM, federation=federation))
    seen = experiment_of(*defense, federation=federation, threat=MODELS)
    run = carried_out(tmp_path / "run", seen)
    assert (
        run.captures.all_keys() == apart.captures.all_keys() == [Key(1, EVERYONE), Key(2, EVERYONE)]
    )
    assert not (run.path / "held").exists() or not list((run.path / "held").iterdir())
    rate = 0.1 if algorithm == "fedsgd" else 1.0
    for key in run.captures.all_keys():
        capture, expected = run.captures.read_capture(key), apart.captures.read_capture(key)
        assert capture.knowledge == expected.knowledge
        assert capture.update.num_examples == expected.update.num_examples
        before = run.models.read_model(key.round)
        for name, value in capture.update.tensors.items():
            rounding = 2**-23 * float(before[name].abs().max()) / rate
            torch.testing.assert_close(
                value, expected.update.tensors[name], rtol=1e-4, atol=4 * rounding
            )
    assert vault.read_truth(run, Key(1, EVERYONE)) == vault.read_truth(apart, Key(1, EVERYONE))


def test_what_is_not_sent_is_not_in_a_difference(tmp_path):
    share, once = {"share": ["embeddings"]}, {"rounds": 1}
    experiment = experiment_of(threat=MODELS, update=share, federation=once)
    run = carried_out(tmp_path / "run", experiment)
    tensors = run.captures.read_capture(Key(1, EVERYONE)).update.tensors
    assert tensors
    assert all("embeddings" in name for name in tensors)


def test_words_are_read_out_of_published_models_but_not_through_the_noise(tmp_path):
    probes, once = {"attack": [{"kind": "probes"}]}, {"rounds": 1}
    clear = carried_out(tmp_path / "a", experiment_of(**probes, threat=MODELS, federation=once))
    (row,) = clear.rows(LEAKAGE)
    assert (row.client, row.batch_size, row.token_recall) == (EVERYONE, 6, 1.0)
    noisy = carried_out(tmp_path / "b", experiment_of(CENTRAL, **probes, federation=once))
    (row,) = noisy.rows(LEAKAGE)
    assert row.token_recall is None or row.token_precision < 0.5


def test_canaries_of_clients_are_looked_for_in_a_difference(tmp_path):
    dp_sgd = {"kind": "dp_sgd", "noise_multiplier": 0.05, "sampling": "fixed"}
    experiment = experiment_of(dp_sgd, threat=MODELS, canary={"count": 16})
    run = carried_out(tmp_path / "run", experiment)
    canary = run.read_document(SUMMARY).canary
    assert {bound.client for bound in canary.bounds} == {EVERYONE, 0, 1, 2}
    # A third of the mean is this client's, beside noise of three clients.
    (together,) = [bound for bound in canary.bounds if bound.client == EVERYONE]
    assert together.gaussian > 10
    assert not canary.alarms


# --- canary clients -------------------------------------------------------------------------


def test_canary_clients_join_the_sum_as_clients_do(held, tmp_path):
    """Their copy is the clipped sum with canaries by hand, and what is captured stays as it was."""
    without, seen = held
    run = carried_out(tmp_path / "run", experiment_of(CENTRAL, canary={"count": 4}))
    captured = run.captures.read_capture(Key(1, EVERYONE)).update.tensors
    for name, value in without.captures.read_capture(Key(1, EVERYONE)).update.tensors.items():
        assert torch.equal(value, captured[name])
    experiment, model = parse(run.info()["experiment"]), loading.load(parse(TABLE).model_spec(2))
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in captured.items()}
    for client in range(3):
        tensors = seen[Key(1, client)]
        norm = math.sqrt(sum(float((value.double() ** 2).sum()) for value in tensors.values()))
        for name, value in tensors.items():
            total[name] += value.double() * min(1.0, 0.5 / norm)
        inside = vault.read_truth(run, Key(1, client)).canaries.inside
        where = places(experiment, client, 1, model)
        there = where.directions() * [0.5 * coin for coin in inside]
        where.add_(total, there)
    rng = stream(TABLE["seed"], "combined", 1)
    for name in sorted(total):
        total[name] += 0.8 * 0.5 * torch.randn(total[name].shape, generator=rng)
    for client in range(3):
        where = places(experiment, client, 1, model)
        scored = next(row for row in run.rows(CANARIES) if (row.round, row.client) == (1, client))
        assert (scored.whole, scored.joined, scored.audited_copy) == (True, True, True)
        assert scored.scores == pytest.approx(where.score(total).tolist(), abs=1e-3)


@pytest.mark.parametrize("algorithm", some(["fedsgd", "fedavg"], every=2))
def test_canary_clients_show_the_noise_of_the_server(tmp_path, algorithm):
    federation = {"algorithm": algorithm, "rounds": 2}
    experiment = experiment_of(CENTRAL, canary={"count": 32}, federation=federation)
    run = carried_out(tmp_path / "run", experiment)
    shown = run.read_document(SUMMARY).canary
    assert not shown.alarms
    together = shown.bounds[0]
    assert (together.client, together.unit, together.canaries) == (EVERYONE, "client", 3 * 32)
    assert 0 <= together.epsilon_delta <= together.f_dp <= together.gaussian <= together.epsilon
    rows = run.rows(CANARIES)
    pairs = list(chain(*(zip(row.inside, row.scores, strict=True) for row in rows)))
    inside, outside = ([z for coin, z in pairs if coin == there] for there in (True, False))
    assert abs(statistics.mean(inside) - 1 / 0.8) < 4 / math.sqrt(len(inside))
    assert abs(statistics.mean(outside)) < 4 / math.sqrt(len(outside))
    assert 0.8 < statistics.stdev(outside) < 1.2


# --- what is said and refused ---------------------------------------------------------------


def explained(**tables):
    experiment = experiment_of(*tables.pop("defense", ()), **tables)
    console = Console(file=io.StringIO(), width=200)
    shown.show(experiment, explanation.explain(experiment), console)
    return console.file.getvalue()


def test_who_sees_what_is_explained():
    models = "who has the published models sees: in their differences the mean gradient of all"
    trust = "the server itself sees each client's update, and has to be trusted"
    assert models in explained(threat=MODELS)
    assert trust not in explained(threat=MODELS)
    assert models in explained(defense=[CENTRAL])
    assert trust in explained(defense=[CENTRAL])
    assert "the server sees: the gradient of each client" in explained(threat={"sees": "updates"})


@pytest.mark.parametrize(
    ("defense", "sees", "words"),
    [
        ([], "sum", "'sum', but without a defense such as secure_sum an attacker sees 'updates'"),
        ([SECURE_SUM], "updates", "but with secure_sum an attacker sees 'sum' or 'models'"),
        ([CENTRAL], "updates", "but with central_dp an attacker sees 'models': choose"),
        ([CENTRAL], "sum", "but with central_dp an attacker sees 'models': choose"),
        ([], "model", "threat.sees = 'model'"),
    ],
)
def test_a_sight_that_the_defenses_do_not_leave_is_refused(defense, sees, words):
    with pytest.raises(ConfigError, match=words) as caught:
        experiment_of(*defense, threat={"sees": sees})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "tables", "words"),
    [
        (
            [{"kind": "freeze", "parameters": ["t2"], "clients": [1]}],
            {},
            "clients freeze different parameters: freeze the same for all",
        ),
        (
            [{"kind": "local_dp", "max_norm": 1.0, "noise_multiplier": 1.0}],
            {},
            "two defenses protect clients, one under 'replace one, given n' and one under 'zero "
            "out one'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(more, tables, words):
    experiment = experiment_of(CENTRAL, *more, **tables)
    model = loading.outline(experiment.model_spec(2))

    def checked():
        check_defenses(experiment, model)
        check_canaries(experiment, model)
        protection(experiment, 1, 3)

    with pytest.raises(ConfigError, match=words):
        checked()


def test_other_defenses_of_the_same_round_are_refused():
    with pytest.raises(ConfigError, match="central_dp and secure_sum: the server sees one update"):
        experiment_of(CENTRAL, SECURE_SUM)


@pytest.mark.usefixtures("in_process")
def test_another_sight_is_another_run(tmp_path, monkeypatch):
    plain, of_models = experiment_of(SECURE_SUM), experiment_of(SECURE_SUM, threat=MODELS)
    assert experiment_of(SECURE_SUM, threat={"sees": "sum"}).fingerprint == plain.fingerprint
    assert of_models.fingerprint != plain.fingerprint
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(toml({"model.name": SMALL["name"]}))
    assert call("run", "small.toml")[0] == 0
    status, _, errors = call("attack", "runs/small", "--set", "threat.sees=models")
    assert status == 2
    assert "threat.sees = 'models', but" in errors
    assert "captured what an attacker sees who sees 'updates'" in errors
