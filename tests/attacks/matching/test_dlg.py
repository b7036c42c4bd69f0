"""DLG and TAG: gradient matching without moves, by their own distances."""

from dataclasses import replace

import pytest

from fedleak.attacks import AttackSetting
from fedleak.attacks.matching import relaxed_tokens
from fedleak.attacks.matching.dlg import Dlg, Tag
from fedleak.attacks.matching.optimizer import match_gradients
from fedleak.attacks.reconstruction import Status
from fedleak.models import CAUSAL_LM, CLASSIFICATION
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

KINDS = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("gpt2", CAUSAL_LM),
    ("llama", CAUSAL_LM),
]
GRANTED = ("labels", "lengths")


def run(attack, seen, model):
    return attack(seen, model, rng=stream(0, "attack"))


@pytest.fixture(params=[Dlg, Tag], ids=["dlg", "tag"])
def attack(request):
    return request.param


def test_each_has_its_own_distance_and_never_moves_words(attack):
    loss = {"dlg": "l2", "tag": "l2l1"}[attack.kind]
    best, faithful = attack().method(), attack(preset="faithful").method()
    assert (best.loss, faithful.loss) == (loss, loss)
    assert best.algorithm is relaxed_tokens.reconstruct
    assert faithful.algorithm is match_gradients
    assert faithful.free_config == faithful.config
    for config in (best.config, best.free_config, faithful.config):
        assert config.lm_weight == 0
        assert not any(config.discrete(step) for step in range(config.steps + 1))
    assert not any(best.config.may_move(step) for step in range(best.config.steps + 1))
    assert best.prior is None


def test_constants_are_those_of_the_authors_of_lamp(attack):
    config = attack(preset="faithful").method().config
    assert (config.steps, config.step_size, config.schedule(2400, 2500)) == (2500, 0.1, 1.0)
    assert (config.guesses, config.norm_weight, config.clip) == (1, 0.0, None)
    large = attack(preset="faithful", size="large").method().config
    assert large.step_size == {"dlg": 0.1, "tag": 0.03}[attack.kind]
    assert (large.steps, large.clip, large.weight_decay, large.epsilon) == (10_000, 1.0, 0.01, 1e-6)
    assert large.schedule(10_000, 10_000) == 0.0
    assert attack(preset="faithful", steps=7).method().config.steps == 7


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_short_text_is_found_with_a_proof(small, observe, attack, kind):
    model = small(*kind)
    truth = observe(model, ["nobody knows it"], granted=GRANTED)
    answer = run(attack(), truth.seen, model)
    assert answer.sequences == tuple(truth.sequences)
    assert answer.verified


def test_more_steps_come_nearer(small, observe, attack):
    model = small("bert", width=16, layers=1)
    truth = observe(model, ["nobody knows"], granted=GRANTED)
    # Without key biases, whose gradient is noise.
    names = truth.seen.update.tensors.keys()
    kept = sorted(names - model.family.null_parameters(names))
    seen = replace(truth.seen, update=partial_update(truth.seen.update, kept))
    reports = []
    attack(preset="faithful", steps=100).many(
        [seen],
        model,
        rngs=[stream(0, "attack")],
        report=lambda _, how: reports.append(how),
    )
    read = [progress for progress in reports if progress.text]
    assert (read[0].step, read[-1].step) == (50, 100)
    assert read[0].loss > read[-1].loss > 0


@pytest.mark.parametrize(
    "granted", [("lengths",), pytest.param(("lengths", "labels"), marks=pytest.mark.slow)]
)
def test_lengths_are_the_granted_ones(small, observe, attack, granted):
    for family in ("bert", "llama"):
        model = small(family)
        truth = observe(model, 2, granted=granted, max_length=7)
        answer = run(attack(steps=2, starts=1, shapes=2), truth.seen, model)
        assert answer.status == Status.RECOVERED
        assert [len(ids) for ids in answer.sequences] == [len(ids) for ids in truth.sequences]


def test_a_parameter_beside_the_word_embedding_is_needed(small, observe, attack):
    model = small("bert")
    seen = observe(model, 1).seen

    def obstacle(patterns):
        update = partial_update(seen.update, patterns)
        return attack().obstacle(AttackSetting.of(replace(seen, update=update), model))

    assert obstacle(["*"]) is None
    assert obstacle(["classifier.bias"]) is None
    assert "update.share" in obstacle(["word_embeddings"])
