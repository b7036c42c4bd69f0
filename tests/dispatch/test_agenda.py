"""What is handed out next, and what it costs to know."""

import shutil
from collections import Counter
from types import SimpleNamespace

import pytest

from fedleak.attacks import is_slow, kinds
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.config.components import NamedAttack
from fedleak.config.federation.lookup import stored
from fedleak.config.loading import parse
from fedleak.flower import inline
from fedleak.flower.engines import train
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch import dispatcher
from fedleak.running.dispatch.agenda import LOOKS, Agenda, Arrivals, groups
from fedleak.running.dispatch.progress import Pace
from fedleak.running.workers.process import answer_of
from fedleak.store import records
from fedleak.store.captures import Captures
from fedleak.store.models import Models
from fedleak.store.run import Key, Run
from fedleak.store.vault import Vault

pytestmark = pytest.mark.core

KEYS = [Key(round, client) for round in (1, 2) for client in range(3)]
QUICK = NamedAttack("quick", SimpleNamespace(slow=False))
PLAIN = NamedAttack("plain", SimpleNamespace())
SLOW = NamedAttack("slow", SimpleNamespace(slow=True))


class Pairs:
    """An attack that takes two captures at once."""

    kind, uses, at_once, slow = "pairs", frozenset(), 2, True

    def obstacle(self, setting): ...

    def __call__(self, seen, model, *, rng): ...

    def many(self, seen, model, *, rngs, report): ...


PAIRS = NamedAttack("pairs", Pairs())


def agenda(*named, answered=(), failed=(), here=KEYS):
    made = Agenda(groups(named, KEYS), set(answered), set(failed))
    for key in here:
        made.arrived(key)
    return made


def taken(made, *, slow=True):
    names_and_keys = []
    while (work := made.take(slow=slow)) is not None:
        names_and_keys.append((work.attack.name, work.keys))
    return names_and_keys


# --- the order ----------------------------------------------------------------------------------


def test_quick_attacks_go_first_and_then_earlier_captures():
    order = taken(agenda(SLOW, QUICK, PLAIN))
    assert order[:12] == [(name, [key]) for key in KEYS for name in ("quick", "plain")]
    assert order[12:] == [("slow", [key]) for key in KEYS]


def test_which_attacks_are_slow():
    assert {kind for kind, cls in kinds().items() if is_slow(cls)} >= {"dlg", "lamp", "tag"}
    assert not any(is_slow(kinds()[kind]) for kind in ("probes", "dager", "keyspan"))


def test_a_later_capture_overtakes_the_slow_attack_of_an_earlier_one():
    made = agenda(SLOW, QUICK, here=KEYS[:1])
    assert made.take(slow=True).attack.name == "quick"
    made.arrived(KEYS[1])
    assert made.take(slow=True) == (QUICK, [KEYS[1]])


def test_a_slow_attack_waits_if_it_may_not():
    made = agenda(SLOW, QUICK, here=KEYS[:1])
    assert taken(made, slow=False) == [("quick", KEYS[:1])]
    assert made.ready
    assert made.quick_left
    for key in KEYS:
        made.answered(key, "quick")
    assert not made.quick_left


def test_quick_answers_of_captures_that_never_come_are_not_waited_for():
    made = agenda(SLOW, QUICK, here=KEYS[:2])
    for key in KEYS[:2]:
        made.answered(key, "quick")
    assert made.quick_left
    made.close()
    assert not made.quick_left


def test_what_is_taken_together_is_ready_once_all_of_it_is_here():
    made = agenda(PAIRS, here=[KEYS[0], KEYS[2], KEYS[3]])
    assert taken(made) == [("pairs", [KEYS[2]])]
    made.arrived(KEYS[1])
    assert taken(made) == [("pairs", KEYS[:2])]
    made.close()
    assert taken(made) == [("pairs", [KEYS[3]])]
    made.arrived(KEYS[4])
    assert not made.ready


def test_what_has_failed_is_tried_alone_also_by_the_next_command():
    made = agenda(PAIRS, failed=[(KEYS[0], "pairs")], answered=[(KEYS[3], "pairs")])
    alone = [("pairs", [key]) for key in (*KEYS[:2], KEYS[2], KEYS[4], KEYS[5])]
    assert taken(made) == alone
    made.again(PAIRS, KEYS[4])
    assert taken(made) == [("pairs", [KEYS[4]])]


def test_groups_are_of_one_round_and_in_order():
    works = groups([PAIRS, QUICK], KEYS[:4])
    assert [(work.attack.name, work.keys) for work in works] == [
        ("pairs", KEYS[:2]),
        ("quick", KEYS[:1]),
        ("quick", KEYS[1:2]),
        ("pairs", KEYS[2:3]),
        ("quick", KEYS[2:3]),
        ("pairs", KEYS[3:4]),
        ("quick", KEYS[3:4]),
    ]


