"""Gram matrices in place of gradients, against gradients that autograd forms."""

import copy
import types
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import some
from torch.nn import functional as F

from fedleak.attacks.matching.factored_gradients import (
    BatchGradients,
    class_logit_grad,
    next_token_logit_grad,
    tables,
)
from fedleak.attacks.matching.gradient_distance import (
    Cosine,
    LowRankGradient,
    Outer,
    added,
    of_nothing,
    squared,
    squared_and_absolute,
    target_of,
)
from fedleak.models import CAUSAL_LM, CLASS_LOSSES, CLASSIFICATION, batch_loss
from fedleak.models.lora import Lora, adapt_
from fedleak.util.rng import stream

PLAIN = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("llama", CLASSIFICATION),
    ("gpt2", CAUSAL_LM),
    ("llama", CAUSAL_LM),
]
KINDS = [(*kind, False) for kind in PLAIN] + [(*kind, True) for kind in (PLAIN[0], *PLAIN[3:])]
DISTANCES = {"cos": Cosine(), "l2": squared, "l2l1": squared_and_absolute}
LENGTHS = {1: (5,), 3: (6, 4, 3)}


def name_of(kind):
    return "-".join((*kind[:2], *(["lora"] if kind[2] else [])))


@pytest.fixture(autouse=True)
def _attention_in_double(monkeypatch):
    """Decoders compute attention weights in float32, whatever their own precision."""
    plain = F.softmax

    def softmax(input, dim=None, _stacklevel=3, dtype=None):
        return plain(input, dim, dtype=None if input.dtype == torch.float64 else dtype)

    monkeypatch.setattr(F, "softmax", softmax)


def in_double(model):
    """A copy in float64 throughout: transformers' RMSNorm is in float32 by itself."""

    def forward(norm, x):
        return norm.weight * x * torch.rsqrt(x.square().mean(-1, True) + norm.variance_epsilon)

    module = copy.deepcopy(model.module).double()
    for submodule in module.modules():
        if type(submodule).__name__ == "LlamaRMSNorm":
            submodule.forward = types.MethodType(forward, submodule)
    return replace(model, module=module)


def made(small, family, task, lora=False, **options):
    model = small(family, task, **{"width": 64, **options})
    if lora:
        trained = model.family.classifier if task == CLASSIFICATION else ()
        adapt_(model.module, Lora(3, 6.0), trained)
        rng = stream(1, "adapters")
        for parameter in model.parameters().values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=rng))
        model.module.eval()
    return model


def matched(model):
    """All that is trained but the word embedding and what has no gradient but rounding."""
    names = model.parameters().keys() - {model.family.word_embedding}
    return sorted(names - model.family.null_parameters(names))


