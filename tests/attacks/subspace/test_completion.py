from dataclasses import replace

import pytest
import torch

from fedleak.attacks import certificate
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.subspace.completion import _came, completed
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.mask import Mask
from fedleak.defenses.prune import Prune
from fedleak.defenses.quantize import Quantize
from fedleak.models import CAUSAL_LM, CLASSIFICATION
from fedleak.training.observation import UpdateKind
from fedleak.util.rng import stream

KINDS = [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("llama", CLASSIFICATION)]
WIDE = {"width": 96, "layers": 3}
TEXTS = ["the cat sat on the mat", "a dog ran after it"]


def sent(seen, *defenses):
    for number, defense in enumerate(defenses):
        seen = replace(seen, update=defense(seen.update, rng=stream(number, "sent")))
    return seen


@torch.no_grad()
def parts_of(model, seen):
    """What was sent of the first layer's gradients, and whole rows of them, side by side."""
    observed = certificate.as_gradient(seen)
    names = [name for name in model.family.attention_parameters(0) if name in observed]
    whole = completed(model, seen, observed, names)
    return tuple(
        None if some is None else torch.cat([*model.family.projections(some, 0).values()])
        for some in (observed, whole and whole.gradients)
    )


@pytest.mark.parametrize(("family", "task"), KINDS)
@pytest.mark.parametrize("defense", [Mask(fraction=0.5), Prune(fraction=0.85)], ids=repr)
def test_rows_are_those_of_the_gradient_before_or_zero(small, observe, family, task, defense):
    model = small(family, task, **WIDE)
    truth = observe(model, TEXTS, [0, 1])
    before_OD, _ = parts_of(model, truth.seen)
    sent_OD, whole_OD = parts_of(model, sent(truth.seen, defense))
    told_O = whole_OD.any(1)
    assert told_O.float().mean() > 0.5
    apart_O = (whole_OD - before_OD).norm(dim=1)[told_O] / before_OD.norm(dim=1)[told_O]
    assert apart_O.max() < 1e-4
    # What came is among them, and it was less.
    assert (sent_OD != 0).float().mean() < 0.8
    few_O = (sent_OD != 0).sum(1) < 12
    assert not whole_OD[few_O].any()


@pytest.mark.parametrize(
    "defenses",
    [
        (),
        (Quantize(bits=8),),
        (Mask(fraction=0.5), GaussianNoise(sigma=1.0)),
        (Mask(fraction=0.95),),
    ],
    ids=repr,
)
def test_rows_that_lack_nothing_or_too_much_stay_as_they_are(small, observe, defenses):
    model = small("bert", **WIDE)
    truth = observe(model, TEXTS, [0, 1])
    _, whole_OD = parts_of(model, sent(truth.seen, *defenses))
    assert whole_OD is None


def test_without_the_words_rows_nothing_is_completed(small, observe):
    model = small("bert", **WIDE)
    seen = sent(observe(model, TEXTS, [0, 1]).seen, Mask(fraction=0.5))
    tensors = {**seen.update.tensors}
    del tensors[model.family.word_embedding]
    seen = replace(seen, update=replace(seen.update, tensors=tensors))
    assert parts_of(model, seen)[1] is None


def test_rows_outside_the_span_are_not_completed(small, observe):
    model = small("bert", **WIDE)
    seen = sent(observe(model, TEXTS).seen, Mask(fraction=0.5))
    gradients = certificate.as_gradient(seen)
    names = model.family.attention_parameters(0)
    for name in names:
        shape = gradients[name].shape
        gradients[name] *= torch.rand(shape, generator=stream(0, name)) > 0.1  # fewer, yet right
    assert completed(model, seen, gradients, names) is not None
    for name in names:
        shape = gradients[name].shape
        gradients[name] *= 1 + 0.1 * torch.randn(shape, generator=stream(1, name))
    assert completed(model, seen, gradients, names) is None


@pytest.mark.parametrize(("family", "task"), KINDS)
@pytest.mark.parametrize("defense", [Mask(fraction=0.5), Prune(fraction=0.85)], ids=repr)
def test_a_batch_behind_a_mask_is_read_and_proved(small, observe, family, task, defense):
    model = small(family, task, **WIDE)
    truth = observe(model, TEXTS, [0, 1])
    seen = sent(truth.seen, defense)
    answer = Keyspan()(seen, model, rng=stream(0, "keyspan"))
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert answer.verified
    assert certificate.proves(model, answer.sequences, seen)