@pytest.mark.parametrize(("at_once", "size"), [(None, 2), (1, 1), (2, 2), (5, 2)])
def test_an_upper_bound_makes_groups_smaller_and_never_larger(at_once, size):
    works = groups([PAIRS, QUICK], KEYS[:2], at_once)
    assert max(len(work.keys) for work in works if work.attack == PAIRS) == size
    assert sorted(work.keys for work in works if work.attack == QUICK) == [[k] for k in KEYS[:2]]


@pytest.mark.parametrize(
    ("at_once", "sizes"), [(8, [5, 4]), (4, [3, 3, 3]), (9, [9]), (1, [1] * 9)]
)
def test_no_capture_is_left_alone_where_others_could_be_beside_it(monkeypatch, at_once, sizes):
    monkeypatch.setattr(Pairs, "at_once", at_once)
    works = groups([PAIRS], [Key(1, client) for client in range(9)])
    assert [len(work.keys) for work in works] == sizes


# --- who takes it -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy", "free", "left", "may"),
    [
        ([], 1, True, False),  # the only worker stays with the quick ones
        ([], 1, False, True),
        ([], 2, True, True),
        ([SLOW], 1, True, False),  # the last one
        ([QUICK], 1, True, True),
        ([SLOW], 1, False, True),
    ],
)
def test_a_worker_is_left_for_quick_attacks_while_some_are_to_come(busy, free, left, may):
    workers = [SimpleNamespace(jobs=(SimpleNamespace(attack=attack),)) for attack in busy]
    workers += [SimpleNamespace(jobs=())] * free
    assert dispatcher.slow_may(workers, SimpleNamespace(quick_left=left)) == may


# --- what has come ------------------------------------------------------------------------------


class Names:
    """Captures or models whose files are names, and which count who looks for them."""

    def __init__(self, names):
        self.names, self.looks = set(names), Counter()

    def all_keys(self):
        self.looks["all"] += 1
        return sorted(self.names)

    rounds = all_keys

    def has(self, name):
        self.looks["one"] += 1
        return name in self.names


def folder():
    """Returns a run with the model of its first round."""
    return SimpleNamespace(captures=Names([]), models=Names([1]))


def test_looking_costs_the_same_however_many_captures_there_are():
    keys = [Key(round, client) for round in range(1, 2001) for client in range(10)]
    run = folder()
    run.captures.names = set(keys[:10_000])
    run.models.names = set(range(1, 1002))
    arrivals = Arrivals(run, keys)
    assert arrivals.new() == keys[:10_000]
    run.captures.looks.clear()
    run.models.looks.clear()
    for _ in range(50):
        assert arrivals.new() == []
        assert arrivals.round() == 1001
    assert run.captures.looks == {"one": 50 * LOOKS}
    assert run.models.looks == {"one": 50}
    run.captures.names |= set(keys[10_000:10_003])
    assert arrivals.new() == keys[10_000:10_003]
    assert arrivals.here == 10_003


def test_captures_come_in_any_order_and_at_the_end_all_are_looked_for():
    run = folder()
    keys = [Key(1, client) for client in range(3 * LOOKS)]
    arrivals = Arrivals(run, keys)
    run.captures.names = {keys[5], keys[2], keys[-1], Key(7, 7)}
    assert arrivals.new() == [keys[2], keys[5]]
    assert arrivals.new(everywhere=True) == [keys[-1]]
    assert arrivals.here == 3


def test_rounds_that_are_not_kept_count_once_they_are_over():
    run = folder()
    arrivals = Arrivals(run, [Key(1, 0), Key(9, 0)])
    assert arrivals.round() == 1
    run.models.names = {1, 4}  # 2 and 3 came and went
    assert arrivals.round() == 4
    run.models.names = {1, 9, 10}
    assert arrivals.round() == 10


def test_updates_that_are_not_kept_count_once_their_round_is_over(many_rounds):
    run, _ = many_rounds
    table = stored(run).model_dump(exclude_none=True) | {
        "threat": {"rounds": [1, 3], "clients": [0, 2]}
    }
    run_dispatcher = dispatcher.Dispatcher(run, parse(table))
    counts = []
    for round in (1, 2, 3, 5):
        run.models.write(round, {})
        run_dispatcher.look_for_captures(last_look=False)
        counts.append(run_dispatcher.progress([]).captures)
    # One of the three clients of the rounds 1 and 3, and all of the rounds 2 and 4.
    assert counts == [0, 1, 4, 8]


# --- the time that is left ----------------------------------------------------------------------


TIMES = [("a", None), ("b", 60)]


