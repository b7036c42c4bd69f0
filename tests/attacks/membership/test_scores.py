"""Scores of membership against gradients that are formed, one text after the other."""

from dataclasses import replace

import pytest
import torch

from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.membership import likelihood
from fedleak.attacks.membership.attack import Membership
from fedleak.attacks.membership.likelihood import (
    Moments,
    Public,
    compared,
    covariance,
    factors,
    products,
    statistics,
)
from fedleak.attacks.reconstruction import Status
from fedleak.models import CAUSAL_LM, CLASSIFICATION, batch_loss
from fedleak.training.observation import Candidates, Example, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

BUILT = [("bert", CLASSIFICATION), ("gpt2", CAUSAL_LM), ("llama", CLASSIFICATION)]


def gradient_of(model, example, names):
    """The gradient of one text's loss by autograd, one row."""
    ids = torch.tensor([example.ids])
    labels = None if model.task == CAUSAL_LM else torch.tensor([example.label])
    loss = batch_loss(model, ids, torch.ones_like(ids), labels)
    own = dict(model.module.named_parameters())
    gradients = torch.autograd.grad(loss, [own[name] for name in names])
    return dict(zip(names, gradients, strict=True))


def examples_of(model, texts):
    return [
        Example(tuple(ids), i % model.num_labels if model.task == CLASSIFICATION else None)
        for i, ids in enumerate(model.encode(texts))
    ]


def noise_of(tensor, factor):
    """The square of the noise in each number that is left if gradients count s^2 = factor."""
    return max(0.0, tensor.square - factor * tensor.expected) / len(tensor.update_X)


