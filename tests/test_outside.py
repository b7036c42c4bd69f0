"""Programs of others in experiments/outside: the example of the docs, and the code of LAMP."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from fedleak.attacks.reconstruction import Status
from fedleak.config.components import build_attack
from fedleak.util.rng import stream

ROOT = Path(__file__).parents[1]
OUTSIDE = ROOT / "experiments" / "outside"
ADAPTER = OUTSIDE / "lamp_adapter.py"


def test_the_docs_show_the_example_as_it_is():
    page = (ROOT / "docs" / "outside-attacks.md").read_text()
    (shown,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert shown == (OUTSIDE / "bag_of_words.py").read_text()


@pytest.fixture
def lamp(monkeypatch):
    """The attack, with few steps."""
    code = os.environ.get("LAMP_CODE")
    if not code:
        pytest.skip("LAMP_CODE names no checkout of eth-sri/lamp")
    steps = "--n_steps 30 --init_candidates 20 --swap_every 20"
    command = f"{shlex.quote(sys.executable)} {ADAPTER} {{observation}} {{answer}} --loss cos"
    table = {"kind": "command", "command": f"{command} {steps}", "environment": ["LAMP_CODE"]}
    return build_attack(0, table).attack


def test_the_authors_code_of_lamp_answers(lamp, observe, bert_tiny):
    truth = observe(bert_tiny, 1, granted=("lengths", "labels"))
    reconstruction = lamp(truth.seen, bert_tiny, rng=stream(0, "attack"))
    assert (reconstruction.status, reconstruction.reason) == (Status.RECOVERED, "")
    (sequence,) = reconstruction.sequences
    assert len(sequence) == len(truth.sequences[0])
    assert (sequence[0], sequence[-1]) == (truth.sequences[0][0], truth.sequences[0][-1])


@pytest.mark.parametrize(
    ("granted", "kind", "reason"),
    [
        (("lengths",), "gradient", "grant both"),
        ((), "gradient", "grant both"),
    ],
)
def test_it_says_what_it_is_not_for(lamp, observe, bert_tiny, granted, kind, reason):
    truth = observe(bert_tiny, 1, granted=granted, kind=kind)
    reconstruction = lamp(truth.seen, bert_tiny, rng=stream(0, "attack"))
    assert reconstruction.status == Status.INADMISSIBLE
    assert reason in reconstruction.reason