def test_where_a_tied_table_gives_all_words_a_row_the_attention_tells_which_are_in_texts(
    small, observe
):
    model = small("gpt2", CAUSAL_LM, **WIDE)
    truth = observe(model, TEXTS, None)
    seen = sent(truth.seen, Mask(fraction=0.5))
    observed = certificate.as_gradient(seen)
    assert observed[model.family.word_embedding].any(1).all()
    names = model.family.attention_parameters(0)
    with torch.no_grad():
        filled = completed(model, seen, observed, names)
    # The last token is a target, and no input.
    assert set(filled.tokens_N.tolist()) == {token for ids in truth.sequences for token in ids[:-1]}
    whole = truth.seen.update.tensors
    for name in names:
        rows_OD, before_OD = (
            torch.cat([*model.family.projections({name: tensors[name]}, 0).values()])
            for tensors in (filled.gradients, whole)
        )
        kept_O = rows_OD.any(1)
        assert kept_O.float().mean() > 0.3
        assert (rows_OD - before_OD)[kept_O].norm() < 1e-3 * before_OD[kept_O].norm()
    answer = Keyspan()(seen, model, rng=stream(0, "keyspan"))
    assert sorted(answer.sequences) == sorted(ids[:-1] for ids in truth.sequences)
    assert answer.verified


def test_where_a_few_rows_are_whole_and_tell_no_span_it_abstains(small, observe):
    model = small("bert", **WIDE)
    seen = sent(observe(model, TEXTS, [0, 1]).seen, Mask(fraction=0.9))
    query = model.family.attention_parameters(0)[0]
    tensors = {**seen.update.tensors}
    tensors[query] = tensors[query].clone()
    tensors[query][3] = observe(model, TEXTS, [0, 1]).seen.update.tensors[query][3]
    seen = replace(seen, update=replace(seen.update, tensors=tensors))
    assert int(parts_of(model, seen)[1].any(1).sum()) == 1
    answer = Keyspan()(seen, model, rng=stream(0, "keyspan"))
    assert answer.status == Status.ABSTAINED
    assert "no end" in answer.reason


def moved(model, observe, *defenses, rate=1e-4):
    """The change of weights by one step, and the gradient that it stands for."""
    exact = observe(model, TEXTS, [0, 1])
    truth = observe(model, TEXTS, [0, 1], kind=UpdateKind.DELTA, learning_rate=rate)
    return sent(truth.seen, *defenses), parts_of(model, exact.seen)[0], truth


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_rounding_is_taken_out_of_a_change_of_weights(small, observe, family, task):
    model = small(family, task, **WIDE)
    seen, before_OD, _ = moved(model, observe, rate=1e-5)
    sent_OD, whole_OD = parts_of(model, seen)
    told_O = whole_OD.any(1)
    assert told_O.float().mean() > 0.9
    _, s_R, vh_RD = torch.linalg.svd(before_OD, full_matrices=False)
    inside_RD = vh_RD[s_R > 1e-4 * s_R[0]]
    rounded, left = (
        float(((value_OD - before_OD)[told_O] @ inside_RD.T).norm())
        for value_OD in (sent_OD, whole_OD)
    )
    assert rounded > 1e-4 * before_OD.norm()
    assert left < 0.9 * rounded
    # What is outside of the span says how large the noise inside is, for each dimension.
    outside = float(
        whole_OD[told_O].square().sum() - (whole_OD[told_O] @ inside_RD.T).square().sum()
    )
    of_each = outside / (before_OD.shape[1] - len(inside_RD)), left**2 / len(inside_RD)
    assert 1 / 3 < of_each[0] / of_each[1] < 3


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_a_masked_change_of_weights_is_completed(small, observe, family, task):
    model = small(family, task, **WIDE)
    seen, before_OD, _ = moved(model, observe, Mask(fraction=0.3), rate=1e-2)
    sent_OD, whole_OD = parts_of(model, seen)
    told_O = whole_OD.any(1)
    assert told_O.float().mean() > 0.9
    size = before_OD[told_O].norm()
    assert (sent_OD - before_OD)[told_O].norm() > 0.5 * size
    assert (whole_OD - before_OD)[told_O].norm() < 0.01 * size


@pytest.mark.parametrize(
    ("defenses", "rate", "part"),
    [((), 1e-6, False), ((Quantize(bits=5),), 1e-3, False), ((Mask(fraction=0.3),), 1e-3, True)],
    ids=repr,
)
def test_rounded_numbers_are_no_missing_ones(small, observe, defenses, rate, part):
    model = small("bert", **WIDE)
    seen, _, _ = moved(model, observe, *defenses, rate=rate)
    sent_OD = parts_of(model, seen)[0]
    assert (sent_OD == 0).float().mean() > 0.02
    assert bool((~_came(sent_OD)).any()) == part


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_a_change_of_weights_behind_a_mask_is_read(small, observe, family, task):
    model = small(family, task, **WIDE)
    seen, _, truth = moved(model, observe, Mask(fraction=0.3), rate=1e-2)
    answer = Keyspan()(seen, model, rng=stream(0, "keyspan"))
    assert sorted(answer.sequences) == sorted(truth.sequences)
