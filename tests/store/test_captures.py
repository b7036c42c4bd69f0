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
        run.captures.write(captured(key))
    assert (run.captures.waiting(), run.captures.deleted(), run.captures.is_closed(KEY)) == (
        3,
        set(),
        False,
    )
    run.captures.close(KEY, delete=False)
    run.captures.close(OTHER, delete=True)
    assert (run.captures.waiting(), run.captures.deleted()) == (1, {OTHER})
    assert run.captures.all_keys() == [KEY, OTHER, SUM]
    assert [run.captures.has(key) for key in (KEY, OTHER, Key(2, 9))] == [True, True, False]
    assert [run.captures.is_closed(key) for key in (KEY, OTHER, SUM)] == [True, True, False]
    for key in (KEY, OTHER, SUM):
        about = run.captures.about(key)
        assert (about.knowledge, about.num_examples) == (SERVER, 5)
    assert run.captures.read_capture(KEY).update.num_examples == 5
    path = run.path / f"captures/{OTHER}.safetensors"
    with pytest.raises(CaptureError) as refused:
        run.captures.read_capture(OTHER)
    assert str(refused.value) == (
        f"capture {path} was deleted once every attack had answered (audit.keep): nothing can "
        "attack it again; `fedleak run FILE --fresh` with audit.keep = 'all' keeps it"
    )
    run.captures.close(KEY, delete=True)  # a second time, from what stands beside it
    assert run.captures.deleted() == {KEY, OTHER}


def test_what_cannot_be_closed_says_what_to_do(run: Run) -> None:
    run.captures.write(captured())
    path = run.path / f"captures/{KEY}.safetensors"
    save_file(load_file(path), path)
    with pytest.raises(CaptureError) as refused:
        run.captures.close(KEY, delete=True)
    assert str(refused.value) == (
        f"capture {path} is damaged ('fedleak' is missing): delete it, run the experiment again, "
        "then `fedleak attack --retry`"
    )
    assert path.is_file()
    assert not run.captures.is_closed(KEY)


def test_what_is_held_is_no_capture_until_it_is_admitted(run: Run) -> None:
    run.held.write(captured())
    run.held.write(captured(OTHER))
    assert run.captures.all_keys() == []
    assert torch.equal(run.held.read_capture(KEY).update.tensors["weight"], HERE["weight"])
    assert (run.held.read_capture(KEY).key, run.held.read_capture(OTHER).key) == (KEY, OTHER)
    run.captures.admit(KEY, run.held)
    assert run.captures.all_keys() == [KEY]
    assert (
        run.captures.read_capture(KEY).knowledge == run.held.read_capture(KEY).knowledge == SERVER
    )
    assert run.is_genuine(f"captures/{KEY}.safetensors")
    run.held.delete(KEY)
    assert not (run.path / f"held/{KEY}.safetensors").exists()
    assert (run.path / f"held/{OTHER}.safetensors").exists()
    run.held.drop()
    assert not (run.path / "held").exists()
    run.held.drop()
    assert run.captures.all_keys() == [KEY]


def test_what_is_no_number_is_not_written(run: Run) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        run.write_json("vault/r0001-c00.json", {"noise_scale": math.nan})
    assert run.vault.all_keys() == []


def test_where_a_file_can_have_one_name_only_what_is_held_is_copied(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    run.held.write(captured())
    run.captures.admit(KEY, run.held)
    run.held.delete(KEY)
    assert torch.equal(run.captures.read_capture(KEY).update.tensors["weight"], HERE["weight"])


def test_a_round_is_forgotten_but_for_the_first_model(run: Run) -> None:
    for key in (Key(1, 7), KEY, OTHER, SUM):
        run.captures.write(captured(key))
    run.captures.close(KEY, delete=False)
    for round in (1, 2, 3):
        run.models.write(round, HERE)
        run.moments.write(round, {"first": torch.full((2,), float(round))})
    assert run.models.rounds() == run.moments.rounds() == [1, 2, 3]
    run.forget(2)
    assert run.captures.all_keys() == [Key(1, 7), SUM]
    assert run.models.rounds() == run.moments.rounds() == [1, 3]
    run.forget(1)
    assert run.captures.all_keys() == [SUM]
    assert run.models.rounds() == run.moments.rounds() == [1, 3]
    assert [run.models.has(round) for round in (1, 2, 3)] == [True, False, True]
    assert run.moments.read_model(3)["first"].tolist() == [3.0, 3.0]
    assert torch.equal(run.models.read_model(3)["weight"], HERE["weight"])


def test_moments_of_another_experiment_are_not_read(run: Run) -> None:
    run.moments.write(2, HERE)
    path = run.path / "models/moments-r0002.safetensors"
    remarked(path, "f01")
    with pytest.raises(CaptureError) as refused:
        run.moments.read_model(2)
    assert str(refused.value).startswith(
        f"model {path} is damaged (it is of another experiment, f01; this one is f00): "
    )


def test_an_audited_copy_comes_back_as_it_was(run: Run) -> None:
    assert not run.vault.has_differences(KEY)
    run.vault.write_differences(KEY, HERE["weight"])
    assert run.vault.has_differences(KEY)
    assert not run.vault.has_differences(OTHER)
    assert torch.equal(run.vault.read_differences(KEY), HERE["weight"])


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
    run.vault.write_differences(KEY, HERE["weight"])
    path = run.path / f"vault/{KEY}.safetensors"
    save_file(tensors, path, {"fedleak": f'{{"fingerprint": "{mark}"}}'})
    with pytest.raises(CaptureError) as refused:
        run.vault.read_differences(KEY)
    assert str(refused.value) == f"{path} is damaged ({says})"


def test_what_defenses_did_is_listed_also_where_it_cannot_be_read(run: Run) -> None:
    run.defended.write(OTHER, {"noise": None, "norms": (1.0, None), "of": {"a": 2.0}})
    run.defended.write(KEY, {"noise": 0.5})
    run.defended.path(KEY).write_text("{")
    assert run.defended.all_keys() == [KEY, OTHER]
    assert run.defended.read_note(OTHER) == {"noise": None, "norms": [1.0, None], "of": {"a": 2.0}}
    with pytest.raises(FedleakError, match="is damaged"):
        run.defended.read_note(KEY)


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
