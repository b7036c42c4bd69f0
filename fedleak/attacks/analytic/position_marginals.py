"""Position marginals: the text itself, from the word and position rows of one update.

Let d_i be the gradient at the i-th token of what the embeddings add up: word, position and type.
The row of a word v is W_v = sum of d_i over the places of v, the row of a position is P_q = sum of
d_i over the tokens at q: two marginals of the same gradients. That holds whatever the layers above
do, with dropout, and for sums over steps, batches and momentum, with any factor on the whole
update (clipping, loss scaling, a learning rate). It does not hold if rows are treated differently:
by weight decay, masks, noise, or by Adam, after which `sign_tables` reads what signs still say.

**One text** has P_q = d_q. So W = A P, where A[v, q] is 1 if v stands at q, and 0 if not. While
places are no more than the hidden size, P has an inverse on the right, and A = W pinv(P) is the
text (the nearest relative is APRIL, Lu et al. 2022, which solves for the input of a vision
transformer from its position gradient). What the solution proves, without the model: let s be the
smallest singular value of P, and r the largest norm of a row of W - A P. Another text has a matrix
A' that differs in a row by whole numbers, at least one, so that row of W - A' P is no shorter than
s - r. With `excess` = r / s, every other text leaves 1 / excess - 1 times as much. The text is
`determined` if that is nine times. This rests on three things: that the update is a sum over one
text, that it is the sum of the text's gradients except for r, and that every used position has a
row. The weights play no part in it: the gradient of another model gives its text as well. So if the
update is known to be one gradient without dropout, and recomputing it fails, nothing is determined.

**Next-token training with a tied output layer** adds sum_i (p_i(v) - [v = y_i]) h_i to each word
row, with h_i the last hidden states. The rows of words that are in no text have nothing else, so
they span the h_i. With that span projected out of W and P, W = A P is left, as long as places and
the rank of the span are together no more than the hidden size. What is projected out holds the last
target, which is no input: it is taken to be the end token, as everywhere else.

**Several texts** share positions, and P pinv(W) is a table of positions and words: it has a 1 for
each word that occurs once. It does not show which places belong to one text. Words go to the text
whose words have the most similar gradients: a guess. Words that occur more than once are left out.

Shapes: V words, M words that may be used, T places, D hidden size, R rank of the span.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks import AttackSetting, Show, certificate
from fedleak.attacks.analytic.sign_tables import SAME, Climb, SignTable
from fedleak.attacks.clock import Clock, Seconds
from fedleak.attacks.reconstruction import Ids, Reconstruction
from fedleak.attacks.subspace.answer import Reader, Reading, answer_of
from fedleak.models import LanguageModel
from fedleak.training.observation import Observation

DETERMINED = 0.1
"""Below this excess every other text leaves at least nine times as much."""

_CUTS = (1e-6, 1e-5, 1e-4, 1e-3)
"""Singular values, as shares of the largest, at which the span of hidden states may end, which
depends on rounding and local steps. The one with the clearest solution is taken."""

_SUMS = 2
"""Random sums of rows for each dimension, which span what the rows span."""

_AT_ONCE = 4096
"""Rows that are in memory in float64."""

_EMPTY = 1e-4
"""A word whose row is smaller than this, as a share of the largest row, is in no text."""

_ZERO = 1e-12
"""A singular value below this share of the largest one is zero."""

_CLIMBING = 60.0
"""Seconds for a batch after Adam, if nothing is said."""

_HALF = 0.5
"""Numbers of a solution that are nearer to 0 and 1 than this are a text."""


class Marginals(NamedTuple):
    """Both tables, without what an output layer adds.

    Attributes:
        word_MD: The rows of the words that may be used, the largest first.
        words_M: These words.
        place_TD: The rows of the positions, from the first used one to the last.
        others: The largest norm of the other words' rows.
        rank: Dimensions that were projected out.
    """

    word_MD: Tensor
    words_M: Tensor
    place_TD: Tensor
    others: float
    rank: int


class Places(NamedTuple):
    """Where the words of a batch stand.

    Attributes:
        words_M: The distinct words.
        word_MD: Their rows.
        table_TM: 1 where a word that occurs once stands, else near 0.
        rank: Dimensions that were projected out.
    """

    words_M: Tensor
    word_MD: Tensor
    table_TM: Tensor
    rank: int

    def ambiguity(self) -> float:
        """Returns how far the table is from whole numbers, in the mean."""
        return float((self.table_TM - self.table_TM.round()).abs().mean())


class Solution(NamedTuple):
    """The only 0/1 matrix near W pinv(P).

    Attributes:
        ids: The text.
        distance: How far the farthest number is from 0 or 1.
        excess: The largest row that the text leaves, over the smallest singular value of P.
        rank: Dimensions that were projected out.
    """

    ids: Ids
    distance: float
    excess: float
    rank: int


@dataclass(frozen=True)
class PositionMarginals(Reader):
    """One text in closed form from the word and position embeddings' gradients, dropout or not.

    Attributes:
        seconds: After which no proof is begun, and after Adam the search for a batch ends; None: no
            limit, and a minute.
    """

    kind: ClassVar[str] = "position_marginals"
    uses: ClassVar[frozenset[str]] = frozenset()
    seconds: Seconds | None = None

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs the gradients of the word embedding and of learned positions."""
        if setting.family.position_embedding is None:
            return "reads rows of positions, and the model's are rotary: choose another model.name"
        return setting.lacks(*setting.tables)

    def reads(self, setting: AttackSetting) -> frozenset[str]:
        """Reads both embeddings, and the classifier, which gives the label for a proof."""
        return setting.tables | {*setting.family.classifier}

    @torch.no_grad()
    def reading(
        self, seen: Observation, model: LanguageModel, rng: torch.Generator, on_progress: Show
    ) -> Reading:
        """Returns the text that the two tables leave, or the words of a batch at their places."""
        family, tensors = model.family, seen.update.tensors
        assert family.position_embedding is not None
        if not seen.knowledge.adds_up:
            seconds = _CLIMBING if self.seconds is None else self.seconds
            return _by_signs(seen, model, Clock(seconds), rng)
        tables = marginals(
            tensors[family.word_embedding], tensors[family.position_embedding], model.tied
        )
        if isinstance(tables, str):
            return Reading.none(tables)
        if seen.update.num_examples > 1:
            return Reading(_batch(tables, seen.update.num_examples, model.hidden_size))
        best = min((solved(table) for table in tables), key=lambda solution: solution.excess)
        places = len(best.ids)
        numbers: dict[str, Any] = {
            "distance": best.distance,
            "determined": False,
            "budget": [places + best.rank, model.hidden_size],
        }
        if best.distance >= _HALF:
            reason = (
                f"the {places} position rows explain no text: a number of the solution is "
                f"{best.distance:.2g} from 0 or 1 (noise, Adam, a mask, or more texts than one)"
            )
            return Reading.none(reason, **numbers)
        verdict = certificate.judge(model, [best.ids], seen, Clock(self.seconds))
        # Where dropout may be on, it is the usual reason why a right text is not proved.
        refuted = (
            certificate.is_linear(seen) and seen.knowledge.dropout is False and not verdict.verified
        )
        determined = best.excess < DETERMINED and not refuted
        answer = answer_of(
            [best.ids],
            [best.excess],
            verdict,
            margins=[max(1 / best.excess - 1, 0.0) if best.excess else None],
            diagnostics=numbers | {"determined": determined},
            reason=_NOT_PROVED[determined],
        )
        return Reading.of(answer, settled=determined)


