from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedleak.attacks import certificate
from fedleak.attacks.certificate import PRECISION, Member, Units
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.defenses.mask import Mask
from fedleak.defenses.prune import Prune
from fedleak.models import CAUSAL_LM, CLASS_LOSSES, CLASSIFICATION, pad, token_losses
from fedleak.training.observation import Knowledge, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

ENDLESS = Clock(None)
KINDS = [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("llama", CLASSIFICATION)]
CAUSAL = ["gpt2", "llama"]
TEXTS = ("nobody knows", "she told us that it is over", "he pays for it")


def with_tensors(seen, change):
    tensors = {name: change(value) for name, value in seen.update.tensors.items()}
    return replace(seen, update=replace(seen.update, tensors=tensors))


def counted(model, truth):
    """The batch as members: how often each sequence is in it, with each label."""
    batch = len(truth.sequences)
    counts_by_ids = {}
    for ids, label in zip(truth.sequences, truth.labels, strict=True):
        counts = counts_by_ids.setdefault(tuple(ids), [0] * model.num_labels)
        counts[label] += 1
    return [
        Member(ids, sum(counts) / batch, tuple(counts)) for ids, counts in counts_by_ids.items()
    ]


def weighed(truth):
    """The batch of a next-token training as members: the last target is left out of the ids."""
    total = sum(len(ids) - 1 for ids in truth.sequences)
    unique = sorted({tuple(ids) for ids in truth.sequences})
    return [
        Member(ids[:-1], truth.sequences.count(ids) * (len(ids) - 1) / total, None)
        for ids in unique
    ]


def assert_equal_gradients(actual, expected):
    size = max(float(g.norm()) for g in expected.values())
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name] / size, gradient / size, atol=2e-5, rtol=0)


# --- units ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", sorted(CLASS_LOSSES))
@pytest.mark.parametrize(("family", "task"), KINDS)
def test_units_weighed_by_the_pull_on_their_logits_add_up_to_the_gradient(
    small, observe, family, task, loss
):
    model = replace(small(family, task, width=48), class_loss=CLASS_LOSSES[loss])
    truth = observe(model, TEXTS)
    names = sorted(truth.seen.update.tensors)
    units = certificate.units(model, truth.sequences, names)
    ids, mask = pad(truth.sequences, model.tokenizer.pad_token_id, model.device)
    logits = model.family.logits(model.module, mask, ids_BT=ids, embeds_BTD=None).detach()
    logits.requires_grad_()
    model.class_loss(logits, torch.tensor(truth.labels)).backward()
    total = dict.fromkeys(names, 0.0)
    for unit, ids, z_C, kappa_C in zip(units, truth.sequences, logits, logits.grad, strict=True):
        assert unit.ids == tuple(ids)
        torch.testing.assert_close(unit.logits_C, z_C.detach())
        assert not unit.logits_C.requires_grad
        for kappa, gradient in zip(kappa_C, unit.gradients, strict=True):
            total = {name: total[name] + kappa * gradient[name] for name in names}
    assert_equal_gradients(total, dict(truth.seen.update.tensors))


@pytest.mark.parametrize("family", CAUSAL)
def test_units_of_next_tokens_are_each_sequence_s_summed_loss(small, observe, family):
    model = small(family, CAUSAL_LM, width=48)
    truth = observe(model, TEXTS)
    names = sorted(truth.seen.update.tensors)
    units = certificate.units(model, [ids[:-1] for ids in truth.sequences], names)
    targets = sum(len(ids) - 1 for ids in truth.sequences)
    total = {name: sum(unit.gradients[0][name] for unit in units) / targets for name in names}
    assert all(unit.logits_C is None and len(unit.gradients) == 1 for unit in units)
    assert_equal_gradients(total, dict(truth.seen.update.tensors))


def test_units_are_of_the_named_parameters_only_and_change_nothing(small, observe):
    model = small("bert", width=48)
    truth = observe(model, 1)
    with torch.no_grad():
        (unit,) = certificate.units(model, truth.sequences, ["classifier.weight"])
    assert [list(gradient) for gradient in unit.gradients] == [["classifier.weight"]] * 3
    assert all(p.grad is None and p.requires_grad for p in model.module.parameters())


# --- labels and multiplicities ----------------------------------------------------------------


def pulled(loss, logits, counts, batch):
    """Kappa by the formulas: shares of classes less labels, or twice the difference over C."""
    total, labels = sum(counts), torch.tensor(counts, dtype=torch.float64)
    if loss == "cross-entropy":
        return (total * logits.double().softmax(0) - labels) / batch
    return 2 / len(counts) * (total * logits.double() - labels) / batch


