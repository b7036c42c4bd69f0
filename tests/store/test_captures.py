"""What becomes of captures, models and private files of a run: each is told by what is left."""

import errno
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedleak.store.run import EVERYONE, Capture, Key, Run
from fedleak.training.observation import ClientUpdate, Knowledge, UpdateKind
from fedleak.util.errors import CaptureError, FedleakError

pytestmark = pytest.mark.core

KEY, OTHER, SUM = Key(2, 7), Key(2, 8), Key(3, EVERYONE)
SERVER = Knowledge(learning_rate=5e-5, local_steps=3)
HERE = {"weight": torch.arange(6.0).reshape(2, 3)}


def captured(key: Key = KEY) -> Capture:
    return Capture(key, ClientUpdate(UpdateKind.DELTA, HERE, 5), SERVER)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "r")
    run.create(experiment={}, fingerprint="f00", status="new", num_labels=2)
    return run


def remarked(path: Path, mark: str) -> None:
    """Writes a file of tensors anew, as of another experiment."""
    save_file(load_file(path), path, {"fedleak": f'{{"fingerprint": "{mark}"}}'})


def test_a_capture_that_is_answered_and_deleted_leaves_what_stood_beside_it(run: Run) -> None:
    for key in (KEY, OTHER, SUM):
        run.write_capture(captured(key))
    assert (run.waiting(), run.deleted(), run.is_closed(KEY)) == (3, set(), False)
    run.close(KEY, delete=False)
    run.close(OTHER, delete=True)
    assert (run.waiting(), run.deleted()) == (1, {OTHER})
    assert run.captures() == [KEY, OTHER, SUM]
    assert [run.has_capture(key) for key in (KEY, OTHER, Key(2, 9))] == [True, True, False]
    assert [run.is_closed(key) for key in (KEY, OTHER, SUM)] == [True, True, False]
    for key in (KEY, OTHER, SUM):
        assert (run.read_knowledge(key), run.num_examples(key)) == (SERVER, 5)
    assert run.read_capture(KEY).update.num_examples == 5
    path = run.path / f"captures/{OTHER}.safetensors"
    with pytest.raises(CaptureError) as refused:
        run.read_capture(OTHER)
    assert str(refused.value) == (
        f"capture {path} was deleted once every attack had answered (audit.keep): nothing can "
        "attack it again; `fedleak run FILE --fresh` with audit.keep = 'all' keeps it"
    )
    run.close(KEY, delete=True)  # a second time, from what stands beside it
    assert run.deleted() == {KEY, OTHER}


def test_what_cannot_be_closed_says_what_to_do(run: Run) -> None:
    run.write_capture(captured())
    path = run.path / f"captures/{KEY}.safetensors"
    save_file(load_file(path), path)
    with pytest.raises(CaptureError) as refused:
        run.close(KEY, delete=True)
    assert str(refused.value) == (
        f"capture {path} is damaged ('fedleak' is missing): delete it, run the experiment again, "
        "then `fedleak attack --retry`"
    )
    assert path.is_file()
    assert not run.is_closed(KEY)


def test_what_is_held_is_no_capture_until_it_is_admitted(run: Run) -> None:
    run.hold(captured())
    run.hold(captured(OTHER))
    assert run.captures() == []
    assert torch.equal(run.held(KEY).update.tensors["weight"], HERE["weight"])
    assert (run.held(KEY).key, run.held(OTHER).key) == (KEY, OTHER)
    run.admit(KEY)
    assert run.captures() == [KEY]
    assert run.read_capture(KEY).knowledge == run.held(KEY).knowledge == SERVER
    assert run.is_genuine(f"captures/{KEY}.safetensors")
    run.release(KEY)
    assert not (run.path / f"held/{KEY}.safetensors").exists()
    assert (run.path / f"held/{OTHER}.safetensors").exists()
    run.drop_held()
    assert not (run.path / "held").exists()
    run.drop_held()
    assert run.captures() == [KEY]


def test_what_is_no_number_is_not_written(run: Run) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        run.write_json("vault/r0001-c00.json", {"noise_scale": math.nan})
    assert run.truths() == []