def test_time_that_is_left_is_told_once_each_attack_that_is_left_was_measured():
    a, b = (NamedAttack(name, SimpleNamespace(seconds=limit)) for name, limit in TIMES)
    left = {(Key(1, client), "a") for client in range(10)} | {(Key(1, 9), "b")}
    pace = Pace([a, b], left)
    assert pace.seconds_most(2) == 1 * 60 / 2
    assert pace.seconds_left(1) is None
    pace.answered("a", 2.0)
    pace.answered("a", 4.0)
    assert pace.seconds_left(1) is None
    pace.answered("b", 100.0)
    assert pace.seconds_left(1) == 8 * 3.0
    assert pace.seconds_left(2) == 4 * 3.0


# --- a dispatcher that dies ---------------------------------------------------------------------


@pytest.fixture
def many_rounds(tmp_path):
    experiment = parse(
        {
            "name": "stopped",
            "model": {"name": "builtin/bert-tiny"},
            "data": {"name": "builtin/notes", "samples": 12, "held_out": 2},
            "federation": {"clients": 3, "rounds": 50, "batch_size": 1, "learning_rate": 0.1},
            "utility": {"rounds": []},
        }
    )
    return preparation.prepare(experiment, tmp_path / "run"), experiment


def test_a_round_that_ends_during_a_look_is_not_complete_before_the_next(many_rounds, monkeypatch):
    run, experiment = many_rounds
    run_dispatcher, look = dispatcher.Dispatcher(run, experiment), Arrivals.new

    def look_before_the_round_ends(self, **how):
        seen = look(self, **how)
        run.models.write(2, {})  # the first round's captures came before it
        return seen

    monkeypatch.setattr(Arrivals, "new", look_before_the_round_ends)
    run_dispatcher.look_for_captures(last_look=False)
    assert (run_dispatcher.progress([]).rounds, run_dispatcher.progress([]).captures) == (0, 0)
    run_dispatcher.look_for_captures(last_look=False)
    assert run_dispatcher.progress([]).rounds == 1


def test_training_stops_in_the_round_in_which_the_dispatcher_dies(many_rounds, monkeypatch):
    run, experiment = many_rounds
    answer = inline.InlineGrid._answer

    def dies(run, _, crew, **__):
        while not run.captures.all_keys() and not crew.enough():
            pass
        raise OSError(28, "No space left on device")

    def answer_after_that(grid, message):
        """Trains a client, and then waits until the dispatcher is dead, as if it took long."""
        reply = answer(grid, message)
        while run.captures.all_keys() and not grid._stop():
            pass
        return reply

    monkeypatch.setattr(dispatcher, "attack_captures", dies)
    monkeypatch.setattr(inline.InlineGrid, "_answer", answer_after_that)
    with pytest.raises(OSError, match="No space left on device"):
        pipeline.carry_out(run, experiment, train)
    assert {key.round for key in run.captures.all_keys()} == {1}
    assert run.info()["status"] == "failed"


def test_an_error_of_training_is_its_own(many_rounds, monkeypatch):
    run, experiment = many_rounds
    monkeypatch.setattr(dispatcher, "attack_captures", lambda *_, **__: None)
    with pytest.raises(ZeroDivisionError), dispatcher.attacking(run, experiment):
        raise ZeroDivisionError


# --- what a poll costs --------------------------------------------------------------------------


def test_a_poll_with_nothing_new_reads_and_lists_nothing(many_rounds, monkeypatch):
    run, experiment = many_rounds
    shutil.rmtree(run.path / "captures", ignore_errors=True)
    done = abstained(experiment)
    answers = records.answers(run.fingerprint())
    run.append(answers, done(Key(1, 0)), done(Key(1, 1)))
    calls, polls = Counter(), []
    looks = ((Captures, "all_keys"), (Models, "rounds"), (Run, "rows"), (Run, "info"))
    for owner, name in (*looks, (Vault, "all_keys")):
        method = getattr(owner, name)

        def counted(*args, _name=(owner, name), _method=method, **kwargs):
            calls[_name] += 1
            return _method(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
    monkeypatch.setattr(dispatcher, "POLL_SECONDS", 0.0)

    def stop():
        polls.append(dict(calls))
        return len(polls) == 50

    (run.path / "models").mkdir()
    (run.path / "models" / "r0001.safetensors").write_bytes(b"")
    crew = dispatcher.Crew([], enough=stop)
    dispatcher.attack_captures(run, experiment, crew, no_more=lambda: False)
    assert polls[0] == polls[-1]


def abstained(experiment):
    """Makes the answer of a probe that abstained."""
    named = experiment.attacks[0]

    def make(key):
        job = SimpleNamespace(
            key=key,
            attack=named,
            knowledge=SimpleNamespace(granted=lambda: ()),
        )
        return answer_of(job, Reconstruction.none(Status.ABSTAINED, "nothing"))

    return make
