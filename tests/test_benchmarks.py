"""The benchmarks count what they say, on small models."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from fedleak.attacks.dager import Dager
from fedleak.attacks.keyspan import Keyspan
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
        used = {one.name: one.tensors for one in matching["memory"](made, 128)}
    assert used["128 moves"] < 1.1 * used["64 moves"]
