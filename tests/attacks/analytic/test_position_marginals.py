"""One text from its word and position rows: what is read, what is determined, what is refused."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fedleak.attacks import AttackSetting, certificate
from fedleak.attacks.analytic.position_marginals import (
    DETERMINED,
    PositionMarginals,
    marginals,
    placed,
    solved,
)
from fedleak.attacks.reconstruction import Status
from fedleak.models import CAUSAL_LM, CLASSIFICATION, batch_loss
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.util.rng import stream

LONG = " ".join(["she told us that nobody knows it, and he pays for all of his old friends"] * 12)


def ask(seen, model):
    return PositionMarginals()(seen, model, rng=stream(0, "attack"))


def with_tensors(seen, **changed):
    """The update with other tensors, by the end of their name."""
    tensors = {
        name: next((value for end, value in changed.items() if end in name), tensor)
        for name, tensor in seen.update.tensors.items()
    }
    return replace(seen, update=replace(seen.update, tensors=tensors))


def embeddings(seen, model):
    family = model.family
    return [seen.update.tensors[n] for n in (family.word_embedding, family.position_embedding)]


def steps_of(model, ids, label, steps, learning_rate):
    """The weights' change by steps of SGD with momentum on one text, with dropout."""
    before = {name: value.clone() for name, value in model.parameters().items()}
    optimiser = torch.optim.SGD(model.module.parameters(), lr=learning_rate, momentum=0.9)
    ids_BT = torch.tensor([ids])
    model.module.train()
    torch.manual_seed(5)
    for _ in range(steps):
        optimiser.zero_grad()
        batch_loss(model, ids_BT, torch.ones_like(ids_BT), torch.tensor([label])).backward()
        optimiser.step()
    model.module.eval()
    tensors = {name: value.detach() - before[name] for name, value in model.parameters().items()}
    for name, value in model.module.named_parameters():
        value.data.copy_(before[name])
    model.module.zero_grad()
    return ClientUpdate(UpdateKind.DELTA, tensors, 1)


@pytest.mark.parametrize(
    ("family", "task"),
    [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)],
)
def test_a_long_text_is_determined_with_dropout_on(small, observe, family, task):
    # A tied output layer takes as many dimensions as there are places.
    model = small(family, task, width=160 if task == CAUSAL_LM else 80)
    truth = observe(model, [LONG], max_length=62, dropout=True)
    answer = ask(truth.seen, model)
    (ids,) = truth.sequences
    assert len(ids) == 62
    # In next-token training the last token is only a target.
    assert answer.sequences == (ids if task == CLASSIFICATION else ids[:-1],)
    assert answer.diagnostics["determined"]
    assert not answer.verified
    assert answer.reason.startswith("not recomputed: the only text")
    assert answer.diagnostics["distance"] < 1e-2


def test_five_steps_of_sgd_with_momentum_and_dropout(small, observe):
    model = small("bert", width=80)
    truth = observe(model, [LONG], max_length=62)
    (ids,) = truth.sequences
    update = steps_of(model, ids, 1, 5, 0.05)
    known = replace(truth.seen.knowledge, local_steps=5, dropout=True)
    answer = ask(replace(truth.seen, update=update, knowledge=known), model)
    assert answer.sequences == (ids,)
    assert answer.diagnostics["determined"]


@pytest.mark.parametrize(
    ("family", "task"), [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)]
)
def test_without_dropout_the_gradient_proves_it(small, observe, family, task):
    model = small(family, task, width=64)
    truth = observe(model, 1, max_length=20)
    answer = ask(truth.seen, model)
    assert answer.verified
    assert certificate.proves(model, answer.sequences, truth.seen)
    assert answer.sequences == tuple(
        ids[: 20 if task == CLASSIFICATION else -1] for ids in truth.sequences
    )
    assert answer.reason == ""


@pytest.mark.parametrize("dropout", [False, None])
def test_the_gradient_of_another_model_is_not_proved(small, observe, dropout):
    """It gives its text, which is stood by only where dropout may be why it is not recomputed."""
    truth = observe(small("bert", width=48, seed=1), 1, max_length=20)
    seen = replace(truth.seen, knowledge=replace(truth.seen.knowledge, dropout=dropout))
    answer = ask(seen, small("bert", width=48))
    assert answer.sequences == tuple(truth.sequences)
    assert not answer.verified
    assert answer.diagnostics["determined"] == (dropout is None)


