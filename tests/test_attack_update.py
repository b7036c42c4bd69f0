"""`fedleak attack-update`: an update from a file, which may be hostile."""

import json
import os
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import call
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import fedleak
from fedleak.running.own_update.update_files import read_update
from fedleak.util.errors import ConfigError

OF_TWO = ("gradient.pt", "--sent", "num_examples=2")
TEXTS = ["the patient has a fever", "my sister lost her job"]


@pytest.fixture(scope="module")
def saved_update(tmp_path_factory) -> Path:
    """A folder with a model, an update of it in both formats, and the texts."""
    folder = tmp_path_factory.mktemp("own")
    builtin = fedleak.builtin_model("bert-tiny")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(builtin)
    tokenizer = AutoTokenizer.from_pretrained(builtin)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    loss = model(**batch, labels=torch.tensor([1, 0])).loss
    named = dict(model.named_parameters())
    gradient = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    save_file(gradient, folder / "gradient.safetensors")
    torch.save({f"module.{n}": g for n, g in gradient.items()}, folder / "gradient.pt")
    torch.save(list(gradient.values()), folder / "in-order.pt")
    save_file({n: -0.1 * g for n, g in gradient.items()}, folder / "delta.safetensors")
    (folder / "truth.txt").write_text("\n".join(TEXTS) + "\n\n")
    return folder


@pytest.fixture
def here(saved_update: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(saved_update)
    return saved_update


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("gradient.safetensors", ()),
        ("gradient.pt", ()),
        ("in-order.pt", ("--attack", "keyspan", "--set", "beam=4")),
        ("delta.safetensors", ("--sent", "payload=delta", "--sent", "learning_rate=0.1")),
    ],
)
def test_an_update_is_read_and_scored_beside_chance(here, file, options):
    status, text, errors = call(
        "attack-update", file, "--model", "model", "--texts", "truth.txt", *options
    )
    assert (status, errors) == (0, "")
    lines = text.splitlines()
    assert lines[0].endswith(", proved")
    assert sorted(line.partition("  (evidence")[0].strip() for line in lines[1:3]) == sorted(TEXTS)
    assert "read word for word: 2 of 2" in text
    assert "ROUGE-L: 100, by chance" in text
    assert "chance: texts of builtin/notes, drawn without the update" in text


def test_all_of_it_is_written_for_its_owner_alone(here, tmp_path):
    out = tmp_path / "out.json"
    status, text, _ = call(
        *("attack-update", "gradient.pt", "--model", "model", "--sent", "num_examples=2"),
        *("--attack", "probes", "--out", str(out)),
    )
    assert status == 0
    assert "words: " in text
    assert out.stat().st_mode & 0o777 == 0o600
    table = json.loads(out.read_text())
    assert set(table["words"]) == {word for private_text in TEXTS for word in private_text.split()}
    assert (table["answer"]["attack"], table["score"], table["texts"]) == ("probes", None, [])


def test_what_was_granted_is_in_the_answer(here, tmp_path):
    out = tmp_path / "out.json"
    status, _, errors = call(
        *("attack-update", "gradient.pt", "--model", "model", "--sent", "num_examples=2"),
        *("--attack", "keyspan", "--sent", "labels=[1, 0]", "--sent", "batch_size=2"),
        *("--out", str(out), "--held-out", "truth.txt", "--texts", "truth.txt"),
    )
    assert (status, errors) == (0, "")
    table = json.loads(out.read_text())
    assert table["answer"]["granted"] == ["batch_size", "labels"]
    assert table["score"]["guess_rougeL"] is None, "the private texts are no chance"


