"""What every attack owes, whatever it does: a new attack is in here without being named."""

import dataclasses
import json
import re
from dataclasses import asdict, replace

import pytest
import torch

from fedleak import attacks
from fedleak.attacks import Batched, Progress, Setting
from fedleak.models import CAUSAL_LM, CLASSIFICATION
from fedleak.observation import ClientUpdate, Knowledge, Observation, UpdateKind
from fedleak.reconstruction import Reconstruction, Status
from fedleak.streams import stream
from fedleak.training import share

QUICK = {
    "dlg": {"steps": 2, "starts": 1, "shapes": 3},
    "lamp": {"steps": 2, "starts": 1, "shapes": 3},
    "tag": {"steps": 2, "starts": 1, "shapes": 3},
    "dager": {"searches": 2, "kicks": 2, "enumerate_up_to": 64},
    "keyspan": {"beam": 2},
}
KINDS = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("gpt2", CAUSAL_LM),
    ("llama", CLASSIFICATION),
    ("llama", CAUSAL_LM),
]
GRANTS = [(), ("batch_size", "labels", "lengths")]
KEYS = r"algorithm = |task = |update\.share|threat\.knows|model\.name|kind = "


@pytest.fixture(params=sorted(attacks.kinds()))
def attack(request):
    return attacks.kinds()[request.param](**QUICK.get(request.param, {}))


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(kind))
def model(request, small):
    return small(*request.param, width=32)


@pytest.fixture(params=UpdateKind)
def honest(request, model, observe):
    """A real update of two short texts, with nothing granted."""
    return observe(model, 2, kind=request.param, max_length=6)


def granting(seen, truth, facts):
    private = {
        "batch_size": len(truth.sequences),
        "labels": tuple(truth.labels),
        "lengths": tuple(map(len, truth.sequences)),
    }
    granted = {fact: private[fact] for fact in facts}
    return replace(seen, knowledge=replace(seen.knowledge, **granted))


def run(attack, seen, model):
    """Runs an attack where it says it can run, and checks all that an answer must be."""
    obstacle = attack.obstacle(Setting.of(seen, model))
    if obstacle is not None:
        assert re.search(KEYS, obstacle), f"names no key: {obstacle}"
        return None
    answer = attack(seen, model, rng=stream(0, "attack"))
    assert isinstance(answer, Reconstruction)
    assert answer.status in (Status.RECOVERED, Status.ABSTAINED)
    json.dumps(asdict(answer), allow_nan=False)
    if answer.status == Status.ABSTAINED:
        assert answer.reason
        assert answer.sequences is None
        assert answer.tokens is None
        assert not answer.verified
        return answer
    ids = [*(answer.tokens or ()), *(t for one in answer.sequences or () for t in one)]
    assert all(type(t) is int and 0 <= t < len(model.tokenizer) for t in ids)
    assert len(answer.evidence) == len(answer.sequences or ())
    assert len(answer.margins) in (0, len(answer.evidence))
    assert all(margin is None or margin >= 0 for margin in answer.margins)
    if answer.verified:
        assert len(answer.sequences) == seen.update.num_examples
    assert all(1 <= len(one) <= model.max_length for one in answer.sequences or ())
    assert sorted(answer.evidence) == list(answer.evidence)
    assert list(answer.tokens or ()) == sorted(set(answer.tokens or ()))
    assert answer.facts.keys() <= {"longest_sequence", "label_counts"}
    return answer


@pytest.mark.parametrize("facts", GRANTS)
def test_an_honest_update_is_answered_well_twice_and_left_alone(attack, model, honest, facts):
    seen = granting(honest.seen, honest, facts)
    tensors = {name: value.clone() for name, value in seen.update.tensors.items()}
    weights = {name: value.clone() for name, value in model.parameters().items()}
    answer = run(attack, seen, model)
    state = torch.get_rng_state()
    assert run(attack, seen, model) == answer
    assert torch.equal(torch.get_rng_state(), state), "draws from the global stream"
    for name, value in model.module.named_parameters():
        assert torch.equal(value, weights[name])
        assert value.grad is None
        assert value.requires_grad
        assert torch.equal(seen.update.tensors[name], tensors[name])
    assert not model.module.training
    assert not [m for m in model.module.modules() if m._forward_pre_hooks or m._forward_hooks]
    assert seen.update.tensors.keys() == tensors.keys()