@pytest.mark.parametrize("factor", [1e-6, 1e4])
def test_a_factor_on_the_whole_update_changes_nothing(small, observe, factor):
    model = small("gpt2", CAUSAL_LM, width=64)
    seen = observe(model, 1, max_length=12, dropout=True).seen
    scaled = {name: factor * value for name, value in seen.update.tensors.items()}
    again = ask(replace(seen, update=replace(seen.update, tensors=scaled)), model)
    plain = ask(seen, model)
    assert plain.sequences
    assert again.sequences == plain.sequences
    assert again.evidence == pytest.approx(plain.evidence, rel=0.5)


def test_it_is_what_a_dense_search_over_all_words_finds(small, observe):
    """The whole vocabulary, without the cut to the largest rows, by the normal equations."""
    model = small("bert", width=48)
    seen = observe(model, 1, max_length=20, dropout=True).seen
    word_VD, position_PD = (tensor.double() for tensor in embeddings(seen, model))
    place_TD = position_PD[position_PD.norm(dim=1) > 0]
    dense_VT = word_VD @ place_TD.T @ torch.linalg.inv(place_TD @ place_TD.T)
    (tables,) = marginals(*embeddings(seen, model), tied=False)
    solution = solved(tables)
    assert solution.ids == tuple(dense_VT.argmax(0).tolist())
    whole_VT = torch.zeros_like(dense_VT)
    whole_VT[list(solution.ids), range(len(solution.ids))] = 1
    assert float((dense_VT - whole_VT).abs().max()) < 1e-3
    # No other word at any one place leaves less than the excess says.
    smallest = float(torch.linalg.svdvals(place_TD)[-1])
    own = float((word_VD - whole_VT @ place_TD).norm(dim=1).max())
    assert solution.excess == pytest.approx(own / smallest, rel=1e-3)
    lowest_residual = float("inf")
    for place, token in enumerate(solution.ids):
        # Moving the place to another word leaves its whole row there.
        rows_VD = word_VD - whole_VT @ place_TD
        lost = (rows_VD[token] + place_TD[place]).norm()
        gained = (rows_VD - place_TD[place]).norm(dim=1)
        gained[token] = float("inf")
        lowest_residual = min(lowest_residual, max(float(lost), float(gained.min())))
    assert lowest_residual >= smallest - own


def test_the_tied_tables_of_gpt2_need_the_span_to_be_projected_out(small, observe):
    model = small("gpt2", CAUSAL_LM, width=64)
    truth = observe(model, 1, max_length=14, dropout=True)
    pair = embeddings(truth.seen, model)
    wanted = truth.sequences[0][:-1]
    assert any(solved(tables).ids == wanted for tables in marginals(*pair, tied=True))
    (plain,) = marginals(*pair, tied=False)
    assert solved(plain).distance > 0.5


def test_the_first_place_need_not_be_the_first_row(small, observe):
    """RoBERTa counts positions from 2."""
    model = small("bert", width=48)
    truth = observe(model, 1, max_length=20, dropout=True)
    moved = embeddings(truth.seen, model)[1].roll(2, 0)
    answer = ask(with_tensors(truth.seen, position_embeddings=moved), model)
    assert answer.sequences == tuple(truth.sequences)
    assert answer.diagnostics["determined"]


@pytest.mark.parametrize(("family", "task"), [("bert", CLASSIFICATION), ("gpt2", CAUSAL_LM)])
def test_a_batch_has_each_word_that_occurs_once_at_its_place(small, observe, texts, family, task):
    model = small(family, task, width=128)
    truth = observe(model, texts[:3], max_length=10, dropout=True)
    fed = truth.sequences if task == CLASSIFICATION else [ids[:-1] for ids in truth.sequences]
    every = [token for ids in fed for token in ids]
    once = {(q, v) for ids in fed for q, v in enumerate(ids) if every.count(v) == 1}
    placements = [placed(table) for table in marginals(*embeddings(truth.seen, model), model.tied)]
    best = min(filter(None, placements), key=lambda places: places.ambiguity())
    pairs = {(q, int(best.words_M[m])) for q, m in (best.table_TM > 0.5).nonzero().tolist()}
    assert len(once) > 8
    assert once <= pairs
    answer = ask(truth.seen, model)
    assert answer.tokens == tuple(sorted(set(every)))
    assert len(answer.sequences) == 3
    assert not answer.verified
    assert "determined" not in answer.diagnostics
    assert "is guessed" in answer.reason


