import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedleak.models import CAUSAL_LM, CLASS_LOSSES, CLASSIFICATION, batch_loss, pad
from fedleak.models.parameter_selection import matching
from fedleak.training.aggregation import WeightedSum, aggregate
from fedleak.training.batches import round_batch, round_clients
from fedleak.training.local import local_update_
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.settings import LocalTraining, ServerOptimiser
from fedleak.training.wire import from_wire, partial_update, to_wire
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

KINDS = [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)]
FEDSGD = LocalTraining(
    kind=UpdateKind.GRADIENT, batch_size=3, epochs=1, learning_rate=0.1, dropout=False
)
FEDAVG = LocalTraining(
    kind=UpdateKind.DELTA, batch_size=2, epochs=3, learning_rate=0.1, dropout=False
)


def transformers_loss(model, module, sequences, labels):
    """The loss of transformers' own heads, which know nothing of ours."""
    ids, mask = pad(sequences, model.tokenizer.pad_token_id, torch.device("cpu"))
    causal = model.task == CAUSAL_LM
    targets = ids.masked_fill(mask == 0, -100) if causal else torch.tensor(labels)
    return module(input_ids=ids, attention_mask=mask, labels=targets).loss


def transformers_gradient(model, module, sequences, labels):
    module.zero_grad()
    transformers_loss(model, module, sequences, labels).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in module.named_parameters()
    }


def assert_near(tensors, expected, tolerance=2e-5):
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        size = value.abs().max().clamp_min(1e-3)
        torch.testing.assert_close(tensors[name] / size, value / size, atol=tolerance, rtol=0)


def unequal(model, texts, count=3):
    """Sequences of different lengths, so that there is padding."""
    sequences = [ids[: 4 + 3 * i] for i, ids in enumerate(model.encode(texts[:count]))]
    assert len(set(map(len, sequences))) > 1
    return sequences


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_the_gradient_is_that_of_transformers_own_loss(small, texts, family, task):
    model = small(family, task)
    sequences, labels = unequal(model, texts), [0, 2, 2]
    update = local_update_(model, sequences, labels, FEDSGD, seed=0)
    assert (update.kind, update.num_examples) == (UpdateKind.GRADIENT, 3)
    assert_near(update.tensors, transformers_gradient(model, model.module, sequences, labels))


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_the_delta_is_that_of_an_explicit_sgd_loop(small, texts, family, task):
    model = small(family, task)
    sequences, labels = unequal(model, texts, 5), [0, 1, 2, 2, 0]
    module = copy.deepcopy(model.module)
    shuffle = stream(5, "order")
    for _ in range(FEDAVG.epochs):
        order = torch.randperm(5, generator=shuffle).tolist()
        for batch in (order[:2], order[2:4], order[4:]):
            chosen = [sequences[i] for i in batch], [labels[i] for i in batch]
            gradient = transformers_gradient(model, module, *chosen)
            for name, parameter in module.named_parameters():
                parameter.data -= FEDAVG.learning_rate * gradient[name]
    before = {name: p.clone() for name, p in model.parameters().items()}
    expected = {name: p.detach() - before[name] for name, p in module.named_parameters()}
    update = local_update_(model, sequences, labels, FEDAVG, seed=5)
    assert (update.kind, update.num_examples) == (UpdateKind.DELTA, 5)
    assert_near(update.tensors, expected, 1e-4)
    assert FEDAVG.steps(5) == 9
    assert FEDSGD.steps(5) == 1


def test_a_gradient_step_leaves_the_weights_and_a_delta_moves_them(small, texts):
    model = small("bert")
    before = {name: p.clone() for name, p in model.parameters().items()}
    sequences = unequal(model, texts)
    local_update_(model, sequences, [0, 1, 2], FEDSGD, seed=0)
    assert all(torch.equal(p, before[name]) for name, p in model.parameters().items())
    delta = local_update_(model, sequences, [0, 1, 2], FEDAVG, seed=0).tensors
    for name, p in model.parameters().items():
        assert torch.equal(p - before[name], delta[name])


