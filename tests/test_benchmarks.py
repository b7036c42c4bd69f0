"""The benchmarks count what they say, on small models."""

import json
import os
import runpy
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.data import Corpus

PATH = Path(__file__).parents[1] / "experiments" / "benchmarks" / "subspace_attacks.py"
sys.path.insert(0, str(PATH.parent))  # as running one of them does
BENCHMARK = runpy.run_path(str(PATH))


@pytest.mark.parametrize(("attack", "size"), [(Dager(), 1), (Keyspan(), 2)])
def test_a_row_holds_what_was_recovered(bert_tiny, texts, attack, size):
    corpus = Corpus(texts[:5], (0, 1, 0, 1, 0), ("other", "health"))
    case = BENCHMARK["Case"]("tiny", "builtin/bert-tiny", attack, (size,))
    row = BENCHMARK["measure"](case, bert_tiny, corpus, size, 20, 0)
    batches = 5 // size
    assert (row.name, row.batches, row.sentences) == (f"tiny-{size}", batches, batches * size)
    assert (row.exact, row.bags, row.proved) == (batches * size, batches, batches)
    assert len(row.seconds) == batches
    assert (row.seconds_without_certificate is None) == (attack.kind == "keyspan")
    json.dumps(row._asdict(), allow_nan=False)
    words = BENCHMARK["line"](row).split()
    all_of_them = [f"{batches * size}/{batches * size}", *[f"{batches}/{batches}"] * 2]
    assert [word for word in words if "/" in word] == all_of_them


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--assets", "x", "--rows", "minilm"], "no row 'minilm': choose from gpt2-dager-1"),
        ([], "--assets, or FEDLEAK_ASSETS"),
    ],
)
def test_a_wrong_command_is_told_what_is_right(monkeypatch, capsys, arguments, says):
    monkeypatch.delenv("FEDLEAK_ASSETS", raising=False)
    monkeypatch.setattr(sys, "argv", [str(PATH), *arguments])
    with pytest.raises(SystemExit):
        BENCHMARK["main"]()
    assert says in " ".join(capsys.readouterr().err.split())


def test_reading_counts_what_was_read(bert_tiny, texts):
    reading = runpy.run_path(str(PATH.with_name("reading.py")))
    args = SimpleNamespace(seed=0, steps=0, dropout=True, seconds=5.0, prior=None)
    pairs = [
        reading["observe"](bert_tiny, [(text, 1)], reading["SENT"]["plain"](""), i, args)
        for i, text in enumerate(texts[:3])
    ]
    attack = reading["make"]("position_marginals", args)
    answers = [reading["answered"](attack, *pair, bert_tiny, 0) for pair in pairs]
    assert [(answer.exact, answer.likely) for answer in answers] == [(1, True)] * 3
    answers[0] = answers[0]._replace(truth=pairs[1][1])
    words = reading["line"]("1 plain", reading["figures"](answers, bert_tiny)).split()
    assert words[2:4] == ["2/3", "[21,"]
    assert words[8:10] == ["3", "(2)"]
    with reading["asked_without"]("keyspan"):
        assert "keyspan" not in [attack.kind for attack, _ in reading["ensemble"].ENSEMBLE]
    assert "keyspan" in [attack.kind for attack, _ in reading["ensemble"].ENSEMBLE]


GRADIENT_MATCHING = PATH.with_name("gradient_matching.py")


@pytest.fixture(name="matching")
def _matching():
    return runpy.run_path(str(GRADIENT_MATCHING))