def test_a_pipe_of_a_shell_is_called_one(here):
    reads, writes = os.pipe()  # as in --texts <(cat truth.txt)
    try:
        status, _, errors = call(
            "attack-update", "gradient.pt", "--model", "model", "--texts", f"/dev/fd/{reads}"
        )
    finally:
        os.close(reads)
        os.close(writes)
    assert status == 2
    assert "it is a pipe, and no plain file: give a file" in errors


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("gradient.pt",), 2, "num_examples is missing"),
        (
            ("gradient.pt", "--sent", "num_examples=3", "--texts", "truth.txt"),
            2,
            "but --texts has 2",
        ),
        (("none.pt", "--sent", "num_examples=2"), 2, "there is no such file"),
        (("truth.txt", "--sent", "num_examples=2"), 2, "end it in .safetensors, .pt"),
        (("gradient.pt", "--texts", "none.txt"), 2, "No such file"),
        (("gradient.pt", "--texts", "/dev/zero"), 2, "it is a device, and no plain file"),
        ((*OF_TWO, "--sent", "payload=delta"), 2, "learning_rate is missing"),
        ((*OF_TWO, "--sent", "optimiser=adm"), 2, "unknown optimiser 'adm'"),
        ((*OF_TWO, "--sent", "weight_decay=0.1"), 2, "leave out how the client"),
        ((*OF_TWO, "--sent", "payload=dleta"), 2, "did you mean 'delta'?"),
        ((*OF_TWO, "--attack", "dagr"), 2, "did you mean 'dager'?"),
        ((*OF_TWO, "--task", "causal-lm"), 2, "needs a causal model"),
        ((*OF_TWO, "--task", "tagging"), 2, "unknown task 'tagging'"),
        ((*OF_TWO, "--sent", "loss=hinge"), 2, "unknown loss 'hinge'"),
        ((*OF_TWO, "--sent", "labels"), 2, "--sent 'labels': write it"),
        (("classifier.pt", "--sent", "num_examples=2", "--attack", "dager"), 2, "needs one of"),
        ((*OF_TWO, "--out", "."), 2, "--out '.' is a folder: give a file"),
        ((*OF_TWO, "--out", ""), 2, "--out '.' is a folder: give a file"),
        (
            (*OF_TWO, "--attack", "lamp", "--set", "kind=dager"),
            2,
            "settings: kind = 'dager' is the attack itself, and that is 'lamp'",
        ),
    ],
)
def test_a_mistake_is_one_line(here, arguments, status, says):
    torch.save({"classifier.bias": torch.tensor([0.5, -0.5])}, "classifier.pt")
    ended, _, errors = call("attack-update", *arguments, "--model", "model")
    assert ended == status
    assert says in errors
    assert errors.count("\n") == 1


def test_a_checkpoint_without_its_classifier_is_refused(here):
    """Its weights would be drawn anew, and not those that the update is of."""
    status, _, errors = call(
        *("attack-update", "gradient.pt", "--model", fedleak.builtin_model("bert-tiny")),
        *("--task", "sequence-classification", "--sent", "num_examples=2"),
    )
    assert status == 2
    assert "lacks 2 of its 73 weights" in errors


def test_a_crash_ends_with_status_1(here, monkeypatch):
    def crash(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("fedleak.attacks.subspace.keyspan.Keyspan.__call__", crash)
    status, text, errors = call(
        *("attack-update", "gradient.pt", "--model", "model", "--sent", "num_examples=2"),
        *("--attack", "keyspan"),
    )
    assert status == 1
    assert "keyspan: failed" in text
    assert errors == "fedleak: the attack keyspan failed: MemoryError:\n"


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.file,))