class Batch:
    """Victims and guesses of them, as arrays and one by one."""

    def __init__(self, model, victims, guesses, size, seed=0):
        self.model, self.lengths = model, LENGTHS[size]
        rng = stream(seed, "batch")
        self.ids_RBT = torch.randint(5, 400, (victims, size, max(self.lengths)), generator=rng)
        self.mask_RBT = torch.zeros_like(self.ids_RBT)
        for r in range(victims):
            # Each victim has its lengths in another order.
            for b in range(size):
                self.mask_RBT[r, b, : self.lengths[(b + r) % size]] = 1
        self.labels_RB = torch.randint(model.num_labels, (victims, size), generator=rng)
        table_VD = model.module.get_parameter(model.family.word_embedding).detach()
        x_RBTD = table_VD[self.ids_RBT]
        noise = torch.randn(victims, guesses, *x_RBTD.shape[1:], generator=rng)
        self.x_RKBTD = x_RBTD[:, None] + 0.3 * x_RBTD.std() * noise.to(x_RBTD)
        self.true_RBTD = x_RBTD

    def loss(self, r, x_BTD):
        """What the client trains on, at any word embeddings."""
        family = self.model.family

        def logits(module, mask_BT, **_):
            return family.logits(module, mask_BT, ids_BT=None, embeds_BTD=x_BTD)

        at_x = replace(self.model, family=types.SimpleNamespace(logits=logits))
        return batch_loss(at_x, self.ids_RBT[r], self.mask_RBT[r], self.labels_RB[r])

    def naive(self, names, r, x_BTD, graph=False):
        """The gradients that autograd forms."""
        own = dict(self.model.module.named_parameters())
        return dict(
            zip(
                names,
                torch.autograd.grad(
                    self.loss(r, x_BTD),
                    [own[name] for name in names],
                    create_graph=graph,
                    materialize_grads=True,
                ),
                strict=True,
            )
        )

    def logit_grad(self, rows=slice(None), guesses=1):
        model, mask_RBT = self.model, self.mask_RBT[rows]
        dtype = self.x_RKBTD.dtype

        def each(value):
            return value[:, None].expand(-1, guesses, *value.shape[1:]).flatten(0, 2)

        if model.task == CLASSIFICATION:
            labels_N = self.labels_RB[rows][:, None].expand(-1, guesses, -1).flatten()
            weights_N = torch.full_like(labels_N, 1, dtype=dtype) / mask_RBT.shape[1]
            return class_logit_grad(model, labels_N, weights_N)
        targets_RBTV = F.one_hot(self.ids_RBT[rows], len(model.tokenizer)).to(dtype)
        weights_RBT = mask_RBT.to(dtype) / (sum(self.lengths) - len(self.lengths))
        return next_token_logit_grad(each(targets_RBTV), each(weights_RBT))

    def gradients(self, computed, x_RKBTD, rows=slice(None), **how):
        logit_grad = self.logit_grad(rows, x_RKBTD.shape[1])
        return computed(x_RKBTD, self.mask_RBT[rows], logit_grad, **{"differentiable": True, **how})

    def target(self, names, noise=0.0, whole=()):
        """The gradients at the true embeddings, and as a target."""
        rng, observed = stream(2, "noise"), []
        for r in range(len(self.ids_RBT)):
            gradients = self.naive(names, r, self.true_RBTD[r])
            for name, value in gradients.items():
                extra = torch.randn(value.shape, generator=rng).to(value)
                gradients[name] = value + noise * value.abs().mean() * extra
            observed.append(gradients)
        small = [*tables(self.model), self.model.family.word_embedding, *whole]
        return observed, target_of(observed, sum(self.lengths), small)


def naive_distance(name, gradients, observed, weights=None):
    """The three distances as the papers have them; zero tensors say nothing."""
    pairs = {
        key: (gradients[key], observed_grad)
        for key, observed_grad in observed.items()
        if observed_grad.any()
    }
    if name == "l2":
        return sum((g - o).square().sum() for g, o in pairs.values())
    if name == "l2l1":
        return sum((g - o).square().sum() + 0.01 * (g - o).abs().sum() for g, o in pairs.values())
    weights = {key: (weights or {}).get(key, 1.0) for key in pairs}
    terms = [
        weights[key] * (1 - F.cosine_similarity(g.flatten(), o.flatten(), dim=0, eps=0))
        for key, (g, o) in pairs.items()
    ]
    return sum(terms) / sum(weights.values())


def naive_grads(batch, names, observed, losses):
    """Each distance [R, K] and its grad in the word embeddings, one guess at a time."""
    apart = {name: torch.zeros(batch.x_RKBTD.shape[:2], dtype=torch.float64) for name in losses}
    grads = {name: torch.zeros_like(batch.x_RKBTD) for name in losses}
    for r, k in product(*map(range, batch.x_RKBTD.shape[:2])):
        x_BTD = batch.x_RKBTD[r, k].clone().requires_grad_()
        gradients = batch.naive(names, r, x_BTD, graph=True)
        for name in losses:
            value = naive_distance(name, gradients, observed[r])
            apart[name][r, k] = value.detach()
            grads[name][r, k] = torch.autograd.grad(value, x_BTD, retain_graph=True)[0]
    return apart, grads


def assert_near(actual, expected, tolerance):
    """By the size of the largest number."""
    size = expected.abs().max()
    assert size > 0
    actual = actual.to(expected)
    torch.testing.assert_close(actual / size, expected / size, atol=tolerance, rtol=0)


