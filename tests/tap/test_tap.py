"""The tap keeps what passes, believes nothing, and never breaks the training."""

import io
import pickle
from collections import Counter

import numpy as np
import others
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.serverapp import Grid
from own_app import task
from safetensors.torch import load_file

from fedleak.flower.inline import InlineGrid
from fedleak.tap import tap
from fedleak.tap.folder import Tapped
from fedleak.tap.recorder import decoded
from fedleak.util.errors import ConfigError


def untapped(grid, folder):
    return grid


def arrays_of(result):
    return {name: value.numpy() for name, value in result.arrays.items()}


def same(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[k], second[k]) for k in first)


def npy(value):
    file = io.BytesIO()
    np.save(file, value, allow_pickle=True)
    return file.getvalue()


def npz():
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


class Runs:
    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


def huge_header():
    """An array that says it has more numbers than there is memory for."""
    whole = npy(np.zeros((8, 8), np.float32))
    return whole.replace(b"(8, 8)", b"(8, 8" + b"0" * 9 + b")", 1)


HOSTILE = {
    "a pickle": Array("float32", (1,), "numpy.ndarray", npy(np.array([Runs()], object))),
    "a bare pickle": Array("float32", (1,), "numpy.ndarray", pickle.dumps(Runs())),
    "an archive": Array("float32", (3,), "numpy.ndarray", npz()),
    "no bytes": Array("float32", (3,), "numpy.ndarray", b""),
    "a huge header": Array("float32", (8, 8), "numpy.ndarray", huge_header()),
    "another encoding": Array("float32", (1,), "pickle", b"x"),
    "texts": Array("<U3", (1,), "numpy.ndarray", npy(np.array(["abc"]))),
}


def test_training_is_the_same_with_it(federate):
    plain = federate(untapped)
    assert same(arrays_of(plain), arrays_of(federate(tap)))


def test_it_keeps_what_was_sent_and_received(federate, tmp_path, folder):
    replies = {}

    def change(content, context):
        content["extra"] = ArrayRecord({"c": Array(np.asfortranarray(np.eye(3, 2)))})
        content["more"] = MetricRecord({"loss": float("nan"), "list": [1.5, 2.0]})
        content["said"] = ConfigRecord(
            {"name": "n\x1b", "key": b"\x00\xff", "on": True, "vector": [bytes(5000)]}
        )
        replies[context.node_id] = {**content.array_records}
        return content

    federate(tap, change, rounds=2)
    tapped = Tapped(tmp_path / "mine")
    messages, damaged = tapped.messages()
    assert not damaged
    assert not tapped.problems()
    ways = Counter((message.way, message.round) for message in messages)
    assert ways == {(way, r): 3 for way in ("sent", "received", "evaluated") for r in (1, 2)}
    first = task.get_model(folder).state_dict()
    for message in messages:
        if message.way == "sent":
            assert message.numbers == {"config": {"lr": 0.5, "server-round": message.round}}
        if (message.way, message.round) == ("sent", 1):
            (kept,) = message.arrays
            read = load_file(tapped.path / kept.file)
            assert all(torch.equal(read[name], first[name]) for name in first)
        if (message.way, message.round) == ("received", 2):
            sent = replies[message.node]
            assert [kept.record for kept in message.arrays] == ["arrays", "extra"]
            for kept in message.arrays:
                read = load_file(tapped.path / kept.file)
                assert same(
                    {k: v.numpy() for k, v in read.items()},
                    {name: array.numpy() for name, array in sent[kept.record].items()},
                )
            assert message.numbers["more"] == {"loss": None, "list": [1.5, 2.0]}
            assert message.numbers["said"] == {
                "name": "n\x1b",
                "key": {"base64": "AP8="},
                "on": True,
                "vector": [{"bytes": 5000}],
            }
    # What all got alike is one file: a model per round and the last, and the replies' two each.
    assert len(list((tmp_path / "mine" / "arrays").iterdir())) == 3 + 2 * 3 * 2
    for path in (tmp_path / "mine").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


QUICK = {"a pickle", "an archive"}
"""Each trains twice; these two by default, the others are slow tests."""


