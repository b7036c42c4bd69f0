import itertools
import json
import math
from dataclasses import asdict, fields, replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from cases import some
from hypothesis import given
from hypothesis import strategies as st

from fedleak import models
from fedleak.attacks import AttackSetting, certificate
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.subspace import beam_search, keyspan
from fedleak.attacks.subspace.atoms import Atoms, make_atoms
from fedleak.attacks.subspace.beam_search import (
    SQUARED_ROUNDING,
    best_sets,
    grow,
    needed,
    read_seeds,
)
from fedleak.attacks.subspace.keyspan import Keyspan, read_sentences
from fedleak.attacks.subspace.span import ACCEPT
from fedleak.models import (
    CAUSAL_LM,
    CLASS_LOSSES,
    CLASSIFICATION,
    ModelSpec,
    batch_loss,
    loading,
    pad,
)
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

KINDS = [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)]
ROTARY = [("llama", CLASSIFICATION), ("llama", CAUSAL_LM)]
WIDE = {"width": 96, "layers": 3}
LONG = 14
"""Tokens of the longest text that heads of 24 dimensions tell with something to spare."""


def taking_turns(values):
    """Every kind of model with values in turn: an update is read in one way, whatever made it."""
    return [(*kind, values[i % len(values)]) for i, kind in enumerate([*KINDS, *ROTARY])]


def answer_of(model, seen, attack=None):
    """Runs the attack, and checks what its every answer owes."""
    answer = (attack or Keyspan())(seen, model, rng=stream(0, "keyspan"))
    json.dumps(asdict(answer), allow_nan=False)
    assert answer.status in (Status.RECOVERED, Status.ABSTAINED)
    assert len(answer.evidence) == len(answer.margins) == len(answer.sequences or ())
    if answer.verified:
        assert len(answer.sequences) == seen.update.num_examples
        assert certificate.proves(model, answer.sequences, seen), "a worker would not believe it"
    return answer


def scored(model, truth):
    """The tokens that something flows through: the last target is no input."""
    end = -1 if model.task == CAUSAL_LM else None
    return sorted(tuple(ids[:end]) for ids in truth.sequences)


def assert_exact(answer, model, truth):
    assert sorted(answer.sequences) == scored(model, truth)
    assert answer.tokens == tuple(sorted({t for ids in scored(model, truth) for t in ids}))
    assert answer.verified
    assert not answer.reason
    assert max(answer.evidence) < ACCEPT
    assert all(margin is None or margin > 100 for margin in answer.margins)


def with_tensors(seen, change):
    tensors = {name: change(value) for name, value in seen.update.tensors.items()}
    return replace(seen, update=replace(seen.update, tensors=tensors))


