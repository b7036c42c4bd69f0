"""What fedleak did not write on this machine, or somebody changed since, is named."""

import hmac
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedleak.store import seal
from fedleak.store.provenance import unsealed
from fedleak.store.records import UTILITY, Utility
from fedleak.store.run import Capture, Key, Run
from fedleak.training.observation import ClientUpdate, Knowledge, UpdateKind
from fedleak.util.errors import ConfigError

pytestmark = pytest.mark.core

KEY = Key(1, 0)
CAPTURE, TRUTH = f"captures/{KEY}.safetensors", f"vault/{KEY}.json"


def sealed_run(path: Path) -> Run:
    run = Run(path)
    run.create(experiment={}, fingerprint="f", status="finished", num_labels=2)
    update = ClientUpdate(UpdateKind.GRADIENT, {"weight": torch.arange(3.0)}, 2)
    run.captures.write(Capture(KEY, update, Knowledge()))
    run.models.write(1, {"weight": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(())})
    run.vault.write(KEY, {"texts": ["a"], "of": {1: (2, 3)}})
    run.append(UTILITY, *(Utility(round=number, accuracy=0.5) for number in range(2)))
    return run


def edited_json(run: Run) -> list[str]:
    path = run.path / TRUTH
    path.write_text(path.read_text().replace('"a"', '"b"'))
    return [TRUTH]


def edited_tensor(run: Run) -> list[str]:
    path = run.path / CAPTURE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    return [CAPTURE]


def without_seal(run: Run) -> list[str]:
    path = run.path / "run.json"
    table = json.loads(path.read_text())
    del table["seal"]
    path.write_text(json.dumps(table))
    return ["run.json"]


def moved(run: Run) -> list[str]:
    name = f"vault/{Key(1, 1)}.json"
    shutil.copy(run.path / TRUTH, run.path / name)
    return [name]


def edited_line(run: Run) -> list[str]:
    path = run.path / UTILITY.name
    path.write_text(path.read_text().replace("0.5", "0.9", 1))
    return ["utility.jsonl, line 1"]


def strange_seal(run: Run) -> list[str]:
    path = run.path / UTILITY.name
    line, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(line) | {"seal": "é"}), *rest, ""]))
    return ["utility.jsonl, line 1"]


@pytest.mark.parametrize(
    "change", [edited_json, edited_tensor, without_seal, moved, edited_line, strange_seal]
)
def test_what_was_changed_is_named(tmp_path: Path, change: Callable[[Run], list[str]]) -> None:
    run = sealed_run(tmp_path / "run")
    assert unsealed(run) == []
    changed = change(run)
    assert unsealed(run) == changed


def test_nothing_is_of_here_under_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sealed_run(tmp_path / "run")
    other = tmp_path / "other.key"
    other.write_bytes(bytes(seal.KEY_BYTES))
    monkeypatch.setenv(seal.KEY_FILE, str(other))
    assert not run.is_genuine("run.json")
    models = "models/r0001.safetensors"
    lines = [f"utility.jsonl, line {number}" for number in (1, 2)]
    assert unsealed(run) == ["run.json", CAPTURE, models, TRUTH, *lines]


def test_a_note_in_the_run_json_of_others_does_not_make_it_ours(tmp_path: Path) -> None:
    run = sealed_run(tmp_path)
    run.update_info(status="running")
    assert run.is_genuine("run.json")
    without_seal(run)
    run.update_info(status="finished")
    assert not run.is_genuine("run.json")
    assert run.info()["status"] == "finished"


def test_what_is_held_becomes_a_capture_with_its_seal(tmp_path: Path) -> None:
    run = sealed_run(tmp_path)
    update = ClientUpdate(UpdateKind.GRADIENT, {"weight": torch.ones(3)}, 2)
    run.held.write(Capture(Key(1, 1), update, Knowledge()))
    run.captures.admit(Key(1, 1), run.held)
    run.captures.close(Key(1, 1), delete=False)
    assert unsealed(run) == []


def test_the_seal_is_no_part_of_a_value(tmp_path: Path) -> None:
    run = sealed_run(tmp_path)
    assert "seal" in json.loads((run.path / TRUTH).read_text())
    assert run.vault.read_note(KEY) == {"texts": ["a"], "of": {"1": [2, 3]}}


def test_a_seal_is_an_hmac_of_place_and_content() -> None:
    """Word for word, so that runs of an older version keep theirs."""
    key = Path(os.environ[seal.KEY_FILE]).read_bytes()

    def slowly(content: bytes) -> str:
        return hmac.digest(key, b"f/vault\0" + content, "sha256").hex()

    assert seal.seal("f/vault", [b"a", b"b"]) == slowly(b"ab")
    table = {"b": (1, 2.5), "a": {3: "é"}, seal.FIELD: "of another content"}
    text = b'{"a": {"3": "\\u00e9"}, "b": [1, 2.5]}'
    assert seal.sealed("f/vault", table) == {
        "b": (1, 2.5),
        "a": {3: "é"},
        seal.FIELD: slowly(text),
    }
    tensors = {"b": torch.tensor([[1.0, -2.0]]), "a": torch.tensor(3, dtype=torch.int16)}
    parts = b"".join(map(bytes, seal.tensor_parts(tensors, "beside")))
    assert parts == (
        b"beside"
        b"\0a\0torch.int16\0()\0"
        + struct.pack("<h", 3)
        + b"\0b\0torch.float32\0(1, 2)\0"
        + struct.pack("<2f", 1.0, -2.0)
    )


def test_a_user_gets_a_key_that_only_he_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(seal.KEY_FILE)
    monkeypatch.setattr(seal, "user_state_path", lambda name: tmp_path / "state" / name)
    seal._key.cache_clear()
    try:
        mark = seal.seal("here", [b"content"])
        path = tmp_path / "state" / "fedleak" / "seal.key"
        assert path.stat().st_mode & 0o777 == 0o600
        assert [path] == list(path.parent.iterdir())
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert len(path.read_bytes()) == seal.KEY_BYTES
        seal._key.cache_clear()
        assert seal.seal("here", [b"content"]) == mark
        assert seal.seal("there", [b"content"]) != mark
    finally:
        seal._key.cache_clear()


def test_without_a_place_for_a_key_nothing_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv(seal.KEY_FILE)
    monkeypatch.setattr(seal, "user_state_path", lambda name: tmp_path / "file" / name)
    seal._key.cache_clear()
    try:
        run = sealed_run(tmp_path / "run")
        assert not run.is_genuine("run.json")
        assert "seal" not in json.loads((run.path / TRUTH).read_text())
    finally:
        seal._key.cache_clear()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (bytes(31), "the key {!r} holds 31 bytes: it needs 32 random ones"),
        (
            None,
            "FEDLEAK_SEAL_KEY = {!r} cannot be read (No such file or directory): name a file of at "
            "least 32 random bytes",
        ),
    ],
)
def test_a_key_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, says: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv(seal.KEY_FILE, str(path))
    with pytest.raises(ConfigError) as refused:
        seal.seal("here", [])
    assert str(refused.value) == says.format(str(path))
