import errno
import json
import multiprocessing
import os
import re
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedleak.running.preparation import move_aside
from fedleak.store.files import HALF_WRITTEN, new_file, replace
from fedleak.store.lines import SCHEMA_VERSION, Lines
from fedleak.store.records import UTILITY, Utility
from fedleak.store.run import Capture, Key, Run
from fedleak.store.summaries import SWEEP, SweepSummary
from fedleak.training.observation import ClientUpdate, Knowledge, UpdateKind
from fedleak.util.errors import CaptureError, FedleakError

pytestmark = pytest.mark.core

SOME = Lines("some.jsonl", dict)
SERVER = Knowledge(learning_rate=5e-5, local_steps=3, dropout=True)
# Hypothesis runs one test many times in one folder: each of these tests starts by clearing it.
shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


KEY = Key(3, 7)
INFO = {"experiment": {}, "fingerprint": "f00", "status": "new", "num_labels": 2}


def capture_of(key=KEY, kind=UpdateKind.DELTA):
    rng = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(4, 6, generator=rng).T,  # not contiguous
        "b": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(3, generator=rng).half(),
    }
    return Capture(key, ClientUpdate(kind, tensors, 5), SERVER)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "runs" / "r")


@pytest.fixture
def rows(run):
    """A run whose folder is there, for files that are appended to."""
    run.path.mkdir(parents=True)
    return run


# --- captures and models --------------------------------------------------------------------


@pytest.mark.parametrize("kind", UpdateKind)
def test_a_capture_comes_back_as_it_was(run, kind):
    capture = capture_of(kind=kind)
    run.captures.write(capture)
    back = run.captures.read_capture(capture.key)
    assert (back.key, back.knowledge) == (capture.key, SERVER)
    assert run.captures.about(capture.key).knowledge == SERVER
    assert (back.update.kind, back.update.num_examples) == (kind, 5)
    assert type(back.update.kind) is UpdateKind
    assert back.update.tensors.keys() == capture.update.tensors.keys()
    for name, value in capture.update.tensors.items():
        assert back.update.tensors[name].dtype == value.dtype
        assert torch.equal(back.update.tensors[name], value)


def test_keys_and_rounds_are_listed_in_order_whatever_their_number_of_digits(run):
    assert run.captures.all_keys() == run.vault.all_keys() == run.models.rounds() == []
    keys = [Key(1, 3), Key(1, 120), Key(2, 0), Key(12345, 1)]
    for key in reversed(keys):
        run.captures.write(capture_of(key))
        run.vault.write(key, {})
        run.models.write(key.round, {"a": torch.ones(1)})
    (run.path / "captures" / "note.safetensors").touch()
    assert run.captures.all_keys() == run.vault.all_keys() == keys
    assert run.models.rounds() == [1, 2, 12345]
    assert sorted(p.name for p in (run.path / "captures").iterdir())[0] == "note.safetensors"


@shared_folder
@given(st.floats(0, 1, exclude_max=True))
def test_a_cut_capture_is_damaged_wherever_it_was_cut(run, where):
    run.captures.write(capture_of())
    path = run.path / "captures" / "r0003-c07.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(where * len(content))])
    for read in (run.captures.read_capture, run.captures.about):
        with pytest.raises(CaptureError, match=r"r0003-c07\.safetensors is damaged"):
            read(Key(3, 7))


@pytest.mark.parametrize(
    "garbage", [b"", b"\0" * 100, b"{}" * 50, b"\x08\0\0\0\0\0\0\0{}      ", b"\xff" * 16]
)
def test_garbage_is_a_damaged_capture_and_a_damaged_model(run, garbage):
    run.captures.write(capture_of())
    run.models.write(3, {"a": torch.ones(1)})
    (run.path / "captures" / "r0003-c07.safetensors").write_bytes(garbage)
    for read in (run.captures.read_capture, run.captures.about):
        with pytest.raises(CaptureError, match=r"r0003-c07\.safetensors is damaged.*delete it"):
            read(Key(3, 7))
    (run.path / "models" / "r0003.safetensors").write_bytes(garbage[:8])
    with pytest.raises(CaptureError, match=r"r0003\.safetensors is damaged"):
        run.models.read_model(3)