@pytest.mark.parametrize(
    "case", [pytest.param(w, marks=[] if w in QUICK else pytest.mark.slow) for w in HOSTILE]
)
def test_a_reply_that_cannot_be_read_is_noted(case, federate, tmp_path, capsys):
    def change(content, context):
        if context.node_config["partition-id"] == 1:
            content["spare"] = ArrayRecord({"a\x1b[31m": HOSTILE[case]})
        return content

    plain = federate(untapped, change=change)
    result = federate(tap, change=change)
    assert same(arrays_of(plain), arrays_of(result))
    messages, _ = Tapped(tmp_path / "mine").messages()
    assert sum(message.way == "received" for message in messages) == 2
    (problem,) = Tapped(tmp_path / "mine").problems()
    assert (problem.round, problem.node) == (1, 3)
    errors = capsys.readouterr().err
    assert "NOT KEPT: round 1, node 3: the array " in errors
    assert "\x1b" not in errors


@pytest.mark.parametrize("name", ["__metadata__", "__x"])
def test_a_name_that_safetensors_keeps_for_itself_is_refused(name):
    with pytest.raises(ValueError, match=f"an array is called '{name}', as none of a model is"):
        decoded(ArrayRecord({name: Array(np.zeros(2))}))


def test_a_reply_that_is_too_large_is_noted(federate, tmp_path):
    def change(content, context):
        content["spare"] = ArrayRecord({"a": Array(np.zeros(8 << 20, np.float32))})
        return content

    federate(tap, change=change)
    problems = Tapped(tmp_path / "mine").problems()
    assert len(problems) == 3
    assert "more than 4 times what was sent" in problems[0].reason


def test_a_client_that_fails_is_noted(grid_of, tmp_path, folder):
    def fails(message, context, call_next):
        if context.node_id == 3:
            return Message(Error(1, "out of \x1b memory"), reply_to=message)
        return call_next(message, context)

    others.serve(tap(grid_of(mods=[fails]), tmp_path / "mine"), folder)
    (problem,) = Tapped(tmp_path / "mine").problems()
    assert (problem.round, problem.node) == (1, 3)
    assert problem.reason == "the client failed: out of \\x1b memory"


@pytest.mark.parametrize("broken", ["write_arrays", "append", "complain"])
def test_a_disk_that_is_full_breaks_nothing(broken, federate, tmp_path, monkeypatch, capsys):
    plain = federate(untapped)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Tapped, broken, full)
    if broken == "complain":
        monkeypatch.setattr(Tapped, "append", full)
    assert same(arrays_of(plain), arrays_of(federate(tap)))
    errors = capsys.readouterr().err
    assert errors.count("No space left on device") >= 6
    assert len(Tapped(tmp_path / "mine").problems()) == (0 if broken == "complain" else 9)


def test_a_folder_that_cannot_be_made_is_said(tmp_path, grid_of, capsys):
    (tmp_path / "file").write_text("")
    grid = grid_of()
    for folder in (tmp_path / "file" / "mine", None):
        assert tap(grid, folder) is grid
        assert "NOTHING IS KEPT" in capsys.readouterr().err


def test_an_earlier_tap_stays_as_it_is(tmp_path, federate, capsys):
    federate(tap)
    before = (tmp_path / "mine" / "messages.jsonl").read_bytes()
    federate(tap)
    assert (tmp_path / "mine" / "messages.jsonl").read_bytes() == before
    assert Tapped(tmp_path / "mine-2").messages()[0]
    assert "this one goes to" in capsys.readouterr().err


class OneAtATime(InlineGrid):
    """Counts how many replies one pull asks for."""

    most, private = 0, "of this grid"

    def pull_messages(self, message_ids):
        names = list(message_ids)
        type(self).most = max(self.most, len(names))
        return super().pull_messages(names)


def test_one_reply_is_asked_for_at_a_time(folder, grid_of, tmp_path):
    grid = tap(grid_of(OneAtATime), tmp_path / "mine")
    assert isinstance(grid, Grid)
    others.serve(grid, folder)
    assert OneAtATime.most == 1
    assert grid.private == "of this grid"
    assert list(grid.get_node_ids()) == [2, 3, 4]


class Gone(InlineGrid):
    def push_messages(self, messages):
        raise ConnectionError("the SuperLink is gone")


def test_what_the_grid_raises_reaches_the_app(tmp_path, folder, grid_of):
    with pytest.raises(ConnectionError, match="the SuperLink is gone"):
        others.serve(tap(grid_of(Gone), tmp_path / "mine"), folder)


def test_a_folder_that_is_no_tap_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not the folder of a tap"):
        Tapped(tmp_path).messages()
