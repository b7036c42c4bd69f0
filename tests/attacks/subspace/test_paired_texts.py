from dataclasses import replace

import pytest
import torch

from fedleak.attacks import certificate
from fedleak.attacks.clock import UNLIMITED
from fedleak.attacks.subspace import keyspan
from fedleak.attacks.subspace.atoms import make_atoms
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.attacks.subspace.paired_texts import read_pairs
from fedleak.attacks.subspace.pooled_span import PooledSpan, completed_directions
from fedleak.defenses.mask import Mask
from fedleak.defenses.prune import Prune
from fedleak.models import CLASSIFICATION
from fedleak.util.rng import stream

WIDE = {"width": 96, "layers": 3}
TEXTS = ["the cat sat on the mat", "a dog ran after it"]


def sent(seen, defense):
    return replace(seen, update=defense(seen.update, rng=stream(0, "sent")))


@pytest.mark.parametrize("kept", [0.3, 0.6])
def test_directions_of_a_part_are_those_of_the_whole(kept):
    """Beside the singular vectors of the whole matrix."""
    rng = stream(0, "matrix")
    whole = torch.randn(120, 3, generator=rng) @ torch.randn(3, 90, generator=rng)
    part = whole * (torch.rand(whole.shape, generator=rng) < kept)
    directions = completed_directions(part, 3)
    right = torch.linalg.svd(whole).Vh[:3]
    assert directions.told_X.all()
    assert (right - right @ directions.vector_RX.T @ directions.vector_RX).abs().max() < 1e-4
    # One text more than there are leaves a matrix that the part does not tell.
    assert (
        completed_directions(part + 0.01 * (part != 0) * torch.randn(part.shape, generator=rng), 3)
        is None
    )
    assert completed_directions(whole * (torch.rand(whole.shape, generator=rng) < 0.02), 3) is None


def test_columns_that_did_not_come_are_not_told():
    rng = stream(0, "matrix")
    whole = torch.randn(120, 2, generator=rng) @ torch.randn(2, 90, generator=rng)
    whole[:, 7] = 0
    whole[::2, 8] = 0
    directions = completed_directions(whole, 2)
    assert directions.told_X.tolist() == [float(column != 7) for column in range(90)]
    assert not directions.vector_RX[:, 7].any()


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_texts_are_read_from_their_pairs_and_what_reaches_the_loss(small, observe, family):
    model = small(family, CLASSIFICATION, **WIDE)
    truth = observe(model, TEXTS, [0, 1])
    gradients = certificate.as_gradient(truth.seen)
    names = model.family.attention_parameters(0)
    first = {name: gradients[name] for name in names}
    with torch.no_grad():
        atoms = make_atoms(model, first, first, among_N=None, rng=stream(0, "atoms"))
    part = certificate.as_gradient(sent(truth.seen, Mask(fraction=0.5)))
    span = PooledSpan(model, part, 1.0, 2)
    assert span
    reports = []
    texts = read_pairs(
        atoms, span, 2, stream(0, "starts"), UNLIMITED, lambda *step: reports.append(step)
    )
    assert sorted(text.ids for text in texts) == sorted(truth.sequences)
    assert [step for step, _, _ in reports] == [1, 2]
    # Of another batch the span holds none of these texts.
    other = observe(model, ["he pays for all of his friends", "nobody saw it"], [0, 1])
    strange = PooledSpan(
        model, certificate.as_gradient(sent(other.seen, Mask(fraction=0.5))), 1.0, 2
    )
    assert strange
    assert not read_pairs(atoms, strange, 2, stream(0, "starts"), UNLIMITED, lambda *_: None)


def test_where_pruning_hides_queries_the_last_block_groups_words(small, observe, monkeypatch):
    model = small("bert", **WIDE)
    truth = observe(model, TEXTS, [0, 1])
    seen = sent(truth.seen, Prune(fraction=0.85))
    tensors = {**seen.update.tensors}
    query, key, _ = model.family.attention_parameters(0)
    for name in (query, key):
        tensors[name] = torch.zeros_like(tensors[name])  # as if they were smaller than all the rest
    seen = replace(seen, update=replace(seen.update, tensors=tensors))
    answer = Keyspan()(seen, model, rng=stream(0, "keyspan"))
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert answer.verified
    monkeypatch.setattr(keyspan, "read_pairs", lambda *_: [])
    assert not Keyspan()(seen, model, rng=stream(0, "keyspan")).verified