@pytest.mark.parametrize("facts", GRANTS)
def test_together_each_is_answered_as_alone(attack, model, observe, texts, facts):
    if not isinstance(attack, Batched) or attack.at_once < 2:
        pytest.skip("takes one observation at a time")
    # Of different lengths, because what is padded must not matter.
    truths = [observe(model, texts[:2], max_length=6), observe(model, texts[2:4], max_length=8)]
    seen = [granting(truth.seen, truth, facts) for truth in truths]
    if attack.obstacle(Setting.of(seen[0], model)) is not None:
        pytest.skip("cannot work here")
    told = []
    rngs = [stream(0, "attack", i) for i in range(2)]
    together = attack.many(seen, model, rngs=rngs, report=lambda *what: told.append(what))
    assert len(together) == 2
    for i, answer in enumerate(together):
        alone = attack(seen[i], model, rng=stream(0, "attack", i))
        assert (answer.status, answer.reason) == (alone.status, alone.reason)
        # Sequences of one class and length are interchangeable: their order is anybody's.
        assert sorted(answer.sequences or ()) == sorted(alone.sequences or ())
        assert answer.tokens == alone.tokens
        assert answer.evidence == pytest.approx(alone.evidence, rel=1e-3, abs=1e-5)
    for which, progress in told:
        assert which in (0, 1)
        assert isinstance(progress, Progress)
        assert 0 <= progress.step <= progress.steps
        assert [type(each) for each in progress] == [int, int, float, str]


@pytest.mark.parametrize("facts", GRANTS)
@pytest.mark.parametrize(
    "patterns",
    [
        ["embedding", "wte", "wpe"],
        ["word_embeddings", "wte"],
        ["position_embeddings", "wpe"],
        ["query", "c_attn.weight", "q_proj"],
        ["key", "c_attn.bias", "k_proj"],
        ["layer.0.attention.self.value", "layer.1.attention.self.key", "h.*.c_attn.weight"],
        ["layer.0.attention", "h.0.attn", "layers.0.self_attn"],
        ["classifier", "score", "ln_f"],
        ["LayerNorm.bias", "ln_1.bias"],
    ],
    ids=lambda patterns: patterns[0],
)
def test_a_part_of_an_update_is_refused_by_its_key_or_answered(
    attack, model, honest, patterns, facts
):
    seen = replace(honest.seen, update=share(honest.seen.update, patterns))
    run(attack, granting(seen, honest, facts), model)


@pytest.mark.parametrize("facts", GRANTS)
@pytest.mark.parametrize("size", [0.0, 1.0, 1e-30])
def test_zeros_and_noise_are_no_reason_to_crash_or_to_invent_tokens(
    attack, model, observe, facts, size
):
    truth = observe(model, 2, max_length=6)
    rng = torch.Generator().manual_seed(3)
    noise = {
        name: size * torch.randn(value.shape, generator=rng)
        for name, value in truth.seen.update.tensors.items()
    }
    seen = Observation(1, 0, ClientUpdate(UpdateKind.GRADIENT, noise, 2), Knowledge(0.1, 1, False))
    answer = run(attack, granting(seen, truth, facts), model)
    if answer is not None and not facts:
        assert answer.sequences is None
        assert answer.tokens is None


def test_an_attack_is_a_frozen_value_that_says_what_it_does(attack):
    with pytest.raises(dataclasses.FrozenInstanceError):
        attack.kind = "other"
    assert attack == type(attack)(**asdict(attack))
    assert type(attack).__doc__.splitlines()[0].endswith(".")
    assert attacks.kinds()[attack.kind] is type(attack)


def test_one_layer_is_too_few_for_spans(small):
    model = small("bert", layers=1)
    names = frozenset(model.parameters())
    setting = Setting(UpdateKind.GRADIENT, names, frozenset(), model.family, 1, model.task)
    assert "needs 3 layers" in attacks.kinds()["dager"]().obstacle(setting)