@pytest.mark.parametrize(
    ("built", "optimiser"),
    # Gradients of texts are those of a model, and what is made of them is the optimiser's.
    [(BUILT[0], "adamw"), (BUILT[1], "sgd"), (BUILT[2], "gradient")],
    ids=["bert-adamw", "gpt2-sgd", "llama-gradient"],
)
def test_the_statistic_is_that_of_the_whole_covariance(small, observe, texts, built, optimiser):
    """`g S^-1 u` over the root of `g S^-1 g`, with S formed and solved, tensor by tensor.

    And with the mean of two other updates, each as large as u, in place of u.
    """
    model = small(*built, layers=1)
    kind = UpdateKind.GRADIENT if optimiser == "gradient" else UpdateKind.DELTA

    def observed_of(some):
        seen = observe(model, some, kind=kind).seen
        if optimiser == "adamw":
            known = replace(seen.knowledge, recipe=Recipe(optimiser="adamw"))
            seen = replace(seen, knowledge=known)
        few = {n: v for n, v in seen.update.tensors.items() if v.numel() < 1500}
        return replace(seen, update=replace(seen.update, tensors=few))

    seen = observed_of(texts[:3])
    others = [observed_of(texts[10:12]), observed_of(texts[12:15])]
    few = seen.update.tensors
    examples = examples_of(model, texts[:9])
    queried, public = examples[:5], examples[5:]
    names, observed = compared(model, few), as_gradient(seen)
    rows = [gradient_of(model, example, names) for example in examples]
    ratio_K, variance_K = torch.zeros(2, 5, dtype=torch.float64)
    null_K, inner_K, square_K = torch.zeros(3, 5, dtype=torch.float64)
    numbers = 0
    adaptive = optimiser == "adamw"
    tensors = {
        name: Moments.of(
            Public.of(torch.stack([row[name].flatten() for row in rows[5:]]), adaptive=adaptive),
            observed[name].flatten(),
            3,
        )
        for name in names
    }
    factor = factors(tensors)
    for name in names:
        g_KX, p_PX = (
            torch.stack([row[name].flatten() for row in part]).double()
            for part in (rows[:5], rows[5:])
        )
        u_X = observed[name].flatten().double()
        unit = (u_X.square().sum() / u_X.count_nonzero()) ** 0.5
        inner_K += g_KX @ u_X / unit**2
        square_K += g_KX.square().sum(1) / unit**2
        numbers += int(u_X.count_nonzero())
        power_X = (4 * p_PX.square().mean(0) + p_PX.square().mean()) / 5
        if adaptive:
            g_KX, p_PX = g_KX / power_X.sqrt(), p_PX / power_X.sqrt()
            power_X = torch.ones_like(power_X)
        noise = noise_of(tensors[name], factor[name])
        share = factor[name] / 3
        s_XX = torch.diag(share * power_X + noise) + share * p_PX.T @ p_PX / 4
        g_KX = share**0.5 * g_KX
        ratio_K += g_KX @ torch.linalg.solve(s_XX, u_X)
        others_UX = torch.stack([as_gradient(other)[name].flatten().double() for other in others])
        mean_X = (others_UX / others_UX.norm(dim=1, keepdim=True)).mean(0) * u_X.norm()
        null_K += g_KX @ torch.linalg.solve(s_XX, mean_X)
        variance_K += (g_KX * torch.linalg.solve(s_XX, g_KX.T).T).sum(1)
    answer, *_ = statistics(model, [queried, queried[:1], queried[:2]], public, [seen, *others])
    assert answer.public == 4
    expected_K = ratio_K / variance_K.sqrt()
    torch.testing.assert_close(answer.residual_K, expected_K, rtol=2e-2, atol=2e-2)
    expected_K -= null_K / variance_K.sqrt()
    torch.testing.assert_close(answer.calibrated_K, expected_K, rtol=2e-2, atol=2e-2)
    cosine_K = inner_K / (square_K * numbers).sqrt()
    torch.testing.assert_close(answer.cosine_K, cosine_K, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
def test_moments_are_those_that_an_update_was_made_with(noise):
    rng = stream(3)
    common_X, sizes_X = torch.randn(20_000, generator=rng), torch.rand(20_000, generator=rng)

    def drawn(count):
        return common_X + 3 * sizes_X * torch.randn(count, 20_000, generator=rng)

    update_X = 0.1 * drawn(16).mean(0) + noise * torch.randn(20_000, generator=rng)
    moments = Moments.of(Public.of(drawn(60), adaptive=False), update_X, 16)
    factor = factors({"one": moments})["one"]
    assert factor**0.5 == pytest.approx(0.1, rel=0.1)
    assert noise_of(moments, factor) ** 0.5 == pytest.approx(noise, rel=0.02, abs=0.02)


@pytest.mark.parametrize(
    ("sigma", "limit"), [(1.0, 0.74), pytest.param(2.0, 0.6, marks=pytest.mark.slow)]
)
def test_under_much_noise_it_tells_nearly_what_one_could_who_knows_all(sigma, limit):
    """DP-SGD: gradients of unit norm in tensors of unlike sizes, noise on their sum.

    Whoever knows sigma, clipping and how the others are distributed has the product as likelihood
    ratio, because the gradients are orthogonal in expectation.
    """
    rng, sizes = stream(5), [100, 300, 3000] * 4
    shares = torch.rand(len(sizes), generator=rng) + 0.1

    def drawn(count):
        parts = [
            torch.randn(count, size, generator=rng) * (share / size) ** 0.5
            for size, share in zip(sizes, shares, strict=True)
        ]
        norm_K1 = torch.cat(parts, 1).norm(dim=1, keepdim=True)
        return {str(number): part / norm_K1 for number, part in enumerate(parts)}

    own, known = [], []
    public = {name: Public.of(part, adaptive=False) for name, part in drawn(30).items()}
    for _ in range(100):
        rows = drawn(4)
        update = {
            name: (part[:2].sum(0) + sigma * torch.randn(part.shape[1], generator=rng)) / 2
            for name, part in rows.items()
        }
        backgrounds = covariance(public, update, {}, 2)
        ratio_K, _, variance_K, *_ = products(rows, backgrounds)
        own.append(ratio_K / variance_K.sqrt())
        known.append(sum(part @ update[name] for name, part in rows.items()))
    best = won(torch.stack(known))
    assert best > limit
    assert won(torch.stack(own)) > best - 0.015


def won(scores_NK):
    """The share of pairs of which the first two, who were in, are above the others."""
    members, others = scores_NK[:, :2, None], scores_NK[:, None, 2:]
    return float((members > others).double().mean())


def test_fewer_public_texts_are_used_where_there_is_no_room(small, observe, texts, monkeypatch):
    model = small("bert")
    seen = observe(model, 3).seen
    examples = examples_of(model, texts[:9])
    numbers = sum(seen.update.tensors[name].numel() for name in compared(model, as_gradient(seen)))
    monkeypatch.setattr(likelihood, "NUMBERS", 3 * numbers)
    (few,) = statistics(model, [examples[:2]], examples[2:], [seen])
    assert few.public == 3
    (same,) = statistics(model, [examples[:2]], examples[2:5], [seen])
    assert few.residual_K.tolist() == same.residual_K.tolist()
    monkeypatch.setattr(likelihood, "NUMBERS", 0)
    (none,) = statistics(model, [examples[:2]], examples[2:], [seen])
    assert none.public == 0
    assert bool(none.residual_K.isfinite().all())


@pytest.mark.parametrize("built", BUILT, ids="-".join)
def test_a_loss_is_that_of_one_text_before_and_after_a_step(small, observe, texts, built):
    model = small(*built, layers=1)
    truth = observe(model, 3, granted=("candidates",), learning_rate=0.5)
    answer = Membership()(truth.seen, model, rng=stream(0))
    gradient = as_gradient(truth.seen)
    before = {name: value.clone() for name, value in model.parameters().items()}

    def losses():
        text_losses = []
        for example in truth.candidates.listed:
            ids = torch.tensor([example.ids])
            labels = None if model.task == CAUSAL_LM else torch.tensor([example.label])
            with torch.no_grad():
                text_losses.append(float(batch_loss(model, ids, torch.ones_like(ids), labels)))
        return torch.tensor(text_losses)

    old = losses()
    for name, value in model.parameters().items():
        value.sub_(0.5 * gradient[name])
    new = losses()
    for name, value in model.parameters().items():
        value.copy_(before[name])
    torch.testing.assert_close(torch.tensor(answer.scores["loss"]), -old, atol=1e-4, rtol=1e-4)
    drop = torch.tensor(answer.scores["loss_drop"])
    torch.testing.assert_close(drop, old - new, atol=1e-4, rtol=1e-3)


def test_it_ranks_the_texts_of_the_batch_first_where_the_plain_cosine_does_not(small, observe):
    """The residual is what the method is for: texts of one class have gradients much alike."""
    model = small("bert")
    texts = ["she told us that", "nobody knows it"]
    truth = observe(model, texts, [1, 1], granted=("candidates",))
    answer = Membership()(truth.seen, model, rng=stream(0))

    def gap(name):
        scored = list(zip(answer.scores[name], truth.inside, strict=True))
        return min(s for s, i in scored if i) - max(s for s, i in scored if not i)

    assert gap("residual") > max(0.0, gap("cosine"))


def test_updates_are_compared_with_those_that_have_an_answer(small, observe, texts):
    model, attack = small("bert"), Membership()
    parts = [texts[start : start + 2] for start in (0, 2, 4)]
    truths = [observe(model, part, granted=("candidates",)) for part in parts]
    public = truths[0].candidates.public[-4:]

    def asked(truth, public):
        candidates = Candidates(truth.candidates.listed, public)
        return replace(truth.seen, knowledge=replace(truth.seen.knowledge, candidates=candidates))

    seen = [asked(truth, public) for truth in truths]
    nothing = {name: 0 * value for name, value in seen[0].update.tensors.items()}
    silent = replace(seen[0], update=replace(seen[0].update, tensors=nothing))

    def answers(*seen):
        return attack.many(
            seen, model, rngs=[stream(0)] * len(seen), report=lambda place, progress: None
        )

    *together, of_silent, apart = answers(*seen, silent, asked(truths[0], public[:2]))
    assert of_silent.status == Status.ABSTAINED
    assert "calibrated" not in apart.scores  # with other public texts scores are of another scale
    assert together == answers(*seen)
    for observation, answer in zip(seen, together, strict=True):
        (alone,) = answers(observation)
        assert answer.scores.keys() - alone.scores.keys() == {"calibrated"}
        assert answer.scores["residual"] == pytest.approx(alone.scores["residual"], rel=1e-3)