@pytest.mark.parametrize("loss", sorted(CLASS_LOSSES))
@given(
    st.integers(2, 3).flatmap(lambda c: st.lists(st.integers(0, 4), min_size=c, max_size=c)),
    st.integers(0, 10**6),
    st.integers(0, 3),
)
def test_kappa_tells_how_often_a_sequence_occurs_with_each_label(
    bert_tiny, loss, counts, seed, others
):
    if not sum(counts):
        return
    model = replace(bert_tiny, class_loss=CLASS_LOSSES[loss])
    rng, batch = torch.Generator().manual_seed(seed), sum(counts) + others
    logits = torch.randn(len(counts), generator=rng)
    unit = Units((1, 2), logits, [])
    kappa = pulled(loss, logits, counts, batch)
    noise = 1e-5 * torch.randn(len(counts), generator=rng) / batch
    member = certificate.member(model, unit, kappa + noise, batch)
    # With few enough occurrences nothing else can explain it; else something smaller might.
    assert member is not None
    explained = pulled(loss, logits, member.counts, batch)
    assert (explained - kappa).abs().max() * batch < 4 * certificate.WHOLE
    assert sum(member.counts) <= sum(counts)
    assert member.weight == pytest.approx(sum(member.counts) / batch)
    if sum(counts) <= 4:
        assert member == Member((1, 2), pytest.approx(sum(counts) / batch), tuple(counts))


@pytest.mark.parametrize("loss", sorted(CLASS_LOSSES))
def test_kappa_that_no_labels_explain_is_of_no_member(small, loss):
    model = replace(small("bert"), class_loss=CLASS_LOSSES[loss])
    logits = torch.tensor([0.3, -0.9, 0.5])
    unit = Units((1, 2), logits, [])
    right = pulled(loss, logits, [1, 0, 0], 4)
    assert certificate.member(model, unit, right, 4).counts == (1, 0, 0)
    for wrong in (0.5 * right, -right, torch.zeros(3), right + 0.05, right.flip(0)):
        assert certificate.member(model, unit, wrong, 4) is None


@pytest.mark.parametrize("family", CAUSAL)
def test_next_token_training_needs_a_positive_weight(small, family):
    model = small(family, CAUSAL_LM)
    unit = Units((5, 6, 7), None, [])
    assert certificate.member(model, unit, torch.tensor([0.1]), 2) == Member(
        (5, 6, 7), pytest.approx(0.3), None
    )
    assert certificate.member(model, unit, torch.tensor([-0.1]), 2) is None


# --- what a whole batch explains --------------------------------------------------------------


@pytest.mark.parametrize("loss", sorted(CLASS_LOSSES))
@pytest.mark.parametrize(("family", "task"), KINDS)
@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (TEXTS[:1], [1]),
        (TEXTS, [0, 2, 1]),
        ([*TEXTS, TEXTS[0], TEXTS[0]], [0, 0, 1, 0, 2]),
        ([TEXTS[0]] * 3, [1, 1, 0]),
    ],
    ids=["one", "three", "repeated", "only one text"],
)
def test_the_batch_is_explained_with_labels_and_multiplicities(
    small, observe, family, task, loss, texts, labels
):
    model = replace(small(family, task, width=48), class_loss=CLASS_LOSSES[loss])
    truth = observe(model, texts, labels)
    expected = counted(model, truth)
    with torch.no_grad():
        members = certificate.explain(
            model, [member.ids for member in expected][::-1], truth.seen, Clock(None)
        )
        verdict = certificate.verify(model, members, truth.seen)
    assert sorted((member.ids, member.counts) for member in members) == sorted(
        (member.ids, member.counts) for member in expected
    )
    assert verdict.verified
    assert verdict.difference < PRECISION
    assert verdict.repeats == {member.ids: sum(member.counts) for member in expected}


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_a_sequence_that_is_not_in_the_batch_is_left_out(small, observe, family, task):
    model = small(family, task, width=48)
    truth = observe(model, TEXTS[:2])
    (stranger,) = model.encode(TEXTS[2:])
    sequences = [*map(tuple, truth.sequences), tuple(stranger)]
    members = certificate.explain(model, sequences, truth.seen, ENDLESS)
    assert {member.ids for member in members} == set(map(tuple, truth.sequences))
    assert certificate.verify(model, members, truth.seen).verified


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_without_one_of_its_sequences_a_batch_is_not_explained(small, observe, family, task):
    model = small(family, task, width=48)
    truth = observe(model, TEXTS)
    members = certificate.explain(
        model, [tuple(ids) for ids in truth.sequences[1:]], truth.seen, Clock(None)
    )
    assert members == []
    assert certificate.verify(model, members, truth.seen) == certificate.Verdict({}, None, False)


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("loss", sorted(CLASS_LOSSES))
def test_a_sequence_that_begins_another_is_found(small, observe, family, loss):
    model = replace(small(family, width=48), class_loss=CLASS_LOSSES[loss])
    texts = ["nobody knows that it is over", "nobody knows", "he pays", "nobody knows"]
    truth = observe(model, texts, [0, 1, 2, 1])
    longer = [tuple(model.encode([text])[0]) for text in (texts[0], texts[2])]
    members = certificate.explain(model, longer, truth.seen, ENDLESS)
    expected = counted(model, truth)
    assert sorted((member.ids, member.counts) for member in members) == sorted(
        (member.ids, member.counts) for member in expected
    )
    assert certificate.verify(model, members, truth.seen).verified


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize(
    "texts",
    [
        TEXTS[:1],
        TEXTS,
        (*TEXTS, TEXTS[0], TEXTS[0]),
        (TEXTS[0],) * 3,
        (*TEXTS[:2], *TEXTS[:2]),
        (*TEXTS[:2], *TEXTS[:2], TEXTS[0]),
    ],
    ids=["one", "three", "repeated", "only one text", "all twice", "twice and thrice"],
)
def test_a_batch_of_next_token_training_is_explained(small, observe, family, texts):
    model = small(family, CAUSAL_LM, width=48)
    truth = observe(model, texts)
    expected = weighed(truth)
    members = certificate.explain(model, [member.ids for member in expected], truth.seen, ENDLESS)
    assert {member.ids: pytest.approx(member.weight, rel=1e-3) for member in expected} == {
        member.ids: member.weight for member in members
    }
    verdict = certificate.verify(model, members, truth.seen)
    assert verdict.verified
    # The mean loss of a batch is that of the same batch twice, but its size was reported.
    assert verdict.repeats == {
        member.ids: truth.sequences.count((*member.ids, model.tokenizer.eos_token_id))
        for member in expected
    }


