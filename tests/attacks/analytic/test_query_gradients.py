"""Long texts of a batch from the equations of their words: the maths, the search, the proof."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fedleak.attacks import AttackSetting, certificate
from fedleak.attacks.analytic import query_gradients
from fedleak.attacks.analytic.query_equations import SOLVED, relaxed
from fedleak.attacks.analytic.query_gradients import QueryGradients, Text, split
from fedleak.attacks.reconstruction import Status
from fedleak.models import CAUSAL_LM, CLASSIFICATION, batch_loss, pad
from fedleak.util.rng import stream

LONG = (
    "she told us that nobody knows it and the old man who lives near the river sold his books",
    "it is said that John gave Mary what they wanted before the children left the house in town",
)
"""Together they have words that occur once, and words that occur in both, and twice in one."""


def ask(seen, model, **settings):
    return QueryGradients(**settings)(seen, model, rng=stream(0, "attack"))


@pytest.fixture
def narrow(small):
    """An encoder whose heads are narrower than the texts are long."""
    return small("bert", width=96, layers=2)


@pytest.fixture
def truth(narrow, observe):
    return observe(narrow, LONG)


@pytest.fixture
def parts(narrow, truth):
    gradients = certificate.as_gradient(truth.seen)
    with torch.no_grad():
        yield split(narrow, gradients, gradients)


def members_of(parts, ids):
    """The candidates that are a text, place by place."""
    at = {
        pair: j
        for j, pair in enumerate(zip(parts.ids_J.tolist(), parts.place_J.tolist(), strict=True))
    }
    return torch.tensor([at[(token, place)] for place, token in enumerate(ids)])


def text_with(truth, token):
    (ids,) = (ids for ids in truth.sequences if token in ids)
    return ids


def place_of(parts, number):
    return int(parts.place_J[parts.number_J == number])


def really_once(parts, truth):
    """The numbers of the words that do occur once, and where the table says."""
    times = Counter(token for ids in truth.sequences for token in ids)
    pairs = {pair for ids in truth.sequences for pair in enumerate(ids) if times[pair[1]] == 1}
    ids = parts.equations.ids_N.tolist()
    return [number for number, token in enumerate(ids) if (place_of(parts, number), token) in pairs]


def all_of(parts, number):
    return parts.equations.of(number, parts.among(torch.arange(len(parts.ids_J))))


def test_texts_longer_than_a_head_is_wide_are_proved(narrow, truth):
    head = narrow.hidden_size // 4
    assert min(map(len, truth.sequences)) > head
    answer = ask(truth.seen, narrow)
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert answer.verified
    assert certificate.proves(narrow, answer.sequences, truth.seen)
    assert answer.tokens == tuple(sorted({t for ids in truth.sequences for t in ids}))
    assert max(answer.evidence) < SOLVED
    assert answer.reason == ""


def test_dq_is_the_covariance_and_one_wrong_word_is_seen(narrow, truth, parts):
    """The gradient at a query from autograd, against the split update and the equation."""
    taken = {}
    query = narrow.module.bert.encoder.layer[0].attention.self.query
    hook = query.register_forward_hook(lambda *call: taken.update(q=call[2]))
    with torch.enable_grad():
        ids_BT, mask_BT = pad(truth.sequences, narrow.tokenizer.pad_token_id, narrow.device)
        loss = batch_loss(narrow, ids_BT, mask_BT, torch.tensor(truth.labels))
        (dq_BTD,) = torch.autograd.grad(loss, taken["q"])
    hook.remove()
    numbers = really_once(parts, truth)
    assert len(numbers) > 20
    for number in numbers:
        token, place = int(parts.equations.ids_N[number]), place_of(parts, number)
        ids = text_with(truth, token)
        equation = all_of(parts, number)
        dense_D = dq_BTD[truth.sequences.index(ids), place].double()
        size = equation.key_JHK.shape[-1] ** 0.5
        assert (equation.dq_HK.flatten() / size - dense_D).norm() < 1e-3 * dense_D.norm()
        members = members_of(parts, ids)
        assert equation.covariance(members).residual < 0.1 * SOLVED
        other = next(x for x in truth.sequences if x != ids)
        swapped = members.clone()
        swapped[5] = members_of(parts, other)[5]
        if ids[5] not in (token, other[5]):
            assert equation.covariance(swapped).residual > SOLVED


def test_an_exchange_is_what_the_whole_covariance_says(truth, parts):
    """One term less and one more, and the derivative, against sums over all members."""
    number = really_once(parts, truth)[3]
    equation = all_of(parts, number)
    members = members_of(parts, truth.sequences[0])
    now = equation.covariance(members)
    in_L = torch.tensor([j for j in range(0, len(parts.ids_J), 31) if parts.place_J[j] < 25])
    out_L = members[parts.place_J[in_L]]
    square_L = equation.exchanged(now, out_L, in_L)
    factor_JH, s_JH = equation.derivative(now)
    for j, square in zip(in_L.tolist(), square_L.tolist(), strict=True):
        dense = members.clone()
        dense[parts.place_J[j]] = j
        value_FHK = dense_covariance(equation, dense)
        value_HK = torch.einsum("f,fhk->hk", now.facts_F, value_FHK)
        expected = (equation.dq_HK - value_HK).square().sum() / equation.dq_HK.square().sum()
        assert square == pytest.approx(float(expected), rel=1e-6, abs=1e-12)
    j, step = int(in_L[4]), 1e-6
    column_HK = s_JH[j, :, None] * (equation.key_JHK[j] - now.key_HK) - now.value_HK
    column_HK = factor_JH[j, :, None] * column_HK
    moved = torch.cat([members, torch.tensor([j])])
    weights = torch.tensor([1.0] * len(members) + [step], dtype=torch.float64)
    moved_FHK = dense_covariance(equation, moved, weights)
    change_HK = torch.einsum("f,fhk->hk", now.facts_F, moved_FHK) - now.value_HK
    assert torch.allclose(change_HK / step, column_HK, rtol=1e-3, atol=1e-5 * column_HK.norm())


def dense_covariance(equation, members, weights=None):
    """The covariance of keys and s, head by head and member by member."""
    weights = torch.ones(len(members), dtype=torch.float64) if weights is None else weights
    facts, heads = equation.s_JFH.shape[1:]
    value_FHK = equation.key_JHK.new_zeros(facts, heads, equation.key_JHK.shape[-1])
    for f in range(facts):
        for h in range(heads):
            a_M = weights * equation.e_JH[members, h]
            a_M = a_M / a_M.sum()
            s_M, key_MK = equation.s_JFH[members, f, h], equation.key_JHK[members, h]
            for a, s, key_K in zip(a_M, s_M, key_MK, strict=True):
                value_FHK[f, h] += a * (s - a_M @ s_M) * key_K
    return value_FHK


def test_the_equations_of_one_word_give_its_whole_text(truth, parts):
    """Among twice as many words at places as there are, without any exchange."""
    number = really_once(parts, truth)[0]
    ids = text_with(truth, int(parts.equations.ids_N[number]))
    among_L = torch.cat([members_of(parts, ids) for ids in truth.sequences]).unique()
    candidates = parts.among(among_L)
    own = int((parts.number_J[among_L] == number).nonzero())
    weight_L = relaxed(parts.equations.of(number, candidates), candidates, own)
    read = among_L[weight_L > 0.5]
    assert sorted(read.tolist()) == sorted(members_of(parts, ids).tolist())
    assert float((weight_L - weight_L.round()).abs().max()) < 0.05


def test_a_text_that_is_not_in_the_batch_is_not_explained(narrow, truth, parts):
    gradients = certificate.as_gradient(truth.seen)
    ids = truth.sequences[0]
    once = tuple(n for n in really_once(parts, truth) if int(parts.equations.ids_N[n]) in ids)
    right = Text(ids, 0.0, 1.0, once)
    assert query_gradients.explained(right, parts, narrow, gradients, gradients) is not None
    ids = [*right.ids]
    ids[3], ids[4] = ids[4], ids[3]
    wrong = replace(right, ids=tuple(ids))
    assert query_gradients.explained(wrong, parts, narrow, gradients, gradients) is None


def test_a_text_twice_in_a_batch_is_counted(narrow, observe):
    truth = observe(narrow, [LONG[0], LONG[0], LONG[1]], labels=[1, 2, 0])
    answer = ask(truth.seen, narrow)
    assert answer.verified
    assert sorted(answer.sequences) == sorted(truth.sequences)


def test_what_changes_the_input_or_the_gradient_is_no_reason_to_guess(narrow, observe, truth):
    known = replace(truth.seen.knowledge, dropout=True)
    answer = ask(replace(truth.seen, knowledge=known), narrow)
    assert answer.status == Status.ABSTAINED
    assert "without dropout" in answer.reason
    hidden = observe(narrow, LONG, dropout=True).seen
    answer = ask(replace(hidden, knowledge=replace(hidden.knowledge, dropout=None)), narrow)
    assert answer.status == Status.ABSTAINED
    assert "dropout, noise" in answer.reason


def test_more_words_than_there_is_room_for(small, observe):
    model = small("bert", width=48)
    answer = ask(observe(model, LONG).seen, model)
    assert answer.status == Status.ABSTAINED
    assert "more than the hidden size, 48, holds" in answer.reason


def test_without_a_word_that_occurs_once_no_text_begins(narrow, truth, monkeypatch):
    monkeypatch.setattr(query_gradients, "_ONCE", 2.0)
    answer = ask(truth.seen, narrow)
    assert answer.status == Status.ABSTAINED
    assert answer.reason == "no word of the batch occurs just once"


def test_out_of_time_it_answers_with_what_it_has(narrow, truth, ticking):
    ticking(query_gradients, 3)
    answer = ask(truth.seen, narrow)
    assert not answer.verified
    assert answer.diagnostics["time_up"]


def test_it_says_what_it_needs(small, observe):
    gpt2 = small("gpt2", CAUSAL_LM)
    assert "encoders" in QueryGradients().obstacle(AttackSetting.of(observe(gpt2, 2).seen, gpt2))
    model = small("bert", CLASSIFICATION)
    setting = AttackSetting.of(observe(model, 2).seen, model)
    frozen = setting.shared - {model.family.position_embedding}
    assert "position" in QueryGradients().obstacle(replace(setting, shared=frozen))
    assert QueryGradients().obstacle(setting) is None
