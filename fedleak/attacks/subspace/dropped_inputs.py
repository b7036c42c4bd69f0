"""Batches with dropout: the first layer's inputs as dropout left them, and which make up a text.

An encoder drops numbers of its first attention inputs: that of word v at place p is
`m * x_vp / (1 - rate)`, with a mask m of zeros and ones that each token draws anew. With fewer
tokens than dimensions the gradients' row space is the span of these inputs, S. So for a word at a
place of the batch there is an s in S that equals x_vp but for some numbers, and is zero there. A
regression of x_vp on S with least absolute deviations finds it, because it is exact but for a tenth
of gross errors (Candes and Tao, "Decoding by linear programming", 2005). `Span.excess` of m * x_vp
tells whether there is one at all: S has hundreds of equations for a mask. The same word at the same
place of several texts has as many masks: the cheapest is found first, and another one if deviations
cost more at the numbers that the first lost. All inputs are known as soon as they are as many as S
has dimensions.

From here on nothing is blurred. Least squares gives the gradient at each token's query and key,
and they lie in the spans of its text's keys and queries (`keyspan`), whatever dropout does to the
attention's probabilities. An input belongs to one text, so the inputs of a text that was read are
taken out of the dictionary. The masks of later layers stay unknown, so that no gradient is
recomputed, and nothing is proved. The batch is `determined` if its texts use all inputs, each once,
and the gradients at all words lie in the spans of their own texts.

Shapes: N inputs, C words at places, D hidden size, R rank, K known masks, A atoms, M members of a
text.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.certificate import NOTHING_PROVED
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import tokens_of
from fedleak.attacks.subspace.answer import OnJudged, Reading, recovered
from fedleak.attacks.subspace.atoms import Atoms, atoms_of
from fedleak.attacks.subspace.beam_search import Spanned, read_seeds
from fedleak.attacks.subspace.span import ACCEPT, Span, row_space
from fedleak.attacks.subspace.token_bag import TokenBag
from fedleak.models import LanguageModel

_AT_ONCE = 32
"""Words at places that are tried side by side."""

_STEPS = 14
"""Steps of reweighted least squares, which make one of least absolute deviations."""

_NO_DEVIATION = (0.3, 0.55, 1e-4)
"""The deviation that counts as none, as a share of an input's root mean square: in the first step,
its factor from step to step, and the least."""

_LEVERAGE = 0.5
"""Numbers that decide more than this of their own fit do not count. A BERT has one or two such
numbers, which are large in all inputs."""

_SURE = (0.1, 0.05)
"""A number is surely kept if it deviates by less than this share of itself, and is no smaller than
this share of the root mean square."""

_MOST = 1 / 3
"""Share of the dimensions that inputs may span: beyond it too few equations are left for a mask."""

_TURNS = 16
"""Times that more masks of words at places are sought, each with other costs of deviations."""

_DEARER = 4.0
"""How much more a deviation costs at a number that a known mask of the word at the place lost."""

_OVERSHOOT = 10.0
"""How much more a deviation costs that dropout cannot make: dropout only takes numbers away."""

_OTHERS = 1e-9
"""Weight of numbers that are not surely kept, so that enough are left to solve for."""


class Inputs(NamedTuple):
    """First attention inputs as dropout left them.

    Attributes:
        ids_N, place_N: Their words and places.
        x_ND: The inputs.
    """

    ids_N: Tensor
    place_N: Tensor
    x_ND: Tensor


_REASONS = {
    True: "not recomputed: texts that use all inputs of the first layer as dropout left them, each "
    "once, and whose spans hold the gradients at all words",
    False: "nothing determined: texts whose spans hold the gradients at a word, with dropout",
}


def read_dropped(
    model: LanguageModel,
    observed: Mapping[str, Tensor],
    size: int,
    width: int,
    clock: Clock,
    tell: OnJudged,
) -> Reading | None:
    """Returns what is read from a batch, whose gradient cannot be recomputed.

    None if not all inputs, or no text, are found.

    Args:
        model: At the broadcast weights.
        observed: The gradient by parameter name; it takes both embeddings and the first attention.
        size: Texts of the batch.
        width: Of the beam.
        clock: Ends the search.
        tell: Called with the number of inputs in texts, the number of all inputs, and each text.
    """
    family = model.family
    words_VD = observed.get(family.word_embedding)
    places_PD = observed.get(family.position_embedding or "")
    gradients = {n: observed[n] for n in family.attention_parameters(0) if n in observed}
    dropout = family.token_table(model.module).dropout
    if not dropout or words_VD is None or places_PD is None or not places_PD.any():
        return None
    span = row_space([*gradients.values()])
    if span is None or not span.exact or span.rank > _MOST * span.width:
        return None
    used_V, places = words_VD.any(1).nonzero()[:, 0], int(places_PD.any(1).nonzero()[-1]) + 1
    inputs = find_inputs(model, used_V, places, span, size, clock)
    if len(inputs.ids_N) < span.rank:
        return None
    texts, whole = group(make_dropped(model, gradients, inputs, span), width, clock, tell)
    if not texts:
        return None
    tokens, determined = tokens_of([inputs.ids_N.tolist()]), whole and len(texts) == size
    answer = recovered(
        texts,
        NOTHING_PROVED,
        tokens=tokens,
        diagnostics={
            "rank": span.rank,
            "budget": [span.rank, model.hidden_size],
            "candidates": {"tokens": len(tokens), "pairs": span.rank, "spanned": len(texts)},
            "determined": determined,
            **clock.late(),
        },
        reason=_REASONS[determined],
    )
    return Reading.of(answer, tokens=tokens, settled=determined)


def find_inputs(
    model: LanguageModel, words_V: Tensor, places: int, span: Span, size: int, clock: Clock
) -> Inputs:
    """Returns the dropped inputs in a span, at most as many as it has dimensions.

    Args:
        model: At the broadcast weights.
        words_V: Words that may be in the batch.
        places: The number of places in the longest text.
        span: Of the gradients of the first attention.
        size: Texts of the batch: no word is at a place more often.
        clock: Ends the search.
    """
    table = model.family.token_table(model.module)
    place_P = torch.arange(places, device=words_V.device)
    ids_C, place_C = torch.cartesian_prod(words_V, place_P).T
    first_C = (ids_C == model.tokenizer.cls_token_id) == (place_C == 0)
    ids_C, place_C = ids_C[first_C], place_C[first_C]
    x_CD = table(ids_C, place_C).double()
    masks: dict[int, list[Tensor]] = defaultdict(list)
    waiting = span.excess(x_CD).argsort().tolist()
    for turn in range(_TURNS):
        for some in clock.paced(_parts(waiting)):
            cost_XD = torch.stack([_cost(x_CD[i], masks[i], turn) for i in some])
            kept_XD, inside_X = kept(x_CD[some], span, cost_XD)
            for x in inside_X.nonzero()[:, 0].tolist():
                known = masks[some[x]]
                if len(known) < size and not any(torch.equal(kept_XD[x], m_D) for m_D in known):
                    known.append(kept_XD[x])
            if sum(map(len, masks.values())) == span.rank:
                break
        if sum(map(len, masks.values())) == span.rank:
            break
        # A word that is at a place of one text may be there in another one.
        waiting = sorted((i for i in masks if masks[i]), key=lambda i: -len(masks[i]))
    index = [i for i, known in masks.items() for _ in known]
    if not index:
        return Inputs(ids_C[:0], place_C[:0], x_CD[:0])
    kept_ND = torch.stack([mask_D for known in masks.values() for mask_D in known])
    x_ND = x_CD[index] * kept_ND / (1 - table.dropout)
    return Inputs(ids_C[index], place_C[index], x_ND)


def kept(x_CD: Tensor, span: Span, cost_CD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which numbers [C, D] of inputs dropout kept, and whether [C] the span holds them.

    Args:
        x_CD: Inputs before dropout.
        span: Of inputs after dropout.
        cost_CD: The cost of a deviation at each number.
    """
    basis_DR = span.basis_DR
    product_DX = (basis_DR[:, :, None] * basis_DR[:, None]).flatten(1)
    fair_D = (basis_DR.square().sum(1) < _LEVERAGE).double()
    first, shrinks, last = _NO_DEVIATION
    scale_C1 = x_CD.square().mean(1, keepdim=True).sqrt()

    def deviations(weight_CD: Tensor) -> Tensor:
        system_CRR = (weight_CD @ product_DX).view(-1, span.rank, span.rank)
        # If a system is singular, its solution is wrong, and the span has no such input.
        inside_CR, _ = torch.linalg.solve_ex(system_CRR, (weight_CD * x_CD) @ basis_DR)
        rest_CD: Tensor = x_CD - inside_CR @ basis_DR.T
        return rest_CD

    prior_CD = fair_D * cost_CD
    weight_CD = prior_CD
    for step in range(_STEPS):
        rest_CD = deviations(weight_CD)
        nothing_C1 = max(first * shrinks**step, last) * scale_C1
        weight_CD = prior_CD / (rest_CD.square() + nothing_C1.square()).sqrt()
        weight_CD = weight_CD.where(rest_CD * x_CD > 0, _OVERSHOOT * weight_CD)
    deviation, size = _SURE
    for _ in range(2):
        sure_CD = (rest_CD.abs() < deviation * x_CD.abs()) & (x_CD.abs() > size * scale_C1)
        rest_CD = deviations(fair_D * (sure_CD + _OTHERS))
    kept_CD = (rest_CD.abs() < 0.5 * x_CD.abs()).double()
    return kept_CD, span.excess(x_CD * kept_CD) < ACCEPT