def test_where_a_file_can_have_one_name_only_what_is_held_is_copied(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    run.hold(captured())
    run.admit(KEY)
    run.release(KEY)
    assert torch.equal(run.read_capture(KEY).update.tensors["weight"], HERE["weight"])


def test_a_round_is_forgotten_but_for_the_first_model(run: Run) -> None:
    for key in (Key(1, 7), KEY, OTHER, SUM):
        run.write_capture(captured(key))
    run.close(KEY, delete=False)
    for round in (1, 2, 3):
        run.write_broadcast(round, HERE)
        run.write_moments(round, {"first": torch.full((2,), float(round))})
    assert run.broadcasts() == run.moments() == [1, 2, 3]
    run.forget(2)
    assert run.captures() == [Key(1, 7), SUM]
    assert run.broadcasts() == run.moments() == [1, 3]
    run.forget(1)
    assert run.captures() == [SUM]
    assert run.broadcasts() == run.moments() == [1, 3]
    assert [run.has_broadcast(round) for round in (1, 2, 3)] == [True, False, True]
    assert run.read_moments(1) == {}
    assert run.read_moments(3)["first"].tolist() == [3.0, 3.0]
    assert torch.equal(run.read_broadcast(3)["weight"], HERE["weight"])


def test_moments_of_another_experiment_are_not_read(run: Run) -> None:
    run.write_moments(2, HERE)
    path = run.path / "models/moments-r0002.safetensors"
    remarked(path, "f01")
    with pytest.raises(CaptureError) as refused:
        run.read_moments(2)
    assert str(refused.value).startswith(
        f"model {path} is damaged (it is of another experiment, f01; this one is f00): "
    )


def test_an_audited_copy_comes_back_as_it_was(run: Run) -> None:
    assert not run.has_audited(KEY)
    run.write_audited(KEY, HERE["weight"])
    assert run.has_audited(KEY)
    assert not run.has_audited(OTHER)
    assert torch.equal(run.read_audited(KEY), HERE["weight"])


@pytest.mark.parametrize(
    ("tensors", "mark", "says"),
    [
        (HERE, "f01", "it is of another experiment, f01; this one is f00"),
        ({"differences": torch.tensor([1.0, math.nan])}, "f00", "not all of it are finite numbers"),
        ({"differences": torch.tensor([1, 2])}, "f00", "not all of it are finite numbers"),
        (HERE, "f00", "'differences' is missing"),
    ],
)
def test_an_audited_copy_that_cannot_be_is_refused(
    run: Run, tensors: dict[str, Tensor], mark: str, says: str
) -> None:
    run.write_audited(KEY, HERE["weight"])
    path = run.path / f"vault/{KEY}.safetensors"
    save_file(tensors, path, {"fedleak": f'{{"fingerprint": "{mark}"}}'})
    with pytest.raises(CaptureError) as refused:
        run.read_audited(KEY)
    assert str(refused.value) == f"{path} is damaged ({says})"


def test_what_defenses_did_is_listed_also_where_it_cannot_be_read(run: Run) -> None:
    run.write_defended(OTHER, {"noise": math.inf, "norms": (1.0, math.nan), "of": {"a": 2.0}})
    run.write_defended(KEY, {"noise": 0.5})
    (run.path / f"defended/{KEY}.json").write_text("{")
    assert run.defended() == {
        KEY: None,
        OTHER: {"noise": None, "norms": [1.0, None], "of": {"a": 2.0}},
    }
    assert list(run.defended()) == [KEY, OTHER]


def test_what_is_asked_of_a_lock_is_whether_somebody_has_it(run: Run) -> None:
    assert not run.in_use()
    with run.shared():
        assert run.in_use()
        with run.shared():
            pass
        with pytest.raises(FedleakError) as refused, run.lock():
            pass
    assert str(refused.value) == f"{str(run.path)!r} is in use by another fedleak process"
    with run.lock():
        assert run.in_use()
        with pytest.raises(FedleakError, match="in use"), run.shared():
            pass
    assert not run.in_use()


def test_a_run_in_a_run_is_no_link(run: Run, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run.path / "cell").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedleakError) as refused:
        run.inside("cell")
    assert str(refused.value) == (
        f"{run.path / 'cell'} cannot be used: it is a link, and no real folder: mend that and give "
        "the same command again"
    )
    assert run.inside("other") == Run(run.path / "other")


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(FedleakError) as refused:
        Run(tmp_path).info()
    assert str(refused.value) == (
        f"{str(tmp_path)!r} is not a run directory: it has no run.json: name the folder of a run, "
        "such as runs/NAME"
    )