BESIDE = {
    "rows that are text": ({"rows": {"b": "5"}}, "rows.b: Input should be a valid integer"),
    "rows without end": ({"rows": {"b": 10**15}}, "b has the shape"),
    "no rows": ({"rows": None}, "rows: Input should be an object"),
    "rows left out": ({"rows": {}}, "b has the shape"),
    "examples that are text": ({"num_examples": "5"}, "num_examples: Input should be a valid int"),
    "a rate that is text": ({"knowledge": {"learning_rate": "x"}}, "knowledge.learning_rate: "),
    "another kind": ({"kind": "pickle"}, "kind: Input should be"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_stands_beside_a_capture_is_checked_before_it_is_used(run, name):
    changes, says = BESIDE[name]
    rows, parameters = torch.zeros(9, 4), {"b": torch.empty(9, 4, device="meta")}
    rows[3] = 1
    run.captures.write(Capture(KEY, ClientUpdate(UpdateKind.DELTA, {"b": rows}, 5), SERVER))
    assert torch.equal(run.captures.read_capture(KEY, parameters).update.tensors["b"], rows)
    file = run.path / "captures" / "r0003-c07.safetensors"
    with safe_open(file, framework="pt") as opened:
        table = json.loads(opened.metadata()["fedleak"])
    save_file(load_file(file), file, {"fedleak": json.dumps(table | changes)})
    with pytest.raises(CaptureError, match=rf"r0003-c07\.safetensors is damaged \(.*{says}"):
        run.captures.read_capture(KEY, parameters)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ({"other": torch.ones(2)}, "'other' is no parameter of the model"),
        ({"b": torch.ones(3)}, r"b has the shape \(3,\), and the model's \(2,\)"),
        ({"b": torch.ones(2, dtype=torch.int64)}, "b is of torch.int64"),
    ],
)
def test_a_capture_of_another_model_is_damaged(run, tensor, says):
    run.captures.write(Capture(KEY, ClientUpdate(UpdateKind.DELTA, tensor, 5), SERVER))
    with pytest.raises(CaptureError, match=says):
        run.captures.read_capture(KEY, {"b": torch.empty(2, device="meta")})


def test_what_is_not_there_is_named(run):
    with pytest.raises(CaptureError, match=r"r0001-c00\.safetensors"):
        run.captures.read_capture(Key(1, 0))
    with pytest.raises(CaptureError, match=r"r0001\.safetensors"):
        run.models.read_model(1)
    with pytest.raises(FedleakError, match="not a run directory"):
        run.info()
    assert run.vault.read_note(Key(1, 0)) is None
    assert run.rows(Lines("leakage.jsonl", dict)) == []


# --- the vault, run.json --------------------------------------------------------------------


WRITES = {
    "create": lambda run: run.create(**INFO),
    "capture": lambda run: run.captures.write(capture_of()),
    "hold": lambda run: run.held.write(capture_of()),
    "broadcast": lambda run: run.models.write(1, {"a": torch.ones(1)}),
    "truth": lambda run: run.vault.write(Key(1, 2), {}),
    "defended": lambda run: run.defended.write(Key(1, 2), {}),
    "append": lambda run: run.append(SOME, {}),
    "rows": lambda run: run.write_rows(SOME, [{}]),
    "json": lambda run: run.write_json("some.json", {}),
    "lock": lambda run: run.lock().__enter__(),
}