def test_sequences_in_parts_are_explained_alike_and_not_at_all_when_time_is_up(
    small, observe, monkeypatch, ticking
):
    model = small("bert", width=48)
    truth = observe(model, TEXTS)
    sequences = list(map(tuple, truth.sequences))
    whole = certificate.explain(model, sequences, truth.seen, ENDLESS)
    monkeypatch.setattr(certificate, "TOKENS_AT_ONCE", 1)
    for ticks, members in ((2, []), (3, whole)):
        work = ticking(certificate, ticks, (certificate, "units"))
        explained = certificate.explain(model, sequences, truth.seen, work.clock)
        assert [(member.ids, member.counts) for member in explained] == [
            (member.ids, member.counts) for member in members
        ]
        assert (work.before, work.after) == (ticks, 0)


# --- proofs -----------------------------------------------------------------------------------


def flipped(members):
    first = members[0]
    return [first._replace(counts=(*first.counts[1:], first.counts[0])), *members[1:]]


def swapped(members):
    first = members[0]
    ids = list(first.ids)
    ids[1], ids[2] = ids[2], ids[1]
    return [first._replace(ids=tuple(ids)), *members[1:]]


def exchanged(members):
    return [members[0]._replace(counts=members[1].counts), *members[1:]]


def missing(members):
    return members[1:]


def one_too_many(members):
    first = members[0]
    return [*members, first._replace(ids=(*first.ids[:-2], first.ids[-1]))]


def in_place_of_another(members):
    return [members[0]._replace(ids=members[1].ids[:-2] + members[0].ids[-1:]), *members[1:]]


WRONG = [swapped, missing, one_too_many, in_place_of_another]


@pytest.mark.parametrize("loss", sorted(CLASS_LOSSES))
@pytest.mark.parametrize(("family", "task"), KINDS)
def test_only_the_right_batch_is_verified(small, observe, family, task, loss):
    model = replace(small(family, task, width=48), class_loss=CLASS_LOSSES[loss])
    truth = observe(model, TEXTS, [0, 2, 1])
    right = counted(model, truth)
    assert certificate.verify(model, right, truth.seen).verified
    assert certificate.verify(model, right[::-1], truth.seen).verified
    for spoil in (*WRONG, flipped, exchanged):
        verdict = certificate.verify(model, spoil(right), truth.seen)
        assert not verdict.verified, spoil.__name__
        # One sequence less or more is no whole batch, so there is nothing to compute.
        assert (verdict.difference is None) == (spoil in (missing, one_too_many))
        assert verdict.difference is None or verdict.difference > 10 * PRECISION


@pytest.mark.parametrize("family", CAUSAL)
def test_only_the_right_batch_of_next_token_training_is_verified(small, observe, family):
    model = small(family, CAUSAL_LM, width=48)
    truth = observe(model, TEXTS)
    right = weighed(truth)
    assert certificate.verify(model, right, truth.seen).verified
    for spoil in WRONG:
        assert not certificate.verify(model, spoil(right), truth.seen).verified, spoil.__name__


