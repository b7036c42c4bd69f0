"""Reading an imprinted model, in parts against slow versions, and as a whole."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fedleak.attacks import AttackSetting, certificate, read_by
from fedleak.attacks.imprinted.attack import ImprintReader
from fedleak.attacks.imprinted.bins import Words, _nearest, read_bins
from fedleak.attacks.imprinted.checksum import Checksum, read_texts
from fedleak.attacks.imprinted.slots import _Inputs
from fedleak.attacks.imprinted.tags import Tags, without_mixtures
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.server_modes.imprint import Imprint, planted
from fedleak.detectors.parallel_rows import ParallelRows
from fedleak.detectors.rank import Rank
from fedleak.detectors.zeros import Zeros
from fedleak.models import CLASSIFICATION, ModelSpec, load_parameters_, loading
from fedleak.training.observation import UpdateKind
from fedleak.util.rng import stream

FIRST = "bert.encoder.layer.0.intermediate.dense.weight"


def imprint_(model, observe, seed=0):
    public = observe(model, 1).candidates.public
    changes = Imprint().broadcast(model, targeted=True, public=public, rng=stream(seed, "server"))
    load_parameters_(model, {**model.parameters(), **changes})
    return model


@pytest.fixture
def model(small, observe):
    return imprint_(small("bert", width=64, layers=3), observe)


def seen_of(observe, model, texts, **options):
    return observe(model, texts, max_length=8, server_mode="imprint", **options)


def ask(seen, model):
    return ImprintReader()(seen, model, rng=stream(1, "attack"))


def certified(answer):
    return (answer.sequences or ())[: answer.diagnostics.get("certified", 0)]


@pytest.fixture
def truth(model, observe, texts):
    """A batch of four, as the server sees it and as it is."""
    return seen_of(observe, model, texts[:4])


@torch.no_grad()
def words_of(model, truth, places=8):
    ids = sorted({token for sequence in truth.sequences for token in sequence})
    return Words(model.family.token_table(model.module), torch.tensor(ids), places)


@torch.no_grad()
def exactly(model, truth):
    """The words, what they make of tags, the tags and the slots of a batch, from the truth."""
    known, words = planted(model), words_of(model, truth)
    index = {token: place for place, token in enumerate(words.ids_V.tolist())}
    word_ST = torch.full((len(truth.sequences), words.places), -1)
    for text, ids in enumerate(truth.sequences):
        word_ST[text, : len(ids)] = torch.tensor([index[token] for token in ids])
    checksum = Checksum(words.whole() @ known.project_KD.T + known.shift_K, 1.0)
    rows = [[word for word in row if word >= 0] for row in word_ST.tolist()]
    tags = Tags(
        torch.stack([checksum.tag(row) for row in rows]),
        torch.full((len(rows),), 1e-6),
        torch.ones(len(rows)),
    )
    return words, checksum, tags, word_ST


# --- its parts, against slow versions ------------------------------------------------------------


@pytest.mark.core
@torch.no_grad()
def test_a_bin_is_the_sum_of_the_tokens_between_its_edges(model, truth):
    known = planted(model)
    bins = read_bins(truth.seen.update.tensors[FIRST], known)
    rows = []
    for ids in truth.sequences:
        row_TD = words_of(model, truth).table(torch.tensor(ids), torch.arange(len(ids)))
        tag_K = (row_TD @ known.project_KD.T).mean(0) + known.shift_K
        rows.append(F.layer_norm(row_TD + F.pad(tag_K, (0, 48)), (64,)))
    row_ND = torch.cat(rows)
    probed_N = row_ND @ known.probe_D
    for number, sum_D in enumerate(bins.sum_ND):
        inside_N = (probed_N >= bins.low_N[number]) & (probed_N <= bins.high_N[number])
        system_DX = row_ND[inside_N].T
        left_D = sum_D
        if inside_N.any():
            left_D = (
                sum_D - system_DX @ torch.linalg.lstsq(system_DX, sum_D[:, None]).solution[:, 0]
            )
        assert float(left_D.norm()) <= float(bins.limit_N[number]) + 1e-4 * float(sum_D.norm())
    assert len(bins.used()) >= 8


def test_noise_is_told_from_where_the_norm_leaves_nothing(model, truth):
    gradient_ND = truth.seen.update.tensors[FIRST]
    rng = torch.Generator().manual_seed(1)
    sd = float(gradient_ND.std())
    noisy_ND = gradient_ND + sd * torch.randn(gradient_ND.shape, generator=rng)
    # A bin is a difference of two rows.
    noise = float(read_bins(noisy_ND, planted(model)).noise_N.median())
    assert noise == pytest.approx(math.sqrt(2) * sd, rel=0.3)


@torch.no_grad()
def test_the_best_row_of_a_table_is_that_of_the_whole_table(model, truth):
    words, outside = words_of(model, truth), slice(16, None)
    rng = torch.Generator().manual_seed(1)
    map_LL, rest_XL = torch.randn(48, 48, generator=rng), torch.randn(50, 48, generator=rng)
    whole_VTL = words.whole()[..., outside] @ map_LL
    cosine_XVT = torch.einsum("xl,vtl->xvt", rest_XL, F.normalize(whole_VTL, dim=2)).abs()
    best_X = cosine_XVT.flatten(1).argmax(1)
    pick_X, row_XL = _nearest(words, outside, map_LL)(rest_XL)
    assert torch.equal(pick_X, best_X)
    assert torch.allclose(row_XL, whole_VTL.flatten(0, 1)[best_X], atol=1e-4)


@torch.no_grad()
def test_inputs_in_parts_are_the_inputs(model, truth):
    words, _, tags, _ = exactly(model, truth)
    known = planted(model)
    inputs = _Inputs(words, known, tags, 0.0, stream(2))
    row_VTSD = words.whole()[:, :, None] + F.pad(tags.tag_SK, (0, 48))
    row_VTSD = F.layer_norm(row_VTSD, (64,), eps=known.eps)
    assert torch.allclose(inputs.probed_VTS, row_VTSD @ known.probe_D, atol=1e-4)
    size_VTS = (row_VTSD @ inputs.white_DD).norm(dim=3)
    assert torch.allclose(inputs.per_norm_VTS * size_VTS, torch.ones_like(size_VTS), atol=1e-2)
    picked = torch.tensor([0, 5, 17])
    assert torch.allclose(inputs.rows(picked), row_VTSD.flatten(0, 2)[picked], atol=1e-4)


def test_a_mixture_of_two_tags_is_no_tag():
    rng = torch.Generator().manual_seed(1)
    tag_SK = torch.randn(20, 16, generator=rng)
    mixed_1K = 1.7 * tag_SK[3] - 0.7 * tag_SK[11]
    bins = torch.tensor([2] * 20 + [1])
    tags = Tags(torch.cat([tag_SK, mixed_1K[None]]), torch.full((21,), 1e-6), bins)
    assert without_mixtures(tags).tag_SK.equal(tag_SK)


# --- the checksum --------------------------------------------------------------------------------


@pytest.mark.core
def test_right_texts_fit_and_one_wrong_word_is_found_or_refused(model, truth):
    _, checksum, tags, word_ST = exactly(model, truth)
    for text in read_texts(word_ST, checksum, tags, None, None):
        assert text.certified
        assert text.chance < 1e-12
    # One wrong word at any place: the tag names the right one again.
    wrong_ST = word_ST.clone()
    wrong_ST[:, 2] = (word_ST[:, 2] + 1) % len(checksum.part_VTK)
    closing = int(word_ST[0, len(truth.sequences[0]) - 1])
    for text, right_T in zip(
        read_texts(wrong_ST, checksum, tags, None, closing), word_ST.tolist(), strict=True
    ):
        assert text.certified
        assert text.words == tuple(word for word in right_T if word >= 0)
    # Two wrong words, and a tag of another text.
    wrong_ST[:, 3] = (word_ST[:, 3] + 1) % len(checksum.part_VTK)
    swapped = tags._replace(tag_SK=tags.tag_SK.roll(1, 0))
    for read in (
        read_texts(wrong_ST, checksum, tags, None, closing),
        read_texts(word_ST, checksum, swapped, None, closing),
    ):
        assert not any(text.certified for text in read)


def test_missing_words_follow_from_the_tag_unless_it_is_too_coarse(model, truth):
    _, checksum, tags, word_ST = exactly(model, truth)
    gaps_ST = word_ST.clone()
    gaps_ST[:, [1, 4]] = -1
    read = read_texts(gaps_ST, checksum, tags, None, None)
    assert [text.words for text in read] == [
        tuple(word for word in row if word >= 0) for row in word_ST.tolist()
    ]
    assert all(text.certified for text in read)
    coarse = tags._replace(error_S=torch.full_like(tags.error_S, 0.3))
    for slots_ST in (gaps_ST, word_ST):  # a right text fits a coarse tag, and so do wrong ones
        assert not any(t.certified for t in read_texts(slots_ST, checksum, coarse, None, None))
    gaps_ST[:, 2] = -1
    assert not any(text.certified for text in read_texts(gaps_ST, checksum, tags, None, None))


def test_the_chance_of_a_wrong_text_is_not_understated():
    """With tags of three numbers, compared so coarsely that wrong texts do fit."""
    rng = torch.Generator().manual_seed(1)
    vocabulary, length, size = 40, 6, 3
    checksum = Checksum(torch.randn(vocabulary, length, size, generator=rng), 1.0)
    passed = expected = 0.0
    for _ in range(60):
        words = torch.randint(vocabulary, (length,), generator=rng)
        radius = 0.04
        own_K = checksum.tag(words.tolist())
        expected += checksum.chance(words.tolist(), radius)
        for changes in (1, 2, 3):
            trials = 4000
            wrong_XT = words.repeat(trials, 1)
            for _ in range(changes):
                place_X = torch.randint(length, (trials,), generator=rng)
                word_X = torch.randint(vocabulary, (trials,), generator=rng)
                wrong_XT[torch.arange(trials), place_X] = word_X
            differ_X = (wrong_XT != words).sum(1) == changes
            tag_XK = checksum.part_VTK[wrong_XT, torch.arange(length)].mean(1)
            near_X = ((tag_XK - own_K).norm(dim=1) <= radius) & differ_X
            share = int(near_X.sum()) / int(differ_X.sum())
            passed += share * math.comb(length, changes) * vocabulary**changes
    assert 0.2 * expected < passed < 1.2 * expected


def test_it_hides_from_detectors_of_weights_and_is_read_all_the_same(small, observe, texts):
    """Of a model of this size, where half of the neurons are enough for two texts."""
    model = small("bert", width=64, layers=3, intermediate_size=512)
    public = observe(model, 1).candidates.public
    before = {name: value.clone() for name, value in model.parameters().items()}
    silent = {}
    for hidden in (Imprint(), Imprint(left=1e-3, neurons=0.5)):
        changes = hidden.broadcast(model, targeted=True, public=public, rng=stream(0, "server"))
        load_parameters_(model, {**before, **changes})
        sent = {name: value.numpy() for name, value in model.parameters().items()}
        seen = SimpleNamespace(now=SimpleNamespace(parameters=sent))
        findings = [detector(seen) for detector in (Zeros(), Rank(), ParallelRows())]
        silent[hidden] = [finding.statistic <= finding.limit for finding in findings]
        truth = seen_of(observe, model, texts[:2])
        assert Counter(ask(truth.seen, model).sequences) == Counter(truth.sequences)
        load_parameters_(model, before)
    assert list(silent.values()) == [[False] * 3, [True] * 3]


# --- as a whole ----------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("kind", list(UpdateKind))
def test_a_batch_is_read_and_proved(model, observe, texts, kind):
    truth = seen_of(observe, model, texts[:4], kind=kind)
    answer = ask(truth.seen, model)
    assert Counter(answer.sequences) == Counter(truth.sequences)
    assert len(certified(answer)) == 4
    # The weights of steep neurons are so large that a delta of them is rounded away: zeros that
    # are no gradient, beside numbers that are.
    assert answer.verified
    assert certificate.proves(model, answer.sequences, truth.seen)
    assert answer.diagnostics["chance"] < 1e-12


def test_a_text_that_occurs_twice_is_counted_by_the_proof(model, observe, texts):
    truth = seen_of(observe, model, [texts[0], texts[1], texts[0]], labels=[0, 1, 2])
    answer = ask(truth.seen, model)
    assert Counter(answer.sequences) == Counter(truth.sequences)
    assert answer.verified


def test_what_it_does_not_read_changes_nothing(model, observe, texts):
    seen = seen_of(observe, model, texts[:3]).seen
    names = read_by(ImprintReader(), AttackSetting.of(seen, model))
    part = {name: seen.update.tensors[name] for name in names}
    less = ask(replace(seen, update=replace(seen.update, tensors=part)), model)
    whole = ask(seen, model)
    assert sorted(less.sequences) == sorted(whole.sequences)
    assert less.verified == whole.verified


def test_a_clipped_update_is_read_and_noise_certifies_nothing_wrong(model, observe, texts):
    truth = seen_of(observe, model, texts[:3])
    tensors = truth.seen.update.tensors
    rng = torch.Generator().manual_seed(1)
    clipped = {name: 1e-3 * value for name, value in tensors.items()}
    answer = ask(replace(truth.seen, update=replace(truth.seen.update, tensors=clipped)), model)
    assert Counter(answer.sequences) == Counter(truth.sequences)
    rms = math.sqrt(
        sum(float(value.square().sum()) for value in tensors.values())
        / sum(value.numel() for value in tensors.values())
    )
    for share in (1e-6, 1e-4, 1e-2, 1.0):
        noisy = {
            name: value + share * rms * torch.randn(value.shape, generator=rng)
            for name, value in tensors.items()
        }
        answer = ask(replace(truth.seen, update=replace(truth.seen.update, tensors=noisy)), model)
        assert set(certified(answer)) <= set(truth.sequences)
        if share == 1e-6:
            assert len(certified(answer)) == 3
        if share == 1.0:
            assert not certified(answer)


@pytest.mark.core
def test_the_update_of_another_imprint_certifies_nothing(small, model, observe, texts):
    """Other quantiles and projections than the client's."""
    other = imprint_(small("bert", width=64, layers=3), observe, seed=1)
    answer = ask(seen_of(observe, other, texts[:3]).seen, model)
    assert not certified(answer)
    assert not answer.verified