@pytest.mark.parametrize("kind", WRITES)
def test_only_its_owner_can_open_what_is_written_from_the_first_moment(run, kind, monkeypatch):
    modes, opened = [], os.open

    def watch(path, flags, mode=0o777, **more):
        if flags & os.O_CREAT:
            modes.append(mode)
        return opened(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", watch)
    before = os.umask(0o022)
    try:
        WRITES[kind](run)
    finally:
        os.umask(before)
    assert modes
    assert set(modes) == {0o600}
    paths = [run.path, *run.path.rglob("*")]
    assert all(stat.S_IMODE(p.stat().st_mode) == (0o700 if p.is_dir() else 0o600) for p in paths)
    assert any(p.is_file() for p in paths)


def test_a_folder_that_was_there_becomes_its_owners(run):
    run.path.mkdir(parents=True, mode=0o755)
    run.create(**INFO)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


def test_a_private_batch_is_replaced(run):
    run.vault.write(Key(1, 2), {"sequences": [[1, 2]]})
    run.vault.write(Key(1, 2), {"sequences": [[1, 3]]})
    assert run.vault.read_note(Key(1, 2)) == {"sequences": [[1, 3]]}


def test_captures_and_models_of_another_experiment_are_not_read(run, tmp_path):
    other = Run(tmp_path / "other")
    run.create(**INFO)
    other.create(**INFO | {"fingerprint": "f01"})
    for directory in (run, other):
        directory.captures.write(capture_of())
        directory.held.write(capture_of())
        directory.models.write(3, {"a": torch.ones(1)})
    files = ("captures/r0003-c07.safetensors", "held/r0003-c07.safetensors")
    for name in (*files, "models/r0003.safetensors"):
        (run.path / name).write_bytes((other.path / name).read_bytes())
    reads = (
        run.captures.read_capture,
        run.captures.about,
        run.held.read_capture,
        lambda _: run.models.read_model(3),
    )
    for read in reads:
        with pytest.raises(CaptureError, match="of another experiment, f01; this one is f00"):
            read(KEY)
    assert other.captures.read_capture(KEY).key == KEY


def test_information_is_added_to_and_replaced(run):
    assert not run.exists()
    assert run.fingerprint() is None
    run.create(**INFO, a=1, b=2)
    run.update_info(b=3)
    assert run.info() == {"schema_version": 2, **INFO, "a": 1, "b": 3}
    assert run.fingerprint() == "f00"
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.update_info(b=float("nan"))
    assert run.info()["b"] == 3


# --- rows -----------------------------------------------------------------------------------


@shared_folder
@given(st.data())
def test_a_torn_last_line_is_ignored_and_cut_by_the_next_append(rows, data):
    lines = data.draw(
        st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=4), max_size=2), max_size=4)
    )
    path = rows.path / "some.jsonl"
    path.unlink(missing_ok=True)
    for line in lines:
        rows.append(SOME, line)
    content = path.read_bytes() if lines else b""
    assert rows.rows(SOME) == lines
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    kept = lines[: content[:cut].count(b"\n")]
    assert rows.rows(SOME) == kept
    rows.append(SOME, {"after": 1})
    assert rows.rows(SOME) == [*kept, {"after": 1}]
    assert path.read_bytes().count(b"\n") == len(kept) + 1


@shared_folder
@given(st.lists(st.integers(0, 3), max_size=4), st.floats(0, 1))
def test_lines_that_belong_together_are_all_there_or_none(rows, sizes, where):
    path = rows.path / "some.jsonl"
    path.write_bytes(b"")
    written = []
    for group, size in enumerate(sizes):
        lines = [{"group": group, "line": i} for i in range(size)]
        rows.append(SOME, *lines)
        written += [(path.stat().st_size, line) for line in lines]
    content = path.read_bytes()
    assert [json.loads(line) for line in content.splitlines()] == [line for _, line in written]
    cut = round(where * len(content))
    path.write_bytes(content[:cut])
    kept = [line for end, line in written if end <= cut]
    assert rows.rows(SOME) == kept
    rows.append(SOME, {"after": 1})
    assert rows.rows(SOME) == [*kept, {"after": 1}]
    assert len(path.read_bytes().splitlines()) == len(kept) + 1


def test_a_group_that_was_cut_after_a_whole_line_does_not_count(rows):
    path = rows.path / "some.jsonl"
    path.unlink(missing_ok=True)
    rows.append(SOME, {"a": 1}, {"b": 2})
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    rows.append(SOME, {"after": 1})
    assert rows.rows(SOME) == [{"after": 1}]


