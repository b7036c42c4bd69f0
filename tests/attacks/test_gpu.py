"""On a GPU the span attacks say what they say on a CPU. Run with `pytest -m gpu`."""

import copy
from dataclasses import replace

import pytest
import torch

from fedleak.attacks.dager import Dager
from fedleak.attacks.keyspan import Keyspan
from fedleak.models import CAUSAL_LM, CLASSIFICATION
from fedleak.streams import stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("attack", [Dager(), Keyspan()], ids=lambda attack: attack.kind)
@pytest.mark.parametrize(
    ("family", "task"), [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)]
)
def test_a_gpu_recovers_what_a_cpu_does(small, observe, attack, family, task) -> None:
    model = small(family, task, width=96, layers=3)
    truth = observe(model, 2, max_length=10)
    on_gpu = replace(model, module=copy.deepcopy(model.module).to("cuda"))
    tensors = {name: value.to("cuda") for name, value in truth.seen.update.tensors.items()}
    seen = replace(truth.seen, update=replace(truth.seen.update, tensors=tensors))
    expected = attack(truth.seen, model, rng=stream(0, "attack"))
    answer = attack(seen, on_gpu, rng=stream(0, "attack"))
    assert sorted(answer.sequences) == sorted(expected.sequences)
    assert answer.verified == expected.verified
    assert answer.tokens == expected.tokens
