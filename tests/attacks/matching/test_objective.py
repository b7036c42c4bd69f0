"""How far guesses are off, against gradients that are formed."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedleak.attacks.matching.objective import lower_precision
from fedleak.models import CLASSIFICATION, batch_loss

TEXTS = ("she told us that it is over", "nobody knows it", "he pays us")
GRANTED = ("labels", "lengths")


def naive_loss(model, objective, variables_BTF, observed):
    """The mean of 1 - cosine over tensors, tables counting more, of gradients autograd forms."""
    space, rows, family = objective.space, objective.rows, model.family
    own = dict(model.module.named_parameters())
    fixed_BT1 = rows.fixed_RBT[0, ..., None]
    ids_M = space.ids_RM[0]
    table_MD = space.table_VD[ids_M].clone().requires_grad_()
    share_BTM = variables_BTF.softmax(-1)
    known_BTD = space.table_VD[rows.ids_RBT[0]]
    x_BTD = torch.where(fixed_BT1, known_BTD, share_BTM @ table_MD)
    mask_BT = rows.mask_RBT[0]
    logits = family.logits(model.module, mask_BT, ids_BT=None, embeds_BTD=x_BTD)
    if model.task == CLASSIFICATION:
        loss = F.cross_entropy(logits, rows.labels_RB[0])
    else:
        token_BTV = share_BTM @ F.one_hot(ids_M, len(space.table_VD)).to(share_BTM)
        known_BTV = F.one_hot(rows.ids_RBT[0], len(space.table_VD)).to(share_BTM)
        target_BTV = torch.where(fixed_BT1, known_BTV, token_BTV)
        loss_BT = -(target_BTV[:, 1:] * logits[:, :-1].log_softmax(-1)).sum(-1) * mask_BT[:, 1:]
        loss = loss_BT.sum() / mask_BT[:, 1:].sum()
    wanted = [table_MD if name == family.word_embedding else own[name] for name in observed]
    gradients = torch.autograd.grad(loss, wanted, create_graph=True)
    # Each table counts as a third of all tensors.
    tables = (family.word_embedding, family.position_embedding, family.token_type_embedding)
    weights = [len(observed) / 3 if name in tables else 1.0 for name in observed]
    terms = [
        weight * (1 - F.cosine_similarity(g.flatten(), o.flatten(), dim=0, eps=0))
        for weight, g, o in zip(weights, gradients, observed.values(), strict=True)
    ]
    return sum(terms) / sum(weights)


def test_the_loss_of_a_mixture_is_that_of_formed_gradients(
    model, observe, on_objective, random_variables
):
    truth = observe(model, TEXTS, granted=GRANTED)
    family = model.family
    apart = replace(model, module=copy.deepcopy(model.module))  # with parameters to differentiate

    def check(objective):
        names = list(objective.target.tensors)
        left = set(truth.seen.update.tensors) - set(names)
        assert left <= {*family.null_parameters(left), family.word_embedding}
        assert (family.word_embedding in names) != model.tied
        observed = {name: truth.seen.update.tensors[name] for name in names}
        if family.word_embedding in names:
            rows_MD = observed[family.word_embedding][objective.space.ids_RM[0]]
            observed[family.word_embedding] = rows_MD
        variables = random_variables(objective).requires_grad_()
        loss_R = objective.loss(variables)
        expected = naive_loss(apart, objective, variables[0], observed)
        torch.testing.assert_close(loss_R[0], expected, atol=1e-5, rtol=0)
        (grad,) = torch.autograd.grad(loss_R.sum(), variables)
        (expected_grad,) = torch.autograd.grad(expected, variables)
        size = expected_grad.norm()
        assert float((grad - expected_grad).norm() / size) < 1e-4
        assert torch.allclose(
            objective.scores(objective.space.guess(objective.rows, variables[:, None]))[:, 0],
            loss_R,
        )

    on_objective(check, [truth.seen], model)


@pytest.mark.parametrize("loss", ["cos", "l2", "l2l1"])
def test_at_the_truth_the_distance_is_zero_and_at_zero_gradients_one(
    model, observe, loss, on_objective, true_ids
):
    truth = observe(model, TEXTS[:2], granted=GRANTED)

    def check(objective):
        ids_RBT = true_ids(truth, objective)
        right = objective.scores(objective.space.exact(objective.rows, ids_RBT[:, None]))
        assert right.abs().item() < 1e-4
        first, last = ids_RBT.clone(), objective.rows.content(0, 0)
        first[0, 0, last[:2]] = ids_RBT[0, 0, last[:2]].flip(0)
        wrong = objective.scores(objective.space.exact(objective.rows, first[:, None]))
        assert wrong.item() > 100 * abs(right.item())

    on_objective(check, [truth.seen], model, loss=loss)


def test_a_changed_sequence_is_scored_as_the_whole_batch_with_it(
    model, observe, space, on_objective, random_variables
):
    truths = [
        observe(model, TEXTS, granted=GRANTED),
        observe(model, TEXTS[::-1], [2, 2, 1], granted=GRANTED),
    ]

    def check(objective):
        rows, space = objective.rows, objective.space
        now = space.guess(rows, random_variables(objective)[:, None])
        tried = random_variables(objective, 4)
        whole = space.guess(rows, tried)
        for b in range(3):
            expected = []
            for k in range(4):
                x = now.x_RKBTD.clone()
                x[:, 0, b] = whole.x_RKBTD[:, k, b]
                parts = [x]
                for mine, theirs in (
                    (now.mixture_RKBTM, whole.mixture_RKBTM),
                    (now.targets_RKBTV, whole.targets_RKBTV),
                ):
                    both = None if mine is None else mine.clone()
                    if both is not None:
                        both[:, 0, b] = theirs[:, k, b]
                    parts.append(both)
                expected.append(objective.scores(type(now)(*parts)))
            others = objective.other_sequences(now, b)
            # Also of sequences that are shorter than the longest.
            guess = whole.sequences([b], rows.sequences_of([b]).length)
            scores = objective.scores_of_sequence(guess, b, others)
            torch.testing.assert_close(scores, torch.cat(expected, 1), atol=2e-6, rtol=1e-5)
            assert scores.std(1).min() > 1e-4

    on_objective(check, [truth.seen for truth in truths], model, space=space)


def test_a_single_sequence_has_no_others(small, observe, on_objective, random_variables):
    model = small("bert")
    truth = observe(model, 1, granted=GRANTED)

    def check(objective):
        guess = objective.space.guess(objective.rows, random_variables(objective, 3))
        assert objective.other_sequences(guess, 0) is None
        scores = objective.scores_of_sequence(guess, 0, None)
        torch.testing.assert_close(scores, objective.scores(guess))

    on_objective(check, [truth.seen], model)


@pytest.mark.parametrize("loss", ["cos", pytest.param("l2l1", marks=pytest.mark.slow)])
def test_a_smaller_and_shorter_batch_is_judged_as_if_it_were_alone(
    model, observe, space, loss, on_objective, random_variables
):
    short = observe(model, TEXTS[2:], granted=GRANTED)
    long = observe(model, TEXTS[:2], granted=GRANTED)
    kept = {}

    def alone(objective):
        variables = random_variables(objective).requires_grad_()
        distance = objective.loss(variables)
        (grad,) = torch.autograd.grad(distance.sum(), variables)
        gap = objective.norm_gap(variables.detach())
        kept["alone"] = variables.detach(), distance.detach(), grad, gap

    def beside(objective):
        assert objective.rows.mask_RBT.shape[1] == 2
        variables_BTF, distance, grad_BTF, gap = kept["alone"]
        _, length, size = variables_BTF[0].shape
        variables = 3 * random_variables(objective)
        assert not torch.equal(variables[0, 0, :length, :size], variables_BTF[0])
        variables[0, 0, :length, :size] = variables_BTF[0, 0]
        variables.requires_grad_()
        loss_R = objective.loss(variables)
        torch.testing.assert_close(loss_R[0], distance[0], atol=2e-6, rtol=1e-5)
        (grad,) = torch.autograd.grad(loss_R.sum(), variables)
        assert float((grad[0, 0, :length, :size] - grad_BTF[0, 0]).norm() / grad_BTF.norm()) < 1e-4
        assert not grad[0, 1].any()
        assert not grad[0, 0, length:].any()
        assert not grad[0, 0, :, size:].any()
        assert grad[1, 1].any()
        torch.testing.assert_close(objective.norm_gap(variables.detach())[0], gap[0])

    on_objective(alone, [short.seen], model, space=space, loss=loss)
    on_objective(beside, [short.seen, long.seen], model, space=space, loss=loss)


def test_some_of_the_rows_are_judged_as_all_of_them_are(
    model, observe, on_objective, random_variables
):
    truths = [observe(model, TEXTS[i:], granted=GRANTED) for i in range(3)]

    def check(objective):
        variables = random_variables(objective).requires_grad_()
        chosen = torch.tensor([2, 0])
        taken = objective.take(chosen)
        torch.testing.assert_close(
            taken.loss(variables[chosen]), objective.loss(variables)[chosen], atol=2e-6, rtol=1e-5
        )
        assert taken.victim_R.tolist() == [2, 0]
        variables = variables.detach()
        assert torch.equal(
            taken.nearest_tokens(variables[chosen]), objective.nearest_tokens(variables)[chosen]
        )

    on_objective(check, [truth.seen for truth in truths], model)


def test_the_norm_that_is_aimed_at_is_the_mean_of_the_table(
    small, observe, on_objective, random_variables
):
    model = small("bert")
    truth = observe(model, TEXTS[:2], granted=GRANTED)

    def check(objective):
        variables = random_variables(objective)
        norms = []
        for b, ids in enumerate(truth.sequences):
            for t in range(len(ids)):
                known = objective.rows.fixed_RBT[0, b, t]
                x_D = objective.space.table_VD[ids[t]] if known else variables[0, b, t]
                norms.append(x_D.norm())
        expected = (torch.stack(norms).mean() - objective.space.table_VD.norm(dim=1).mean()) ** 2
        torch.testing.assert_close(objective.norm_gap(variables)[0], expected)

    on_objective(check, [truth.seen], model, space="free")


@pytest.mark.parametrize("guesses", [1, 7, 100])
def test_all_guesses_are_scored_once_and_in_order(small, observe, guesses, on_objective):
    model = small("bert")
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective):
        seen = [k for chunk in objective.chunks(guesses, 3) for k in range(guesses)[chunk]]
        assert seen == list(range(guesses))
        assert [c.stop - c.start for c in objective.chunks(2, 10**9)] == [1, 1]

    on_objective(check, [truth.seen], model)


@pytest.mark.parametrize("loss", ["cos", "l2", "l2l1"])
def test_lower_precision_ranks_alike_and_leaves_the_model_alone(
    small, observe, loss, on_objective, random_variables
):
    model = small("bert", width=64)
    truth = observe(model, TEXTS[:2], granted=GRANTED)

    def check(objective):
        guess = objective.space.guess(objective.rows, random_variables(objective, 6))
        fine, rough = objective.scores(guess), objective.rough.scores(guess)
        assert rough.dtype == torch.float32
        assert (rough - fine).abs().max() < 0.1 * fine.abs().max()
        assert not torch.equal(rough, fine)
        assert {p.dtype for p in objective.rough.model.module.parameters()} == {torch.bfloat16}

    on_objective(check, [truth.seen], model, loss=loss, precision="mixed")
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}
    assert {p.dtype for p in lower_precision(model).module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("loss", ["cos", "l2", "l2l1"])
def test_in_lower_precision_distances_are_still_summed_in_float32(
    small, observe, loss, on_objective, random_variables
):
    model = small("bert", width=64)
    truth = observe(model, TEXTS[:2], granted=GRANTED)

    def check(objective):
        guess = objective.space.guess(objective.rows, random_variables(objective, 1))
        judge = objective.rough
        gradients = judge.gradients(guess, judge.rows, differentiable=False)
        # One matrix alone: a sum over tensors would hide what each was rounded to.
        name = next(n for n in list(judge.target.tensors) if n.endswith("query.weight"))
        target = type(judge.target)(
            {name: judge.target.tensors[name]}, {name: judge.target.norms[name]}
        )
        apart = judge.distance({name: gradients[name]}, target)
        assert not torch.equal(apart, apart.bfloat16().float())

    on_objective(check, [truth.seen], model, loss=loss, precision="mixed")


def test_objectives_are_of_the_client_s_own_loss(model, observe, on_objective, true_ids):
    """The weights of sequences and targets are those of the mean that clients train on."""
    truth = observe(model, TEXTS, granted=GRANTED)
    apart = replace(model, module=copy.deepcopy(model.module))

    def check(objective):
        ids_RBT = true_ids(truth, objective)
        rows = objective.rows
        own = dict(apart.module.named_parameters())
        gradients = objective.gradients(
            objective.space.exact(rows, ids_RBT[:, None]), rows, differentiable=False
        )
        loss = batch_loss(apart, ids_RBT[0], rows.mask_RBT[0], rows.labels_RB[0])
        biases = [name for name in list(objective.target.tensors) if own[name].dim() == 1]
        expected = torch.autograd.grad(loss, [own[name] for name in biases])
        for name, expected_grad in zip(biases, expected, strict=True):
            torch.testing.assert_close(gradients[name][0, 0], expected_grad, atol=1e-6, rtol=1e-4)

    on_objective(check, [truth.seen], model)
