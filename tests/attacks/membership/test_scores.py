"""Scores of membership against gradients that are formed, one text after the other."""

import pytest
import torch
from torch.nn import functional as F

from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.membership import attack as scores
from fedleak.attacks.membership.attack import Membership
from fedleak.models import CAUSAL_LM, CLASSIFICATION, batch_loss
from fedleak.training.observation import Example, UpdateKind
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

BUILT = [("bert", CLASSIFICATION), ("gpt2", CAUSAL_LM), ("llama", CLASSIFICATION)]


def gradient_of(model, example, names):
    """The gradient of one text's loss by autograd, one row."""
    ids = torch.tensor([example.ids])
    labels = None if model.task == CAUSAL_LM else torch.tensor([example.label])
    loss = batch_loss(model, ids, torch.ones_like(ids), labels)
    own = dict(model.module.named_parameters())
    found = torch.autograd.grad(loss, [own[name] for name in names])
    return dict(zip(names, found, strict=True))


def examples_of(model, texts):
    return [
        Example(tuple(ids), i % model.num_labels if model.task == CLASSIFICATION else None)
        for i, ids in enumerate(model.encode(texts))
    ]


@pytest.mark.parametrize("built", BUILT, ids="-".join)
@pytest.mark.parametrize("share", [None, ("attn", "attention")], ids=["all", "part"])
@pytest.mark.parametrize("kind", list(UpdateKind))
def test_scores_are_those_of_gradients_that_are_formed(small, observe, texts, built, share, kind):
    model = small(*built)
    seen = observe(model, 3, kind=kind).seen
    update = seen.update if share is None else partial_update(seen.update, share)
    observed = {name: value for name, value in update.tensors.items()}
    if kind == UpdateKind.DELTA:
        observed = {name: -value for name, value in observed.items()}
    examples = examples_of(model, texts[:9])
    asked, public = examples[:5], examples[5:]
    # Each tensor counts in units of its root mean square; a tied embedding is left out.
    left_out = model.family.null_parameters(observed)
    left_out |= {model.family.word_embedding} if model.tied else set()
    unit = {
        name: (float(value.square().sum()) / int(value.count_nonzero())) ** 0.5
        for name, value in observed.items()
        if name not in left_out and float(value.norm()) > 1e-15
    }

    def row(tensors):
        return torch.cat([(tensors[name] / unit[name]).flatten() for name in unit]).double()

    u_X = row(observed)
    g_KX = torch.stack([row(gradient_of(model, one, list(unit))) for one in asked])
    p_PX = torch.stack([row(gradient_of(model, one, list(unit))) for one in public])
    basis_PX = torch.linalg.qr(p_PX.T).Q.T  # orthonormal
    r_KX = g_KX - (g_KX @ basis_PX.T) @ basis_PX

    pairs = scores.products(model, examples, observed)
    torch.testing.assert_close(
        scores.cosine(pairs, len(asked)), F.cosine_similarity(g_KX, u_X[None]), atol=1e-4, rtol=1e-3
    )
    torch.testing.assert_close(
        scores.residual(pairs, len(asked)),
        F.cosine_similarity(r_KX, u_X[None]),
        atol=1e-3,
        rtol=1e-2,
    )


@pytest.mark.parametrize("built", BUILT, ids="-".join)
def test_a_loss_is_that_of_one_text_before_and_after_a_step(small, observe, texts, built):
    model = small(*built)
    truth = observe(model, 3, granted=("candidates",), learning_rate=0.5)
    found = Membership()(truth.seen, model, rng=stream(0))
    gradient = as_gradient(truth.seen)
    before = {name: value.clone() for name, value in model.parameters().items()}

    def losses():
        each = []
        for one in truth.candidates.listed:
            ids = torch.tensor([one.ids])
            labels = None if model.task == CAUSAL_LM else torch.tensor([one.label])
            with torch.no_grad():
                each.append(float(batch_loss(model, ids, torch.ones_like(ids), labels)))
        return torch.tensor(each)

    old = losses()
    for name, value in model.parameters().items():
        value.sub_(0.5 * gradient[name])
    new = losses()
    for name, value in model.parameters().items():
        value.copy_(before[name])
    torch.testing.assert_close(torch.tensor(found.scores["loss"]), -old, atol=1e-4, rtol=1e-4)
    drop = torch.tensor(found.scores["loss_drop"])
    torch.testing.assert_close(drop, old - new, atol=1e-4, rtol=1e-3)


def test_a_public_text_has_nothing_that_could_be_told_apart(small, observe, texts):
    model = small("bert")
    seen = observe(model, 3).seen
    examples = examples_of(model, texts[:6])
    pairs = scores.products(model, [examples[0], *examples], as_gradient(seen))
    assert scores.residual(pairs, 1).tolist() == [0.0]


def test_it_ranks_the_texts_of_the_batch_first_where_the_plain_cosine_does_not(small, observe):
    """The residual is what the method is for: texts of one class have gradients much alike."""
    model = small("bert")
    texts = ["she told us that", "nobody knows it"]
    truth = observe(model, texts, [1, 1], granted=("candidates",))
    found = Membership()(truth.seen, model, rng=stream(0))

    def gap(name):
        each = list(zip(found.scores[name], truth.inside, strict=True))
        return min(s for s, i in each if i) - max(s for s, i in each if not i)

    assert gap("residual") > max(0.0, gap("cosine"))
