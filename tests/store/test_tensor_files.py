"""Files of tensors: safetensors reads them, and the table beside them is sealed."""

import json
from pathlib import Path

import pytest
import torch

from fedleak.store import seal
from fedleak.store.folder import Folder, stored_tensors

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
ABOUT = {"rows": {"single": 9}, "é": "ü"}


@pytest.mark.parametrize("has_key", [True, False])
def test_what_is_written_is_read(
    has_key: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_key:
        monkeypatch.setattr(seal, "_key", lambda named: None)
    folder, beside = Folder(tmp_path), {"fingerprint": None, **ABOUT}
    folder.write_tensors("tensors", TENSORS, **ABOUT)
    tensors, table = stored_tensors(tmp_path / "tensors")
    parts = seal.tensor_parts(TENSORS, json.dumps(beside))
    expected = seal.seal(folder.sealed_place("tensors"), parts)
    assert (expected is not None) == folder.is_genuine("tensors") == has_key
    assert json.loads(table) == beside | ({seal.FIELD: expected} if expected else {})
    assert tensors.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value)


def test_views_of_the_same_numbers_can_be_written(tmp_path: Path) -> None:
    numbers = torch.randn(4)
    views = {"all": numbers, "again": numbers, "first": numbers[:2], "last": numbers[2:]}
    Folder(tmp_path).write_tensors("tensors", views)
    tensors, _ = stored_tensors(tmp_path / "tensors")
    assert all(torch.equal(tensors[name], view) for name, view in views.items())
