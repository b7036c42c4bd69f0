"""Bins: what the gradient of an imprinted feed-forward layer says of few tokens at a time.

Neuron n is on for the tokens above edge n. So the rows of neighbouring neurons differ by a sum over
the tokens between two edges, `sum_i c_i y_i`, with `y_i = (x_i + tag - mean) / sigma` the normed
input of token i. The weights c_i are not known. A norm without bias leaves nothing along (1, ...,
1), so what a bin has there is its noise: of rounding, of a cast, of what the client added.

Outside the tag's numbers x_i depends on word and place alone, so a bin is a sum of few rows of a
known table, up to a constant. Orthogonal matching pursuit (Pati et al. 1993) finds them, of many
bins at once. The rows are much alike, and are whitened before:
else pursuit takes what is between two rows first.

Shapes: N bins, D hidden size, K numbers of a tag, V words, T places, L numbers outside the tag, A
rows of the table, R picks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.analytic.facts import used_rows
from fedleak.attacks.server_modes.imprint import Planted
from fedleak.attacks.server_modes.sectors import Sectors, Stream
from fedleak.models import LanguageModel, frame
from fedleak.models.family import TokenTable
from fedleak.training.observation import Observation

ROOM = 2.0
"""How many times the size of the noise the rest of an explained bin may have."""

ROUNDING = 1e-5
"""What recomputed inputs may leave of a bin, as a share of it."""

PICKS = 4
"""Tokens of a bin that are looked for before the tags are known."""

_NEIGHBOURS = 31
"""Bins on either side whose noise is alike."""

_FLATTEST = 1e-4
"""Whitening raises no direction whose variance is below this share of the largest one's."""

SAMPLE = 4096
"""Rows of the table whose covariance is taken."""

_PLACES = 40
"""Positions that are considered if it is not known how many were used."""

_AT_ONCE = 20_000_000
"""Numbers of a table of scores."""


Best = Callable[[Tensor], tuple[Tensor, Tensor]]
"""What is left of sums [X, L] -> the rows that are nearest, as numbers [X] and as they are [X, L].
"""


class Bins(NamedTuple):
    """The gradient of an imprinted layer, by bin.

    Attributes:
        sum_ND: The weighted sum of the inputs of a bin's tokens.
        noise_N: Standard deviation of each number of that.
        limit_N: The largest norm of the rest of an explained bin.
        low_N, high_N: The range of its tokens on the probe.
    """

    sum_ND: Tensor
    noise_N: Tensor
    limit_N: Tensor
    low_N: Tensor
    high_N: Tensor

    def used(self) -> list[int]:
        """Returns the bins that hold more than noise."""
        used: list[int] = (self.sum_ND.norm(dim=1) > self.limit_N).nonzero()[:, 0].tolist()
        return used

    def noise(self) -> float:
        """Returns the noise of a number of a bin, as a share of the bin, in the middle."""
        used = self.used()
        return float((self.noise_N / self.sum_ND.norm(dim=1))[used].median()) if used else 0.0


def read_bins(gradient_ND: Tensor, planted: Planted | Sectors) -> Bins:
    """Returns the bins of a gradient of the first feed-forward matrix.

    Args:
        gradient_ND: A row for each neuron, in any float type.
        planted: What the layer does.
    """
    neurons = len(planted.edge_N)  # the others do not sort
    rows_ND = gradient_ND[:neurons].double().cpu() * planted.sign_N[:, None]
    sum_ND = rows_ND - torch.cat([rows_ND[1:], torch.zeros_like(rows_ND[:1])])
    # Rows of neurons without a token between them are equal, and so is their rounding.
    differ_N = sum_ND.any(1).double()
    squares_N, counts_N = map(_around, (planted.nothing(sum_ND).square(), differ_N))
    noise_N = (squares_N / counts_N.clamp_min(1)).sqrt()
    if isinstance(planted, Sectors):
        sum_ND[-1] = 0  # no neuron is on its other side
        noise_N += torch.finfo(gradient_ND.dtype).eps * rows_ND.square().mean(1).sqrt()
    sum_ND, noise_N = sum_ND.float(), noise_N.float()
    limit_N = ROOM * math.sqrt(sum_ND.shape[1]) * noise_N + ROUNDING * sum_ND.norm(dim=1)
    ends_N = torch.cat([planted.edge_N[1:], planted.edge_N.new_tensor([math.inf])])
    step = planted.step if isinstance(planted, Planted) else 0.0  # every token has its own there
    return Bins(sum_ND, noise_N, limit_N, planted.edge_N - step, ends_N + step)