def test_a_text_that_the_model_is_sure_of_proves_no_batch(small, observe, texts):
    """It has nearly no gradient, so another such text could stand in its place."""
    model = small("bert", num_labels=2)
    head = model.module.classifier
    pooled = []
    hook = head.register_forward_pre_hook(lambda _, given: pooled.append(given[0]))
    observe(model, texts[:2], [0, 1])
    hook.remove()
    unsure, sure = pooled[0].detach().double().unbind()
    axis = sure - (sure @ unsure) / (unsure @ unsure) * unsure
    with torch.no_grad():
        head.weight.zero_()[1] = (14 * axis / (axis @ sure)).float()
        head.bias.zero_()
    truth = observe(model, texts[:2], [0, 1])
    assert not certificate.judge(model, truth.sequences, truth.seen).verified
    assert not certificate.proves(model, truth.sequences, truth.seen)
    with torch.no_grad():
        head.weight.mul_(0.2)
    truth = observe(model, texts[:2], [0, 1])
    assert certificate.judge(model, truth.sequences, truth.seen).verified


@pytest.mark.parametrize(("family", "task"), [*KINDS, ("gpt2", CAUSAL_LM), ("llama", CAUSAL_LM)])
def test_a_claim_of_a_proof_stands_on_the_tokens_of_the_whole_batch_alone(
    small, observe, family, task
):
    model = small(family, task, width=48)
    truth = observe(model, (*TEXTS, TEXTS[0]))
    right = [tuple(ids) for ids in truth.sequences]
    assert certificate.proves(model, right[::-1], truth.seen)
    if task == CAUSAL_LM:  # attacks on spans do not see the last target
        assert certificate.proves(model, [ids[:-1] for ids in right], truth.seen)
    first, *rest = right
    wrong = {
        "another token": [(first[0], first[1] + 1, *first[2:]), *rest],
        "too few": rest,
        "another one twice": [right[1], *rest],
        "too many": [*right, first],
        "none": [],
        "an empty one": [(), *rest],
    }
    for case, sequences in wrong.items():
        assert not certificate.proves(model, sequences, truth.seen), case
    for blurred in ({"local_steps": 2}, {"dropout": True}, {"recipe": Recipe(optimiser="adam")}):
        seen = replace(truth.seen, knowledge=Knowledge(learning_rate=0.1, **blurred))
        assert not certificate.proves(model, right, seen), blurred


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_a_part_of_an_update_is_verified_by_what_it_holds(small, observe, family, task):
    model = small(family, task, width=48)
    truth = observe(model, TEXTS, [0, 2, 1])
    seen = replace(
        truth.seen, update=partial_update(truth.seen.update, ["query", "c_attn", "q_proj"])
    )
    right = counted(model, truth)
    assert certificate.verify(model, right, seen).verified
    for spoil in (swapped, flipped):
        assert not certificate.verify(model, spoil(right), seen).verified


@pytest.mark.parametrize("task", [CLASSIFICATION, CAUSAL_LM])
def test_words_of_one_embedding_are_told_apart_by_its_rows_alone(small, observe, task):
    model = small("llama", task, width=48)
    mine, other = model.encode(TEXTS)[1][2], model.encode(TEXTS)[2][1]
    embedding = model.module.get_parameter(model.family.word_embedding)
    with torch.no_grad():
        embedding[other] = embedding[mine] * (1 + 1e-5)
    truth = observe(model, TEXTS[:2], [0, 2] if task == CLASSIFICATION else None)
    without = {n: t for n, t in truth.seen.update.tensors.items() if "embed" not in n}
    frozen = replace(truth.seen, update=replace(truth.seen.update, tensors=without))

    right = [tuple(ids) for ids in truth.sequences]
    wrong = [tuple(other if token == mine else token for token in ids) for ids in right]

    assert wrong != right
    assert certificate.proves(model, right, truth.seen)
    assert not certificate.proves(model, wrong, truth.seen)
    assert not certificate.proves(model, right, frozen)
    assert not certificate.proves(model, wrong, frozen)


def test_the_nearest_word_is_that_of_an_obvious_search(small):
    model = small("bert", width=48)
    ids = [token for token in range(5, 700, 63) if token not in model.special_ids()]
    rows = model.module.get_parameter(model.family.word_embedding).detach().double()

    nearest_N, apart_N = certificate.nearest_words(model, ids)

    content = [token for token in range(len(model.tokenizer)) if token not in model.special_ids()]
    for token, nearest, apart in zip(ids, nearest_N.tolist(), apart_N.tolist(), strict=True):
        far = {word: float((rows[word] - rows[token]).norm()) for word in content if word != token}
        assert far[nearest] == pytest.approx(min(far.values()), rel=1e-4)
        assert apart == pytest.approx(far[nearest] / float(rows[token].norm()), rel=1e-3)