def _cost(x_D: Tensor, masks: Sequence[Tensor], turn: int) -> Tensor:
    """Returns the cost [D] of deviations: more where a known mask lost a number, and random."""
    lost_D = 1 - torch.stack([torch.ones_like(x_D), *masks]).amin(0)
    chance_D = torch.randn(len(x_D), generator=torch.Generator().manual_seed(turn))
    return (1 + _DEARER * lost_D) * (chance_D.exp().to(x_D) if turn else 1)


def _parts(index: Sequence[int]) -> list[Sequence[int]]:
    """Returns the parts of an index that are tried side by side."""
    return [index[i : i + _AT_ONCE] for i in range(0, len(index), _AT_ONCE)]


def make_dropped(
    model: LanguageModel, gradients: Mapping[str, Tensor], inputs: Inputs, span: Span
) -> Atoms:
    """Returns the dictionary of a batch's inputs: each counts as its own token, at one place.

    Args:
        model: At the broadcast weights.
        gradients: Of the first layer's attention, by parameter name.
        inputs: As dropout left them.
        span: Of the gradients.
    """
    bag = TokenBag(
        tokens_N=inputs.ids_N,
        positions=int(inputs.place_N.max()) + 1,
        basis_MD=inputs.x_ND,
    )
    every_A = torch.arange(len(inputs.ids_N), device=inputs.ids_N.device)
    x_AD = inputs.x_ND.to(model.family.token_table(model.module).token_VD.dtype)
    atoms = atoms_of(model, gradients, bag, span, every_A, inputs.place_N, x_AD)
    # Each text has an input of its own that begins it: the search finds which one.
    return replace(atoms, first=None)


