"""On a GPU attacks say what they say on a CPU. Run with `pytest -m gpu`."""

import copy
from dataclasses import replace

import pytest
import torch

from fedleak.attacks.analytic.probes import Probes
from fedleak.attacks.matching.dlg import Dlg
from fedleak.attacks.matching.lamp import Lamp
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.models import CAUSAL_LM, CLASSIFICATION, pad, prior
from fedleak.util.rng import stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _moved(model, seen):
    """Returns the model and the observation on the GPU."""
    module = copy.deepcopy(model.module).to("cuda")
    tensors = {name: value.to("cuda") for name, value in seen.update.tensors.items()}
    update = replace(seen.update, tensors=tensors)
    return replace(model, module=module), replace(seen, update=update)


@pytest.mark.parametrize("attack", [Dager(), Keyspan(), Probes()], ids=lambda attack: attack.kind)
@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("bert", CLASSIFICATION),
        ("gpt2", CLASSIFICATION),
        ("gpt2", CAUSAL_LM),
        ("llama", CAUSAL_LM),
    ],
)
def test_a_gpu_recovers_what_a_cpu_does(small, observe, attack, family, task) -> None:
    model = small(family, task, width=96, layers=3)
    truth = observe(model, 2, max_length=10)
    expected = attack(truth.seen, model, rng=stream(0, "attack"))
    on_gpu, seen = _moved(model, truth.seen)
    answer = attack(seen, on_gpu, rng=stream(0, "attack"))
    assert answer.status == expected.status == Status.RECOVERED
    assert sorted(answer.sequences or ()) == sorted(expected.sequences or ())
    assert answer.verified == expected.verified
    assert answer.tokens == expected.tokens
    assert answer.facts == expected.facts


@pytest.mark.parametrize("precision", ["float32", "mixed"])
@pytest.mark.parametrize(("family", "task"), [("bert", CLASSIFICATION), ("gpt2", CAUSAL_LM)])
def test_gradient_matching_proves_on_a_gpu_what_it_does_on_a_cpu(
    small, observe, family, task, precision
) -> None:
    model = small(family, task, width=96, layers=3)
    seen = observe(model, 1, max_length=6, granted=("labels", "lengths")).seen
    attack = Lamp(steps=100, prior="builtin/gpt2-tiny", precision=precision)
    expected = attack(seen, model, rng=stream(0, "attack"))
    assert expected.verified, "an easy case, on a CPU"
    on_gpu, there = _moved(model, seen)
    answer = attack(there, on_gpu, rng=stream(0, "attack"))
    assert (answer.sequences, answer.verified) == (expected.sequences, True)


@pytest.mark.parametrize("attack", [Lamp, Dlg], ids=lambda attack: attack.kind)
def test_the_published_attacks_run_on_a_gpu(small, observe, attack) -> None:
    model = small("bert", CLASSIFICATION, width=96, layers=3)
    seen = observe(model, 2, max_length=6, granted=("labels", "lengths")).seen
    on_gpu, there = _moved(model, seen)
    own = {"guesses": 4, "orders": 8} if attack is Lamp else {}
    answer = attack(preset="faithful", steps=20, **own)(there, on_gpu, rng=stream(0, "attack"))
    assert answer.status == Status.RECOVERED
    # Special tokens are given; the rest has been optimised, and is nearer than what is drawn.
    assert 0 < answer.diagnostics["distance"] < answer.diagnostics["distance_by_chance"]


def test_a_prior_finds_texts_as_likely_on_a_gpu(small, texts) -> None:
    model = small("gpt2", CAUSAL_LM)
    on_gpu = replace(model, module=copy.deepcopy(model.module).to("cuda"))
    here, there = (
        prior.load("builtin/gpt2-tiny", placed_model) for placed_model in (model, on_gpu)
    )
    ids_NT, mask_NT = pad(model.encode(texts[:8]), 0, torch.device("cpu"))
    found_N = there.nll(ids_NT.to("cuda"), mask_NT.to("cuda"))
    torch.testing.assert_close(found_N.cpu(), here.nll(ids_NT, mask_NT), rtol=1e-4, atol=1e-4)
