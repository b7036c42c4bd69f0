"""What ends with status 1 because something is missing, and says what."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from tiny import Here, call, toml

from fedleak.dispatch import dispatcher
from fedleak.store.records import answers
from fedleak.store.run import Run
from fedleak.store.shards import Shard, Share, share


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(dispatcher, "hire", lambda *_: nullcontext([Here()]))
        Path("small.toml").write_text(toml())
        assert call("run", "small.toml")[0] == 0
    return folder


@pytest.fixture
def small(trained_once: Path, tmp_path: Path, in_process: None) -> Run:
    return Run(shutil.copytree(trained_once / "runs" / "small", tmp_path / "small"))


def interrupted(run: Run) -> str:
    run.update_info(status="interrupted")
    return "the run is not finished (interrupted): 2 of 2 captures are here"


def without_a_capture(run: Run) -> str:
    (run.path / "captures" / "r0001-c01.safetensors").unlink()
    return "1 of 2 captures are missing (r0001-c01)"


@pytest.mark.parametrize("command", ["score", "report", "attack"])
@pytest.mark.parametrize("lacking", [interrupted, without_a_capture])
def test_what_is_missing_is_the_last_line_and_status_1(
    small: Run, lacking: Callable[[Run], str], command: str
) -> None:
    says = lacking(small)
    status, _, errors = call(command, str(small.path))
    assert status == 1
    assert says in errors.splitlines()[-1]


@pytest.mark.parametrize("content", [None, "{"])
def test_a_shard_that_lost_its_mark_still_lacks_its_answers(
    small: Run, content: str | None
) -> None:
    """Shard 1 of 2 tried another attack on one of two updates, and shard 2 was never begun."""
    shard, given = Shard(2, 1), small.rows(answers(small.fingerprint()))
    small.write(share(shard), Share(attacks=("other",), complete=False))
    other = given[0].model_copy(update={"attack": "other"})
    small.append(shard.lines(answers(small.fingerprint())), other)
    lacks = "1 of 4 answers are missing (for r0001-c01)"
    status, _, errors = call("score", str(small.path))
    assert status == 1
    assert lacks in errors
    mark = small.path / shard.folder / "shard.json"
    mark.unlink() if content is None else mark.write_text(content)
    status, _, errors = call("score", str(small.path))
    assert status == 1
    assert lacks in errors
    assert "shard.json of shard 1/2 is missing or damaged" in errors


def test_a_report_prints_the_notes(small: Run) -> None:
    small.update_info(left_out=["a message"])
    status, text, _ = call("report", str(small.path))
    assert status == 0
    assert "note: 1 messages were left out of the run when it was imported" in text
