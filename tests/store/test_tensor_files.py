"""Files of tensors are written from memory: safetensors reads them, and seals are as ever."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fedleak.store import seal, tensor_files

pytestmark = pytest.mark.core

TENSORS = {
    "half": torch.randn(3).half(),
    "brain": torch.tensor(1.5, dtype=torch.bfloat16),
    "single": torch.randn(2, 3),
    "single:rows": torch.tensor([0, 7], dtype=torch.int32),
    "double": torch.randn(5, 1).double(),
    "nöthing": torch.zeros(0, 4),
    "long": torch.randn(3 * 2**17 + 1),
}
ABOUT = {"fingerprint": "é", "rows": {"single": 9}}


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["fedleak"])


@pytest.mark.parametrize("has_key", [True, False])
def test_safetensors_reads_what_is_written(
    has_key: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_key:
        monkeypatch.setattr(seal, "_key", lambda named: None)
    path = tmp_path / "tensors"
    tensor_files.write(path, TENSORS, ABOUT, "place")
    tensors, table = read(path)
    expected = seal.seal("place", seal.tensor_parts(TENSORS, json.dumps(ABOUT)))
    assert (expected is not None) == has_key
    assert table == (ABOUT if expected is None else {**ABOUT, seal.FIELD: expected})
    assert tensors.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value)


def test_numbers_are_aligned_and_where_the_library_puts_them(tmp_path: Path) -> None:
    """Where all are of one type; else types of one width stand in another order."""
    alike = {name: torch.randn(4) for name in "bca"}
    tensor_files.write(tmp_path / "own", alike, ABOUT, "place")
    save_file(alike, tmp_path / "theirs")
    own, theirs = ((tmp_path / name).read_bytes() for name in ("own", "theirs"))
    assert own[-48:] == theirs[-48:]
    assert (len(own) - 48) % 8 == 0


def test_numbers_of_mixed_widths_begin_at_multiples_of_their_own(tmp_path: Path) -> None:
    mixed = {
        "a": torch.ones(3, dtype=torch.float16),
        "b": torch.ones(1),
        "c": torch.ones(5).double(),
    }
    tensor_files.write(tmp_path / "own", mixed, ABOUT, "place")
    content = (tmp_path / "own").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, value in mixed.items():
        assert (8 + length + header[name]["data_offsets"][0]) % value.element_size() == 0