def test_gradient_matching_agrees_with_the_straightforward_version(matching):
    made = matching["bench"](matching["Size"](2, 64), 8, 2, 200, 0)
    with made.exact.batch_gradients.ready(), made.rough.batch_gradients.ready():
        lines = {line.name: line for line in matching["measure"](made, 1, 64)}
    exact = ["step, alone", "step, 2 victims", "step, 2 victims, noisy", "step, 2 victims, l2l1"]
    for name in exact:
        assert lines[name].loss < 1e-5, name
        assert lines[name].gradient < 1e-3, name
    assert lines["step, 2 victims, bfloat16"].loss < 1e-2
    # All of the 200 draws that differ were scored by both.
    (moves,) = [line for name, line in lines.items() if name.endswith("distinct")]
    assert moves.loss < 1e-5
    assert all(line.ratio > 0 for line in lines.values())
    both = lines["step, 2 victims"], lines["start"]
    whole = lines["schedule, 2 victims"]
    assert whole.ours == pytest.approx(2000 * both[0].ours + 24 * moves.ours + 1000 * both[1].ours)
    assert "schedule, 2 victims" in matching["row"](whole)


def test_memory_does_not_grow_with_the_guesses(matching):
    made = matching["bench"](matching["Size"](1, 64), 16, 2, 30522, 0)
    with made.exact.batch_gradients.ready():
        used = {usage.name: usage.tensors for usage in matching["memory"](made, 128)}
    assert used["128 moves"] < 1.1 * used["64 moves"]


GPU = PATH.with_name("gpu.sh")
PARTS = ("tests", "workers", "subspace", "stories15m", "matching", "pass", "together", "cola")
KEYS = {
    "schema",
    "dry_run",
    "machine",
    "python",
    "versions",
    "commit",
    "assets",
    "seed",
    "seconds",
    "parts",
}


@pytest.fixture(name="dry_run")
def _dry_run(tmp_path):
    """Runs the GPU benchmarks on the CPU and returns the exit status, the record and the table."""

    def run(*arguments):
        command = ["bash", str(GPU), "--dry-run", "--out", str(tmp_path), *arguments]
        environment = os.environ | {"PYTHON": sys.executable}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        record = json.loads((tmp_path / "gpu.json").read_text())
        assert record.keys() == KEYS, done.stderr
        return done.returncode, record, (tmp_path / "gpu.md").read_text()

    return run


@pytest.mark.slow
def test_without_time_every_part_is_left_out_and_that_is_said(dry_run):
    status, record, table = dry_run("--seconds", "0")
    assert status == 1
    assert [part["name"] for part in record["parts"]] == list(PARTS)
    for part in record["parts"]:
        outcome = (part["status"], part["reason"], part["complete"])
        assert outcome == ("skipped", "0 s are left of all, and it needs 1", False)
        assert f"| {part['name']} | **skipped in 0 s: 0 s are left of all" in table


@pytest.mark.slow
def test_parts_of_the_gpu_benchmarks_run_on_a_cpu(dry_run):
    status, record, table = dry_run("--part", "pass", "together")
    assert (status, record["dry_run"], record["machine"]["torch_cuda"]) == (0, True, None)
    assert [(part["name"], part["status"]) for part in record["parts"]] == [
        ("pass", "done"),
        ("together", "done"),
    ]
    for part, name in zip(record["parts"], ("PASS", "TOGETHER"), strict=True):
        values = [figure for figure in part["figures"] if figure["what"].startswith(name)]
        (present,) = [figure for figure in values if figure["values"]["present"]]
        fastest = [figure for figure in values if figure["values"]["fastest"]]
        assert present["ratio"] == 1
        assert len(values) > 2
        assert {figure["seconds"] for figure in fastest} == {
            min(figure["seconds"] for figure in values)
        }
        for figure in part["figures"]:
            assert figure["seconds"] > 0
            assert figure["ratio"] == figure["beside_seconds"] / figure["seconds"]
            assert f"| {figure['what']} | {figure['size']} |" in table