def _by_signs(
    seen: Observation, model: LanguageModel, clock: Clock, rng: torch.Generator
) -> Reading:
    """Returns the texts that the signs of the rows and of gradients lead to, after Adam."""
    tensors, texts = seen.update.tensors, seen.update.num_examples
    table = SignTable.of(
        tensors[model.family.word_embedding], tensors[model.family.position_embedding or ""]
    )
    if isinstance(table, str):
        return Reading.none(table)
    if texts == 1:
        text, alike = table.text()
        sequences, likely = [text], alike > _HALF
    else:
        ((*_, end),) = model.encode(["a"])
        if end not in model.special_ids() or end not in table.words_M:
            return Reading.none("nothing shows where a text of the batch ends: no token ends each")
        climb = Climb(model, seen, table, end)
        batch, alike = climb.best(table.begun(texts, end), clock, rng)
        sequences, likely = [tuple(ids) for ids in batch.sequences], alike >= SAME
    answer = answer_of(
        sequences,
        [1 - alike] * texts,
        tokens=sorted(table.words_M.tolist()),
        diagnostics={"alike": alike, "likely": [likely] * texts} | clock.late(),
        reason=f"nothing proved: {100 * alike:.0f} % of signs are those of the update",
    )
    return Reading.of(answer, settled=likely)


