"""What a large federation takes: whose updates reach the disk, and how long they stay there."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from cases import some
from tiny import DLG, Here, tables

from fedleak.attacks import certificate
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.audit.gaps import refuse_gaps
from fedleak.config import components
from fedleak.config.federation.lookup import stored
from fedleak.config.federation.schedule import captures_made
from fedleak.config.federation.workload import outline
from fedleak.config.loading import parse
from fedleak.flower import inline
from fedleak.flower.engines import train
from fedleak.flower.server.strategy import CuriousServer
from fedleak.running import forecast, pipeline, preparation
from fedleak.running.dispatch import dispatcher
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.store import records
from fedleak.store.captures import Captures
from fedleak.store.run import Key, Run
from fedleak.util.errors import CaptureError, ConfigError, FedleakError

SMALL = {"federation.clients": 3, "federation.rounds": 2, "utility.rounds": []}


def experiment_of(**changes):
    return parse(tables(SMALL | {name.replace("__", "."): v for name, v in changes.items()}))


def carried_out(path, experiment):
    run = preparation.prepare(experiment, path)
    pipeline.carry_out(run, experiment, train, Crew([Here()]))
    return run


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return carried_out(tmp_path_factory.mktemp("plain") / "run", experiment_of())


def rows(run):
    leakage = run.rows(records.LEAKAGE)
    return [row.model_copy(update={"seconds": None, "together": None}) for row in leakage]


def tensors(run):
    return sorted(path.name for path in (run.path / "captures").glob("*.safetensors"))


def assert_same_models(run, other, rounds):
    for round in rounds:
        ours, theirs = run.models.read_model(round), other.models.read_model(round)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# --- threat.clients -----------------------------------------------------------------------------


def test_only_the_clients_that_are_attacked_reach_the_disk_and_the_model_is_the_same(
    tmp_path, plain, monkeypatch
):
    written, write = [], Run.write_tensors

    def watched(self, name, *rest, **about):
        written.append(name)
        write(self, name, *rest, **about)

    monkeypatch.setattr(Run, "write_tensors", watched)
    run = carried_out(tmp_path / "run", experiment_of(threat__clients=[1]))
    assert run.captures.all_keys() == [Key(1, 1), Key(2, 1)]
    assert [name for name in written if not name.startswith("models/")] == [
        "captures/r0001-c01.safetensors",
        "captures/r0002-c01.safetensors",
    ]
    assert_same_models(run, plain, (1, 2, 3))
    assert len(rows(run)) == 2
    assert not run.read_json("summary.json")["missing"]


def test_of_rounds_without_such_a_client_no_model_stays(tmp_path):
    changes = {"federation__rounds": 5, "federation__clients_per_round": 1}
    experiment = experiment_of(threat__clients=[0], **changes)
    mine = {key.round for key in captures_made(experiment) if key.client == 0}
    assert mine
    assert len(mine) < 5
    run = preparation.prepare(experiment, tmp_path / "run")
    needed = forecast.bytes_kept(experiment, outline(experiment, 2))
    inline.train(run, experiment)
    assert run.models.rounds() == sorted(mine | {1, 6})
    kept = [run.captures.read_capture(key).update.tensors for key in run.captures.all_keys()]
    kept += [run.models.read_model(round) for round in run.models.rounds()]
    assert needed == sum(t.numel() * 4 for parameters in kept for t in parameters.values())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"threat.clients": [3]}, r"threat.clients has 3, but federation.clients = 3"),
        ({"threat.clients": []}, r"threat.clients"),
        ({"threat.clients": [-1]}, r"threat.clients"),
        (
            {"threat.clients": [0], "defense": [{"kind": "secure_sum"}]},
            "sees is of all clients of a round",
        ),
        ({"audit.keep": "none", "canary": {"count": 8}}, "canaries are scored in them at the end"),
        ({"audit.store": "read", "canary": {"count": 8}}, "canaries are scored in whole ones"),
        ({"audit.store": "some"}, r"audit\.store"),
        ({"audit.waiting": 2}, "waiting = 2 bounds the disk only where captures are deleted"),
    ],
)
def test_what_cannot_be_is_refused(changes, line):
    with pytest.raises(ConfigError, match=line):
        parse(tables(SMALL | changes))


def test_fewer_may_not_wait_than_an_attack_takes_at_once(tmp_path):
    changes = {"audit__keep": "none", "audit__waiting": 2, "attack": [{"kind": "dlg", "steps": 1}]}
    with pytest.raises(ConfigError, match=r"'dlg' takes 3 .*, or set workers.at_once = 2"):
        preparation.prepare(experiment_of(workers__at_once=None, **changes), tmp_path / "run")
    run = preparation.prepare(experiment_of(workers__at_once=2, **changes), tmp_path / "run")
    assert stored(run).audit.waiting == 2


def test_clients_that_never_train_where_it_is_attacked_are_refused(tmp_path):
    changes = {"federation__clients_per_round": 1, "federation__rounds": 1}
    (key,) = captures_made(experiment_of(**changes))
    experiment = experiment_of(threat__clients=[(key.client + 1) % 3], **changes)
    with pytest.raises(ConfigError, match="none of them trains in a round that is attacked"):
        preparation.prepare(experiment, tmp_path / "run")


# --- audit.keep ---------------------------------------------------------------------------------


def test_captures_go_once_they_are_answered_and_rows_and_models_are_the_same(tmp_path, plain):
    run = carried_out(tmp_path / "run", experiment_of(audit__keep="none"))
    assert tensors(run) == []
    assert run.captures.all_keys() == plain.captures.all_keys()
    assert run.captures.deleted() == set(run.captures.all_keys())
    for key in run.captures.all_keys():
        assert run.captures.about(key).knowledge == plain.captures.about(key).knowledge
        assert run.captures.about(key).num_examples == plain.captures.about(key).num_examples
        with pytest.raises(CaptureError, match="was deleted once every attack had answered"):
            run.captures.read_capture(key)
    assert rows(run) == rows(plain)
    assert_same_models(run, plain, (1, 2, 3))
    refuse_gaps(run)


def test_a_run_whose_captures_are_gone_is_finished_and_goes_on_where_it_was_cut(tmp_path, plain):
    experiment = experiment_of(audit__keep="none")
    run = carried_out(tmp_path / "run", experiment)
    assert pipeline.finished(run, experiment)
    before = rows(run)
    (run.path / "models" / "r0003.safetensors").unlink()  # killed before the last round's end
    (run.path / "captures" / "r0002-c02.json").unlink()
    carried_out(run.path, experiment)
    assert (tensors(run), rows(run)) == ([], before)
    assert_same_models(run, plain, (1, 2, 3))
    assert len(run.rows(records.answers(run.fingerprint()))) == 6


def test_what_was_answered_before_the_process_died_goes_with_the_next(tmp_path, plain):
    shutil.copytree(plain.path, tmp_path / "run")
    experiment = experiment_of(audit__keep="none")  # it may change
    run = Run(tmp_path / "run")
    assert len(tensors(run)) == 6
    run.captures.close(Key(1, 0), delete=False)
    carried_out(run.path, experiment)
    assert tensors(run) == []
    assert stored(run).audit.keep == "none"


def test_an_attack_that_comes_later_is_refused_with_a_line_or_attacks_what_is_left(tmp_path):
    experiment = experiment_of(audit__keep="none")
    run = carried_out(tmp_path / "run", experiment)
    late = experiment_of(audit__keep="none", attack=[{"kind": "dager"}])
    with pytest.raises(ConfigError, match="dager could attack: 6 of 6 captures were deleted"):
        dispatcher.Dispatcher(run, late)
    (run.path / "captures" / "r0002-c02.json").unlink()
    inline.train(run, experiment)  # captured again
    assert tensors(run) == ["r0002-c02.safetensors"]
    with run.lock():
        dispatcher.attack_captures(run, late, Crew([Here()]), no_more=lambda: True)
    answers = run.rows(records.answers(run.fingerprint()))
    assert [answer.key for answer in answers if answer.attack == "dager"] == [Key(2, 2)]
    with run.lock():
        pipeline.scoring.score_run(run, ["probes", "dager"])
    with pytest.raises(FedleakError, match="dager came after 5 of 6 captures were deleted"):
        refuse_gaps(run)


def test_a_capture_waits_for_the_attacks_of_its_run_whatever_is_asked_for_first(tmp_path):
    experiment = experiment_of(audit__keep="none", attack=[DLG])
    run = preparation.prepare(experiment, tmp_path / "run")
    inline.train(run, experiment)
    other = experiment_of(audit__keep="none", attack=[DLG | {"name": "other"}])
    with run.lock():
        dispatcher.attack_captures(run, other, Crew([Here()]), no_more=lambda: True)
    assert len(tensors(run)) == 6
    with run.lock():
        dispatcher.attack_captures(run, experiment, Crew([Here()]), no_more=lambda: True)
    assert tensors(run) == []


@dataclass(frozen=True)
class Sometimes:
    """Proves the updates of client 0, fails on those of client 1, and reads those of client 2."""

    kind: ClassVar[str] = "sometimes"
    uses: ClassVar[frozenset[str]] = frozenset()
    slow: ClassVar[bool] = True

    def obstacle(self, setting):
        return None

    def __call__(self, seen, model, *, rng):
        if seen.client == 1:
            raise ValueError("no")
        return Reconstruction(
            status=Status.RECOVERED, tokens=(5,), verified=seen.client == 0, sequences=None
        )


@pytest.fixture
def sometimes(monkeypatch):
    known = {**components.attacks.kinds(), "sometimes": Sometimes}
    monkeypatch.setattr(components.attacks, "kinds", lambda: known)
    monkeypatch.setattr(certificate, "proves", lambda *_: True)


@pytest.mark.parametrize(
    ("keep", "left"), [("none", [1]), ("unproved", [1, 2]), ("all", [0, 1, 2])]
)
def test_what_stays_is_what_was_asked_for_and_what_can_be_tried_again(
    tmp_path, keep, left, sometimes
):
    changes = {"attack": [{"kind": "sometimes"}], "audit__keep": keep}
    run = carried_out(tmp_path / "run", experiment_of(**changes))
    names = [f"r{round:04d}-c{client:02d}.safetensors" for round in (1, 2) for client in left]
    assert tensors(run) == names
    assert run.captures.waiting() == (0 if keep != "all" else 6)


def test_training_waits_for_attacks_so_that_no_more_captures_wait_than_may(
    tmp_path, monkeypatch, sometimes
):
    changes = {"audit__keep": "none", "audit__waiting": 2, "attack": [{"kind": "sometimes"}]}
    experiment = experiment_of(
        federation__clients=6, federation__rounds=1, data__samples=12, **changes
    )
    on_disk, write = [], Captures.write

    def watched(self, capture):
        write(self, capture)
        on_disk.append(self.waiting())

    monkeypatch.setattr(Captures, "write", watched)
    run = preparation.prepare(experiment, tmp_path / "run")
    model = outline(experiment, 2)
    size = sum(4 * p.numel() for p in model.trained().values())
    assert forecast.bytes_kept(experiment, model) == (2 + 2) * size
    pipeline.carry_out(run, experiment, train, Crew([Here()]))
    assert len(on_disk) == 6
    assert max(on_disk) <= 2
    assert tensors(run) == ["r0001-c01.safetensors"]


def test_without_attacks_beside_it_training_waits_for_nobody(tmp_path):
    experiment = experiment_of(audit__keep="none", audit__waiting=1)
    run = preparation.prepare(experiment, tmp_path / "run")
    inline.train(run, experiment)
    assert len(tensors(run)) == 6


# --- audit.store --------------------------------------------------------------------------------

READ = {"audit__store": "read", "attack": [{"kind": "keyspan"}]}


@pytest.mark.parametrize("more", some([{}, {"federation__at_once": 1}], every=2))
def test_captures_hold_what_is_read_and_answers_and_models_are_the_same(tmp_path, more):
    more = {"federation__rounds": 1, **more}
    whole = carried_out(tmp_path / "whole", experiment_of(attack=READ["attack"], **more))
    experiment = experiment_of(**READ, **more)
    run = carried_out(tmp_path / "run", experiment)
    assert experiment.fingerprint == stored(whole).fingerprint
    for key in whole.captures.all_keys():
        ours, all_of_it = run.captures.read_capture(key), whole.captures.read_capture(key)
        names = ours.update.tensors.keys()
        assert "classifier.bias" in names
        assert "bert.encoder.layer.0.attention.self.query.weight" in names
        assert "bert.encoder.layer.1.attention.self.query.weight" not in names
        assert names < all_of_it.update.tensors.keys()
        assert all(torch.equal(ours.update.tensors[n], all_of_it.update.tensors[n]) for n in names)
    assert_same_models(run, whole, (1, 2))
    assert rows(run) == rows(whole)
    sizes = [sum(t.numel() * 4 for t in run.models.read_model(1).values())]
    sizes += [
        sum(t.numel() * 4 for t in run.captures.read_capture(key).update.tensors.values())
        for key in run.captures.all_keys()
    ]
    model = outline(experiment, 2)
    assert forecast.bytes_kept(experiment, model) == sum(sizes) + sizes[0]
    assert forecast.bytes_there(experiment, model, run) == sum(sizes) + sizes[0]


def test_of_a_sum_what_is_read_is_stored(tmp_path):
    experiment = experiment_of(**READ, defense=[{"kind": "secure_sum"}])
    run = carried_out(tmp_path / "run", experiment)
    (first, _) = run.captures.all_keys()
    assert len(run.captures.read_capture(first).update.tensors) < len(run.models.read_model(1)) / 2


def test_an_attack_that_reads_more_is_refused_afterwards(tmp_path):
    run = carried_out(tmp_path / "run", experiment_of(**READ))
    preparation.prepare_attacks(run, experiment_of(**READ))
    preparation.prepare_attacks(run, experiment_of(attack=[]))
    for kind, line in {"dager": "'dager' reads 4 tensors", "dlg": "'dlg' reads .* tensors"}.items():
        for store in ("read", "all"):
            late = experiment_of(audit__store=store, attack=[{"kind": kind}])
            with pytest.raises(ConfigError, match=f"{line} that the captures do not hold"):
                preparation.prepare_attacks(run, late)
    with pytest.raises(ConfigError, match=r"holds another experiment \(audit\.store: "):
        preparation.prepare(experiment_of(attack=READ["attack"]), run.path)


def test_what_reads_all_is_named(tmp_path):
    attacks = [*READ["attack"], {"kind": "dlg", "steps": 1}]
    plan = preparation.plan(experiment_of(**READ | {"attack": attacks}))
    assert "audit.store = 'read' stores whole updates, because dlg read them" in plan.remarks
    assert not [line for line in preparation.plan(experiment_of(**READ)).remarks if "audit" in line]


# --- memory -------------------------------------------------------------------------------------


def test_how_many_are_asked_at_a_time_changes_nothing_and_may_change(tmp_path, plain, monkeypatch):
    experiment = experiment_of(federation__at_once=1)
    assert experiment.fingerprint == stored(plain).fingerprint
    shutil.copytree(plain.path, tmp_path / "run")
    run = preparation.prepare(experiment, tmp_path / "run")
    assert stored(run).federation.at_once == 1
    (run.path / "models" / "r0003.safetensors").unlink()
    inline.train(run, experiment)
    assert_same_models(run, plain, (1, 2, 3))


def test_a_capture_is_on_disk_before_the_next_but_one_is_received(tmp_path, monkeypatch):
    experiment = experiment_of()
    behind, on_reply, received = [], CuriousServer.on_reply, []

    def watched(self, reply):
        kept = on_reply(self, reply)
        received.append(reply)
        behind.append(len(received) - len(self._run.captures.all_keys()))
        return kept

    monkeypatch.setattr(CuriousServer, "on_reply", watched)
    run = preparation.prepare(experiment, tmp_path / "run")
    inline.train(run, experiment)
    assert len(behind) == 6
    assert set(behind) <= {0, 1}


def files_of(tensors):
    """Returns the files that tensors' memory is mapped from; None: some is from no file."""
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(address, 16) for address in line.split()[0].split("-"))
        mapped.append((start, end, Path(line.split(maxsplit=5)[5]).name if "/" in line else None))
    return {
        next((name for start, end, name in mapped if start <= tensor.data_ptr() < end), None)
        for tensor in tensors
    }


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is mapped")
def test_the_server_holds_the_model_once_in_memory_and_the_sum_for_a_round(tmp_path, monkeypatch):
    sent, mapped, sums = [], [], []
    configure, aggregate = CuriousServer.configure_train, CuriousServer.aggregate_train

    def configured(self, server_round, arrays, *rest):
        messages = list(configure(self, server_round, arrays, *rest))
        sent.append(arrays)
        mapped.append(files_of(self._model.parameters().values()))
        return messages

    def aggregated(self, *rest):
        following, metrics = aggregate(self, *rest)
        assert following is sent[-1]
        sums.append(self._sum)
        return following, metrics

    monkeypatch.setattr(CuriousServer, "configure_train", configured)
    monkeypatch.setattr(CuriousServer, "aggregate_train", aggregated)
    experiment = experiment_of(federation__rounds=3, utility__rounds=[1])
    run = preparation.prepare(experiment, tmp_path / "run")
    inline.train(run, experiment)
    assert sums == [None] * 3
    # The model is of the round that was scored last.
    assert mapped == [{f"r{round:04d}.safetensors"} for round in (1, 2, 2)]