def test_a_model_that_was_not_imprinted_is_refused(small, observe, texts):
    honest = small("bert", width=64)
    seen = observe(honest, texts[:2]).seen
    obstacle = ImprintReader().obstacle(AttackSetting.of(seen, honest))
    assert "server.mode = 'imprint'" in obstacle
    answer = ask(seen, honest)
    assert answer.status == Status.ABSTAINED
    assert "not imprinted" in answer.reason


@pytest.mark.slow
def test_64_sentences_of_real_minilm_are_read_and_proved(assets, observe):
    lines = (assets / "data" / "cola" / "in_domain_train.tsv").read_text().splitlines()
    lines = [line.split("\t")[3] for line in lines]
    name = str(assets / "models" / "minilm-l6-h384")
    model = loading.load(ModelSpec(name=name, task=CLASSIFICATION, num_labels=2))
    texts = lines[100:164]
    public = observe(model, lines[2000:2400]).candidates.listed
    changes = Imprint().broadcast(model, targeted=True, public=public, rng=stream(0, "server"))
    load_parameters_(model, {**model.parameters(), **changes})
    truth = observe(model, texts, server_mode="imprint")
    answer = ask(truth.seen, model)
    assert set(certified(answer)) <= set(truth.sequences)
    assert len(set(certified(answer))) >= 60