def assert_alike(batch, observed, target, exact, tolerance, losses=tuple(DISTANCES)):
    """Values and grads are those of formed gradients; `exact` is the batch in float64."""
    exactly = [{name: value.double() for name, value in tensors.items()} for tensors in observed]
    apart, grads = naive_grads(exact, list(target.tensors), exactly, losses)
    with BatchGradients(batch.model, list(target.tensors)).ready() as computed:
        for name in losses:
            x_RKBTD = batch.x_RKBTD.clone().requires_grad_()
            gradients = batch.gradients(computed, x_RKBTD)
            assert gradients.keys() == target.tensors.keys()
            apart_RK = DISTANCES[name](gradients, target)
            (grad_RKBTD,) = torch.autograd.grad(apart_RK.sum(), x_RKBTD)
            assert_near(apart_RK.detach(), apart[name], tolerance)
            assert_near(grad_RKBTD, grads[name], tolerance)


# --- against gradients that are formed --------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size", "noise"), some(product(KINDS, [1, 3], [0.0, 0.5]), every=5)
)
def test_distances_and_their_derivatives_are_those_of_formed_gradients(small, kind, size, noise):
    model = in_double(made(small, *kind))
    batch = Batch(model, 2, 2, size)
    observed, target = batch.target(matched(model), noise)
    factored = [isinstance(value, LowRankGradient) for value in target.tensors.values()]
    if not kind[2]:  # adapters are too thin
        assert any(factored) == (noise == 0)
    whole = {"l2l1"} if any(factored) else set()
    assert_alike(batch, observed, target, batch, 1e-12, sorted(DISTANCES.keys() - whole))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_in_float32_they_differ_by_rounding(small, kind):
    model = made(small, *kind)
    # Of some batches autograd's own float32 gradient is over 1e-5 off, depending on the processor.
    batch = Batch(model, 1, 1, 3, seed=1)
    observed, target = batch.target(matched(model))
    exact = Batch(in_double(model), 1, 1, 3, seed=1)
    exact.x_RKBTD = batch.x_RKBTD.double()
    assert_alike(batch, observed, target, exact, 1e-5, ["cos", "l2"])


def test_another_loss_of_classifiers_is_matched_too(small):
    model = replace(
        in_double(made(small, "bert", CLASSIFICATION)), class_loss=CLASS_LOSSES["squared"]
    )
    batch = Batch(model, 1, 2, 3)
    observed, target = batch.target(matched(model), 0.5)
    assert_alike(batch, observed, target, batch, 1e-12)


EVERY, LEARNED = ("bert", "gpt2", "llama"), ("bert", "gpt2")
SUBSETS = {
    "one query matrix": (
        EVERY,
        ["1.attn.c_attn.weight", "1.attention.self.query.w", "1.self_attn.q"],
    ),
    "biases": (LEARNED, ["bias"]),
    "norms": (EVERY, ["LayerNorm", "ln_", "norm"]),
    "positions": (LEARNED, ["position_embeddings", "wpe"]),
    "token types": (("bert",), ["token_type"]),
    "tables": (("bert",), ["_embeddings"]),
    "output": (EVERY, ["classifier", "pooler", "score", "lm_head", "ln_f"]),
}


@pytest.mark.parametrize(
    ("kind", "subset"),
    [
        # Classifiers of decoders differ from next-token models in the last layer alone.
        pytest.param(
            kind,
            subset,
            marks=pytest.mark.slow if kind[0] != "bert" and kind[1] == CLASSIFICATION else [],
        )
        for kind in PLAIN
        for subset, (families, _) in SUBSETS.items()
        if kind[0] in families
    ],
    ids=str,
)
def test_a_part_of_the_parameters_is_matched_alone(small, kind, subset):
    model = in_double(made(small, *kind, width=32, layers=3))
    names = [
        name for name in matched(model) if any(pattern in name for pattern in SUBSETS[subset][1])
    ]
    batch = Batch(model, 1, 1, 3)
    observed, target = batch.target(names, 0.5)
    assert list(target.tensors) == names
    assert_alike(batch, observed, target, batch, 1e-12)


def test_every_kind_of_layer_is_among_those_tested(small):
    kinds = set()
    for family, task in PLAIN:
        model = small(family, task)
        owners = {name.rpartition(".")[0] for name in matched(model)}
        kinds |= {type(model.module.get_submodule(owner)).__name__ for owner in owners}
    assert kinds == {"Linear", "Conv1D", "LayerNorm", "LlamaRMSNorm", "Embedding"}