def test_rotary_positions_and_frozen_ones_are_refused_in_a_line(small, observe):
    llama = small("llama")
    reason = PositionMarginals().obstacle(AttackSetting.of(observe(llama, 1).seen, llama))
    assert (
        reason == "reads rows of positions, and the model's are rotary: choose another model.name"
    )
    bert = small("bert")
    seen = observe(bert, 1).seen
    kept = {n: t for n, t in seen.update.tensors.items() if "position" not in n}
    part = replace(seen, update=replace(seen.update, tensors=kept))
    reason = PositionMarginals().obstacle(AttackSetting.of(part, bert))
    assert "position_embeddings.weight" in reason
    assert "clients send none" in reason
    zeros = torch.zeros_like(seen.update.tensors[bert.family.position_embedding])
    answer = ask(with_tensors(seen, position_embeddings=zeros), bert)
    assert answer.status == Status.ABSTAINED
    assert "frozen" in answer.reason


@pytest.mark.parametrize(
    ("family", "task", "length", "says"),
    [("bert", CLASSIFICATION, 60, "has no room"), ("gpt2", CAUSAL_LM, 36, "no room: ")],
)
def test_a_text_that_is_too_long_is_refused_in_a_line(small, observe, family, task, length, says):
    model = small(family, task, width=48)
    answer = ask(observe(model, [LONG], max_length=length).seen, model)
    assert answer.status == Status.ABSTAINED
    assert says in answer.reason
    assert "48" in answer.reason


def test_noise_and_rows_of_two_updates_determine_nothing(small, observe, texts):
    model = small("bert", width=48)
    seen, other = (observe(model, [text], dropout=True, max_length=12).seen for text in texts[:2])
    mixed = with_tensors(seen, position_embeddings=embeddings(other, model)[1])
    rng = torch.Generator().manual_seed(1)
    size = float(embeddings(seen, model)[0].norm(dim=1).max())
    wrong = [mixed]
    for share in (1e-3, 1e-2, 0.1, 1.0):
        tensors = {
            name: value + share * size * torch.randn(value.shape, generator=rng)
            for name, value in seen.update.tensors.items()
        }
        wrong.append(replace(seen, update=replace(seen.update, tensors=tensors)))
    halves = [observe(model, texts[:2], dropout=True, max_length=12).seen]
    wrong += [replace(seen, update=replace(seen.update, num_examples=1)) for seen in halves]
    for update in wrong:
        answer = ask(update, model)
        assert not answer.verified
        assert not answer.diagnostics.get("determined")


def test_a_little_noise_leaves_the_text_and_the_excess_grows_with_it(small, observe):
    model = small("bert", width=64)
    truth = observe(model, 1, dropout=True, max_length=12)
    word_VD, position_PD = embeddings(truth.seen, model)
    used = position_PD.norm(dim=1) > 0
    rng = torch.Generator().manual_seed(1)
    excesses = []
    for share in (0.0, 1e-5, 1e-3, 1e-2):
        noise = share * word_VD.norm(dim=1).max() * torch.randn(word_VD.shape, generator=rng)
        blurred = position_PD * used[:, None]
        (tables,) = marginals(word_VD + noise, blurred, tied=False)
        excesses.append(solved(tables).excess)
    assert all(less < more for less, more in pairwise(excesses))
    assert excesses[0] < DETERMINED < excesses[-1]


def test_what_a_tied_output_layer_adds_is_projected_out_as_a_dense_decomposition_does():
    rng = torch.Generator().manual_seed(3)
    width, places, words = 24, 5, 400
    place_TD = 20 * torch.randn(places, width, generator=rng)
    ids = torch.randint(words, (places,), generator=rng)
    hidden_TD = torch.randn(places, width, generator=rng)
    predicted_VT = torch.rand(words, places, generator=rng)
    word_VD = (predicted_VT @ hidden_TD).index_add(0, ids, place_TD)
    word_VD += 1e-7 * torch.randn(words, width, generator=rng)
    (tables,) = marginals(word_VD, torch.cat([place_TD, torch.zeros(3, width)]), tied=True)
    assert tables.rank == places
    assert solved(tables).ids == tuple(ids.tolist())
    # The span of all rows that no word of the text has, by a decomposition of them all.
    others_X = [word for word in range(words) if word not in tables.words_M]
    others_XD = word_VD[others_X].double()
    inside_DR = torch.linalg.svd(others_XD).Vh[:places].T
    outside_X = (others_XD - others_XD @ inside_DR @ inside_DR.T).norm(dim=1)
    assert tables.others == pytest.approx(float(outside_X.max()), rel=0.5)
    assert tables.others < 1e-5
