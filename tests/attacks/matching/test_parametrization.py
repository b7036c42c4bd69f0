"""What is optimised: free embeddings and mixtures of tokens, as inputs and as tokens."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedleak.attacks.matching.parametrization import FreeEmbeddings, TokenMixtures
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

TEXTS = ("she told us that it is over", "nobody knows it", "he pays us")
GRANTED = ("labels", "lengths")


def test_what_begins_with_tokens_is_read_as_these_tokens(
    model, observe, space, on_objective, true_ids, random_variables
):
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective):
        assert isinstance(objective.space, TokenMixtures if space == "mixtures" else FreeEmbeddings)
        ids_RBT = true_ids(truth, objective)
        assert not torch.equal(objective.nearest_tokens(random_variables(objective)), ids_RBT)
        flat = (
            replace(objective.space, hint_RTM=0 * objective.space.hint_RTM)
            if (space == "mixtures")
            else objective.space
        )
        assert torch.equal(
            flat.nearest_tokens(objective.rows, flat.variables(ids_RBT)[:, None])[:, 0],
            ids_RBT,
        )

    on_objective(check, [truth.seen], model, space=space)


def test_known_tokens_and_padding_stay_and_have_no_derivative(
    model, observe, space, on_objective, true_ids, random_variables
):
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective):
        rows, table_VD = objective.rows, objective.space.table_VD
        variables_RBTF = random_variables(objective).requires_grad_()
        (grad,) = torch.autograd.grad(objective.loss(variables_RBTF).sum(), variables_RBTF)
        assert not grad[rows.fixed_RBT].any()
        assert grad[~rows.fixed_RBT].any(-1).all()
        guess = objective.space.guess(rows, variables_RBTF[:, None])
        x_RBTD, ids_RBT = guess.x_RKBTD[:, 0], objective.nearest_tokens(variables_RBTF.detach())
        assert torch.equal(x_RBTD[rows.fixed_RBT], table_VD[rows.ids_RBT][rows.fixed_RBT])
        assert torch.equal(ids_RBT[rows.fixed_RBT], rows.ids_RBT[rows.fixed_RBT])
        assert rows.fixed_RBT[rows.mask_RBT == 0].all()
        expected = true_ids(truth, objective)
        assert torch.equal(expected[rows.fixed_RBT], rows.ids_RBT[rows.fixed_RBT])

    on_objective(check, [truth.seen], model, space=space)


def test_a_guess_that_is_sure_of_tokens_is_as_far_as_the_tokens_are(
    model, observe, space, on_objective, true_ids, random_variables
):
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective):
        ids_RBT = true_ids(truth, objective)
        for tokens in (ids_RBT, objective.nearest_tokens(random_variables(objective))):
            exact = objective.space.exact(objective.rows, tokens[:, None])
            assert torch.equal(exact.x_RKBTD, objective.space.table_VD[tokens[:, None]])
            variables = objective.space.variables(tokens)
            if space == "mixtures":
                same = tokens[..., None] == objective.space.ids_RM[:, None, None]
                variables = 200.0 * same
                assert (
                    exact.mixture_RKBTM.sum(-1)[:, 0].tolist()
                    == (~objective.rows.fixed_RBT).float().tolist()
                )
            loss_R = objective.loss(variables.clone().requires_grad_()).detach()
            torch.testing.assert_close(loss_R, objective.scores(exact)[:, 0], atol=1e-6, rtol=1e-5)
        right = objective.scores(objective.space.exact(objective.rows, ids_RBT[:, None]))
        assert right.abs().max() < 1e-6 or space == "free"
        assert right.item() < 0.1 * loss_R.item()

    on_objective(check, [truth.seen], model, space=space)


def test_a_mixture_is_read_with_every_token_of_the_bag(
    model, observe, on_objective, random_variables
):
    truth = observe(model, TEXTS[:2], granted=GRANTED)

    def check(objective):
        bag = set(objective.space.ids_RM[0].tolist())
        content = {t for ids in truth.sequences for t in ids} - model.special_ids()
        assert bag == content
        variables_RKBTM = random_variables(objective, 20)
        variables_RKBTM[:, :10] = variables_RKBTM[:, :10, ..., :1] * 100  # all want one token
        read = objective.space.nearest_tokens(objective.rows, variables_RKBTM)[0]
        likeliest = objective.space.ids_RM[0][variables_RKBTM[0].argmax(-1)]
        free = ~objective.rows.fixed_RBT[0]
        for k in range(20):
            assert set(read[k][free].tolist()) == bag
            # A place that was not needed for another has its own favourite.
            changed = (read[k] != likeliest[k]) & free
            assert int(changed.sum()) <= len(bag)

    on_objective(check, [truth.seen], model)


def test_with_more_tokens_than_places_every_place_has_its_own(small, observe, on_objective):
    model = small("bert")
    truth = observe(model, TEXTS[1:2], granted=GRANTED)

    def check(objective):
        many = torch.arange(100, 120)[None]
        hint = torch.zeros(1, objective.rows.mask_RBT.shape[2], 20)
        bigger = replace(objective.space, ids_RM=many, there_RM=many > 0, hint_RTM=hint)
        variables = torch.randn(
            1, 5, *objective.rows.mask_RBT.shape[1:], 20, generator=stream(0, "x")
        )
        for ids_BT in bigger.nearest_tokens(objective.rows, variables)[0]:
            tokens = ids_BT[~objective.rows.fixed_RBT[0]].tolist()
            assert len(set(tokens)) == len(tokens)
            assert set(tokens) <= set(range(100, 120))

    on_objective(check, [truth.seen], model)


def test_the_nearest_token_is_that_of_the_largest_cosine_that_is_allowed(
    small, observe, on_objective, random_variables
):
    model = small("bert")
    truth = observe(model, 1, granted=GRANTED)

    def check(objective):
        space, rows = objective.space, objective.rows
        allowed = space.allowed_M[::7]
        variables = random_variables(objective, 2)
        nearest = replace(space, allowed_M=allowed).nearest_tokens(rows, variables)
        for k in range(2):
            for t in rows.content(0, 0):
                x_D = variables[0, k, 0, t]
                apart = F.cosine_similarity(space.table_VD[allowed], x_D[None])
                assert nearest[0, k, 0, t] == allowed[apart.argmax()]

    on_objective(check, [truth.seen], model, space="free")


def test_starts_are_random_and_scaled_ones_have_the_length_asked_for(small, observe, on_objective):
    model = small("bert")
    truth = observe(model, TEXTS[:2], granted=GRANTED)

    def check(objective):
        rows, space = objective.rows, objective.space
        assert space.norm is None
        drawn = space.start(rows, [stream(0, "a")])
        assert torch.equal(drawn, space.start(rows, [stream(0, "a")]))
        assert not torch.equal(drawn, space.start(rows, [stream(0, "b")]))
        assert drawn.std().item() == pytest.approx(1, rel=0.3)
        assert torch.equal(space.scaled(drawn), drawn)
        lengths = replace(space, norm=1.4).scaled(drawn).norm(dim=-1)[~rows.fixed_RBT]
        torch.testing.assert_close(lengths, torch.full_like(lengths, 1.4))

    on_objective(check, [truth.seen], model, space="free")