@pytest.mark.parametrize("relative", [1e-6, 1e-3])
def test_noise_beyond_rounding_is_not_verified(small, observe, relative):
    model = small("bert", width=48)
    truth = observe(model, TEXTS)
    rng = stream(0, "noise")
    seen = with_tensors(
        truth.seen, lambda g: g + relative * g.std() * torch.randn(g.shape, generator=rng)
    )
    verdict = certificate.verify(model, counted(model, truth), seen)
    assert verdict.verified == (relative < PRECISION)
    assert verdict.difference == pytest.approx(relative, rel=0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_verified_to_its_own_precision(small, observe, dtype):
    model = small("bert", width=48)
    truth = observe(model, TEXTS)
    right = counted(model, truth)
    seen = with_tensors(truth.seen, lambda g: g.to(dtype))
    assert certificate.precision(truth.seen) == PRECISION
    assert certificate.precision(seen) == torch.finfo(dtype).eps
    assert certificate.verify(model, right, seen).verified
    for spoil in (swapped, flipped):
        assert not certificate.verify(model, spoil(right), seen).verified
    assert not certificate.verify(model, right, with_tensors(seen, torch.Tensor.float)).verified


# --- a factor on the whole update -------------------------------------------------------------


def times(seen, factor):
    return with_tensors(seen, lambda g: factor * g)


@pytest.mark.parametrize(
    ("family", "task", "factor"),
    # A factor is solved for in the same way whatever made the gradients.
    [
        *((*KINDS[0], factor) for factor in (0.037, 0.4, 3, 1e4)),
        *((*kind, 0.037) for kind in KINDS[1:]),
        ("gpt2", CAUSAL_LM, 1e4),
        ("llama", CAUSAL_LM, 3),
    ],
)
def test_one_factor_on_all_of_an_update_is_solved_for(small, observe, family, task, factor):
    model = small(family, task, width=48)
    truth = observe(model, (*TEXTS, TEXTS[0]), [0, 2, 1, 0])
    seen = times(truth.seen, factor)
    right = counted(model, truth) if task == CLASSIFICATION else weighed(truth)
    members = certificate.explain(model, [member.ids for member in right], seen, ENDLESS)
    assert sorted((member.ids, member.counts) for member in members) == sorted(
        (member.ids, member.counts) for member in right
    )
    verdict = certificate.verify(model, members, seen)
    assert verdict.verified
    assert verdict.scale == pytest.approx(factor, rel=1e-4)
    assert sum(verdict.repeats.values()) == 4
    assert certificate.proves(model, truth.sequences, seen)
    for spoil in (*WRONG, *((flipped, exchanged) if task == CLASSIFICATION else ())):
        assert not certificate.verify(model, spoil(right), seen).verified, spoil.__name__
    assert not certificate.proves(model, truth.sequences, times(truth.seen, -1))


@pytest.mark.parametrize("task", [CLASSIFICATION, CAUSAL_LM])
@pytest.mark.parametrize("part", ["", "h.0.attn.c_attn.bias", "h.0.ln_1", "h.0.mlp.c_proj.bias"])
def test_a_direction_alone_tells_each_token_of_one_text(small, observe, task, part):
    """Of all texts that are one token away, none has nearly the same direction."""
    (text,) = TEXTS[1:2]
    model = small("gpt2", task, width=48)
    truth = observe(model, [text], [1])
    shared = partial_update(truth.seen.update, [part]) if part else truth.seen.update
    u = torch.cat([g.flatten() for g in shared.tensors.values()])
    rng = stream(0, "token")
    for place in range(len(truth.sequences[0])):
        ids = list(truth.sequences[0])
        while ids[place] == truth.sequences[0][place]:
            ids[place] = int(torch.randint(len(model.tokenizer), (), generator=rng))
        (unit,) = certificate.units(model, [tuple(ids[:-1])], list(shared.tensors))
        system = torch.stack(
            [torch.cat([g.flatten() for g in gradients.values()]) for gradients in unit.gradients],
            1,
        )
        if task == CLASSIFICATION:
            assert model.num_labels == 3  # any kappa at all, which is more than any label
        rest = u - system @ torch.linalg.lstsq(system, u[:, None]).solution[:, 0]
        last_target = task == CAUSAL_LM and place == len(ids) - 1
        assert last_target or float(rest.norm() / u.norm()) > 20 * PRECISION


def test_a_batch_of_equal_repetitions_is_proved_at_no_other_scale(small, observe):
    """Poisson sampling divides by the expected size: two texts of four look like all twice."""
    for family, task in (("bert", CLASSIFICATION), ("gpt2", CAUSAL_LM)):
        model = small(family, task, width=48)
        twice = observe(model, TEXTS[:2] * 2, [0, 1, 0, 1])
        assert certificate.proves(model, twice.sequences, twice.seen)
        assert not certificate.proves(model, twice.sequences, times(twice.seen, 0.5))


@pytest.mark.parametrize("loss", sorted(CLASS_LOSSES))
def test_some_sequences_of_a_batch_tell_the_scale_of_all(small, observe, loss):
    model = replace(small("bert", width=48), class_loss=CLASS_LOSSES[loss])
    truth = observe(model, (*TEXTS, TEXTS[0]), [0, 2, 1, 1])
    unique = list(dict.fromkeys(truth.sequences))
    names = ["classifier.weight", "classifier.bias"]
    units = certificate.units(model, unique, names)
    flat = [torch.cat([g[n].flatten() for n in names]) for unit in units for g in unit.gradients]
    target = torch.cat([truth.seen.update.tensors[n].flatten() for n in names])
    kappa = torch.linalg.lstsq(torch.stack(flat, 1).double(), target[:, None].double()).solution
    for factor in (1.0, 0.21, 4.0):
        pulls = [
            certificate.Pull(unit, factor * kappa_C)
            for unit, kappa_C in zip(units, kappa[:, 0].split(3), strict=True)
        ][1:]
        tally = certificate.counted(model, pulls, 4, whole=False)
        assert tally.scale == pytest.approx(factor, rel=1e-3)
        expected = {member.ids: member.counts for member in counted(model, truth)}
        assert [member.counts for member in tally.of_pulls] == [expected[ids] for ids in unique[1:]]
    assert certificate.counted(model, pulls, 4, whole=True).scale == 1, "they are not the batch"


@pytest.mark.parametrize(
    ("scale", "remark"),
    [(1.0, ""), (2.0, "a sum over 2, not a mean"), (0.4, "a clipped one"), (512.0, "a scaled one")],
)
def test_a_scale_is_named_by_what_it_looks_like(scale, remark):
    verdict = certificate.Verdict({(5, 6, 7): 1}, 0.0, True, scale)
    assert remark in verdict.remark()
    assert bool(verdict.remark()) == bool(remark) == ("scale" in verdict.diagnostics())


# --- updates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("learning_rate", [0.5, 1e-2])
def test_a_delta_of_one_step_is_the_gradient_times_minus_the_learning_rate(
    small, observe, learning_rate
):
    model = small("bert", width=48)
    gradient = certificate.as_gradient(observe(model, 2).seen)
    sent = observe(model, 2, kind=UpdateKind.DELTA, learning_rate=learning_rate).seen
    from_delta = certificate.as_gradient(sent)
    assert from_delta.keys() == gradient.keys()
    for name, tensor in gradient.items():
        torch.testing.assert_close(from_delta[name], tensor, atol=1e-5 / learning_rate, rtol=1e-4)
    unknown = replace(sent, knowledge=Knowledge())
    for name, tensor in certificate.as_gradient(unknown).items():
        assert torch.equal(tensor, -sent.update.tensors[name])


def test_a_gradient_is_read_in_float32_as_it_is(small, observe):
    seen = with_tensors(observe(small("bert"), 1).seen, lambda g: g.to(torch.bfloat16))
    for name, tensor in certificate.as_gradient(seen).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, seen.update.tensors[name].float())


