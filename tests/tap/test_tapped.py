"""The folder of a tap: what is kept comes back, and what cannot be read is said."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedleak.tap.folder import MOST_ROUNDS, KeptArrays, Problem, Tapped, TappedMessage
from fedleak.util.errors import ConfigError, FedleakError

KEPT = KeptArrays(record="arrays", file="arrays/r0001.safetensors")


def message(round: int = 1) -> TappedMessage:
    return TappedMessage(
        way="received", round=round, node=5, arrays=(KEPT,), numbers={"metrics": {"loss": 0.5}}
    )


@pytest.fixture
def tap(tmp_path: Path) -> Tapped:
    tap = Tapped(tmp_path / "taps" / "mine")
    tap.create()
    return tap


def test_only_its_owner_can_open_the_folder(tap: Tapped) -> None:
    tap.path.chmod(0o755)
    tap.create()  # a second time, in a folder that was there
    assert [path.stat().st_mode & 0o777 for path in (tap.path, tap.path / "arrays")] == [0o700] * 2


def test_a_folder_is_used_where_something_is_there(tap: Tapped, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    paths = (tap.path, tmp_path / "empty", tmp_path / "file", tmp_path / "none")
    assert [Tapped(path).used() for path in paths] == [True, False, True, False]


def test_arrays_come_back_by_their_names(tap: Tapped) -> None:
    file = tap.write_arrays("r0001", {"b": np.ones(2), "a": np.zeros((3, 1))})
    assert file == KEPT.file
    assert sorted(tap.names(KEPT)) == ["a", "b"]
    with tap.opened(KEPT) as file:
        assert file.get_tensor("b").tolist() == [1.0, 1.0]


def test_arrays_are_read_from_the_folder_of_arrays_alone(tap: Tapped) -> None:
    tap.write_arrays("r0001", {"a": np.ones(1)})
    (tap.path / "arrays/r0001.safetensors").rename(tap.path / "r0001.safetensors")
    with pytest.raises(FedleakError) as refused:
        tap.names(KeptArrays(record="arrays", file="../r0001.safetensors"))
    beginning = f"{tap.path / 'arrays/r0001.safetensors'} cannot be read ("
    assert str(refused.value).startswith(beginning)
    (tap.path / "arrays/r0001.safetensors").write_bytes(b"no tensors")
    with pytest.raises(FedleakError, match=r"r0001\.safetensors cannot be read \("):
        tap.names(KEPT)


def test_messages_that_cannot_be_read_are_named_by_their_line(tap: Tapped) -> None:
    tap.append(message())
    with (tap.path / "messages.jsonl").open("a") as file:
        file.write("[]\n")
    tap.append(message(MOST_ROUNDS))
    assert tap.messages() == (
        [message(), message(MOST_ROUNDS)],
        ["line 2 of messages.jsonl is damaged (a table was expected, not a list)"],
    )


def test_a_message_that_could_not_be_read_back_is_not_noted(tap: Tapped) -> None:
    beyond = message().model_copy(update={"round": MOST_ROUNDS + 1})
    with pytest.raises(ValueError, match=r"^round: Input should be less than or equal to"):
        tap.append(beyond)
    with pytest.raises(ConfigError) as refused:
        tap.messages()
    assert str(refused.value) == (
        f"{str(tap.path)!r} is not the folder of a tap: it has no messages.jsonl: name the folder "
        'that the ServerApp gave to `tap(grid, "FOLDER")`'
    )


def test_a_problem_that_cannot_be_read_is_a_problem(tap: Tapped) -> None:
    assert tap.problems() == []
    problem = Problem(round=2, node=None, reason="too large")
    tap.complain(problem)
    with (tap.path / "problems.jsonl").open("a") as file:
        file.write(json.dumps({"round": 1, "node": 1}) + "\n")
    assert tap.problems() == [
        problem,
        Problem(round=None, node=None, reason="reason: Field required"),
    ]