@pytest.mark.slow
def test_all_of_the_gpu_benchmarks_run_on_a_cpu(dry_run):
    status, record, table = dry_run("--seconds", "3000")
    parts = {part["name"]: part for part in record["parts"]}
    assert status == 0
    assert tuple(parts) == PARTS
    assert parts["stories15m"]["status"] in ("done", "skipped")
    for name, part in parts.items():
        assert part["complete"]
        assert part["status"] == "done" or "FEDLEAK_ASSETS" in part["reason"], part
        assert (part["status"] == "done") == bool(part["figures"])
        assert f"| {name} | **{part['status']} in" in table
    (tests,) = parts["tests"]["figures"]
    assert tests["values"]["passed"] == tests["values"]["failed"] == 0
    assert tests["values"]["skipped"] > 0
    (workers,) = parts["workers"]["figures"]
    assert workers["values"]["equal answers"] == workers["values"]["answers"] > 0
    assert all(figure["values"]["exact"][0] == "2" for figure in parts["subspace"]["figures"][:3])
    scored = [figure["values"] for figure in parts["cola"]["figures"]]
    assert len(scored) == 2
    assert all(0 <= values["chance R-L"] <= 100 for values in scored)


FAKE = """
import os

from gpu_figures import Figure


def works(settings):
    yield Figure("work", "small", 2.0, "other", 5.0, {"a | b": 1})


def breaks(settings):
    yield Figure("half of it", "small", 1.0)
    raise ValueError("what went wrong")


def dies(settings):
    yield Figure("half of it", "small", 1.0)
    os._exit(3)
"""

RUN = """
import sys

import gpu

if __name__ == "__main__":
    names = ["breaks", "absent", "dies", "works"]
    parts = [gpu.Part(name, f"fake_parts:{name}", 1, 60) for name in names]
    sys.exit(gpu.main(["--dry-run", "--out", sys.argv[1]], parts))
"""


@pytest.mark.slow
def test_a_part_that_fails_is_recorded_and_the_rest_goes_on(tmp_path):
    (tmp_path / "fake_parts.py").write_text(FAKE)
    (tmp_path / "run.py").write_text(RUN)
    paths = [str(tmp_path), str(GPU.parent), str(GPU.parents[2])]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 1, done.stderr
    breaks, absent, dies, works = record["parts"]
    assert breaks["status"] == "failed"
    assert breaks["reason"] == "ValueError: what went wrong"
    assert "in breaks" in breaks["traceback"]
    assert [figure["what"] for figure in breaks["figures"]] == ["half of it"]
    assert (absent["status"], "no attribute 'absent'" in absent["reason"]) == ("failed", True)
    assert (dies["status"], dies["reason"]) == ("failed", "its process died with exit status 3")
    assert (works["status"], works["figures"][0]["ratio"]) == ("done", 2.5)
    table = (tmp_path / "gpu.md").read_text()
    assert "| breaks | **failed in" in table
    assert "| works | work | small | 2,000.00 | other | 5,000.00 | 2.50 |  | a \\| b 1 |" in table


def test_a_part_whose_time_is_over_keeps_what_it_measured():
    gpu = runpy.run_path(str(GPU.with_name("gpu.py")))
    receiver, sender = Pipe(duplex=False)
    sender.send(("figure", {"what": "first"}))
    figures = []
    assert gpu["_listen"](receiver, figures, time.monotonic()) is None
    assert figures == [{"what": "first"}]


def test_what_has_to_be_installed_for_a_gpu_is_what_is_not_there(monkeypatch, capsys):
    packages = runpy.run_path(str(GPU.with_name("gpu_packages.py")))
    there = {"torch": "2.11.0+cu130", "transformers": "5.17.0", "numpy": "2.5.2", "flwr": "1.42"}

    def installed(name):
        return there.get(name)

    monkeypatch.setitem(packages["lacking"].__globals__, "installed", installed)
    lacking = list(packages["lacking"]())
    assert {"transformers>=5.20", "flwr>=1.41,<1.42", "pydantic>=2.12", "pytest>=9.0"} <= {*lacking}
    assert not [
        requirement for requirement in lacking if requirement.startswith(("torch", "numpy", "ruff"))
    ]
    kept = list(packages["constraints"]())
    assert any(constraint.startswith("pydantic==") for constraint in kept)
    assert not [
        constraint
        for constraint in kept
        if constraint.startswith(("torch==", "numpy==", "transformers=="))
    ]
