"""Reference updates, made by hand and by the attack."""

from dataclasses import replace

import pytest
import torch

from fedleak.attacks.membership.attack import Membership
from fedleak.attacks.membership.likelihood import statistics
from fedleak.attacks.membership.references import obstacle, reference
from fedleak.attacks.reconstruction import Status
from fedleak.models import CAUSAL_LM, CLASSIFICATION, load_parameters_
from fedleak.training.local import local_update_
from fedleak.training.observation import Example, Knowledge, Observation, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream


@pytest.mark.parametrize("optimiser", ["gradient", "sgd", "adamw"])
def test_a_reference_of_the_texts_of_an_update_is_the_update(small, optimiser):
    """Of one gradient, or of two steps."""
    model = small("bert", CLASSIFICATION)
    ids = [tuple(text) for text in model.encode(["she told us that", "nobody knows it", "it was"])]
    labels, before = [1, 0, 2], {k: v.clone() for k, v in model.parameters().items()}
    by_gradient = optimiser == "gradient"
    how = LocalTraining(
        kind=UpdateKind.GRADIENT if by_gradient else UpdateKind.DELTA,
        batch_size=3 if by_gradient else 2,
        epochs=1,
        learning_rate=0.01,
        dropout=False,
        recipe=Recipe(optimiser="sgd" if by_gradient else optimiser),
    )
    # Seed 1 leaves the texts in their order.
    update = local_update_(model, ids, labels, how, seed=1)
    load_parameters_(model, before)
    known = Knowledge(
        learning_rate=0.01,
        local_steps=how.steps(3),
        local_epochs=1,
        batch_size=how.batch_size,
        dropout=False,
        recipe=how.recipe,
    )
    seen = Observation(round=1, client=0, update=update, knowledge=known)
    examples = [Example(*pair) for pair in zip(ids, labels, strict=True)]
    made = reference(model, seen, examples).update
    assert (made.kind, made.num_examples) == (update.kind, 3)
    for name, value in update.tensors.items():
        torch.testing.assert_close(made.tensors[name], value, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_lira_is_how_far_a_residual_is_from_those_of_references(
    small, observe, family, monkeypatch
):
    task = CAUSAL_LM if family == "gpt2" else CLASSIFICATION
    model = small(family, task, layers=1)
    truth = observe(model, 2, granted=("candidates",))
    made = []

    def noted(*given):
        made.append(reference(*given))
        return made[-1]

    monkeypatch.setattr("fedleak.attacks.membership.references.reference", noted)
    answer = Membership(references=3)(truth.seen, model, rng=stream(0))
    listed, public = truth.candidates.listed, truth.candidates.public
    assert len(made) == 3
    own, *others = (
        statistics(model, [listed], public[::2], [seen])[0].residual_K
        for seen in (truth.seen, *made)
    )
    others_RK = torch.stack(others)
    deviation = ((others_RK - others_RK.mean(0)).square().sum(0) / 2).mean().sqrt()
    expected_K = (own - others_RK.mean(0)) / deviation
    torch.testing.assert_close(
        torch.tensor(answer.scores["lira"]), expected_K.float(), rtol=1e-3, atol=1e-3
    )
    asked_less = Membership()(truth.seen, model, rng=stream(0))
    assert answer.scores.keys() - asked_less.scores.keys() == {"lira"}
    assert answer.scores["residual"] == asked_less.scores["residual"]
    scored = list(zip(answer.scores["lira"], truth.inside, strict=True))
    assert min(s for s, inside in scored if inside) > max(s for s, inside in scored if not inside)


def test_texts_of_references_are_those_that_do_not_explain(small, observe, monkeypatch):
    model = small("bert", layers=1)
    truth = observe(model, 2, granted=("candidates",))
    drawn = []
    monkeypatch.setattr(
        "fedleak.attacks.membership.references.reference",
        lambda model, seen, texts: drawn.append(texts) or seen,
    )
    Membership(references=3)(truth.seen, model, rng=stream(0))
    public = truth.candidates.public
    assert all(len(texts) == len({*texts}) == 2 for texts in drawn)
    assert {text for texts in drawn for text in texts} <= {*public[1::2]}
    assert len({frozenset(texts) for texts in drawn}) > 1


def test_without_references_it_says_why(small, observe):
    model = small("bert")
    truth = observe(model, 2, granted=("candidates",))
    known = truth.seen.knowledge
    few = replace(known.candidates, public=known.candidates.public[:3])
    seen = replace(truth.seen, knowledge=replace(known, candidates=few))
    answer = Membership(references=2)(seen, model, rng=stream(0))
    assert answer.status == Status.RECOVERED
    assert "lira" not in answer.scores
    assert "a reference needs 2 texts, and 1 of 3 public ones" in answer.reason
    public = known.candidates.public
    assert "sum over clients" in obstacle(replace(truth.seen, client=-1), public)
    other = replace(known, recipe=Recipe(optimiser="other"))
    assert "optimiser" in obstacle(replace(truth.seen, knowledge=other), public)
    assert obstacle(truth.seen, public) is None
    # Of three kept texts, references of two would be much alike.
    assert "twice as many" in obstacle(truth.seen, public[:7])
    assert obstacle(truth.seen, public[:8]) is None


def test_of_steps_that_end_within_a_pass_it_says_that_none_can_be_made(small, observe):
    """A client may end before it has used all of its texts."""
    model = small("bert")
    truth = observe(model, 2, granted=("candidates",), kind=UpdateKind.DELTA)
    known = replace(truth.seen.knowledge, local_steps=3, local_epochs=1, batch_size=2)
    answer = Membership(references=2)(replace(truth.seen, knowledge=known), model, rng=stream(0))
    assert answer.status == Status.RECOVERED
    assert "no passes over 2 texts make the client's number of steps" in answer.reason