def safetensors_of(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


def torch_file(value: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path)


def compressed(path: Path) -> None:
    torch.save({"a": torch.zeros(10**6)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def cut(path: Path) -> None:
    torch.save({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:300])


NAN = struct.pack("<2f", float("nan"), 0.0)


def nested(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        tensor = torch.nested.nested_tensor([torch.ones(2)])
    torch.save({"classifier.bias": tensor}, path)


HOSTILE: dict[str, tuple[str, bytes | Callable[[Path], None], str]] = {
    "not a number": (
        ".safetensors",
        safetensors_of({"classifier.bias": entry([2], 8)}, NAN),
        "not every number of 'classifier.bias' is finite",
    ),
    "a shape that is not there": (
        ".safetensors",
        safetensors_of({"classifier.bias": entry([2**40, 2**40], 8)}, b"\0" * 8),
        "cannot be read",
    ),
    "a shape that no memory has": (
        ".pt",
        torch_file({"classifier.bias": torch.ones(1).expand(10**9, 10**9)}),
        "has the shape [1000000000, 1000000000]",
    ),
    "a header of exabytes": (".safetensors", b"\xff" * 8 + b"{}", "cannot be read"),
    "a cut header": (".safetensors", safetensors_of(b'{"a": {"dty'), "cannot be read"),
    "a cut file": (
        ".safetensors",
        safetensors_of({"classifier.bias": entry([2], 8)}, b"\0" * 3),
        "cannot be read",
    ),
    "nothing": (".safetensors", b"", "cannot be read"),
    "no tensor": (".safetensors", safetensors_of({}), "is empty"),
    "control characters": (
        ".safetensors",
        safetensors_of({"\x1b[2J\u202ebert\n": entry([1], 4)}, b"\0" * 4),
        r"no parameter '\x1b[2J\u202ebert\n'",
    ),
    "a lone surrogate": (
        ".safetensors",
        safetensors_of(b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
        "cannot be read",
    ),
    "whole numbers": (
        ".safetensors",
        safetensors_of({"classifier.bias": entry([2], 16, "I64")}, b"\0" * 16),
        "give floating-point numbers",
    ),
    "a cut zip": (".pt", cut, "cannot be read"),
    "a compressed zip": (".pt", compressed, "it is compressed"),
    "no torch file": (".pt", b"\x80\x05nonsense", "nothing else is loaded"),
    "an empty torch file": (".pt", b"", "cannot be read"),
    "a tensor alone": (".pt", torch_file(torch.ones(2)), "holds Tensor: save a dict"),
    "a checkpoint": (
        ".pt",
        torch_file({"classifier": {"bias": torch.ones(2)}, "epoch": 3}),
        "the model has no parameter 'classifier' and 1 more",
    ),
    "a number for a tensor": (".pt", torch_file({"classifier.bias": 3}), "is int, not a tensor"),
    "sparse, with an index beyond its shape": (
        ".pt",
        torch_file(
            {
                "classifier.bias": torch.sparse_coo_tensor(
                    torch.tensor([[10**9]]), torch.tensor([1.0]), (2,), check_invariants=False
                )
            }
        ),
        "is a sparse tensor",
    ),
    "nested": (".pt", nested, "is a nested tensor"),
    "without numbers": (
        ".pt",
        torch_file({"classifier.bias": torch.ones(2, device="meta")}),
        "is a meta tensor",
    ),
    "complex": (
        ".pt",
        torch_file({"classifier.bias": torch.ones(2, dtype=torch.complex64)}),
        "give floating-point numbers",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(here, tmp_path, name):
    suffix, content, says = HOSTILE[name]
    path = tmp_path / f"hostile{suffix}"
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    status, _, errors = call(
        "attack-update", str(path), "--model", "model", "--sent", "num_examples=2"
    )
    assert status == 2
    assert says in errors
    assert errors.count("\n") == 1
    assert errors[:-1].isprintable()


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_in_a_file_is_run(tmp_path, protocol):
    mark = tmp_path / "it-ran"
    plain, zipped = tmp_path / "plain.pt", tmp_path / "zipped.pt"
    plain.write_bytes(pickle.dumps({"classifier.bias": Evil(mark)}, protocol))
    torch.save({"classifier.bias": Evil(mark)}, zipped)
    for path in (plain, zipped):
        with pytest.raises(ConfigError, match=r"holds more than tensors|cannot be read"):
            read_update(path)
    assert not mark.exists()
    pickle.loads(plain.read_bytes())
    assert mark.exists(), "it would run"


def test_the_help_of_the_command_imports_nothing_heavy():
    code = "import sys, runpy\nsys.argv[1:] = ['attack-update', '--help']\n" + (
        "try: runpy.run_module('fedleak', run_name='__main__')\n"
        "finally: print('IMPORTED', *{n.split('.')[0] for n in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert not {"torch", "pydantic"} & set(done.stdout.rpartition("IMPORTED")[2].split())
