"""The benchmark of `dager` and `keyspan` counts what it says, on a small model."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from fedleak.attacks.dager import Dager
from fedleak.attacks.keyspan import Keyspan
from fedleak.data import Corpus

PATH = Path(__file__).parents[1] / "experiments" / "benchmarks" / "subspace_attacks.py"
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