def noisy(seen, relative, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return with_tensors(
        seen, lambda g: g + relative * g.std() * torch.randn(g.shape, generator=rng)
    )


@torch.no_grad()
def atoms_of(model, seen):
    names = set(model.family.attention_parameters(0))
    gradients = {n: g for n, g in certificate.as_gradient(seen).items() if n in names}
    return make_atoms(model, gradients, gradients, among_N=None, rng=stream(0, "atoms"))


def index_of(atoms, token, position):
    """The atom of a (token, position) pair."""
    (index,) = ((atoms.token_A == token) & (atoms.position_A == position)).nonzero().flatten()
    return int(index)


def seeds_of(model, truth):
    """Each token that occurs once in the batch: itself, its sequence and its position there."""
    every = [token for ids in scored(model, truth) for token in ids]
    return [
        (token, ids, at)
        for ids in scored(model, truth)
        for at, token in enumerate(ids)
        if every.count(token) == 1
    ]


# --- fact 3: whose keys span a query's gradient ----------------------------------------------


def queries_and_keys(model, truth):
    """The outputs [B, T, H, K] of the first layer's query and key projections, with gradients."""
    kept = []

    def keep(_, __, output):
        output.retain_grad()
        kept.append(output)

    names = model.family.attention_parameters(0)[:2]
    modules = [model.module.get_submodule(name.rpartition(".")[0]) for name in names]
    handles = [module.register_forward_hook(keep) for module in modules]
    ids, mask = pad(truth.sequences, model.tokenizer.pad_token_id, model.device)
    batch_loss(model, ids, mask, torch.tensor(truth.labels)).backward()
    for handle in handles:
        handle.remove()
    model.module.zero_grad()
    heads = model.family.first_block(model.module).num_heads

    def split(x):
        return x.detach().reshape(*x.shape[:2], heads, -1).double()

    if len(kept) == 2:
        return *map(split, kept), *(split(x.grad) for x in kept)
    (q, k, _), (dq, dk, _) = kept[0].chunk(3, -1), kept[0].grad.chunk(3, -1)
    return split(q), split(k), split(dq), split(dk)


def outside(target_K, span_NK):
    """The share of a vector outside the span of others."""
    weight = torch.linalg.lstsq(span_NK.T, target_K[:, None], driver="gelsd").solution
    return float((target_K - (span_NK.T @ weight)[:, 0]).norm() / target_K.norm())


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_gradients_at_queries_lie_in_the_span_of_their_sentence_s_keys_and_the_reverse(
    small, observe, family, task
):
    model = small(family, task, **WIDE)
    truth = observe(model, 2, max_length=LONG - 2)
    q, k, dq, dk = queries_and_keys(model, truth)
    right, wrong = [], []
    for b, ids in enumerate(truth.sequences):
        length = len(ids) - (task == CAUSAL_LM)
        for at, head in itertools.product(range(2, length - 2), range(q.shape[2])):
            for target, vectors, seen in (
                (dq, k, range(at + 1) if model.family.causal else range(length)),
                (dk, q, range(at, length) if model.family.causal else range(length)),
            ):
                own = vectors[b, list(seen), head]
                other = own.clone()
                other[len(seen) // 2] = vectors[1 - b, list(seen)[len(seen) // 2], head]
                right.append(outside(target[b, at, head], own))
                wrong.append(outside(target[b, at, head], other))
                # Shifting a query's scores changes nothing: what keys weigh adds up to nothing.
                weights = torch.linalg.lstsq(own.T, target[b, at, head][:, None]).solution
                if target is dq:
                    assert abs(float(weights.sum())) < 1e-3 * float(weights.abs().sum())
    assert max(right) < 1e-4
    assert torch.tensor(wrong).median() > 0.01


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_the_excess_of_a_sentence_tells_it_from_one_with_a_wrong_token(
    small, observe, family, task
):
    model = small(family, task, **WIDE)
    truth = observe(model, 3, max_length=LONG)
    atoms, rng = atoms_of(model, truth.seen), stream(0, "wrong")
    bag = atoms.bag.tokens_N.tolist()
    tried = 0
    for token, ids, at in seeds_of(model, truth)[::2]:
        seed, own = bag.index(token), index_of(atoms, token, at)
        members = torch.tensor([index_of(atoms, t, p) for p, t in enumerate(ids)])
        right = atoms.excess(seed, members, torch.tensor(own))
        assert right < ACCEPT / 2
        for p in range(len(ids)):
            if p == at:
                continue
            fewer = torch.cat([members[:p], members[p + 1 :]])
            assert atoms.excess(seed, fewer, torch.tensor(own)) > 500 * max(right, 1)
            others = ((atoms.position_A == p) & (atoms.token_A != ids[p])).nonzero().flatten()
            if len(others):
                wrong = members.clone()
                wrong[p] = others[torch.randint(len(others), (), generator=rng)]
                assert atoms.excess(seed, wrong, torch.tensor(own)) > 500 * max(right, 1)
                tried += 1
    assert tried > 50


# --- the search ------------------------------------------------------------------------------

RECURRING = ("we pay and they pay", "they pay him and we", "pay me and we pay")


def naive_rest(atoms, seed, members, at):
    """Squared share [H] of a seed's gradient outside the span of its members, and their number."""
    rest = []
    for head in range(atoms.vector_HAK.shape[0]):
        target = atoms.target_NHK[seed, head]
        rows = []
        for member in members:
            here, there = int(atoms.position_A[at]), int(atoms.position_A[member])
            later = bool(atoms.of_keys_H[head])
            if not atoms.causal or (there >= here if later else there <= here):
                rows.append(atoms.vector_HAK[head, member])
        rest.append(outside(target, torch.stack(rows)) ** 2 if rows else 1.0)
    return torch.tensor(rest, dtype=torch.float64)


def scores(rest_H, quiet_H):
    """The least and the most that a sum of log residuals may be in float32."""
    off = 3e-7
    low_H, high_H = (rest_H - off).clamp_min(0) + quiet_H, rest_H + off + quiet_H
    return float(low_H.log().sum()), float(high_H.log().sum())


def may_join(atoms, members, atom):
    """Whether an atom may stand beside the members: the rules, one by one."""
    position, token = int(atoms.position_A[atom]), int(atoms.token_A[atom])
    places = [(int(atoms.position_A[m]), int(atoms.token_A[m])) for m in members]
    if position in [p for p, _ in places]:
        return False
    if atoms.first is not None and token == atoms.first:
        return False
    ends = [p for p, t in places if t == atoms.last] if atoms.last is not None else []
    if ends and position > min(ends):
        return False
    if atoms.last is not None and token == atoms.last:
        return not ends and position > max(p for p, _ in places)
    return True


@pytest.mark.parametrize(
    ("family", "task", "width"),
    some([(*kind, width) for width in (1, 8, 3) for kind in KINDS], every=8),
)
def test_sets_grow_by_the_atoms_that_least_squares_from_scratch_would_choose(
    small, observe, family, task, width
):
    model = small(family, task, **WIDE)
    truth = observe(model, RECURRING)
    atoms = atoms_of(model, truth.seen)
    bag = atoms.bag.tokens_N.tolist()
    compared = 0
    for token, _, _ in seeds_of(model, truth):
        seed = bag.index(token)
        starts = [a for a in range(len(atoms.token_A)) if int(atoms.bag_A[a]) == seed]
        if atoms.first is not None:
            mark = index_of(atoms, atoms.first, 0)
            beams = [((a, mark), a) for a in starts if atoms.position_A[a] > 0]
        else:
            beams = [((a,), a) for a in starts]
        norm_H = atoms.target_NHK[seed].norm(dim=-1)
        quiet_H = (atoms.noise_NH[seed] / norm_H).square() + SQUARED_ROUNDING
        for members_1WM, at_1W, rest_1W in grow(atoms, torch.tensor([seed]), width):
            children = {}
            for members, at in beams:
                for atom in range(len(atoms.token_A)):
                    if may_join(atoms, members, atom):
                        key = frozenset((*members, atom))
                        bounds = scores(naive_rest(atoms, seed, (*members, atom), at), quiet_H)
                        children[key] = min(children.get(key, bounds), bounds)
            lows, highs = (sorted(x)[:width] for x in zip(*children.values(), strict=True))
            chosen = [
                (tuple(members), int(at))
                for members, at in zip(members_1WM[0].tolist(), at_1W[0], strict=True)
            ]
            beams = list(dict.fromkeys(chosen))
            assert len({frozenset(members) for members, _ in beams}) == len(beams) == len(lows)
            if min(float(naive_rest(atoms, seed, m, at).mean()) for m, at in beams) < 1e-8:
                break  # all is explained: the order is that of rounding
            for i, (members, at) in enumerate(beams):
                rest_H = naive_rest(atoms, seed, members, at)
                low, high = scores(rest_H, quiet_H)
                assert low <= highs[i] + 1e-3
                assert high >= lows[i] - 1e-3
                freedom = atoms.vector_HAK.shape[-1] - len(members)
                expected = (rest_H / (freedom * quiet_H)).mean().sqrt()
                assert float(rest_1W[0, i]) == pytest.approx(float(expected), rel=0.02)
                compared += high - low < 0.1
    assert compared > 5


@given(
    st.integers(1, 5),
    st.lists(
        st.lists(st.integers(0, 8), min_size=2, max_size=2, unique=True), min_size=1, max_size=5
    ),
    st.integers(0, 10**6),
    st.floats(0, 1),
)
def test_the_best_sets_are_kept_each_once(width, members, seed, forbidden):
    rng = torch.Generator().manual_seed(seed)
    score = torch.rand(len(members), 9, generator=rng)
    score[torch.rand(score.shape, generator=rng) < forbidden] = torch.inf
    score.scatter_(1, torch.tensor(members), torch.inf)
    # One set has one score, from whichever members it came.
    by_set = {}
    for parent, atom in itertools.product(range(len(members)), range(9)):
        if score[parent, atom].isfinite():
            key = frozenset((*members[parent], atom))
            score[parent, atom] = by_set.setdefault(key, score[parent, atom].clone())
    parent, atom, possible = best_sets(score[None], torch.tensor(members)[None], width)
    assert possible == bool(by_set)
    if not possible:
        return
    pairs = list(zip(parent[0].tolist(), atom[0].tolist(), strict=True))
    assert all(score[p, a].isfinite() for p, a in pairs)
    sets = [frozenset((*members[p], a)) for p, a in pairs]
    expected = sorted(by_set, key=lambda key: float(by_set[key]))[:width]
    assert sets[: len(expected)] == expected
    assert set(sets[len(expected) :]) <= {expected[0]}  # the best one fills them up


def made_atoms(pairs, first, last):
    """Atoms of which only the places matter."""
    tokens, positions = torch.tensor(pairs).T
    unused = {field.name: None for field in fields(Atoms)}
    of_tokens = {"bag": SimpleNamespace(tokens_N=tokens), "bag_A": torch.arange(len(tokens))}
    return Atoms(**unused | of_tokens | {"position_A": positions, "first": first, "last": last})


@given(st.sampled_from([(None, None), (100, 101)]), st.data(), st.integers(2, 6), st.integers(1, 5))
def test_no_atom_joins_where_it_could_not_stand(marks, data, positions, beams):
    tokens = [100, 101, 7, 8] if marks[0] else [6, 7, 8]
    pairs = list(itertools.product(tokens, range(positions)))
    atoms = made_atoms(pairs, *marks)
    size = data.draw(st.integers(1, positions))
    sets = []
    for _ in range(beams):
        places = data.draw(st.permutations(range(positions)))[:size]
        sets.append([pairs.index((data.draw(st.sampled_from(tokens)), p)) for p in places])
    misplaced = atoms.misplaced(torch.tensor(sets)[None])[0]
    expected = [
        [not may_join(atoms, members, atom) for atom in range(len(pairs))] for members in sets
    ]
    assert misplaced.tolist() == expected


def test_a_sentence_is_whole_when_it_has_every_position_up_to_its_end():
    pairs = [(t, p) for p in range(4) for t in (100, 7, 8, 101)]
    encoder, decoder = made_atoms(pairs, 100, 101), made_atoms(pairs, None, None)
    for ids, starts, is_whole, ends in (
        ([100, 7, 101], 0, True, True),
        ([100, 7, 8, 101], 0, True, True),
        ([100, 7, 8], 0, True, False),
        ([7, 101], 2, False, False),
    ):
        members = torch.tensor([pairs.index((t, p)) for p, t in enumerate(ids, starts)]).flip(0)
        assert bool(decoder.whole(members)) is is_whole
        assert bool(encoder.whole(members)) is (is_whole and ends)
        assert encoder.ids(members) == tuple(ids)
    gap = torch.tensor([pairs.index((100, 0)), pairs.index((101, 2))])
    assert not decoder.whole(gap)


# --- whole attacks ---------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "first"), some(product([1, 2, 3], [20, 30, 50]), every=4))
def test_bert_is_read_exactly_and_proved(bert_tiny, observe, texts, batch, first):
    truth = observe(bert_tiny, texts[first : first + batch])
    assert_exact(answer_of(bert_tiny, truth.seen), bert_tiny, truth)


@pytest.mark.parametrize(("batch", "first"), some(product([1, 2, 3], [0, 10, 20]), every=4))
def test_gpt2_is_read_exactly_and_proved(gpt2_tiny, observe, texts, batch, first):
    truth = observe(gpt2_tiny, texts[first : first + batch])
    assert_exact(answer_of(gpt2_tiny, truth.seen), gpt2_tiny, truth)


@pytest.mark.parametrize(
    ("family", "num_labels", "batch", "loss"),
    some(product(["bert", "gpt2"], [2, 3], [1, 2, 4], sorted(CLASS_LOSSES)), every=5),
)
def test_classifiers_of_any_loss_and_number_of_classes_are_read(
    small, observe, family, num_labels, batch, loss
):
    model = replace(small(family, num_labels=num_labels, **WIDE), class_loss=CLASS_LOSSES[loss])
    truth = observe(model, batch, max_length=LONG)
    assert_exact(answer_of(model, truth.seen), model, truth)


@pytest.mark.parametrize(
    ("family", "std"), [("bert", 1e-3), ("gpt2", 0.02), ("gpt2", 1e-3), ("llama", 1.0)]
)
def test_the_size_of_the_classifier_does_not_matter(small, observe, family, std):
    model = small(family, **WIDE)
    head = model.module.get_parameter(model.family.classifier[0])
    head.data.mul_(std / head.std().item())
    truth = observe(model, 3, max_length=LONG)
    assert_exact(answer_of(model, truth.seen), model, truth)


@pytest.mark.parametrize(
    "patterns", [["query.weight"], ["query", "key"], ["key", "value"], ["query", "classifier"]]
)
def test_part_of_bert_s_first_attention_is_enough(small, observe, patterns):
    model = small("bert", **WIDE)
    truth = observe(model, 3, max_length=LONG)
    only = [p if p == "classifier" else f"layer.0.attention.self.{p}" for p in patterns]
    seen = replace(truth.seen, update=partial_update(truth.seen.update, only))
    assert Keyspan().obstacle(AttackSetting.of(seen, model)) is None
    assert_exact(answer_of(model, seen), model, truth)


def test_keys_alone_are_either_refused_or_read(small, observe):
    model = small("bert", **WIDE)
    truth = observe(model, 2, max_length=LONG)
    seen = replace(
        truth.seen, update=partial_update(truth.seen.update, ["layer.0.attention.self.key"])
    )
    obstacle = Keyspan().obstacle(AttackSetting.of(seen, model))
    if obstacle is None:
        assert_exact(answer_of(model, seen), model, truth)
    else:
        assert "query" in obstacle


SHORT = [
    ["nobody"],
    ["nobody", "knows"],
    ["nobody knows", "he pays", "nobody pays for it"],
    ["nobody knows", "nobody knows", "he pays for it"],
    ["he pays for it", "he pays for it", "he pays for it"],
    ["nobody knows", "nobody knows", "he pays", "he pays"],
    ["he pays", "she told us that it is over and that we pay"],
]


@pytest.mark.parametrize(
    ("family", "task", "texts"),
    some([(*kind, texts) for texts in SHORT for kind in [*KINDS, *ROTARY]], every=4),
)
def test_short_repeated_and_unequal_texts_are_read(small, observe, family, task, texts):
    model = small(family, task, **WIDE)
    for labels in ([0] * len(texts), [i % 2 for i in range(len(texts))]):
        truth = observe(model, texts, labels)
        answer = answer_of(model, truth.seen)
        assert sorted(answer.sequences) == scored(model, truth)
        assert answer.verified


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("task", [CLASSIFICATION, CAUSAL_LM])
def test_a_text_that_begins_another_leaves_no_false_proof(small, observe, family, task):
    model = small(family, task, **WIDE)
    truth = observe(model, ["nobody", "nobody knows that we pay"])
    answer = answer_of(model, truth.seen)
    assert scored(model, truth)[-1] in answer.sequences
    assert not answer.verified or sorted(answer.sequences) == scored(model, truth)


@pytest.mark.core
@pytest.mark.parametrize(("family", "task", "scale"), taking_turns([1e-4, 1e4]))
def test_a_scaled_update_is_read_and_proved_as_well(small, observe, family, task, scale):
    model = small(family, task, **WIDE)
    truth = observe(model, 3, max_length=LONG)
    answer = answer_of(model, with_tensors(truth.seen, lambda g: scale * g))
    assert sorted(answer.sequences) == scored(model, truth)
    assert max(answer.evidence) < ACCEPT
    assert answer.verified
    assert answer.diagnostics["scale"] == pytest.approx(scale, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "task", "learning_rate"), some(taking_turns([1e-1, 1e-2]), every=3)
)
def test_one_step_of_fedavg_is_a_gradient(small, observe, family, task, learning_rate):
    model = small(family, task, **WIDE)
    truth = observe(model, 2, max_length=LONG, kind=UpdateKind.DELTA, learning_rate=learning_rate)
    answer = answer_of(model, truth.seen)
    assert sorted(answer.sequences) == scored(model, truth)
    assert answer.diagnostics["gradient_difference"] < 1e-3
    assert answer.verified == (answer.diagnostics["gradient_difference"] < certificate.PRECISION)


def fedavg(model, observe, batch, batch_size, epochs, learning_rate):
    """A client's several steps over its texts."""
    truth = observe(model, batch, max_length=LONG)
    before = {name: value.clone() for name, value in model.parameters().items()}
    how = LocalTraining(
        kind=UpdateKind.DELTA,
        batch_size=batch_size,
        epochs=epochs,
        learning_rate=learning_rate,
        dropout=False,
    )
    update = local_update_(model, truth.sequences, truth.labels, how, seed=0)
    models.load_parameters_(model, before)
    truth.seen = replace(
        truth.seen,
        update=update,
        knowledge=Knowledge(
            learning_rate=learning_rate, local_steps=how.steps(batch), dropout=False
        ),
    )
    return truth


@pytest.mark.parametrize(
    ("family", "task", "batch", "batch_size", "epochs"),
    some(
        [
            *((*kind, *steps) for steps in ((2, 1, 1), (2, 2, 2), (4, 2, 1)) for kind in KINDS),
            *((*kind, *steps) for steps in ((2, 1, 1), (2, 2, 2)) for kind in ROTARY),
        ],
        every=4,
    ),
)
def test_several_small_steps_of_fedavg_are_read_but_prove_nothing(
    small, observe, family, task, batch, batch_size, epochs
):
    model = small(family, task, **WIDE)
    truth = fedavg(model, observe, batch, batch_size, epochs, 1e-4)
    answer, own = answer_of(model, truth.seen), scored(model, truth)
    if (family, task) == ("llama", CLASSIFICATION):  # where steps hide ends, and a text
        assert all(any(ids[: len(text)] == text for text in own) for ids in answer.sequences)
    else:
        assert sorted(answer.sequences) == own
    assert not answer.verified


@pytest.mark.parametrize(("family", "task"), some([*KINDS, *ROTARY], every=2))
def test_several_large_steps_of_fedavg_are_not_proved(small, observe, family, task):
    model = small(family, task, **WIDE)
    truth = fedavg(model, observe, 2, 1, 1, 0.1)
    assert not answer_of(model, truth.seen).verified


# --- what is not exact -----------------------------------------------------------------------


def assert_not_falsely_proved(answer, model, truth):
    assert not answer.verified or sorted(answer.sequences) == scored(model, truth)


@pytest.mark.parametrize(
    ("family", "task", "dtype"), some(taking_turns([torch.float16, torch.bfloat16]), every=3)
)
def test_half_precision_is_read_and_not_falsely_proved(small, observe, family, task, dtype):
    model = small(family, task, **WIDE)
    truth = observe(model, 2, max_length=LONG)
    for change in (lambda g: g.to(dtype), lambda g: g.to(dtype).float()):
        answer = answer_of(model, with_tensors(truth.seen, change))
        assert sorted(set(answer.sequences)) == scored(model, truth)
        assert_not_falsely_proved(answer, model, truth)


@pytest.mark.parametrize(
    ("dtype", "first"), some(product([torch.float16, torch.bfloat16], [0, 10, 20]), every=6)
)
def test_half_precision_of_a_built_in_model_is_not_falsely_proved(
    gpt2_tiny, observe, texts, dtype, first
):
    model = loading.load(ModelSpec(name="builtin/gpt2-tiny", task=CLASSIFICATION, num_labels=2))
    truth = observe(model, texts[first : first + 2])
    answer = answer_of(model, with_tensors(truth.seen, lambda g: g.to(dtype)))
    assert_not_falsely_proved(answer, model, truth)


@pytest.mark.parametrize(
    ("family", "task", "relative"),
    some([(*kind, noise) for noise in (1e-6, 1e-3, 0.1, 1.0, 10.0) for kind in KINDS], every=4),
)
def test_noise_is_no_reason_to_crash_or_to_prove_what_is_wrong(
    small, observe, family, task, relative
):
    model = small(family, task, **WIDE)
    truth = observe(model, 2, max_length=LONG)
    answer = answer_of(model, noisy(truth.seen, relative), Keyspan(beam=4))
    assert_not_falsely_proved(answer, model, truth)
    if relative < 0.01:
        assert sorted(answer.sequences) == scored(model, truth)
    assert answer.verified == (relative < 1e-5)


@pytest.mark.parametrize(("family", "task"), some([*KINDS, *ROTARY], every=2))
def test_progress_is_reported_with_each_sentence(small, observe, family, task):
    model, reports = small(family, task, **WIDE), []
    truth = observe(model, 2, max_length=8)
    (answer,) = Keyspan().many(
        [truth.seen],
        model,
        rngs=[stream(0, "keyspan")],
        report=lambda *report: reports.append(report),
    )
    assert answer == answer_of(model, truth.seen)
    assert all(which == 0 for which, _ in reports)
    assert all(0 < progress.step <= progress.steps for _, progress in reports)
    texts = {model.decode(ids) for ids in answer.sequences}
    assert texts <= {progress.text for _, progress in reports}


# --- time -----------------------------------------------------------------------------------

WORK = (
    (beam_search, "extend"),
    (Atoms, "excess"),
    (certificate, "units"),
    (certificate, "difference"),
)


@pytest.mark.parametrize(
    ("family", "task", "change", "ticks"),
    some(
        [
            (*kind, change, ticks)
            for change in ("none", "noise")
            for ticks in (0, 1, 3, 6, 10, 20, 40, 80, math.inf)
            for kind in KINDS
        ],
        every=4,
    ),
)
def test_when_time_is_up_what_was_read_counts(small, observe, ticking, family, task, change, ticks):
    model = small(family, task, **WIDE)
    truth = observe(model, 2, max_length=8)
    seen = truth.seen if change == "none" else noisy(truth.seen, 1e-2)
    work = ticking(keyspan, ticks, *WORK)
    answer = answer_of(model, seen, Keyspan(seconds=7))
    assert work.after <= 10
    assert answer.diagnostics.get("time_up", False) == work.clock.rang
    if work.clock.rang and not answer.sequences:
        assert "seconds = 7" in answer.reason
    # The bag is read in one step.
    assert answer.status == Status.RECOVERED
    if change == "none":
        assert answer.tokens == tuple(sorted({t for ids in scored(model, truth) for t in ids}))
        if not work.clock.rang:
            assert_exact(answer, model, truth)
    if ticks == 0:
        assert work.before == 0
        assert answer.sequences == ()
        assert answer.diagnostics["passes"] == 1


def test_a_seed_ends_with_its_sets_and_proofs_with_their_sentence(small, observe, ticking):
    model = small("gpt2", **WIDE)
    truth = observe(model, 2, max_length=8)
    atoms, special = atoms_of(model, truth.seen), model.special_ids()
    seeds = [atoms.bag.tokens_N.tolist().index(token) for token, *_ in seeds_of(model, truth)]
    work = ticking(keyspan, 2, (beam_search, "extend"))
    list(read_seeds(atoms, seeds[-1:], 2, work.clock))
    assert work.before + work.after == 3
    every = keyspan.seeds_of(atoms, special, batch_size=2)
    spanned, _ = read_sentences(atoms, every, 8, Clock(None), lambda *_: None)
    assert len(spanned) == 2
    names = list(model.family.attention_parameters(0))
    work = ticking(keyspan, 1, (certificate, "units"))
    assert len(keyspan.explain(spanned, atoms, model, names, work.clock)) == 1
    assert (work.before, work.after) == (1, 0)


def test_a_set_whose_members_time_does_not_judge_is_only_likely(small, observe, ticking):
    model = small("gpt2", **WIDE)
    truth = observe(model, 2, max_length=8)
    atoms = atoms_of(model, truth.seen)
    token, sequence, at = seeds_of(model, truth)[-1]
    members = torch.tensor([index_of(atoms, t, p) for p, t in enumerate(sequence)])
    seed = atoms.bag.tokens_N.tolist().index(token)
    where = torch.tensor(index_of(atoms, token, at))
    for ticks, sure in ((0, False), (math.inf, True)):
        work = ticking(keyspan, ticks)
        _, own, rejected = needed(atoms, seed, members, where, work.clock)
        assert own < ACCEPT
        assert bool(rejected) == sure


@pytest.mark.parametrize("task", [CLASSIFICATION, CAUSAL_LM])
def test_no_sentence_is_sought_in_a_batch_with_more_tokens_than_dimensions(
    gpt2_tiny, observe, texts, monkeypatch, task
):
    model = (
        gpt2_tiny
        if task == CAUSAL_LM
        else loading.load(ModelSpec(name="builtin/bert-tiny", task=task, num_labels=2))
    )
    truth = observe(model, texts[:24])
    assert sum(map(len, scored(model, truth))) > model.hidden_size

    def never(*_):
        raise AssertionError("a seed is read")

    monkeypatch.setattr(keyspan, "read_seeds", never)
    answer = answer_of(model, truth.seen)
    assert "more tokens than the hidden size" in answer.reason
    assert not answer.sequences
    with pytest.raises(AssertionError, match="a seed is read"):
        answer_of(model, noisy(observe(model, texts[:2]).seen, 1e-2))


@pytest.mark.core
@pytest.mark.parametrize(("family", "task"), [*KINDS, *ROTARY])
def test_of_an_update_that_holds_no_batch_nothing_is_proved(small, observe, family, task):
    model = small(family, task, **WIDE)
    truth = observe(model, 2, max_length=LONG)
    rng = stream(0, "noise")
    other = small(family, task, seed=1, **WIDE)
    for seen in (
        with_tensors(truth.seen, torch.zeros_like),
        with_tensors(truth.seen, lambda g: torch.randn(g.shape, generator=rng)),
        with_tensors(truth.seen, lambda g: g[torch.randperm(len(g), generator=rng)].roll(1, -1)),
        observe(other, 2, max_length=LONG).seen,
        # What dropout left is read of encoders.
        *([observe(model, 2, max_length=LONG, dropout=True).seen] if family == "gpt2" else []),
    ):
        answer = answer_of(model, seen)
        assert "nothing proved" in answer.reason
        assert not answer.verified


@pytest.mark.parametrize(("family", "task"), [*KINDS, *ROTARY])
def test_beyond_the_budget_it_abstains(small, observe, family, task):
    model = small(family, task, width=32, layers=3)
    truth = observe(model, 4)
    answer = answer_of(model, truth.seen)
    assert "nothing proved" in answer.reason
    assert not answer.verified


# --- what it can be used for ------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_is_refused_or_read(small, observe, family, layers):
    for task in (CLASSIFICATION,) if family == "bert" else (CLASSIFICATION, CAUSAL_LM):
        model = small(family, task, width=96, layers=layers)
        truth = observe(model, 2, max_length=LONG)
        obstacle = Keyspan().obstacle(AttackSetting.of(truth.seen, model))
        if layers == 1 and (family == "llama" or task == CLASSIFICATION):
            assert obstacle is not None
        elif obstacle is None:
            assert_exact(answer_of(model, truth.seen), model, truth)
        else:
            assert layers == 1


def test_real_minilm_is_read_from_its_first_attention_alone(assets, observe, texts):
    name = str(assets / "models" / "minilm-l6-h384")
    model = loading.load(ModelSpec(name=name, task=CLASSIFICATION, num_labels=2))
    truth = observe(model, texts[:2])
    assert_exact(answer_of(model, truth.seen), model, truth)
    query = ["layer.0.attention.self.query.weight"]
    seen = replace(truth.seen, update=partial_update(truth.seen.update, query))
    answer = answer_of(model, seen)
    assert sorted(answer.sequences) == scored(model, truth)