def _around(value_N: Tensor) -> Tensor:
    """Returns the sum over the neighbours of each number, and itself."""
    window = value_N.new_ones(1, 1, 2 * _NEIGHBOURS + 1)
    sums_N: Tensor = F.conv1d(value_N[None, None], window, padding=_NEIGHBOURS)
    return sums_N[0, 0]


@dataclass(frozen=True)
class Words:
    """The tokens that a bin may hold.

    Attributes:
        table: The inputs of all tokens at all positions.
        ids_V: The words that are considered.
        places: Positions that the batch uses.
    """

    table: TokenTable | Stream
    ids_V: Tensor
    places: int

    @classmethod
    def of(cls, model: LanguageModel, seen: Observation, table: TokenTable | Stream) -> "Words":
        """Returns words and positions that have a gradient; all if they cannot be distinguished."""
        family, update = model.family, seen.update
        word, place = (
            used_rows(update.tensors[name]) if name is not None and name in update.tensors else None
            for name in (family.word_embedding, family.position_embedding)
        )
        known = word and word.complete and not model.tied
        ids_V = torch.tensor(word.rows) if word and known else torch.arange(model.vocabulary)
        places = place.rows[-1] + 1 if place else min(_PLACES, model.max_length)
        return cls(table, ids_V, 1 if family.position_embedding is None else places)

    def rows(self, word_A: Tensor, place_A: Tensor) -> Tensor:
        """Returns the inputs [A, D] of words, as indices, at places; in memory."""
        device = self.table.token_VD.device
        return self.table(self.ids_V[word_A].to(device), place_A.to(device)).cpu()

    def first(self) -> Tensor:
        """Returns the inputs [V, D] of every word at the first place."""
        word_V = torch.arange(len(self.ids_V))
        return self.rows(word_V, torch.zeros_like(word_V))

    def marks(self, model: LanguageModel) -> tuple[int | None, int | None]:
        """Returns the words, as indices, that begin and end every text, if these are known."""
        ids = self.ids_V.tolist()
        marks = (tokens[0] if len(tokens) == 1 else None for tokens in frame(model))
        first, last = (ids.index(mark) if mark in ids else None for mark in marks)
        return first, last

    def whole(self) -> Tensor:
        """Returns the inputs [V, T, D] of every word at every place."""
        words = len(self.ids_V)
        word_A, place_A = torch.cartesian_prod(torch.arange(words), torch.arange(self.places)).T
        return self.rows(word_A, place_A).reshape(words, self.places, -1)


@torch.no_grad()
def pursue(sum_NL: Tensor, enough_N: Tensor, most: int, best: Best) -> Tensor:
    """Returns the numbers of the few rows [N, R] that explain each sum; -1: no more was needed.

    If the same row is nearest to a sum twice, the sum is left as it is then.

    Args:
        sum_NL: The sums.
        enough_N: A sum is explained when no more than this is left of it.
        most: R, the largest number of rows.
        best: Finds the next row of each.
    """
    rest_NL = sum_NL.clone()
    basis_NRL = rest_NL.new_zeros(len(rest_NL), most, rest_NL.shape[1])
    row_NR = torch.full((len(rest_NL), most), -1)
    live_X = torch.arange(len(rest_NL))
    for pick in range(most):
        live_X = live_X[rest_NL[live_X].norm(dim=1) > enough_N[live_X]]
        if not len(live_X):
            break
        row_X, row_XL = best(rest_NL[live_X])
        new_X = (row_NR[live_X] != row_X[:, None]).all(1)
        live_X, row_XL = live_X[new_X], row_XL[new_X]
        row_NR[live_X, pick] = row_X[new_X]
        basis_XRL = basis_NRL[live_X]
        for _ in range(2):  # twice is enough (Giraud et al. 2005)
            inner_XR = torch.einsum("xl,xrl->xr", row_XL, basis_XRL)
            row_XL = row_XL - torch.einsum("xr,xrl->xl", inner_XR, basis_XRL)
        basis_NRL[live_X, pick] = row_XL = F.normalize(row_XL, dim=1)
        rest_XL = rest_NL[live_X]
        rest_NL[live_X] = rest_XL - (rest_XL * row_XL).sum(1, keepdim=True) * row_XL
    return row_NR