def test_lines_that_belong_together_are_one_write(rows, monkeypatch):
    sizes, sync = [], os.fsync
    path = rows.path / "some.jsonl"
    monkeypatch.setattr(os, "fsync", lambda file: (sizes.append(path.stat().st_size), sync(file)))
    rows.append(SOME, {"a": 1}, {"b": 2}, {"c": 3})
    assert sizes == [path.stat().st_size]
    rows.append(SOME)
    assert len(sizes) == 1
    with pytest.raises(ValueError, match="not JSON compliant"):
        rows.append(SOME, {"d": 4}, {"e": float("nan")})
    assert rows.rows(SOME) == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_writing_rows_replaces_the_file_and_leaves_nothing_beside_it(rows):
    rows.append(SOME, {"a": 1})
    rows.write_rows(SOME, [{"b": 2}, {"c": None}])
    assert rows.rows(SOME) == [{"b": 2}, {"c": None}]
    assert [path.name for path in rows.path.iterdir()] == ["some.jsonl"]


@pytest.mark.parametrize("bad", [b"oops", b"[1]", b"\xff\xfe", b"\0", b'{"a": NaN}', b'{"a": Infi'])
def test_lines_that_cannot_be_read_are_named_and_put_aside(rows, bad):
    rows.append(SOME, {"group": 1}, {"group": 1, "last": True})
    rows.append(SOME, {"group": 2}, {"group": 2, "last": True})
    path = rows.path / "some.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + bad + b"\n" + b"".join(lines[2:]) + b'{"torn')
    with pytest.raises(FedleakError, match=r"some\.jsonl, line 2, is damaged \(.*fedleak score"):
        rows.rows(SOME)
    kept = [{"group": 1}, {"group": 2}, {"group": 2, "last": True}]
    assert rows.salvage(SOME) == kept
    assert rows.salvage(SOME) == rows.rows(SOME) == kept
    (aside,) = rows.rows(Lines("damaged.jsonl", dict))
    assert (aside["file"], aside["line"]) == ("some.jsonl", 2)
    assert aside["content"].encode("latin-1") == bad
    # A kept line that its group ended behind is complete now.
    path.write_bytes(lines[0] + lines[2] + bad + b"\n")
    assert rows.salvage(SOME) == [{"group": 1}, {"group": 2}]
    assert rows.rows(SOME) == [{"group": 1}, {"group": 2}]


def test_a_list_is_written_and_read_without_a_seal(rows):
    rows.write_json("some.json", [1, {"seal": 2}])
    assert rows.read_json("some.json") == [1, {"seal": 2}]


def test_what_the_disk_refuses_is_named_and_leaves_the_old_file(rows, monkeypatch):
    rows.write_json("some.json", {"a": 1})

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for write in (
            lambda: rows.write_json("some.json", {"a": 2}),
            lambda: rows.models.write(1, {"a": torch.ones(1)}),
            lambda: rows.append(SOME, {}),
        ):
            with pytest.raises(FedleakError, match="cannot be written: No space left on device"):
                write()
    assert rows.read_json("some.json") == {"a": 1}
    assert not list(rows.path.rglob(".*"))


@pytest.mark.parametrize("plant", [Path.symlink_to, lambda at, _: os.mkfifo(at)])
def test_what_is_no_plain_file_is_not_replaced(tmp_path, plant):
    elsewhere, planted = tmp_path / "elsewhere", tmp_path / "planted"
    elsewhere.write_text("kept")
    plant(planted, elsewhere)
    before = sorted(tmp_path.iterdir()), planted.lstat().st_ino
    with pytest.raises(FedleakError, match="planted cannot be written: "):
        replace(planted, b"new")
    assert (sorted(tmp_path.iterdir()), planted.lstat().st_ino) == before
    assert elsewhere.read_text() == "kept"


def test_a_new_file_has_a_name_that_nobody_guesses_until_it_is_whole(tmp_path):
    path = tmp_path / "f"
    with new_file(path) as temporary:
        assert (temporary.parent, temporary == path) == (tmp_path, False)
        assert temporary.name.startswith(".f.")
        assert temporary.name.endswith(HALF_WRITTEN)
        temporary.write_text("whole")
        assert not path.exists()
    assert ([*tmp_path.iterdir()], path.read_text()) == ([path], "whole")
    with pytest.raises(KeyError), new_file(path) as temporary:
        raise KeyError(temporary.write_text("half"))
    assert ([*tmp_path.iterdir()], path.read_text()) == ([path], "whole")


def test_a_number_that_is_none_is_not_written(rows):
    with pytest.raises(ValueError, match="not JSON compliant"):
        rows.append(SOME, {"a": float("inf")})
    assert rows.rows(SOME) == []