@pytest.mark.parametrize(
    ("steps", "dropout", "linear"),
    [(1, False, True), (None, None, True), (2, False, False), (1, True, False), (7, True, False)],
)
def test_only_one_step_without_dropout_is_linear(small, observe, steps, dropout, linear):
    seen = observe(small("bert"), 1).seen
    knowledge = Knowledge(learning_rate=0.1, local_steps=steps, dropout=dropout)
    assert certificate.is_linear(replace(seen, knowledge=knowledge)) is linear


# --- proofs that were made already ------------------------------------------------------------


@pytest.fixture
def proved(small, observe, monkeypatch):
    """A batch that was proved, and a list of what is recomputed from now on."""
    model = small("gpt2", CAUSAL_LM, width=48)
    truth = observe(model, TEXTS)
    sequences = [tuple(ids) for ids in truth.sequences]
    assert certificate.judge(model, [ids[:-1] for ids in sequences], truth.seen).verified
    recomputed, plain = [], certificate.difference

    def difference(*args):
        recomputed.append(plain(*args))
        return recomputed[-1]

    monkeypatch.setattr(certificate, "difference", difference)
    return model, truth.seen, sequences, recomputed


def test_a_proof_is_made_once(proved):
    model, seen, sequences, recomputed = proved
    assert certificate.proves(model, sequences[::-1], seen)
    assert recomputed == []