@pytest.mark.parametrize("training", [FEDSGD, FEDAVG])
def test_the_seed_decides_dropout_and_nothing_else_of_the_process(small, texts, training):
    model = small("bert")
    before = copy.deepcopy(model.module.state_dict())
    sequences = unequal(model, texts)

    def update(seed, dropout):
        model.module.load_state_dict(before)
        how = replace(training, dropout=dropout, batch_size=3)
        tensors = local_update_(model, sequences, [0, 1, 2], how, seed=seed).tensors
        return torch.cat([value.flatten() for value in tensors.values()])

    state = torch.get_rng_state()
    dropped = update(1, True)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.module.training
    torch.manual_seed(99)
    assert torch.equal(update(1, True), dropped)
    assert not torch.allclose(update(2, True), dropped)
    assert not torch.allclose(update(1, False), dropped)
    if training.kind == UpdateKind.GRADIENT:
        assert torch.equal(update(1, False), update(2, False))


# --- the loss -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_squared_loss_is_the_mean_over_batch_and_classes(small, texts, family):
    model = replace(small(family), class_loss=CLASS_LOSSES["squared"])
    sequences, labels = unequal(model, texts), [0, 2, 2]
    ids, mask = pad(sequences, model.tokenizer.pad_token_id, torch.device("cpu"))
    logits = model.module(input_ids=ids, attention_mask=mask).logits
    one_hot = [[float(label == c) for c in range(3)] for label in labels]
    loss = sum((logits[b, c] - one_hot[b][c]) ** 2 for b in range(3) for c in range(3)) / 9
    model.module.zero_grad()
    loss.backward()
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.module.named_parameters()
    }
    update = local_update_(model, sequences, labels, FEDSGD, seed=0)
    assert_near(update.tensors, expected)


@pytest.mark.parametrize("loss", CLASS_LOSSES)
def test_a_class_may_be_given_as_probabilities(small, texts, loss):
    model = replace(small("bert"), class_loss=CLASS_LOSSES[loss])
    ids, mask = pad(unequal(model, texts), model.tokenizer.pad_token_id, torch.device("cpu"))
    with torch.no_grad():
        losses = {
            label: batch_loss(model, ids, mask, torch.tensor([label, 0, 2])) for label in (0, 1)
        }
        certain = torch.eye(3)[[1, 0, 2]]
        torch.testing.assert_close(batch_loss(model, ids, mask, certain), losses[1])
        # Between two classes: cross-entropy is linear in them, the squared loss is a parabola.
        between = torch.lerp(torch.eye(3)[[0, 0, 2]], certain, 0.25)
        expected = 0.75 * losses[0] + 0.25 * losses[1]
        if loss == "squared":
            expected -= 0.25 * 0.75 * 2 / 9
        torch.testing.assert_close(batch_loss(model, ids, mask, between), expected)
    assert not torch.isclose(losses[0], losses[1])


# --- which examples and clients -------------------------------------------------------------


@given(st.integers(1, 17), st.integers(1, 6), st.integers(0, 5), st.integers(0, 3))
def test_a_pass_uses_no_example_twice(num_examples, batch_size, seed, client):
    how = replace(FEDSGD, batch_size=batch_size)
    size = min(batch_size, num_examples)
    rounds = num_examples // size
    for sweep in range(2):
        numbers = range(1 + sweep * rounds, 1 + (sweep + 1) * rounds)
        batches = [
            round_batch(num_examples, how, seed=seed, client=client, round=r) for r in numbers
        ]
        assert [len(batch) for batch in batches] == [size] * rounds
        used = Counter(i for batch in batches for i in batch)
        assert set(used) <= set(range(num_examples))
        assert set(used.values()) == {1}
        assert len(used) > num_examples - size