# --- one process, and a fresh start ---------------------------------------------------------


def hold(path, held, end):
    with Run(path).lock():
        held.set()
        end.wait(30)


def test_a_run_is_of_one_process_at_a_time(run):
    context = multiprocessing.get_context("fork")
    held, end = context.Event(), context.Event()
    other = context.Process(target=hold, args=(run.path, held, end))
    other.start()
    try:
        assert held.wait(30)
        in_use = pytest.raises(FedleakError, match="in use by another fedleak process")
        with in_use, run.lock():
            pass
    finally:
        end.set()
        other.join()
    with run.lock():
        pass


def test_the_lock_is_not_taken_twice_in_one_process(run):
    with run.lock(), pytest.raises(FedleakError, match="in use"), Run(run.path).lock():
        pass
    with run.lock():
        pass


def test_moving_aside_keeps_everything_and_never_overwrites(run):
    for number in range(3):
        run.create(**INFO, number=number)
        run.vault.write(Key(1, number), {})
        move_aside(run.path)
        assert not run.path.exists()
    aside = list(run.path.parent.glob("r.*"))
    assert len(aside) == 3
    for path in aside:
        number = json.loads((path / "run.json").read_text())["number"]
        assert Run(path).vault.all_keys() == [Key(1, number)]


# --- typed values ---------------------------------------------------------------------------


NOTHING = SweepSummary(name="empty", axes={"seed": [1, 2]}, cells=())


@pytest.mark.parametrize(
    ("version", "says"),
    [(1, "it has schema_version 1, and this fedleak reads 2"), (None, "schema_version None")],
)
def test_a_document_of_another_version_is_refused_with_what_to_do(rows, version, says):
    rows.write(SWEEP, NOTHING)
    assert rows.read_document(SWEEP) == NOTHING
    table = rows.read_json("sweep.json")
    assert table.pop("schema_version") == SCHEMA_VERSION
    rows.write_json("sweep.json", table | ({"schema_version": version} if version else {}))
    with pytest.raises(FedleakError, match=re.escape(says)) as caught:
        rows.read_document(SWEEP)
    assert "sweep.json cannot be read" in str(caught.value)
    assert "`fedleak sweep` with the experiment's file writes it" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "it holds a list, not a table"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"schema_version": 2, "name": "n", "axes": {}}', "cells: Field required"),
        ('{"schema_version": 2, "a": -Infinity}', "-Infinity is not a number"),
        ('{"schema_version": 2, "a": 1e999}', "1e999 is not a number"),
    ],
)
def test_a_document_that_is_none_is_refused(rows, content, says):
    (rows.path / "sweep.json").write_text(content)
    with pytest.raises(FedleakError) as caught:
        rows.read_document(SWEEP)
    assert str(caught.value) == (
        f"{rows.path / 'sweep.json'} cannot be read ({says}): {SWEEP.remedy}"
    )


def test_figures_stand_beside_the_fields_and_come_back_by_name(rows):
    utility = Utility(round=3, loss=0.25, mcc=None)
    rows.append(UTILITY, utility)
    line = (rows.path / "utility.jsonl").read_text()
    assert line.startswith('{"round": 3, "loss": 0.25, "mcc": null, "seal": "')
    (row,) = rows.rows(UTILITY)
    assert row == utility
    assert row.figures == {"loss": 0.25, "mcc": None}


def test_a_line_that_does_not_fit_says_where_and_not_what(rows):
    (rows.path / "utility.jsonl").write_text('{"round": "the secret of lars"}\n')
    with pytest.raises(FedleakError, match=r"line 1, is damaged \(round: Input") as caught:
        rows.rows(UTILITY)
    assert "lars" not in str(caught.value)


def test_lines_carry_a_mark_and_those_of_another_are_put_aside(rows):
    own_lines, other_lines = (Lines("some.jsonl", dict, {"of": mark}) for mark in ("one", "other"))
    rows.append(own_lines, {"a": 1})
    rows.append(other_lines, {"a": 2})
    assert rows.salvage(own_lines) == [{"a": 1, "of": "one"}]
    assert [(at.line, at.reason) for at in rows.damaged()] == [(2, "it is of another experiment")]
