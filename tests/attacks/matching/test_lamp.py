"""LAMP as published: its descent, its schedule, its discrete step, against plain versions."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import functional as F

from fedleak.attacks import AttackSetting, Equipped
from fedleak.attacks.matching import bucketing, guesses, lamp
from fedleak.attacks.matching.candidate_selection import best_of_batch, best_of_sequence, nll
from fedleak.attacks.matching.dlg import Dlg
from fedleak.attacks.matching.gradient_matching import GradientMatching, Method
from fedleak.attacks.matching.initialization import initial
from fedleak.attacks.matching.lamp import FAITHFUL, Lamp
from fedleak.attacks.matching.optimizer import (
    Descent,
    Recipe,
    Watch,
    best_of_each,
    constant,
    cosine_to_zero,
    linear,
    stepwise,
)
from fedleak.attacks.matching.tag import Tag
from fedleak.errors import ConfigError
from fedleak.models import CAUSAL_LM, CLASSIFICATION, pad
from fedleak.reconstruction import Status
from fedleak.rng import stream
from fedleak.training.wire import partial_update

TEXTS = ("she told us it is over", "nobody knows it")
GRANTED = ("labels", "lengths")
KINDS = [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)]


def without_null(seen, model):
    names = seen.update.tensors.keys()
    kept = sorted(names - model.family.null_parameters(names))
    return replace(seen, update=partial_update(seen.update, kept))


def inside(check, seen, model, like=None, **options):
    """Runs a check in place of an attack's algorithm, with all that it would be given."""
    like = like or Lamp(preset="faithful", **options)
    ran = []

    def algorithm(objective, recipe, prior, rng, watch):
        ran.append(check(objective, recipe, rng))
        return best_of_each(objective.victim_R, objective.rows.ids_RBT, torch.zeros(len(rng)))

    @dataclass(frozen=True)
    class Attack(GradientMatching):
        def method(self):
            return replace(like.method(), algorithm=algorithm)

    attack = Attack(preset=like.preset, starts=like.starts, precision=like.precision)
    rngs = [stream(0, "attack", i) for i in range(len(seen))]
    with pytest.MonkeyPatch.context() as patch:
        # Padding costs less than another pass, however much there is: all victims together.
        patch.setattr(bucketing, "PASS", {"cpu": 10**9})
        attack.many(seen, model, rngs=rngs, report=lambda *_: None)
    assert len(ran) == 1


class LikesRising:
    """A prior that counts the pairs of tokens that fall."""

    def nll(self, ids_NT, mask_NT, stop=None):
        pairs = (ids_NT[:, None, :] < ids_NT[:, :, None]).triu(1)
        there = mask_NT.bool()[:, None, :] & mask_NT.bool()[:, :, None]
        return (pairs & there).sum((1, 2)).float()

    def to(self, dtype):
        return self


# --- constants --------------------------------------------------------------------------------


def test_discrete_steps_are_where_the_authors_code_has_them():
    def rounds(recipe):
        return [step for step in range(recipe.steps + 1) if recipe.discrete(step)]

    base, large = FAITHFUL["base"], FAITHFUL["large"]
    assert rounds(base) == list(range(226, 1952, 75))
    assert len(rounds(base)) == base.rounds == 24
    assert rounds(large) == list(range(601, 4802, 200))
    assert len(rounds(large)) == large.rounds == 22
    assert not rounds(replace(base, discrete_at="never"))
    assert not rounds(replace(base, discrete_at="at-end"))
    assert replace(base, discrete_at="at-end").rounds == 24
    assert not rounds(Dlg(preset="faithful").method().recipe)