def test_passes_and_clients_differ_in_order_and_fedavg_takes_all():
    def order(client, sweep, seed=0):
        training = replace(FEDSGD, batch_size=1)
        rounds = range(1 + 12 * sweep, 13 + 12 * sweep)
        return [round_batch(12, training, seed=seed, client=client, round=r)[0] for r in rounds]

    assert order(0, 0) == order(0, 0)
    different = [order(0, 0), order(0, 1), order(1, 0), order(0, 0, seed=1)]
    assert len({tuple(indices) for indices in different}) == 4
    assert round_batch(5, FEDAVG, seed=0, client=0, round=9) == [0, 1, 2, 3, 4]


@given(st.integers(1, 9), st.data())
def test_a_round_has_so_many_different_clients_in_order(clients, data):
    per_round = data.draw(st.integers(1, clients))
    chosen = [round_clients(clients, per_round, seed=3, round=r) for r in range(1, 60)]
    for selected in chosen:
        assert selected == sorted(set(selected))
        assert len(selected) == per_round
    assert {client for selected in chosen for client in selected} == set(range(clients))


# --- what is sent, and its sum --------------------------------------------------------------

NAMES = ["a.0.query.weight", "a.1.query.weight", "a.1.query.bias", "a.10.key.weight", "head"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["query"], NAMES[:3]),
        (["a.1."], NAMES[1:3]),
        (["a.*.weight"], [NAMES[0], NAMES[1], NAMES[3]]),
        (["head", "bias"], [NAMES[2], NAMES[4]]),
        (["query.weight", "query"], NAMES[:3]),
        (["Query"], []),
        (["weight.a"], []),
    ],
)
def test_patterns_choose_names_that_contain_them(patterns, expected):
    assert matching(NAMES, patterns) == expected
    tensors = {name: torch.tensor([float(i)]) for i, name in enumerate(NAMES)}
    update = ClientUpdate(UpdateKind.DELTA, tensors, 4)
    sent = partial_update(update, patterns)
    assert dict(sent.tensors) == {name: tensors[name] for name in expected}
    assert (sent.kind, sent.num_examples) == (UpdateKind.DELTA, 4)
    assert list(update.tensors) == NAMES


@st.composite
def rounds(draw):
    kind = draw(st.sampled_from(UpdateKind))
    number = st.integers(-9, 9).map(float)
    tensors = st.dictionaries(st.sampled_from("abc"), st.tuples(number, number))
    precision = st.sampled_from([torch.float64, torch.float16, torch.bfloat16])
    sent = draw(st.lists(st.tuples(tensors, st.integers(1, 7), precision), min_size=1, max_size=5))
    return [
        ClientUpdate(kind, {n: torch.tensor(v, dtype=dtype) for n, v in values.items()}, count)
        for values, count, dtype in sent
    ]


@given(rounds())
def test_the_sum_is_the_obvious_weighted_mean_over_who_shared(updates):
    broadcast = {name: torch.tensor([1.0, -2.0], dtype=torch.float64) for name in "abc"}
    held = copy.deepcopy((broadcast, updates))
    total = WeightedSum(lambda name: torch.float64)
    for update in updates:
        total.add_(update)
    following, moments = aggregate(broadcast, total, ServerOptimiser("sgd", 0.5), {})
    assert moments == {}
    sign = -0.5 if updates[0].kind == UpdateKind.GRADIENT else 1.0
    for name, value in broadcast.items():
        shared = [(u.tensors[name].double(), u.num_examples) for u in updates if name in u.tensors]
        expected = value
        if shared:
            expected = value + sign * sum(t * n / sum(n for _, n in shared) for t, n in shared)
        torch.testing.assert_close(following[name], expected, atol=1e-12, rtol=1e-12)
        assert following[name].dtype == torch.float64
    for before, after in [(held[0], broadcast)] + [
        (a.tensors, b.tensors) for a, b in zip(held[1], updates, strict=True)
    ]:
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sum_has_the_bits_of_products_that_are_added(dtype, precision):
    rng, counts = stream(4, "sum"), range(1, 34)
    sent = [torch.randn(999, generator=rng).to(dtype) for _ in counts]
    total, expected = WeightedSum(lambda name: precision), torch.zeros(999, dtype=precision)
    for count, values in zip(counts, sent, strict=True):
        total.add_(ClientUpdate(UpdateKind.GRADIENT, {"a": values}, count))
        expected = expected + values.to(precision) * count
    assert torch.equal(total.tensors["a"], expected)