def group(atoms: Atoms, width: int, clock: Clock, tell: OnJudged) -> tuple[list[Spanned], bool]:
    """Returns texts, and whether all atoms are in texts that all words' gradients agree with.

    Args:
        atoms: One for each input.
        width: Of the beam.
        clock: Ends the search.
        tell: Called with the number of atoms in texts, the number of all atoms, and each text.
    """
    marks_N = (atoms.position_A == 0) | (atoms.token_A == atoms.last)
    texts, agree = [], True
    free_N = torch.ones_like(marks_N)
    for seed in clock.paced(atoms.clearest()):
        if marks_N[seed] or not free_N[seed]:
            continue
        index_A = free_N.nonzero()[:, 0]
        text = next(read_seeds(_only(atoms, index_A), [seed], width, clock), None)
        if text is not None and text.passed:
            members_M = index_A[text.members_M]
            texts.append(text)
            free_N[members_M] = False
            words = [at for at in members_M if not marks_N[at]]
            agree &= all(atoms.excess(int(at), members_M, at) < ACCEPT for at in words)
            tell(int((~free_N).sum()), len(free_N), text)
    return texts, agree and not free_N.any()


def _only(atoms: Atoms, index_A: Tensor) -> Atoms:
    """Returns some of the atoms; tokens of the bag keep their numbers."""
    return replace(
        atoms,
        bag_A=atoms.bag_A[index_A],
        position_A=atoms.position_A[index_A],
        vector_HAK=atoms.vector_HAK[:, index_A],
    )