@pytest.mark.parametrize(("kind", "noise"), some(product(PLAIN, [0.0, 0.5]), every=3))
def test_rows_of_the_word_embedding_are_matched_through_a_mixture(small, kind, noise):
    """The model is fed with P E, so the gradient in E is P^T times that in what it is fed with."""
    model = in_double(made(small, *kind))
    family, rng = model.family, stream(0, "mixture")
    own = dict(model.module.named_parameters())
    names = [family.word_embedding, family.layers + ".0", "norm"]
    names = [name for name in own if any(pattern in name for pattern in names)]
    names = [name for name in names if name not in family.null_parameters(names)]
    batch = Batch(model, 1, 1, 3)
    bag_M = torch.tensor([7, 12, 90, 33])
    variables_BTM = torch.randn(*batch.mask_RBT.shape[1:], 4, generator=rng, dtype=torch.float64)
    (observed,), _ = batch.target(names, noise)
    observed[family.word_embedding] = observed[family.word_embedding][bag_M]
    if model.tied:  # the lookups only, as if nothing were looked up twice
        observed[family.word_embedding] = torch.randn(4, 64, generator=rng, dtype=torch.float64)
    target = target_of([observed], sum(batch.lengths), [*tables(model), family.word_embedding])

    variables_BTM.requires_grad_()
    share_BTM = variables_BTM.softmax(-1)
    table_MD = own[family.word_embedding][bag_M].detach().requires_grad_()
    formed = dict(
        zip(
            names,
            torch.autograd.grad(
                batch.loss(0, share_BTM @ table_MD),
                [table_MD if name == family.word_embedding else own[name] for name in names],
                create_graph=True,
            ),
            strict=True,
        )
    )
    for name, distance in DISTANCES.items():
        if name == "l2l1" and not noise:
            continue
        expected = naive_distance(name, formed, observed)
        (expected_grad,) = torch.autograd.grad(expected, variables_BTM, retain_graph=True)
        mine_BTM = variables_BTM.detach().clone().requires_grad_()
        share_RKBTM = mine_BTM.softmax(-1)[None, None]
        with BatchGradients(model, names).ready() as computed:
            x_RKBTD = share_RKBTM @ own[family.word_embedding][bag_M].detach()
            gradients = batch.gradients(computed, x_RKBTD, mixture_RKBTM=share_RKBTM)
            apart = distance(gradients, target)[0, 0]
            (grad,) = torch.autograd.grad(apart, mine_BTM)
        assert_near(apart.detach(), expected.detach(), 1e-12)
        assert_near(grad, expected_grad, 1e-12)


@pytest.mark.parametrize("kind", [PLAIN[0], PLAIN[3]], ids="-".join)
def test_many_victims_and_guesses_are_each_as_alone(small, kind):
    model = in_double(made(small, *kind, width=32))
    batch = Batch(model, 3, 2, 3)
    for noise, losses in ((0.0, ("cos", "l2")), (0.5, tuple(DISTANCES))):
        _, target = batch.target(matched(model), noise)
        with BatchGradients(model, list(target.tensors)).ready() as computed:
            gradients = batch.gradients(computed, batch.x_RKBTD, differentiable=False)
            together = {name: DISTANCES[name](gradients, target) for name in losses}
            for r, k in product(range(3), range(2)):
                row = torch.tensor([r])
                x_RKBTD = batch.x_RKBTD[row][:, [k]]
                alone = batch.gradients(computed, x_RKBTD, row, differentiable=False)
                for name in losses:
                    apart = DISTANCES[name](alone, target.take(row))
                    assert_near(together[name][r, k], apart[0, 0], 1e-12)


