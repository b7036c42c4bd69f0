"""Guesses: what is optimised, what it means, and how far it is off."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import functional as F

from fedleak.attacks.matching import bucketing
from fedleak.attacks.matching.batch_structure import Shape, frame
from fedleak.attacks.matching.gradient_matching import GradientMatching, Method
from fedleak.attacks.matching.guesses import FreeEmbeddings, Mixtures, lower_precision, rows_of
from fedleak.attacks.matching.optimizer import Recipe, best_of_each, constant
from fedleak.models import CAUSAL_LM, CLASSIFICATION, batch_loss
from fedleak.rng import stream
from fedleak.training.wire import partial_update

KINDS = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("gpt2", CAUSAL_LM),
    ("llama", CAUSAL_LM),
]
TEXTS = ("she told us that it is over", "nobody knows it", "he pays us")
GRANTED = ("labels", "lengths")
SPACES = ["mixtures", "free"]


def inside(check, seen, model, *, space="mixtures", loss="cos", **options):
    """Runs a check in place of an algorithm, on the objective that an attack would have."""
    ran = []
    # A key's bias has no gradient but noise, which the authors' loss counts like any other.
    null = {name for one in seen for name in model.family.null_parameters(one.update.tensors)}
    seen = [
        replace(one, update=partial_update(one.update, sorted(one.update.tensors.keys() - null)))
        for one in seen
    ]

    def algorithm(objective, recipe, prior, rng, watch):
        ran.append(check(objective))
        zero_R = torch.zeros(len(rng))
        return best_of_each(objective.victim_R, objective.rows.ids_RBT, zero_R)

    @dataclass(frozen=True)
    class Attack(GradientMatching):
        def method(self):
            recipe = Recipe(1, 0.1, constant)
            return Method(algorithm, recipe, recipe, loss, False)

    preset = "faithful" if space == "free" else "best"
    attack = Attack(**{"preset": preset, "starts": 1, **options})
    rngs = [stream(0, "attack", i) for i in range(len(seen))]
    with pytest.MonkeyPatch.context() as patch:
        # Padding costs less than another pass, however much there is: all victims together.
        patch.setattr(bucketing, "PASS", {"cpu": 10**9})
        attack.many(seen, model, rngs=rngs, report=lambda *_: None)
    assert len(ran) == 1


def truth_ids(truth, objective, r=0):
    """The true tokens [1, B, T], padded as the rows are."""
    ids_BT = objective.rows.ids_RBT[r].clone()
    for b, one in enumerate(truth.sequences):
        ids_BT[b, : len(one)] = torch.tensor(one)
    return ids_BT[None]


def random_leaf(objective, guesses=None):
    """Numbers of unit variance, so that no mixture is sure of anything."""
    space = objective.space
    each = len(space.table_VD[0]) if isinstance(space, FreeEmbeddings) else space.ids_RM.shape[1]
    shape = (*objective.rows.mask_RBT.shape, each)
    shape = shape if guesses is None else (shape[0], guesses, *shape[1:])
    return torch.randn(shape, generator=stream(3, "leaf"))


@pytest.fixture(params=KINDS, ids="-".join)
def model(request, small):
    return small(*request.param)


@pytest.fixture(params=SPACES)
def space(request):
    return request.param


# --- rows -------------------------------------------------------------------------------------


def test_rows_hold_what_is_known_of_each_shape(model):
    around = frame(model)
    longest, short = len(around.first + around.last) + 4, len(around.first + around.last) + 1
    labels = (2, 1) if model.task == CLASSIFICATION else ()
    rows = rows_of([Shape((longest, short), labels), Shape((short,), labels[:1])], around, model)
    padding = model.tokenizer.pad_token_id
    for r, lengths in enumerate([(longest, short), (short,)]):
        assert [len(one) for one in rows.sequences(r, rows.ids_RBT[r])] == list(lengths)
        targets = sum(length - 1 for length in lengths)
        for b, length in enumerate(lengths):
            content = range(len(around.first), length - len(around.last))
            assert rows.content(r, b) == list(content)
            expected = [0] * length + [padding] * (longest - length)
            expected[: len(around.first)] = around.first
            expected[content.stop : length] = around.last
            assert rows.ids_RBT[r, b].tolist() == expected
            assert rows.mask_RBT[r, b].tolist() == [1] * length + [0] * (longest - length)
            assert float(rows.weights_RB[r, b]) == pytest.approx(
                1 / (len(lengths) if model.task == CLASSIFICATION else targets)
            )
    assert rows.labels_RB[:, 0].tolist() == list((labels or (0,))[:1]) * 2
    # What fills up the smaller batch counts for nothing.
    assert rows.content(1, 1) == []
    assert float(rows.weights_RB[1, 1]) == 0


# --- spaces -----------------------------------------------------------------------------------


def test_what_begins_with_tokens_is_read_as_these_tokens(model, observe, space):
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective):
        assert isinstance(objective.space, Mixtures if space == "mixtures" else FreeEmbeddings)
        ids_RBT = truth_ids(truth, objective)
        assert not torch.equal(objective.read(random_leaf(objective)), ids_RBT)
        flat = (
            replace(objective.space, hint_RTM=0 * objective.space.hint_RTM)
            if (space == "mixtures")
            else objective.space
        )
        assert torch.equal(
            flat.read(objective.rows, flat.leaf(objective.rows, ids_RBT)[:, None])[:, 0], ids_RBT
        )

    inside(check, [truth.seen], model, space=space)


def test_known_tokens_and_padding_stay_and_have_no_slope(model, observe, space):
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective):
        rows, table_VD = objective.rows, objective.space.table_VD
        leaf_RBTF = random_leaf(objective).requires_grad_()
        (slope,) = torch.autograd.grad(objective.loss(leaf_RBTF).sum(), leaf_RBTF)
        assert not slope[rows.fixed_RBT].any()
        assert slope[~rows.fixed_RBT].any(-1).all()
        guess = objective.space.guess(rows, leaf_RBTF[:, None])
        x_RBTD, ids_RBT = guess.x_RKBTD[:, 0], objective.read(leaf_RBTF.detach())
        assert torch.equal(x_RBTD[rows.fixed_RBT], table_VD[rows.ids_RBT][rows.fixed_RBT])
        assert torch.equal(ids_RBT[rows.fixed_RBT], rows.ids_RBT[rows.fixed_RBT])
        assert rows.fixed_RBT[rows.mask_RBT == 0].all()
        expected = truth_ids(truth, objective)
        assert torch.equal(expected[rows.fixed_RBT], rows.ids_RBT[rows.fixed_RBT])

    inside(check, [truth.seen], model, space=space)


def test_a_guess_that_is_sure_of_tokens_is_as_far_as_the_tokens_are(model, observe, space):
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective):
        ids_RBT = truth_ids(truth, objective)
        for tokens in (ids_RBT, objective.read(random_leaf(objective))):
            exact = objective.space.exact(objective.rows, tokens[:, None])
            assert torch.equal(exact.x_RKBTD, objective.space.table_VD[tokens[:, None]])
            leaf = objective.space.leaf(objective.rows, tokens)
            if space == "mixtures":
                same = tokens[..., None] == objective.space.ids_RM[:, None, None]
                leaf = 200.0 * same
                assert (
                    exact.mixture_RKBTM.sum(-1)[:, 0].tolist()
                    == (~objective.rows.fixed_RBT).float().tolist()
                )
            found = objective.loss(leaf.clone().requires_grad_()).detach()
            torch.testing.assert_close(found, objective.scores(exact)[:, 0], atol=1e-6, rtol=1e-5)
        right = objective.scores(objective.space.exact(objective.rows, ids_RBT[:, None]))
        assert right.abs().max() < 1e-6 or space == "free"
        assert right.item() < 0.1 * found.item()

    inside(check, [truth.seen], model, space=space)


def test_a_mixture_is_read_with_every_token_of_the_bag(model, observe):
    truth = observe(model, TEXTS[:2], granted=GRANTED)

    def check(objective):
        bag = set(objective.space.ids_RM[0].tolist())
        content = {t for one in truth.sequences for t in one} - model.special_ids()
        assert bag == content
        leaf_RKBTM = random_leaf(objective, 20)
        leaf_RKBTM[:, :10] = leaf_RKBTM[:, :10, ..., :1] * 100  # all want one token
        read = objective.space.read(objective.rows, leaf_RKBTM)[0]
        likeliest = objective.space.ids_RM[0][leaf_RKBTM[0].argmax(-1)]
        free = ~objective.rows.fixed_RBT[0]
        for k in range(20):
            assert set(read[k][free].tolist()) == bag
            # A place that was not needed for another has its own favourite.
            changed = (read[k] != likeliest[k]) & free
            assert int(changed.sum()) <= len(bag)

    inside(check, [truth.seen], model)


def test_with_more_tokens_than_places_every_place_has_its_own(small, observe):
    model = small("bert")
    truth = observe(model, TEXTS[1:2], granted=GRANTED)

    def check(objective):
        many = torch.arange(100, 120)[None]
        hint = torch.zeros(1, objective.rows.mask_RBT.shape[2], 20)
        bigger = replace(objective.space, ids_RM=many, there_RM=many > 0, hint_RTM=hint)
        leaf = torch.randn(1, 5, *objective.rows.mask_RBT.shape[1:], 20, generator=stream(0, "x"))
        for ids_BT in bigger.read(objective.rows, leaf)[0]:
            tokens = ids_BT[~objective.rows.fixed_RBT[0]].tolist()
            assert len(set(tokens)) == len(tokens)
            assert set(tokens) <= set(range(100, 120))

    inside(check, [truth.seen], model)


def test_the_nearest_token_is_that_of_the_largest_cosine_that_is_allowed(small, observe):
    model = small("bert")
    truth = observe(model, 1, granted=GRANTED)

    def check(objective):
        space, rows = objective.space, objective.rows
        allowed = space.allowed_V[::7]
        leaf = random_leaf(objective, 2)
        found = replace(space, allowed_V=allowed).read(rows, leaf)
        for k in range(2):
            for t in rows.content(0, 0):
                x_D = leaf[0, k, 0, t]
                apart = F.cosine_similarity(space.table_VD[allowed], x_D[None])
                assert found[0, k, 0, t] == allowed[apart.argmax()]

    inside(check, [truth.seen], model, space="free")


# --- objectives -------------------------------------------------------------------------------


def naive_loss(model, objective, leaf_BTF, observed):
    """The mean of 1 - cosine over tensors, tables counting more, of gradients autograd forms."""
    space, rows, family = objective.space, objective.rows, model.family
    own = dict(model.module.named_parameters())
    fixed_BT1 = rows.fixed_RBT[0, ..., None]
    ids_M = space.ids_RM[0]
    table_MD = space.table_VD[ids_M].clone().requires_grad_()
    share_BTM = leaf_BTF.softmax(-1)
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
        each = -(target_BTV[:, 1:] * logits[:, :-1].log_softmax(-1)).sum(-1) * mask_BT[:, 1:]
        loss = each.sum() / mask_BT[:, 1:].sum()
    wanted = [table_MD if name == family.word_embedding else own[name] for name in observed]
    found = torch.autograd.grad(loss, wanted, create_graph=True)
    # Each table counts as a third of all tensors.
    tables = (family.word_embedding, family.position_embedding, family.token_type_embedding)
    weights = [len(observed) / 3 if name in tables else 1.0 for name in observed]
    terms = [
        weight * (1 - F.cosine_similarity(g.flatten(), o.flatten(), dim=0, eps=0))
        for weight, g, o in zip(weights, found, observed.values(), strict=True)
    ]
    return sum(terms) / sum(weights)


def test_the_loss_of_a_mixture_is_that_of_formed_gradients(model, observe):
    truth = observe(model, TEXTS, granted=GRANTED)
    family = model.family
    apart = replace(model, module=copy.deepcopy(model.module))  # with parameters to differentiate

    def check(objective):
        names = objective.target.names
        left = set(truth.seen.update.tensors) - set(names)
        assert left <= {*family.null_parameters(left), family.word_embedding}
        assert (family.word_embedding in names) != model.tied
        observed = {name: truth.seen.update.tensors[name] for name in names}
        if family.word_embedding in names:
            rows_MD = observed[family.word_embedding][objective.space.ids_RM[0]]
            observed[family.word_embedding] = rows_MD
        leaf = random_leaf(objective).requires_grad_()
        found = objective.loss(leaf)
        expected = naive_loss(apart, objective, leaf[0], observed)
        torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=0)
        (slope,) = torch.autograd.grad(found.sum(), leaf)
        (expected_slope,) = torch.autograd.grad(expected, leaf)
        size = expected_slope.norm()
        assert float((slope - expected_slope).norm() / size) < 1e-4
        assert torch.allclose(
            objective.scores(objective.space.guess(objective.rows, leaf[:, None]))[:, 0], found
        )

    inside(check, [truth.seen], model)


@pytest.mark.parametrize("loss", ["cos", "l2", "l2l1"])
def test_at_the_truth_the_distance_is_zero_and_at_zero_gradients_one(model, observe, loss):
    truth = observe(model, TEXTS[:2], granted=GRANTED)

    def check(objective):
        ids_RBT = truth_ids(truth, objective)
        right = objective.scores(objective.space.exact(objective.rows, ids_RBT[:, None]))
        assert right.abs().item() < 1e-4
        first, last = ids_RBT.clone(), objective.rows.content(0, 0)
        first[0, 0, last[:2]] = ids_RBT[0, 0, last[:2]].flip(0)
        wrong = objective.scores(objective.space.exact(objective.rows, first[:, None]))
        assert wrong.item() > 100 * abs(right.item())

    inside(check, [truth.seen], model, loss=loss)


def test_a_changed_sequence_is_scored_as_the_whole_batch_with_it(model, observe, space):
    truths = [
        observe(model, TEXTS, granted=GRANTED),
        observe(model, TEXTS[::-1], [2, 2, 1], granted=GRANTED),
    ]

    def check(objective):
        rows, space = objective.rows, objective.space
        now = space.guess(rows, random_leaf(objective)[:, None])
        tried = random_leaf(objective, 4)
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
            found = objective.scores_of_sequence(guess, b, others)
            torch.testing.assert_close(found, torch.cat(expected, 1), atol=2e-6, rtol=1e-5)
            assert found.std(1).min() > 1e-4

    inside(check, [one.seen for one in truths], model, space=space)


def test_a_single_sequence_has_no_others(small, observe):
    model = small("bert")
    truth = observe(model, 1, granted=GRANTED)

    def check(objective):
        guess = objective.space.guess(objective.rows, random_leaf(objective, 3))
        assert objective.other_sequences(guess, 0) is None
        found = objective.scores_of_sequence(guess, 0, None)
        torch.testing.assert_close(found, objective.scores(guess))

    inside(check, [truth.seen], model)


@pytest.mark.parametrize("loss", ["cos", "l2l1"])
def test_a_smaller_and_shorter_batch_is_judged_as_if_it_were_alone(model, observe, space, loss):
    short = observe(model, TEXTS[2:], granted=GRANTED)
    long = observe(model, TEXTS[:2], granted=GRANTED)
    kept = {}

    def alone(objective):
        leaf = random_leaf(objective).requires_grad_()
        distance = objective.loss(leaf)
        (slope,) = torch.autograd.grad(distance.sum(), leaf)
        gap = objective.norm_gap(leaf.detach())
        kept["alone"] = leaf.detach(), distance.detach(), slope, gap

    def beside(objective):
        assert objective.rows.mask_RBT.shape[1] == 2
        leaf_BTF, distance, slope_BTF, gap = kept["alone"]
        _, length, size = leaf_BTF[0].shape
        leaf = 3 * random_leaf(objective)
        assert not torch.equal(leaf[0, 0, :length, :size], leaf_BTF[0])
        leaf[0, 0, :length, :size] = leaf_BTF[0, 0]
        leaf.requires_grad_()
        found = objective.loss(leaf)
        torch.testing.assert_close(found[0], distance[0], atol=2e-6, rtol=1e-5)
        (slope,) = torch.autograd.grad(found.sum(), leaf)
        assert (
            float((slope[0, 0, :length, :size] - slope_BTF[0, 0]).norm() / slope_BTF.norm()) < 1e-4
        )
        assert not slope[0, 1].any()
        assert not slope[0, 0, length:].any()
        assert not slope[0, 0, :, size:].any()
        assert slope[1, 1].any()
        torch.testing.assert_close(objective.norm_gap(leaf.detach())[0], gap[0])

    inside(alone, [short.seen], model, space=space, loss=loss)
    inside(beside, [short.seen, long.seen], model, space=space, loss=loss)


def test_some_of_the_rows_are_judged_as_all_of_them_are(model, observe):
    truths = [observe(model, TEXTS[i:], granted=GRANTED) for i in range(3)]

    def check(objective):
        leaf = random_leaf(objective).requires_grad_()
        chosen = torch.tensor([2, 0])
        taken = objective.take(chosen)
        torch.testing.assert_close(
            taken.loss(leaf[chosen]), objective.loss(leaf)[chosen], atol=2e-6, rtol=1e-5
        )
        assert taken.victim_R.tolist() == [2, 0]
        leaf = leaf.detach()
        assert torch.equal(taken.read(leaf[chosen]), objective.read(leaf)[chosen])

    inside(check, [one.seen for one in truths], model)


def test_the_norm_that_is_aimed_at_is_the_mean_of_the_table(small, observe):
    model = small("bert")
    truth = observe(model, TEXTS[:2], granted=GRANTED)

    def check(objective):
        leaf = random_leaf(objective)
        norms = []
        for b, one in enumerate(truth.sequences):
            for t in range(len(one)):
                known = objective.rows.fixed_RBT[0, b, t]
                x_D = objective.space.table_VD[one[t]] if known else leaf[0, b, t]
                norms.append(x_D.norm())
        expected = (torch.stack(norms).mean() - objective.space.table_VD.norm(dim=1).mean()) ** 2
        torch.testing.assert_close(objective.norm_gap(leaf)[0], expected)

    inside(check, [truth.seen], model, space="free")


def test_starts_are_random_and_scaled_ones_have_the_length_asked_for(small, observe):
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

    inside(check, [truth.seen], model, space="free")


@pytest.mark.parametrize("guesses", [1, 7, 100])
def test_all_guesses_are_scored_once_and_in_order(small, observe, guesses):
    model = small("bert")
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective):
        seen = [k for chunk in objective.chunks(guesses, 3) for k in range(guesses)[chunk]]
        assert seen == list(range(guesses))
        assert [c.stop - c.start for c in objective.chunks(2, 10**9)] == [1, 1]

    inside(check, [truth.seen], model)


@pytest.mark.parametrize("loss", ["cos", "l2", "l2l1"])
def test_lower_precision_ranks_alike_and_leaves_the_model_alone(small, observe, loss):
    model = small("bert", width=64)
    truth = observe(model, TEXTS[:2], granted=GRANTED)

    def check(objective):
        guess = objective.space.guess(objective.rows, random_leaf(objective, 6))
        fine, rough = objective.scores(guess), objective.rough.scores(guess)
        assert rough.dtype == torch.float32
        assert (rough - fine).abs().max() < 0.1 * fine.abs().max()
        assert not torch.equal(rough, fine)
        assert {p.dtype for p in objective.rough.model.module.parameters()} == {torch.bfloat16}

    inside(check, [truth.seen], model, loss=loss, precision="mixed")
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}
    assert {p.dtype for p in lower_precision(model).module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("loss", ["cos", "l2", "l2l1"])
def test_in_lower_precision_distances_are_still_summed_in_float32(small, observe, loss):
    model = small("bert", width=64)
    truth = observe(model, TEXTS[:2], granted=GRANTED)

    def check(objective):
        guess = objective.space.guess(objective.rows, random_leaf(objective, 1))
        judge = objective.rough
        gradients = judge._gradients(guess, judge.rows, differentiable=False)
        # One matrix alone: a sum over tensors would hide what each was rounded to.
        name = next(n for n in judge.target.names if n.endswith("query.weight"))
        target = type(judge.target)(
            {name: judge.target.tensors[name]}, {name: judge.target.norms[name]}
        )
        apart = judge.distance({name: gradients[name]}, target)
        assert not torch.equal(apart, apart.bfloat16().float())

    inside(check, [truth.seen], model, loss=loss, precision="mixed")


def test_objectives_are_of_the_client_s_own_loss(model, observe):
    """The weights of sequences and targets are those of the mean that clients train on."""
    truth = observe(model, TEXTS, granted=GRANTED)
    apart = replace(model, module=copy.deepcopy(model.module))

    def check(objective):
        ids_RBT = truth_ids(truth, objective)
        rows = objective.rows
        own = dict(apart.module.named_parameters())
        found = objective._gradients(
            objective.space.exact(rows, ids_RBT[:, None]), rows, differentiable=False
        )
        loss = batch_loss(apart, ids_RBT[0], rows.mask_RBT[0], rows.labels_RB[0])
        biases = [name for name in objective.target.names if own[name].dim() == 1]
        expected = torch.autograd.grad(loss, [own[name] for name in biases])
        for name, one in zip(biases, expected, strict=True):
            torch.testing.assert_close(found[name][0, 0], one, atol=1e-6, rtol=1e-4)

    inside(check, [truth.seen], model)