@torch.no_grad()
def pick(bins: Bins, words: Words, size: int, rng: torch.Generator) -> Tensor:
    """Returns the few words and places [N, R] that explain each bin, before tags are known.

    A pick is the number of a word times that of places, plus its place; -1 where no more was
    needed. Only what is outside the tag's numbers counts.

    Args:
        bins: The bins.
        words: What they may hold.
        size: Numbers of the tag: the first ones.
        rng: For a sample of the table.
    """
    vocabulary, places, outside = len(words.ids_V), words.places, slice(size, None)
    sample_A = torch.randint(vocabulary * places, (SAMPLE,), generator=rng)
    sample_AL = words.rows(sample_A // places, sample_A % places)[:, outside]
    constant_L = torch.ones(sample_AL.shape[1])
    white_LL = whitening(sample_AL, bins.noise() * float(sample_AL.norm(dim=1).mean()))
    fixed_LX = torch.linalg.qr(white_LL @ torch.stack([sample_AL.mean(0), constant_L], 1))[0]
    apart_LL = white_LL - (white_LL @ fixed_LX) @ fixed_LX.T

    sum_NL = bins.sum_ND[:, outside] @ apart_LL
    enough_N = bins.limit_N * float(apart_LL.norm()) / math.sqrt(len(apart_LL))
    enough_N = enough_N + ROUNDING * sum_NL.norm(dim=1)
    enough_N[bins.noise_N == 0] = math.inf
    return pursue(sum_NL, enough_N, PICKS, _nearest(words, outside, apart_LL))


def whitening(sample_AL: Tensor, noise: float) -> Tensor:
    """Returns the symmetric matrix [L, L] that makes rows of a table as little alike as it can.

    Args:
        sample_AL: Rows.
        noise: Standard deviation of what is added to each number of a row.
    """
    squares_L, basis_LL = torch.linalg.eigh(torch.cov(sample_AL.T.double()))
    floor = max(_FLATTEST * float(squares_L[-1]), noise**2)
    white_LL: Tensor = (basis_LL * squares_L.clamp_min(floor) ** -0.5) @ basis_LL.T
    return white_LL.float()


def _nearest(words: Words, outside: slice, map_LL: Tensor) -> Best:
    """Returns a function that finds the rows of a table with the largest cosines, of any sign.

    The table is mapped by a matrix, and is not formed. A row is `(word + position) / sigma +
    constant`, so all inner products are sums of a few.
    """
    directions, places = words.table.directions(), words.places
    device = words.table.token_VD.device
    word_VL = directions.token_VD[words.ids_V.to(device)][:, outside].cpu() @ map_LL
    position_TL = directions.position_PD[:places, outside].cpu() @ map_LL
    constant_L = directions.constant_CD[:, outside].sum(0).cpu() @ map_LL
    pairs_A2 = torch.cartesian_prod(words.ids_V, torch.arange(places)).to(device)
    sigma_A = torch.cat([words.table.scale(*part.T) for part in torch.split(pairs_A2, SAMPLE)])
    sigma_VT = sigma_A.reshape(-1, places).cpu()
    both_VT = word_VL @ position_TL.T
    square_VT = word_VL.square().sum(1)[:, None] + position_TL.square().sum(1) + 2 * both_VT
    cross_VT = (word_VL @ constant_L)[:, None] + position_TL @ constant_L
    square_VT = square_VT / sigma_VT**2 + 2 * cross_VT / sigma_VT + constant_L @ constant_L
    # The row that is projected out has a length of rounding alone.
    floor = 1e-6 * float(square_VT.max())
    per_sigma_VT, per_norm_VT = 1 / sigma_VT, square_VT.clamp_min(floor) ** -0.5

    def best(rest_XL: Tensor) -> tuple[Tensor, Tensor]:
        picks = []
        for part_XL in torch.split(rest_XL, max(1, _AT_ONCE // per_norm_VT.numel())):
            at_place_XT = part_XL @ position_TL.T
            score_XVT = (part_XL @ word_VL.T)[:, :, None] + at_place_XT[:, None]
            score_XVT *= per_sigma_VT
            score_XVT += (part_XL @ constant_L)[:, None, None]
            score_XVT *= per_norm_VT
            picks.append(score_XVT.abs_().flatten(1).argmax(1))
        pick_X = torch.cat(picks)
        return pick_X, words.rows(pick_X // places, pick_X % places)[:, outside] @ map_LL

    return best