@pytest.mark.parametrize("loss", DISTANCES)
def test_the_derivative_is_that_of_finite_differences(small, loss):
    model = in_double(made(small, "bert", CLASSIFICATION, width=32))
    batch = Batch(model, 1, 1, 3)
    _, target = batch.target(matched(model), 0.5)
    rng, step = stream(0, "along"), 1e-6

    def apart(x_RKBTD, differentiable=False):
        gradients = batch.gradients(computed, x_RKBTD, differentiable=differentiable)
        return DISTANCES[loss](gradients, target)[0, 0]

    with BatchGradients(model, list(target.tensors)).ready() as computed:
        x_RKBTD = batch.x_RKBTD.clone().requires_grad_()
        (grad,) = torch.autograd.grad(apart(x_RKBTD, True), x_RKBTD)
        for _ in range(3):
            along = torch.randn(grad.shape, generator=rng).double()
            ahead, behind = (apart(batch.x_RKBTD + s * along).item() for s in (step, -step))
            # An absolute value has a corner, which a step may cross.
            near = pytest.approx(float((grad * along).sum()), rel=1e-4 if loss == "l2l1" else 1e-6)
            assert (ahead - behind) / (2 * step) == near


# --- distances on their own -------------------------------------------------------------------


def by_hand():
    """A weight in two parts, the second for all guesses, and a bias; two victims, two guesses."""
    rng = stream(0, "by hand")

    def some(*shape):
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    weight = (Outer(some(2, 2, 3, 4), some(2, 2, 3, 5)), Outer(some(2, 1, 2, 4), some(2, 1, 2, 5)))
    bias_RKX = some(2, 2, 4)
    formed = sum(torch.einsum("rknx,rkny->rkxy", *part) for part in weight)
    observed = [{"weight": some(4, 5), "bias": some(4)} for _ in range(2)]
    return {"weight": weight, "bias": bias_RKX}, {"weight": formed, "bias": bias_RKX}, observed


def formulas(name, formed, observed, weights=None):
    out_RK = torch.zeros(2, 2, dtype=torch.float64)
    for r, k in product(range(2), range(2)):
        gradients = {key: value[r, k] for key, value in formed.items()}
        out_RK[r, k] = naive_distance(name, gradients, observed[r], weights)
    return out_RK


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_are_those_of_the_papers(name):
    gradients, formed, observed = by_hand()
    target = target_of(observed, 9, [])
    assert not any(isinstance(value, LowRankGradient) for value in target.tensors.values())
    apart_RK = DISTANCES[name](gradients, target)
    torch.testing.assert_close(apart_RK, formulas(name, formed, observed), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["cos", "l2"])
def test_factors_stand_for_the_gradient_that_they_are_of(name):
    gradients, _, observed = by_hand()
    for tensors in observed:
        tensors["weight"] = tensors["weight"][:, :1] @ tensors["weight"][:1]
    whole = target_of(observed, 9, [])
    factored = target_of(observed, 1, [])
    assert isinstance(factored.tensors["weight"], LowRankGradient)
    torch.testing.assert_close(
        DISTANCES[name](gradients, factored), DISTANCES[name](gradients, whole), rtol=1e-12, atol=0
    )
    assert isinstance(target_of(observed, 1, ["weight"]).tensors["weight"], torch.Tensor)


def test_a_weighted_cosine_is_the_weighted_mean():
    gradients, formed, observed = by_hand()
    weights = {"bias": 3.0, "another": 9.0}
    apart_RK = Cosine(weights)(gradients, target_of(observed, 9, []))
    expected = formulas("cos", formed, observed, weights)
    torch.testing.assert_close(apart_RK, expected, rtol=1e-12, atol=0)
    assert (apart_RK - formulas("cos", formed, observed)).abs().min() > 1e-3


@pytest.mark.parametrize("name", DISTANCES)
def test_a_tensor_that_is_zero_for_one_victim_says_nothing_about_that_one(name):
    gradients, formed, observed = by_hand()
    observed[1]["bias"] = torch.zeros(4, dtype=torch.float64)
    apart_RK = DISTANCES[name](gradients, target_of(observed, 9, []))
    torch.testing.assert_close(apart_RK, formulas(name, formed, observed), rtol=1e-12, atol=0)


def test_rows_of_a_table_that_no_guess_reaches_count_as_zeros():
    rng = stream(0, "table")
    found_RKTD = torch.randn(1, 2, 3, 4, generator=rng)
    observed = [{"table": torch.randn(6, 4, generator=rng)}]
    filled = torch.cat([found_RKTD, torch.zeros(1, 2, 3, 4)], 2)
    for name, distance in DISTANCES.items():
        apart_RK = distance({"table": found_RKTD}, target_of(observed, 3, ["table"]))
        for k in range(2):
            expected = naive_distance(name, {"table": filled[0, k]}, observed[0])
            torch.testing.assert_close(apart_RK[0, k], expected)