def test_a_verdict_on_members_that_an_attack_made_is_no_proof_for_others(proved):
    model, seen, sequences, recomputed = proved
    update = replace(seen)
    inputs = [ids[:-1] for ids in sequences]
    members = certificate.explain(model, inputs, update, UNLIMITED)
    assert certificate.verify(model, members, update).verified
    recomputed.clear()
    assert certificate.proves(model, sequences, update)
    assert len(recomputed) == 1


def test_another_answer_needs_a_proof_of_its_own(proved):
    model, seen, sequences, recomputed = proved
    assert not certificate.proves(model, [sequences[0], *sequences[:2]], seen)
    assert len(recomputed) > 0


def test_a_copy_of_an_update_is_another_update(proved):
    model, seen, sequences, recomputed = proved
    assert certificate.proves(model, sequences, replace(seen))
    assert len(recomputed) == 1


@pytest.mark.parametrize("written", ["update", "weights"])
def test_a_proof_ends_where_somebody_wrote(proved, written):
    model, seen, sequences, recomputed = proved
    tensor = (
        next(iter(seen.update.tensors.values()))
        if written == "update"
        else next(model.module.parameters())
    )
    with torch.no_grad():
        tensor.mul_(1.1)
    assert not certificate.proves(model, sequences, seen)
    assert len(recomputed) > 0


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("texts", [TEXTS, (*TEXTS, TEXTS[0])], ids=["distinct", "repeated"])
def test_sequences_of_next_tokens_are_judged_with_their_repetitions(small, observe, family, texts):
    model = small(family, CAUSAL_LM, width=48)
    truth = observe(model, texts)
    inputs = {tuple(ids[:-1]) for ids in truth.sequences}
    verdict = certificate.judge(model, sorted(inputs), truth.seen)
    assert verdict.verified
    assert sum(verdict.repeats.values()) == len(texts)
    assert not certificate.judge(model, sorted(inputs)[1:], truth.seen).verified


# --- of a mask, and of pruning -------------------------------------------------------------------

BEHIND = [Mask(fraction=0.5), Mask(fraction=0.9), Prune(fraction=0.9), Prune(fraction=0.97)]


@pytest.mark.parametrize(
    ("family", "defense"),
    # What came is explained in the same way whatever left out the rest.
    [*(("bert", defense) for defense in BEHIND), ("gpt2", BEHIND[1]), ("llama", BEHIND[3])],
    ids=str,
)
def test_only_the_right_batch_explains_the_numbers_that_came(small, observe, family, defense):
    model = small(family, CLASSIFICATION)
    truth = observe(model, ["the cat sat on the mat", "a dog ran after it"], [0, 1])
    seen = behind(truth.seen, defense)
    assert certificate.proves(model, truth.sequences, seen)
    first, second = truth.sequences
    special = model.special_ids()
    assert any(token not in special for token in first)
    for place, token in enumerate(first):
        if token in special:
            continue
        other = next(v for v in range(len(model.tokenizer)) if v not in {token, *special})
        wrong = (*first[:place], other, *first[place + 1 :])
        assert not certificate.proves(model, [wrong, second], seen), place
    assert not certificate.proves(model, [first, first], seen)
    assert not certificate.proves(model, [(*first[:2], *first[3:]), second], seen)


@pytest.mark.parametrize("defense", BEHIND[:3], ids=repr)
def test_a_number_that_came_otherwise_ends_the_proof(small, observe, defense):
    model = small("bert", CLASSIFICATION)
    truth = observe(model, ["the cat sat on the mat", "a dog ran after it"], [0, 1])
    seen = behind(truth.seen, defense)
    for name, value in seen.update.tensors.items():
        if value.dim() < 2 or not value.any():
            continue
        changed = value.clone()
        changed.view(-1)[changed.abs().argmax()] *= 1.1
        tensors = {**seen.update.tensors, name: changed}
        wrong = replace(seen, update=replace(seen.update, tensors=tensors))
        assert not certificate.proves(model, truth.sequences, wrong), name


def test_few_numbers_prove_no_text(small, observe):
    model = small("bert", CLASSIFICATION)
    truth = observe(model, ["the cat sat on the mat", "a dog ran after it"], [0, 1])
    numbers = sum(value.numel() for value in truth.seen.update.tensors.values())
    seen = behind(truth.seen, Prune(fraction=1 - 8 / numbers))
    assert sum(int(value.count_nonzero()) for value in seen.update.tensors.values()) == 8
    assert not certificate.proves(model, truth.sequences, seen)


def test_a_word_without_an_embedding_hides_no_twins(small):
    model = small("bert", CLASSIFICATION)
    table = model.module.get_parameter(model.family.word_embedding)
    with torch.no_grad():
        table[300] = table[301]
        table[100:102] = 0
    ids, apart = certificate.nearest_words(model, [300, 100, 50])
    assert (ids[0], apart[0], apart[1]) == (301, 0, 0)
    assert 0 < apart[2] < torch.inf