_NOT_PROVED = {
    True: "not recomputed: the only text that both embedding gradients admit, if it is one text",
    False: "nothing determined: the text nearest to both embedding gradients",
}


def marginals(word_VD: Tensor, position_PD: Tensor, tied: bool) -> list[Marginals] | str:
    """Returns both tables, for each rank that the projected span may have; or why there are none.

    Args:
        word_VD: Gradient of the word embedding.
        position_PD: Gradient of the position embedding.
        tied: The output layer is the word embedding.
    """
    norms_V = word_VD.norm(dim=1)
    used = position_PD.any(1).nonzero()[:, 0].tolist()
    if not used or not norms_V.any():
        return "an embedding gradient holds only zeros: that table was frozen"
    # The first place need not be the first row: RoBERTa's is row 2.
    place_TD = position_PD[used[0] : used[-1] + 1].double()
    places, width = place_TD.shape
    if len(used) < places:
        return f"{places - len(used)} of {places} position rows were not sent"
    if places > width:
        return (
            f"{places} places are used, or blurred by noise: the hidden size, {width}, has no room"
        )
    # A text has at most one word for each place, and those of a text are among the largest rows.
    order_V = norms_V.argsort(descending=True, stable=True)
    few = min(2 * width, len(order_V) // 2)
    words_M, others_X = order_V[:few], order_V[few:]
    word_MD = word_VD[words_M].double()
    if not tied:
        return [Marginals(word_MD, words_M, place_TD, float(norms_V[others_X].max()), 0)]
    # The span of the hidden states is that of so many random sums of rows.
    signs_X = torch.randint(0, 2, (len(others_X),), generator=torch.Generator().manual_seed(0))
    sketch_YD = word_MD.new_zeros(_SUMS * width, width)
    parts = (torch.split(all_X, len(sketch_YD)) for all_X in (others_X, signs_X.to(sketch_YD)))
    for rows_Y, signs_Y in zip(*parts, strict=True):
        sketch_YD[: len(rows_Y)].addcmul_(word_VD[rows_Y].double(), 2 * signs_Y[:, None] - 1)
    squares_D, basis_DD = torch.linalg.eigh(sketch_YD.T @ sketch_YD)
    ranks = {int((squares_D > cut**2 * squares_D[-1]).sum()) for cut in _CUTS}
    return [
        Marginals(
            word_MD=word_MD @ basis_DD[:, : width - rank],
            words_M=words_M,
            place_TD=place_TD @ basis_DD[:, : width - rank],
            others=float(_outside(word_VD, basis_DD[:, width - rank :])[others_X].max()),
            rank=rank,
        )
        for rank in ranks
        if places + rank <= width
    ] or (
        f"no room: {places} places and the span of the last hidden states, which the tied output "
        f"layer adds, are more than the hidden size, {width}"
    )


def _outside(word_VD: Tensor, inside_DR: Tensor) -> Tensor:
    """Returns the norm [V] of each row's part outside of a span."""
    squares = []
    for word_XD in torch.split(word_VD, _AT_ONCE):
        word_XD = word_XD.double()
        squares.append(word_XD.square().sum(1) - (word_XD @ inside_DR).square().sum(1))
    return torch.cat(squares).clamp_min(0).sqrt()


def solved(tables: Marginals) -> Solution:
    """Returns the text nearest to W pinv(P)."""
    sizes_T = torch.linalg.svdvals(tables.place_TD)
    smallest = max(float(sizes_T[-1]), _ZERO * float(sizes_T[0]))
    near_MT = tables.word_MD @ torch.linalg.pinv(tables.place_TD)
    text_T = near_MT.argmax(0)
    whole_MT = F.one_hot(text_T, len(near_MT)).T.to(near_MT)
    left_M = (tables.word_MD - whole_MT @ tables.place_TD).norm(dim=1)
    left = max(float(left_M.max()), tables.others)
    return Solution(
        ids=tuple(tables.words_M[text_T].tolist()),
        distance=float((near_MT - whole_MT).abs().max()),
        excess=left / smallest,
        rank=tables.rank,
    )


def placed(tables: Marginals) -> Places | None:
    """Returns where the words of a batch stand; None if there are too many words."""
    norms_M = tables.word_MD.norm(dim=1)
    used_M = norms_M > _EMPTY * norms_M.max()
    words, width = int(used_M.sum()), tables.place_TD.shape[1]
    if words > width or tables.others > _EMPTY * norms_M.max():
        return None
    word_MD = tables.word_MD[used_M]
    table_TM = tables.place_TD @ torch.linalg.pinv(word_MD, rtol=_CUTS[0])
    return Places(tables.words_M[used_M], word_MD, table_TM, tables.rank)


def grouped(places: Places, texts: int) -> list[list[int]]:
    """Returns the texts of a batch: words that stand at one place, by similar gradients.

    A text begins with the word at the first place if there is but one.
    """
    from scipy.optimize import linear_sum_assignment  # here, because it takes a while

    unit_MD = F.normalize(places.word_MD, dim=1)
    groups: list[list[int]] = [[] for _ in range(texts)]
    sum_BD = unit_MD.new_zeros(texts, unit_MD.shape[1])
    for place, row_M in enumerate(places.table_TM):
        order_M = row_M.argsort(descending=True).tolist()
        here = [word for word in order_M[:texts] if row_M[word] > _HALF]
        if place == 0 and len(here) == 1:
            groups = [[*here] for _ in range(texts)]
            continue
        similar_BX = (F.normalize(sum_BD, dim=1) @ unit_MD[here].T).cpu()
        for text, k in zip(*linear_sum_assignment(similar_BX, maximize=True), strict=True):
            groups[text].append(here[k])
            sum_BD[text] += unit_MD[here[k]]
    return [places.words_M[group].tolist() for group in groups if group]


def _batch(tables: Sequence[Marginals], texts: int, width: int) -> Reconstruction:
    """Returns the words of a batch, and a guess of its texts from those that stand at a place."""
    places = [known for table in tables if (known := placed(table)) is not None]
    if not places:
        reason = f"distinct words are more than the hidden size, {width}, has room for, or blurred"
        return Reconstruction.abstained(reason)
    best = min(places, key=Places.ambiguity)
    words, standing = len(best.words_M), int((best.table_TM > _HALF).any(0).sum())
    diagnostics = {
        "budget": [words + best.rank, width],
        "candidates": {"words": words, "placed": standing},
    }
    if standing < _HALF * words:
        reason = f"only {standing} of {words} words stand at one place"
        return Reconstruction.abstained(reason, **diagnostics)
    sequences = [tuple(group) for group in grouped(best, texts)]
    return answer_of(
        sequences,
        [1.0] * len(sequences),  # nothing tells a right group from a wrong one
        tokens=sorted(best.words_M.tolist()),
        diagnostics=diagnostics,
        reason=f"nothing proved: {standing} of {words} words stand at a place, and which of them "
        "belong to one text is guessed",
    )