# An absolute distance needs the whole gradients, which noise keeps.
@pytest.mark.parametrize(
    ("name", "noise"), [("cos", 0.0), ("l2", 0.0), ("cos", 0.5), ("l2", 0.5), ("l2l1", 0.5)]
)
def test_a_gradient_of_zeros_is_as_far_as_the_observed_one_is_large(small, name, noise):
    model = in_double(made(small, "bert", CLASSIFICATION))
    observed, target = Batch(model, 2, 1, 1).target(matched(model), noise)
    sizes = [
        {
            "cos": 1.0,
            "l2": sum(float(value.square().sum()) for value in tensors.values()),
            "l2l1": sum(
                float(value.square().sum() + 0.01 * value.abs().sum()) for value in tensors.values()
            ),
        }[name]
        for tensors in observed
    ]
    assert of_nothing(DISTANCES[name], target).tolist() == pytest.approx(sizes, rel=1e-10)


@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("rank", [1, 9])
def test_distances_of_a_gradient_in_parts_have_the_derivatives_that_autograd_finds(name, rank):
    gradients, _, observed = by_hand()
    if rank == 1:
        for tensors in observed:
            tensors["weight"] = tensors["weight"][:, :1] @ tensors["weight"][:1]
    guesses = 1 if name == "l2l1" else 2
    sides = [
        side[:, :1].repeat(1, guesses, 1, 1) + torch.arange(guesses)[:, None, None]
        for part in gradients["weight"]
        for side in part
    ]
    for side in sides:
        side.requires_grad_()
    target = target_of(observed, rank, ["weight"] if name == "l2l1" else [])
    assert isinstance(target.tensors["weight"], LowRankGradient) == (rank == 1 and name != "l2l1")
    found_RK = DISTANCES[name]({"weight": tuple(Outer(*sides[i : i + 2]) for i in (0, 2))}, target)
    formed = sum(
        torch.einsum("rknx,rkny->rkxy", left, right)
        for left, right in zip(sides[::2], sides[1::2], strict=True)
    )
    expected_RK = torch.stack(
        [
            torch.stack(
                [
                    naive_distance(name, {"weight": formed[r, k]}, {"weight": tensors["weight"]})
                    for k in range(guesses)
                ]
            )
            for r, tensors in enumerate(observed)
        ]
    )
    torch.testing.assert_close(found_RK, expected_RK, rtol=1e-11, atol=0)
    each_RK = torch.randn(found_RK.shape, generator=stream(0, "each"), dtype=torch.float64)
    mine = torch.autograd.grad((found_RK * each_RK).sum(), sides)
    theirs = torch.autograd.grad((expected_RK * each_RK).sum(), sides)
    for grad, expected_grad in zip(mine, theirs, strict=True):
        assert_near(grad, expected_grad, 1e-11)


def test_a_target_of_some_victims_and_of_another_precision(small):
    model = made(small, "bert", CLASSIFICATION)
    batch = Batch(model, 2, 1, 1)
    for noise in (0.0, 0.5):
        observed, target = batch.target(matched(model), noise)
        chosen = target.take(torch.tensor([1, 1, 0]))
        low = target.to(torch.bfloat16)
        for name in list(target.tensors):
            for i, r in enumerate((1, 1, 0)):
                assert chosen.norms[name][i] == target.norms[name][r]
                value = chosen.tensors[name]
                if isinstance(value, LowRankGradient):
                    value = value.left_RXQ @ value.right_RYQ.mT
                size = observed[r][name].norm()
                assert (value[i] - observed[r][name]).norm() <= 1e-5 * size
            parts = low.tensors[name]
            parts = parts if isinstance(parts, LowRankGradient) else [parts]
            assert {part.dtype for part in parts} == {torch.bfloat16}
            assert low.norms[name] is target.norms[name]


# --- updates that were tampered with ----------------------------------------------------------