@pytest.mark.parametrize(("texts", "count"), [(TEXTS, 1), (TEXTS[:2], 3)])
def test_a_batch_of_another_size_than_was_told_is_not_proved(small, observe, texts, count):
    model = small("llama", CAUSAL_LM)
    truth = observe(model, [text[:14] for text in texts])
    seen = replace(truth.seen, update=replace(truth.seen.update, num_examples=count))
    inputs = [certificate.opened(model, ids) for ids in truth.sequences]
    assert certificate.judge(model, inputs, truth.seen).verified
    assert not certificate.judge(model, inputs, seen).verified


def test_a_word_of_which_no_row_came_may_have_a_twin(small, observe):
    model = small("bert", CLASSIFICATION)
    truth = observe(model, ["the cat sat on the mat", "a dog ran after it"], [0, 1])
    table = model.module.get_parameter(model.family.word_embedding)
    word = truth.sequences[0][2]
    twin = next(v for v in range(5, len(model.tokenizer)) if v not in sum(truth.sequences, ()))
    with torch.no_grad():
        table[twin] = table[word]
    seen = behind(
        observe(model, ["the cat sat on the mat", "a dog ran after it"], [0, 1]).seen, BEHIND[0]
    )
    assert certificate.proves(model, truth.sequences, seen)
    name = model.family.word_embedding
    rows = seen.update.tensors[name].clone()
    rows[word] = 0
    tensors = {**seen.update.tensors, name: rows}
    seen = replace(seen, update=replace(seen.update, tensors=tensors))
    assert not certificate.proves(model, truth.sequences, seen)


def behind(seen, defense):
    """An update of which a part came."""
    return replace(seen, update=defense(seen.update, rng=stream(0, "defense")))


@pytest.mark.parametrize("most", [certificate._NUMBERS, 2**14])
def test_a_part_of_the_numbers_tells_who_is_in_a_batch(small, observe, monkeypatch, most):
    """One text begins another one, and one occurs twice."""
    monkeypatch.setattr(certificate, "_NUMBERS", most)
    model = small("gpt2", CAUSAL_LM, width=48)
    texts = ("she told us that", "she told us", "nobody knows it", "nobody knows it")
    truth = observe(model, texts)
    batch = [certificate.opened(model, ids) for ids in truth.sequences]
    longest = max(batch, key=len)
    others = [ids for ids in batch if ids != longest[: len(ids)]]
    members = certificate.explain(model, [longest, others[0]], truth.seen, UNLIMITED)
    repeats = certificate.multiplicities(model, members, 4)
    ids_of_members = (member.ids for member in members)
    assert dict(zip(ids_of_members, repeats, strict=True)) == Counter(batch)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_sum_over_clients_is_proved_by_the_weights_of_each_client(small, observe, family):
    """The first client has one text, so that its targets weigh more than those of the other."""
    model = small(family, CAUSAL_LM, width=48)
    texts = ("she told us that", "nobody knows it", "he pays for all of his old friends")
    alone, both = observe(model, texts[:1]), observe(model, texts[1:])
    tensors = {
        name: value / 3 + 2 / 3 * both.seen.update.tensors[name]
        for name, value in alone.seen.update.tensors.items()
    }
    update = replace(both.seen.update, tensors=tensors, num_examples=3)
    seen = replace(both.seen, client=-1, update=update)
    batch = [certificate.opened(model, ids) for ids in (*alone.sequences, *both.sequences)]
    assert certificate.judge(model, batch, seen).verified
    assert certificate.proves(model, batch, seen)
    assert not certificate.judge(model, batch, replace(seen, client=0)).verified
    (other,) = model.encode(["nobody knows us"])
    for wrong in ([*batch[:2], tuple(other[:-1])], batch[:2], [*batch[:2], batch[1]]):
        assert not certificate.judge(model, wrong, seen).verified
        assert not certificate.proves(model, wrong, seen)
    more = replace(seen, update=replace(update, num_examples=4))
    for wrong in ([*batch, tuple(other[:-1])], [*batch, batch[0]]):
        assert not certificate.judge(model, wrong, more).verified
        assert not certificate.proves(model, wrong, more)


def test_losses_of_a_large_vocabulary_are_exact():
    """Sums over columns of so many words are off by 1e-4."""
    logits_BTV = 4 * torch.randn(2, 8, 50_000, generator=stream(0, "logits"))
    targets_BT = torch.arange(16).view(2, 8)
    exact_BT = -logits_BTV.double().log_softmax(-1).gather(2, targets_BT[..., None])[..., 0]
    losses_BT = token_losses(logits_BTV, targets_BT)
    torch.testing.assert_close(losses_BT.double(), exact_BT, atol=2e-5, rtol=0)