@pytest.mark.parametrize("size", ["base", "large"])
@pytest.mark.parametrize("steps", [200, 1000])
def test_a_shorter_descent_has_the_same_schedule_in_fewer_steps(size, steps):
    usual = FAITHFUL[size]
    short = usual.shortened(steps)
    assert usual.shortened(None) == usual
    assert short.steps == steps
    assert abs(short.rounds - usual.rounds) <= 2
    times = usual.steps // steps
    for step in range(steps):
        expected = usual.schedule(step * times, usual.steps)
        assert short.schedule(step, steps) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("attack", "at", "expected"),
    [
        (Lamp(preset="faithful"), 1999, 0.01 * 0.89**39),
        (Lamp(preset="faithful", size="large"), 4999, 0.01 * (1 - 4999 / 10_000)),
        (Dlg(preset="faithful"), 2499, 0.1),
        (Dlg(preset="faithful", size="large"), 9999, 0.1 / 10_000),
        (Tag(preset="faithful", size="large"), 5000, 0.03 / 2),
    ],
)
def test_step_sizes_are_those_of_the_authors_code(attack, at, expected):
    recipe = attack.method().recipe
    assert recipe.step_size * recipe.schedule(at, recipe.steps) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("attack", "loss", "lm_weight", "norm_weight"),
    [
        (Lamp(preset="faithful"), "cos", 0.2, 1.0),
        (Lamp(preset="faithful", loss="l2l1"), "l2l1", 60.0, 25.0),
        (Lamp(preset="faithful", loss="l2"), "l2", 60.0, 25.0),
        (Lamp(preset="faithful", lm_weight=3.0, norm_weight=0.0), "cos", 3.0, 0.0),
        (Dlg(preset="faithful"), "l2", 0.0, 0.0),
        (Tag(preset="faithful"), "l2l1", 0.0, 0.0),
    ],
)
def test_weights_are_those_of_the_authors_code(attack, loss, lm_weight, norm_weight):
    method = attack.method()
    assert method.loss == loss
    assert (method.recipe.lm_weight, method.recipe.norm_weight) == (lm_weight, norm_weight)
    assert method.recipe == method.free_recipe
    assert method.scaled == (attack.kind == "lamp")
    assert method.algorithm is lamp.reconstruct


# --- descent ----------------------------------------------------------------------------------