def masked(value, rng):
    return (
        torch.zeros_like(value)
        if value.dim() == 1
        else value * (torch.rand(value.shape, generator=rng) < 0.1)
    )


TAMPERED = {
    "masked, and biases all zero": masked,
    "zero": lambda value, rng: torch.zeros_like(value),
    "half precision": lambda value, rng: value.bfloat16().float(),
    "tiny": lambda value, rng: value * 1e-12,
    "huge": lambda value, rng: value * 1e12,
    "below what has a square": lambda value, rng: value * 1e-30,
}


@pytest.mark.parametrize("how", TAMPERED)
@pytest.mark.parametrize(
    "kind", [PLAIN[0], pytest.param(PLAIN[4], marks=pytest.mark.slow)], ids="-".join
)
def test_distances_and_derivatives_are_finite_whatever_was_sent(small, kind, how):
    model = made(small, *kind)
    batch = Batch(model, 1, 2, 3)
    rng = stream(0, "tamper")
    (observed,), _ = batch.target(matched(model))
    observed = {name: TAMPERED[how](value, rng) for name, value in observed.items()}
    target = target_of([observed], 13, list(observed))
    empty = sum(not value.any() for value in observed.values())
    assert (empty > 0) == ("zero" in how)
    with BatchGradients(model, list(target.tensors)).ready() as computed:
        for distance in DISTANCES.values():
            x_RKBTD = batch.x_RKBTD.clone().requires_grad_()
            apart_RK = distance(batch.gradients(computed, x_RKBTD), target)
            (grad,) = torch.autograd.grad(apart_RK.sum(), x_RKBTD)
            assert apart_RK.isfinite().all()
            assert grad.isfinite().all()
            assert grad.any() == (how != "zero" and "below" not in how)


# --- how a model is listened to ---------------------------------------------------------------


def state(model):
    module = model.module
    return (
        [p.requires_grad for p in module.parameters()],
        [p.grad is None for p in module.parameters()],
        sum(
            len(submodule._forward_hooks) + len(submodule._forward_pre_hooks)
            for submodule in module.modules()
        ),
        module.training,
    )


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_is_left_as_it_was_also_after_an_error(small, lora):
    model = made(small, "bert", CLASSIFICATION, lora)
    before = state(model)
    with BatchGradients(model, matched(model)).ready():
        during = state(model)
        assert not any(during[0])
    assert state(model) == before
    with pytest.raises(KeyError), BatchGradients(model, matched(model)).ready():
        raise KeyError
    assert state(model) == before
    if lora:
        assert not all(before[0])


class Scale(torch.nn.Module):
    """A layer that is neither linear nor a norm, but has weight and bias as these have."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x):
        return self.weight * x + self.bias


class Gated(torch.nn.Linear):
    """A linear layer with a third parameter."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features)
        self.gate = torch.nn.Parameter(torch.ones(linear.out_features))


@pytest.mark.parametrize(
    ("path", "other", "message"),
    [
        ("output.LayerNorm", Scale, r"layer\.0\.output\.LayerNorm \(layer type Scale\)"),
        ("output.dense", Gated, r"layer\.0\.output\.dense\.gate \(layer type Gated\)"),
    ],
)
def test_a_layer_of_another_type_is_refused_by_its_name(small, path, other, message):
    model = made(small, "bert", CLASSIFICATION)
    model = replace(model, module=copy.deepcopy(model.module))
    path = f"bert.encoder.layer.0.{path}"
    model.module.set_submodule(path, other(model.module.get_submodule(path)))
    with pytest.raises(NotImplementedError, match=message):
        BatchGradients(model, list(model.trained()))
    kept = [name for name in model.trained() if not name.startswith(path)]
    assert BatchGradients(model, kept)