@pytest.mark.parametrize("kind", UpdateKind)
def test_adam_of_the_server_is_the_optimiser_of_torch_on_the_mean(kind):
    """A parameter that nobody shares in a round neither moves nor counts a step."""
    rng = stream(3, "adam")
    weights = {name: torch.randn(4, 3, generator=rng) for name in "abc"}
    expected = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    optimisers = {name: torch.optim.Adam([p], lr=0.03) for name, p in expected.items()}
    moments = {}
    for shared in ("ab", "a", "ab"):
        sent = [{n: torch.randn(4, 3, generator=rng) for n in shared} for _ in range(2)]
        total = WeightedSum(lambda name: torch.float32)
        for count, tensors in zip((1, 3), sent, strict=True):
            total.add_(ClientUpdate(kind, tensors, count))
        held = copy.deepcopy((weights, moments))
        following, next_moments = aggregate(weights, total, ServerOptimiser("adam", 0.03), moments)
        assert_same(held, (weights, moments))
        weights, moments = following, next_moments
        for name in shared:
            mean = (sent[0][name] + 3 * sent[1][name]) / 4
            expected[name].grad = mean if kind == UpdateKind.GRADIENT else -mean
            optimisers[name].step()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name].detach(), atol=1e-6, rtol=1e-6)
    assert moments.keys() == {f"{part}.{n}" for part in ("first", "second", "steps") for n in "ab"}


def test_adam_of_the_server_takes_the_mean_over_those_that_sent_a_parameter():
    """Both gradients are of the size of Adam's epsilon, so that the first step shows their size."""
    total = WeightedSum(lambda name: torch.float32)
    small = torch.full((3,), 1e-8)
    total.add_(ClientUpdate(UpdateKind.GRADIENT, {"all": small}, 3))
    total.add_(ClientUpdate(UpdateKind.GRADIENT, {"all": small, "last": small}, 1))
    before = {name: torch.zeros(3) for name in ("all", "last")}
    after, _ = aggregate(before, total, ServerOptimiser("adam", 1.0), {})
    torch.testing.assert_close(after["last"], torch.full((3,), -0.5))
    assert_same((after,), ({"all": after["last"], "last": after["last"]},))


def test_adam_of_the_server_keeps_the_precision_of_the_weights():
    """In half precision its epsilon, and the squares of small numbers, would be zero."""
    total = WeightedSum(lambda name: torch.bfloat16)
    small = torch.full((3,), 1e-6, dtype=torch.bfloat16)
    total.add_(ClientUpdate(UpdateKind.GRADIENT, {"a": small}, 2))
    before = {"a": torch.zeros(3, dtype=torch.bfloat16)}
    after, _ = aggregate(before, total, ServerOptimiser("adam", 0.5), {})
    assert after["a"].dtype == torch.bfloat16
    torch.testing.assert_close(after["a"].float(), torch.full((3,), -0.5), atol=0.02, rtol=0)


def assert_same(before, after):
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_wire_carries_every_precision_as_it_is_and_numpy_can_hold_it(dtype):
    rows = torch.tensor([[0.0, -0.0, 1.5], [float("inf"), -3e-5, float("nan")]]).to(dtype)
    sent = {"rows": rows, "turned": rows.T, "scalar": rows[0, 2]}
    wire = to_wire(sent)
    sizes = {name: value.numpy().nbytes for name, value in wire.items()}
    assert sizes == {name: value.numel() * dtype.itemsize for name, value in sent.items()}
    received = from_wire(wire)
    assert received.keys() == sent.keys()
    for name, value in sent.items():
        assert received[name].dtype == dtype
        torch.testing.assert_close(received[name], value, atol=0, rtol=0, equal_nan=True)
