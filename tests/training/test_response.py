"""The loss on responses alone: what a client trains on, and what can be proved of it.

The slow way is that of transformers: labels of -100 for all tokens before the response.
"""

from dataclasses import replace

import pytest
import torch

from fedleak.attacks import certificate, replay
from fedleak.audit.metrics.utility import evaluate
from fedleak.models import CAUSAL_LM, load_parameters_, pad, target_counts
from fedleak.models.loading import template_ids
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation, UpdateKind
from fedleak.training.private_steps import Seen, private_gradient
from fedleak.training.recipe import Recipe
from fedleak.training.settings import LocalTraining, PrivateSteps
from fedleak.training.steps import Batch, gradient
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

TEXTS = ["Q: who pays\nA: I do\nA: my sister pays", "Q: why\nA: nobody knows", "Q: when\nA: in May"]
TEMPLATE = "A:"
FEDAVG = LocalTraining(
    kind=UpdateKind.DELTA,
    batch_size=2,
    epochs=1,
    learning_rate=1e-3,
    dropout=False,
    recipe=Recipe(optimiser="adamw"),
)


@pytest.fixture(params=["gpt2", "llama"])
def model(request, small):
    """A decoder that learns responses alone."""
    plain = small(request.param, CAUSAL_LM)
    return replace(plain, response_template=template_ids(plain.tokenizer, TEMPLATE))


def slow_labels(model, ids_BT, mask_BT):
    """What TRL's collator makes: -100 up to the last template, or everywhere without one."""
    labels_BT, template = ids_BT.masked_fill(mask_BT == 0, -100), list(model.response_template)
    for labels_T in labels_BT:
        ends = [
            place + len(template)
            for place in range(len(labels_T))
            if labels_T[place : place + len(template)].tolist() == template
        ]
        labels_T[: ends[-1] if ends else len(labels_T)] = -100
    return labels_BT


def slow_gradient(model, sequences):
    """The gradient of transformers' own loss, and the loss."""
    ids, mask = pad(sequences, model.tokenizer.pad_token_id, model.device)
    loss = model.module(
        input_ids=ids, attention_mask=mask, labels=slow_labels(model, ids, mask)
    ).loss
    trained = model.trained()
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True)), loss


def assert_close(tensors, expected):
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_those_of_labels_of_minus_100(model, accumulate):
    sequences = model.encode([*TEXTS, "Q: no response"])
    gradients = gradient(model, Batch(sequences, [0] * 4), Recipe(accumulate=accumulate))
    assert_close(gradients, slow_gradient(model, sequences)[0])
    counts = target_counts(model, sequences)
    ids, mask = pad(sequences, model.tokenizer.pad_token_id, model.device)
    assert counts == (slow_labels(model, ids, mask) != -100).sum(1).tolist()
    assert counts[3] == 0 < min(counts[:3])
    ends_in_padding = replace(model, response_template=(7, 0))
    assert target_counts(ends_in_padding, [[7, 0, 9, 7], [1] * 6]) == [2, 0]
    # What stands behind the last of two templates: fewer tokens than behind the first.
    assert counts[0] == len(model.encode(["x my sister pays"])[0]) - len(model.encode(["x"])[0]) + 1


def test_utility_is_the_loss_of_responses(model):
    sequences = model.encode(TEXTS)
    expected = slow_gradient(model, sequences)[1].detach()
    assert evaluate(model, sequences, [0] * 3)["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_dp_sgd_clips_the_gradients_of_responses(model):
    sequences = model.encode(TEXTS)
    private = PrivateSteps(noise_multiplier=0.0, max_grad_norm=1e6, sampling="fixed")
    gradients = private_gradient(
        model, Batch(sequences, [0] * 3), 3, private, stream(0, "x"), Seen()
    )
    expected_gradients = [slow_gradient(model, [ids])[0] for ids in sequences]
    assert_close(
        gradients,
        {name: sum(g[name] for g in expected_gradients) / 3 for name in expected_gradients[0]},
    )


def seen_of(model, sequences, how):
    """What the server sees of a client that trains on these texts."""
    before = {name: value.clone() for name, value in model.parameters().items()}
    update = local_update_(model, sequences, [0] * len(sequences), how, seed=0)
    load_parameters_(model, before)
    facts = Knowledge(
        learning_rate=how.learning_rate,
        local_steps=how.steps(len(sequences)),
        dropout=False,
        recipe=how.recipe if how.kind == UpdateKind.DELTA else None,
    )
    return Observation(round=1, client=0, update=update, knowledge=facts)


def with_other_word(sequences):
    """The texts with a word before the response changed, of which the loss knows nothing."""
    first = list(sequences[0])
    first[2] += 1
    return [tuple(first), *sequences[1:]]


def test_prompts_are_proved_too(model, monkeypatch):
    monkeypatch.setattr(certificate, "TOKENS_AT_ONCE", 8)  # one text at a time
    sequences = [tuple(ids) for ids in model.encode(TEXTS)]
    seen = seen_of(model, sequences, replace(FEDAVG, kind=UpdateKind.GRADIENT))
    assert certificate.proves(model, sequences, seen)
    assert not certificate.proves(model, with_other_word(sequences), seen)
    seen = seen_of(model, sequences, FEDAVG)
    assert replay.replay(model, sequences, seen).verified
    assert not replay.replay(model, with_other_word(sequences), seen).verified


def test_texts_without_a_response_are_proved_by_nobody(model):
    response, nothing = (tuple(ids) for ids in model.encode([TEXTS[0], "Q: why"]))
    for how in (replace(FEDAVG, kind=UpdateKind.GRADIENT), FEDAVG):
        seen = seen_of(model, [response, nothing], how)
        for answer in ([response, nothing], [response, response]):
            assert not certificate.proves(model, answer, seen)
            replayed = replay.replay(model, answer, seen)
            assert replayed is None or not replayed.verified
        assert seen.update.num_examples == 2


def test_a_template_has_the_tokens_that_it_has_in_a_text(small):
    llama = small("llama", CAUSAL_LM).tokenizer
    # As the example of Flower makes them for LLaMA.
    ids = llama.encode("\n### Response:", add_special_tokens=False)[2:]
    assert template_ids(llama, "### Response:") == tuple(ids)
    assert template_ids(llama, "") == ()
    with pytest.raises(ConfigError, match="response_template = ' ' has no tokens"):
        template_ids(llama, " ")