def sides(gradient):
    """The tensors that a gradient is made of."""
    return (
        [gradient] if isinstance(gradient, torch.Tensor) else [x for part in gradient for x in part]
    )


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[4], KINDS[5]], ids=name_of)
def test_gradients_to_look_at_are_those_to_differentiate(small, kind):
    model = made(small, *kind)
    batch = Batch(model, 2, 2, 3)
    with BatchGradients(model, matched(model)).ready() as computed:
        x_RKBTD = batch.x_RKBTD.clone().requires_grad_()
        slow = batch.gradients(computed, x_RKBTD)
        fast = batch.gradients(computed, x_RKBTD, differentiable=False)
    assert slow.keys() == fast.keys()
    for name in fast:
        for mine, theirs in zip(sides(fast[name]), sides(slow[name]), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach())
    assert x_RKBTD.grad is None


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[4], KINDS[5]], ids=name_of)
def test_only_gradients_to_look_at_attend_by_fused_kernels(small, kind, monkeypatch, attention):
    model = made(small, *kind)
    model.module.set_attn_implementation(attention)
    batch, whole, fused = Batch(model, 1, 1, 1), torch.nn.functional.scaled_dot_product_attention, 0

    def count(*args, **kwargs):
        nonlocal fused
        fused += 1
        return whole(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", count)
    with BatchGradients(model, matched(model)).ready() as computed:
        batch.gradients(computed, batch.x_RKBTD.clone().requires_grad_())
        assert fused == 0
        batch.gradients(computed, batch.x_RKBTD, differentiable=False)
        assert fused == model.num_layers
        # Also after an error the next second derivative must work.
        with pytest.raises(RuntimeError):
            batch.gradients(computed, batch.x_RKBTD[..., 1:], differentiable=False)
        batch.gradients(computed, batch.x_RKBTD.clone().requires_grad_())
    assert model.module.config._attn_implementation == attention


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[4]], ids=name_of)
def test_gradients_to_look_at_keep_no_graph(small, kind):
    model = made(small, *kind)
    batch = Batch(model, 1, 1, 1)
    with BatchGradients(model, matched(model)).ready() as computed:
        gradients = batch.gradients(computed, batch.x_RKBTD, differentiable=False)
    assert not [
        name
        for name, gradient in gradients.items()
        if any(x.requires_grad for x in sides(gradient))
    ]


@pytest.mark.parametrize("kind", [PLAIN[0], PLAIN[3]], ids="-".join)
def test_what_the_others_of_a_batch_give_is_added(small, kind):
    model = in_double(made(small, *kind))
    batch = Batch(model, 2, 2, 3)
    # The others are the same in every guess.
    batch.x_RKBTD[:, 1, 1:] = batch.x_RKBTD[:, 0, 1:]
    _, target = batch.target(matched(model), 0.5)
    with BatchGradients(model, list(target.tensors)).ready() as computed:
        whole = batch.gradients(computed, batch.x_RKBTD, differentiable=False)
        fewer = copy.copy(batch)

        def of(chosen, x_RKBTD):
            fewer.mask_RBT, fewer.ids_RBT = batch.mask_RBT[:, chosen], batch.ids_RBT[:, chosen]
            fewer.labels_RB = batch.labels_RB[:, chosen]
            gradients = fewer.gradients(computed, x_RKBTD[:, :, chosen], differentiable=False)
            if model.task == CLASSIFICATION:  # `logit_grad` counts each as a share of what it sees
                return {
                    name: scaled(gradient, len(chosen) / 3) for name, gradient in gradients.items()
                }
            return gradients

        total = added(of([1, 2], batch.x_RKBTD[:, :1]), of([0], batch.x_RKBTD))
    for distance in DISTANCES.values():
        torch.testing.assert_close(
            distance(total, target), distance(whole, target), rtol=1e-11, atol=0
        )


def scaled(gradient, factor):
    if isinstance(gradient, torch.Tensor):
        return factor * gradient
    return tuple(Outer(factor * part.left_RKNX, part.right_RKNY) for part in gradient)


def test_next_token_targets_may_be_shares_of_tokens():
    rng = stream(0, "targets")
    logits = torch.randn(2, 4, 7, generator=rng, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(2, 4, 7, generator=rng, dtype=torch.float64).softmax(-1)
    weights = torch.rand(2, 4, generator=rng, dtype=torch.float64)
    losses = -(targets[:, 1:] * logits[:, :-1].log_softmax(-1)).sum(-1)
    (expected,) = torch.autograd.grad((losses * weights[:, 1:]).sum(), logits)
    torch.testing.assert_close(next_token_logit_grad(targets, weights)(logits), expected)