SCHEDULES = {
    "constant": constant,
    "stepwise": stepwise(0.5, 3),
    "linear": linear(2.0),
    "cosine": cosine_to_zero,
}
FACTORS = {
    "constant": lambda step: 1.0,
    "stepwise": lambda step: 0.5 ** (step // 3),
    "linear": lambda step: 1 - step / 20,
    "cosine": lambda step: (1 + torch.tensor(torch.pi * step / 10).cos().item()) / 2,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_rows_together_go_where_each_goes_alone_under_plain_adam(schedule, clip):
    rng = stream(0, "descent")
    start = torch.randn(3, 2, 4, 5, generator=rng, dtype=torch.float64)
    matrix = torch.randn(3, 40, 40, generator=rng, dtype=torch.float64)

    def loss_of(x, r):
        return ((matrix[r] @ x.flatten()).tanh() ** 2).sum() * (1.0, 0.01, 3.0)[r]

    recipe = Recipe(10, 0.1, SCHEDULES[schedule], clip=clip, weight_decay=0.02, epsilon=1e-6)
    descent = Descent(start, recipe)
    losses = [
        descent.step(lambda x: torch.stack([loss_of(x[r], r) for r in range(3)])) for _ in range(10)
    ]
    for r in range(3):
        x = start[r].clone().requires_grad_()
        adam = torch.optim.AdamW([x], lr=1.0, eps=1e-6, weight_decay=0.02)
        for step in range(10):
            adam.param_groups[0]["lr"] = 0.1 * FACTORS[schedule](step)
            adam.zero_grad()
            loss = loss_of(x, r)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([x], clip)
            adam.step()
            torch.testing.assert_close(losses[step][r], loss.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(descent.now()[r], x.detach(), rtol=1e-6, atol=1e-7)


def parabola(x):
    return x.square().flatten(1).sum(1)


def test_rows_that_go_on_keep_their_memory():
    start = torch.randn(4, 1, 2, 3, generator=stream(0, "start"), dtype=torch.float64)
    recipe, chosen = Recipe(20, 0.1, linear(1.0)), torch.tensor([3, 1])
    all_of, some = Descent(start, recipe), Descent(start, recipe)
    for _ in range(5):
        all_of.step(parabola)
        some.step(parabola)
    some.take_(chosen)
    assert torch.equal(some.now(), all_of.now()[chosen])
    for _ in range(5):
        all_of.step(parabola)
        some.step(parabola)
    assert torch.equal(some.now(), all_of.now()[chosen])


def test_a_changed_start_goes_on_with_the_memory_it_is_told():
    start = torch.ones(2, 1, 1, 2, dtype=torch.float64)
    recipe = Recipe(20, 0.1, constant)
    kept, cleared = Descent(start, recipe), Descent(start, recipe)
    for descent in (kept, cleared):
        for _ in range(3):
            descent.step(parabola)
    before = kept.now().clone()
    kept.change_(lambda leaf: leaf + 1)
    assert torch.equal(kept.now(), before + 1)
    cleared.change_(lambda leaf: leaf + 1, torch.zeros_like)
    for descent in (kept, cleared):  # without a slope, only memory moves it
        descent.step(lambda leaf: 0 * parabola(leaf))
    assert (kept.now() - before - 1).abs().min() > 1e-3
    assert torch.equal(cleared.now(), before + 1)


def test_a_row_whose_loss_is_not_a_number_takes_no_other_with_it():
    start = torch.ones(2, 1, 1, 2)
    alone, both = (
        Descent(start[1:], Recipe(9, 0.1, constant)),
        Descent(start, Recipe(9, 0.1, constant)),
    )
    for _ in range(3):
        alone.step(parabola)
        loss = both.step(lambda x: parabola(x) * torch.tensor([torch.nan, 1.0]))
    assert loss.isnan().tolist() == [True, False]
    assert torch.equal(both.now()[1], alone.now()[0])
    assert torch.equal(both.now()[0], start[0])


def test_the_best_row_of_each_victim_is_that_of_the_lowest_loss():
    ids = torch.arange(5)[:, None, None]
    loss = torch.tensor([3.0, torch.nan, 1.0, torch.inf, 2.0])
    found = best_of_each(torch.tensor([0, 1, 0, 1, 1]), ids, loss)
    assert [(one.row, one.loss, int(one.ids_BT)) for one in found] == [(2, 1.0, 2), (4, 2.0, 4)]
    (nothing,) = best_of_each(torch.tensor([0, 0]), ids, torch.tensor([torch.nan, torch.inf]))
    assert nothing.row == 1


# --- algorithm 1 ------------------------------------------------------------------------------


def plain_descent(model, truth, observed, start_BTD, fixed_BT, ids_BT, weights, steps):
    """Adam on embeddings with formed gradients, as the authors' code has it."""
    own = dict(model.module.named_parameters())
    table_VD = own[model.family.word_embedding].detach()
    _, mask_BT = pad(truth.sequences, model.tokenizer.pad_token_id, model.device)
    x = start_BTD.clone().requires_grad_()
    adam = torch.optim.Adam([x], lr=0.01)
    for step in range(steps):
        # 40 steps of the 2000 that are usual in one of 5: 0.89 every 50.
        adam.param_groups[0]["lr"] = 0.01 * 0.89 ** (step * 2000 // steps // 50)
        with torch.no_grad():
            x[fixed_BT] = table_VD[ids_BT[fixed_BT]]
        logits = model.family.logits(model.module, mask_BT, ids_BT=None, embeds_BTD=x)
        if model.task == CLASSIFICATION:
            loss = F.cross_entropy(logits, torch.tensor(truth.labels))
        else:
            near = F.normalize(x, dim=-1) @ F.normalize(table_VD, dim=-1).T
            targets = near.argmax(-1).where(~fixed_BT, ids_BT)[:, 1:]
            loss = F.cross_entropy(logits[:, :-1][mask_BT[:, 1:] > 0], targets[mask_BT[:, 1:] > 0])
        found = torch.autograd.grad(loss, [own[n] for n in observed], create_graph=True)
        pairs = list(zip(found, observed.values(), strict=True))
        if weights is None:
            apart = sum((g - o).square().sum() + 0.01 * (g - o).abs().sum() for g, o in pairs)
        else:
            cosines = [
                F.cosine_similarity(g.flatten(), o.flatten(), dim=0, eps=0) for g, o in pairs
            ]
            apart = 1 - sum(cosines) / len(cosines)
            mean = x.norm(dim=-1)[mask_BT > 0].mean()
            apart = apart + weights * (mean - table_VD.norm(dim=-1).mean()) ** 2
        (x.grad,) = torch.autograd.grad(apart, x)
        adam.step()
    return x.detach()


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("loss", ["cos", "tag"])
def test_five_steps_are_those_of_a_plain_descent(small, observe, kind, loss):
    model = small(*kind)
    truth = observe(model, TEXTS, granted=GRANTED)
    seen = without_null(truth.seen, model)
    oracle = replace(model, module=copy.deepcopy(model.module))
    word = model.family.word_embedding
    observed = {n: v for n, v in seen.update.tensors.items() if n != word and v.any()}
    tag = loss == "tag"
    like = Lamp(preset="faithful", guesses=1, steps=5, discrete="never")

    def check(objective, recipe, rng):
        rows = objective.rows
        start_RBTD = initial(objective, recipe, rng)
        if not tag:
            lengths = start_RBTD.norm(dim=-1)[~rows.fixed_RBT]
            mean = objective.space.table_VD.norm(dim=-1).mean()
            torch.testing.assert_close(lengths, mean.expand_as(lengths))
        recipe = replace(recipe, step_size=0.01, schedule=like.method().recipe.schedule)
        descent = Descent(start_RBTD, recipe)
        for step in range(1, 6):
            descent.step(recipe.loss(objective, step))
        x = plain_descent(
            oracle,
            truth,
            observed,
            start_RBTD[0],
            rows.fixed_RBT[0],
            rows.ids_RBT[0],
            None if tag else 1.0,
            5,
        )
        free = ~rows.fixed_RBT[0]
        assert (x - start_RBTD[0])[free].abs().mean() > 1e-3
        torch.testing.assert_close(descent.now()[0][free], x[free], atol=1e-4, rtol=1e-4)

    inside(check, [seen], model, like=Tag(preset="faithful", steps=5) if tag else like)


@pytest.mark.parametrize("at_once", [1, 10_000])
def test_the_best_of_random_starts_and_of_its_orders_is_begun_with(
    small, observe, monkeypatch, at_once
):
    model = small("bert")
    truth = observe(model, TEXTS, granted=GRANTED)
    monkeypatch.setattr(guesses, "_TOKENS_AT_ONCE", {"cpu": at_once})

    def check(objective, recipe, rng):
        # As drawn: a start's length changes its distance.
        space, rows = replace(objective.space, norm=None), objective.rows
        objective = replace(objective, space=space)

        def distance(start):
            return float(objective.scores(space.guess(rows, start[:, None]))[0, 0])

        found = initial(objective, replace(recipe, guesses=8), [stream(0, "starts")])
        one = stream(0, "starts")
        drawn = [space.start(rows, [one]) for _ in range(8)]
        best = min(drawn, key=distance)
        assert best is not drawn[0]
        assert best is not drawn[-1]
        assert distance(found) < distance(best)
        for b in range(2):
            # The same vectors in another order.
            free = rows.content(0, b)
            mine, theirs = found[0, b, free].sum(-1), best[0, b, free].sum(-1)
            assert sorted(mine.tolist()) == pytest.approx(sorted(theirs.tolist()), abs=1e-5)

    inside(check, [without_null(truth.seen, model)], model)


def test_what_is_returned_had_the_lowest_loss_on_the_way(small, observe, monkeypatch):
    model = small("bert")
    truth = observe(model, TEXTS, granted=GRANTED)
    way, step = [], Descent.step

    def spy(self, loss):
        before = self.now().clone()
        way.append((float(step(self, loss)), before))
        return torch.tensor([way[-1][0]])

    monkeypatch.setattr(Descent, "step", spy)

    def check(objective, recipe, rng):
        wild = replace(recipe, steps=12, step_size=3.0, guesses=1)
        (found,) = lamp.reconstruct(objective, wild, None, rng, Watch())
        least, before = min(way, key=lambda one: one[0])
        assert way[-1][0] > least
        assert found.loss == pytest.approx(least)
        assert torch.equal(found.ids_BT, objective.read(before)[0])

    inside(check, [without_null(truth.seen, model)], model, discrete="never")


@pytest.mark.parametrize("preset", ["best", "faithful"])
def test_distances_are_as_they_are_or_shares_of_the_observed_gradient(small, observe, preset):
    model = small("bert")
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective, recipe, rng):
        squares = sum(float(norm_R.square()) for norm_R in objective.target.norms.values())
        expected = 1.0 if preset == "faithful" else squares
        assert objective.unit_R.tolist() == [pytest.approx(expected, rel=1e-5)]

    inside(check, [truth.seen], model, like=Dlg(preset=preset, starts=1))


# --- discrete step ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_best_of_all_that_was_tried_is_chosen(small, observe, kind):
    model = small(*kind)
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective, recipe, rng):
        rng = stream(0, "tried")
        free_BT = ~objective.rows.fixed_RBT[0]
        tried = objective.rows.ids_RBT[:, None].repeat(1, 30, 1, 1)
        for k in range(30):
            tried[0, k, free_BT] = torch.randint(10, 300, (int(free_BT.sum()),), generator=rng)
        likely = torch.rand(1, 30, generator=rng)
        space, rows = objective.space, objective.rows
        each = objective.scores(space.exact(rows, tried)) + likely
        best = best_of_batch(objective, tried, likely)
        k = int(each.argmin())
        assert torch.equal(best.chosen_RX[0], tried[0, k])
        assert float(best.apart_R + best.likely_R) == pytest.approx(float(each.min()), abs=1e-5)
        equal = best_of_batch(objective, tried[:, [3, 3]], torch.zeros(1, 2))
        assert torch.equal(equal.chosen_RX[0], tried[0, 3])

        now = space.exact(rows, tried[:, 5][:, None])
        changed = tried[:, 5][:, None].repeat(1, 30, 1, 1)
        changed[:, :, 1] = tried[:, :, 1]
        each = objective.scores(space.exact(rows, changed)) + likely
        own = rows.sequences_of([1])
        best = best_of_sequence(
            objective,
            now,
            1,
            lambda ids_RKT: space.exact(own, ids_RKT[:, :, None, : own.length]),
            tried[:, :, 1],
            likely,
        )
        assert torch.equal(best.chosen_RX[0], tried[0, int(each.argmin()), 1])

    inside(check, [without_null(truth.seen, model)], model)


def test_the_prior_counts_as_the_mean_over_real_sequences(small, observe):
    model = small("bert")
    seen = [
        observe(model, TEXTS, granted=GRANTED).seen,
        observe(model, TEXTS[:1], granted=GRANTED).seen,
    ]

    def check(objective, recipe, rng):
        ids = objective.rows.ids_RBT.clone()
        ids[~objective.rows.fixed_RBT] = torch.arange(200, 100, -1)[
            : int((~objective.rows.fixed_RBT).sum())
        ]
        prior, recipe = LikesRising(), replace(recipe, lm_weight=0.5)
        found = nll(prior, recipe, objective, 0, ids[:, None, 0])
        alone = prior.nll(ids[:, 0], objective.rows.mask_RBT[:, 0])
        assert alone.min() > 1
        torch.testing.assert_close(found[:, 0], 0.5 * alone / torch.tensor([2.0, 1.0]))
        assert not nll(prior, replace(recipe, lm_weight=0.0), objective, 0, ids[:, None, 0]).any()
        assert not nll(None, recipe, objective, 0, ids[:, None, 0]).any()

    inside(check, [without_null(one, model) for one in seen], model)


def test_of_equally_distant_orders_the_one_that_the_prior_likes_is_chosen(small, observe):
    model = small("bert")
    truth = observe(model, ["nobody knows it", "he pays us"], granted=GRANTED)

    def check(objective, recipe, rng):
        flat = replace(
            objective,
            distance=lambda gradients, target: torch.full(
                (
                    1,
                    next(iter(gradients.values())).shape[1]
                    if torch.is_tensor(next(iter(gradients.values())))
                    else next(iter(gradients.values()))[-1].left_RKNX.shape[1],
                ),
                0.5,
            ),
        )
        ids = objective.rows.ids_RBT.clone()
        free = ~objective.rows.fixed_RBT
        ids[free] = torch.arange(100 + int(free.sum()), 100, -1)
        leaf = objective.space.leaf(objective.rows, ids)
        for _ in range(4):
            leaf = lamp.better_order(flat, replace(recipe, lm_weight=1.0), LikesRising(), leaf, rng)
        read = objective.read(leaf)
        for b in range(2):
            places = objective.rows.content(0, b)
            assert read[0, b, places].tolist() == sorted(ids[0, b, places].tolist())
        kept = lamp.better_order(
            flat,
            replace(recipe, lm_weight=1.0),
            None,
            objective.space.leaf(objective.rows, ids),
            rng,
        )
        assert torch.equal(objective.read(kept), ids), "the present order, of equals"

    inside(check, [without_null(truth.seen, model)], model)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_wrong_orders_are_mended_by_the_gradient(small, observe, kind):
    model = small(*kind)
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective, recipe, rng):
        ids = objective.rows.ids_RBT.clone()
        for b, one in enumerate(truth.sequences):
            ids[0, b, : len(one)] = torch.tensor(one)
        wrong = ids.clone()
        places = objective.rows.content(0, 0)
        wrong[0, 0, places[:2]] = ids[0, 0, places[:2]].flip(0)
        leaf = objective.space.leaf(objective.rows, wrong)
        assert not torch.equal(objective.read(leaf), ids)
        found = lamp.better_order(objective, recipe, None, leaf, rng)
        assert torch.equal(objective.read(found), ids)

    inside(check, [without_null(truth.seen, model)], model)


# --- end to end -------------------------------------------------------------------------------


def run(attack, seen, model):
    reports = []
    (answer,) = attack.many(
        [seen], model, rngs=[stream(0, "lamp")], report=lambda _, how: reports.append(how)
    )
    return answer, [one for one in reports if not one.phase]


@pytest.mark.parametrize("discrete", ["during", "at-end", "never"])
def test_words_change_places_when_they_may(small, observe, monkeypatch, discrete):
    model = small("bert", width=16)
    truth = observe(model, ["nobody knows it"], granted=GRANTED)
    seen = replace(
        truth.seen, update=partial_update(truth.seen.update, ["query", "position", "classifier"])
    )
    moved, better_order = [], lamp.better_order

    def spy(*args):
        moved.append(len(steps))
        return better_order(*args)

    steps, step = [], Descent.step

    def counting(self, loss):
        steps.append(1)
        return step(self, loss)

    monkeypatch.setattr(lamp, "better_order", spy)
    monkeypatch.setattr(Descent, "step", counting)
    attack = Lamp(preset="faithful", steps=52, guesses=2, discrete=discrete)
    answer, reports = run(attack, seen, model)
    recipe = replace(attack.method().recipe, discrete_at="during")
    expected = [s for s in range(1, 53) if recipe.discrete(s)]
    assert len(expected) > 10
    assert moved == {"during": expected, "at-end": [52] * len(expected), "never": []}[discrete]
    assert answer.status == Status.RECOVERED
    assert [one.step for one in reports] == [50, 52]
    assert reports[0].loss >= reports[1].loss
    assert {one.steps for one in reports} == {52}


def test_the_published_attack_finds_a_short_text(small, observe):
    model = small("bert", width=16)
    truth = observe(model, ["nobody knows"], granted=GRANTED)
    attack = Lamp(preset="faithful", steps=100, guesses=20)
    answer, reports = run(attack, without_null(truth.seen, model), model)
    assert answer.sequences == tuple(truth.sequences)
    assert answer.verified
    assert [one.step for one in reports] == [50, 100]
    losses = [one.loss for one in reports]
    assert losses == sorted(losses, reverse=True)


def test_a_descent_out_of_time_answers_with_its_best(small, observe):
    model = small("bert")
    truth = observe(model, TEXTS, granted=GRANTED)
    answer, _ = run(Lamp(preset="faithful", guesses=2, seconds=1e-9), truth.seen, model)
    assert answer.status == Status.RECOVERED
    assert [len(one) for one in answer.sequences] == [len(one) for one in truth.sequences]
    assert Watch(1e-9).up()
    assert not Watch(None).up()
    assert not Watch(1e9).up()


def test_a_prior_is_asked_for_by_name_and_given_to_the_algorithm(small, observe, monkeypatch):
    from fedleak.attacks.matching import gradient_matching

    model = small("bert")
    truth = observe(model, TEXTS[1:], granted=GRANTED)
    prior, loaded = LikesRising(), []
    monkeypatch.setattr(
        gradient_matching.priors, "load", lambda name, of: loaded.append((name, of)) or prior
    )
    given = []

    def algorithm(objective, recipe, prior, *_):
        given.append(prior)
        return best_of_each(objective.victim_R, objective.rows.ids_RBT, torch.zeros(1))

    method = Lamp.method
    monkeypatch.setattr(Lamp, "method", lambda self: replace(method(self), algorithm=algorithm))
    run(Lamp(prior="builtin/x", starts=1), truth.seen, model)
    run(Lamp(starts=1), truth.seen, model)
    assert given == [prior, None]
    assert loaded == [("builtin/x", model)]
    assert isinstance(Lamp().method(), Method)


@pytest.mark.parametrize("preset", ["best", "faithful"])
@pytest.mark.parametrize("kind", [*KINDS, ("llama", CAUSAL_LM)], ids="-".join)
def test_a_model_that_transformers_loaded_is_attacked_like_ours(
    small, observe, tmp_path, kind, preset
):
    ours = small(*kind, width=16)
    ours.module.save_pretrained(tmp_path)
    plain = replace(ours, module=type(ours.module).from_pretrained(tmp_path).eval())
    # Its default: fused attention, which has no second derivative.
    assert plain.module.config._attn_implementation == "sdpa"
    truth = observe(ours, ["nobody knows"], granted=GRANTED)
    attack = Lamp(preset=preset, steps=20, guesses=2)
    answer, _ = run(attack, truth.seen, plain)
    assert plain.module.config._attn_implementation == "sdpa"
    expected, _ = run(attack, truth.seen, ours)
    assert ours.module.config._attn_implementation == "eager"
    assert answer.sequences == expected.sequences
    assert answer.evidence == pytest.approx(expected.evidence, rel=1e-4, abs=1e-6)


def test_whether_it_can_work_is_said_without_a_look_at_the_prior(small, observe, tmp_path):
    model = small("bert", width=16)
    seen = observe(model, TEXTS, granted=GRANTED).seen
    attack = Lamp(prior=str(tmp_path / "gone"))
    assert attack.obstacle(AttackSetting.of(seen, model)) is None
    assert isinstance(attack, Equipped)
    for needs_it in (attack.check_equipment, lambda: run(attack, seen, model)):
        with pytest.raises(ConfigError, match=r"^prior = .*gone.* there is no such folder$"):
            needs_it()
    Lamp().check_equipment()
    Lamp(prior="builtin/gpt2-tiny").check_equipment()
