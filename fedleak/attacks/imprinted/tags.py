"""Tags of texts, from tokens that are alone in a bin, and from pairs of which one is known.

A bin of one token is `a (x + tag - mean)`: outside the tag's numbers that gives a and the mean, and
within them the tag. Tags that are alike are of one text. A bin of two tokens leaves one equation
for two tags. With each known tag for one token, it names a tag for the other token; a name that two
bins give independently is right, because tags have too many numbers to meet by chance.

Shapes: S texts, K numbers of a tag, P points, D hidden size, M tokens of a bin.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.imprinted.bins import Bins, Words

SIGMAS = 5.0
"""Errors of a tag that it may be off by."""

_ALIKE = 5.0
"""Tags closer than so many times their error are of one text."""

EXACT = 2e-4
"""Likewise, as a share of how far tags are apart: what rounding does to them."""

_NAMES = 512
"""Tags that one bin may name."""

_VOTE = 1e-3
"""Names of two bins that are closer than this share of how far tags are apart are one tag."""


class Tags(NamedTuple):
    """The tags of the texts that are known.

    Attributes:
        tag_SK: Of each text.
        error_S: Standard deviation of its numbers.
        bins_S: How many bins gave it.
    """

    tag_SK: Tensor
    error_S: Tensor
    bins_S: Tensor

    def spread(self) -> float:
        """Returns how far tags are apart: the root of the mean squared number of a tag."""
        return float(self.tag_SK.square().mean().sqrt())


class Split(NamedTuple):
    """A bin that few tokens explain, outside the tag's numbers.

    Attributes:
        bin: Its number.
        word_M, place_M: Its tokens.
        weight_M: Of each of them.
        tags_K: The sum of the tokens' tags, each times its weight.
        noise: Standard deviation of a number of that.
    """

    bin: int
    word_M: Tensor
    place_M: Tensor
    weight_M: Tensor
    tags_K: Tensor
    noise: float

    @property
    def single(self) -> bool:
        """Whether it holds one token."""
        return len(self.weight_M) == 1


@torch.no_grad()
def splits(bins: Bins, words: Words, pick_NR: Tensor, size: int) -> list[Split]:
    """Returns the bins that are sums over their picks.

    Args:
        bins: The bins.
        words: What they may hold.
        pick_NR: What each of them holds, as `bins.pick` returns it.
        size: Numbers of a tag: the first ones.
    """
    exact = []
    for number in bins.used():
        pick_M = pick_NR[number, pick_NR[number] >= 0]
        if not 0 < len(pick_M) < pick_NR.shape[1]:
            continue
        word_M, place_M = pick_M // words.places, pick_M % words.places
        row_MD = words.rows(word_M, place_M)
        system_DX = torch.cat([row_MD, torch.ones_like(row_MD[:1])]).T.double()
        sum_D = bins.sum_ND[number].double()
        solved_X = torch.linalg.lstsq(system_DX[size:], sum_D[size:, None]).solution[:, 0]
        rest_D = sum_D - system_DX @ solved_X
        if float(rest_D[size:].norm()) <= float(bins.limit_N[number]):
            weight_M, tags_K = solved_X[:-1].float(), rest_D[:size].float()
            noise = float(bins.noise_N[number])
            exact.append(Split(number, word_M, place_M, weight_M, tags_K, noise))
    return exact


@torch.no_grad()
def read_tags(exact: Sequence[Split]) -> Tags | None:
    """Returns the tags that bins of one token give; None if there is no such bin."""
    singles = [split for split in exact if split.single]
    if not singles:
        return None
    points_PK = torch.stack([split.tags_K / split.weight_M for split in singles])
    errors_P = torch.tensor([split.noise / abs(float(split.weight_M)) for split in singles])
    return _clusters(points_PK, errors_P, EXACT * float(points_PK.square().mean().sqrt()))


@torch.no_grad()
def more_tags(exact: Sequence[Split], tags: Tags, word_ST: Tensor | None = None) -> Tags:
    """Returns the known tags, and those that two bins name, given the known ones.

    Args:
        exact: Bins of few tokens.
        tags: The known ones.
        word_ST: The word, as an index, at a place of a text with a known tag; -1: not read. None:
            nothing is read yet.
    """
    from scipy.spatial import KDTree  # here, because it takes a while

    apart = _VOTE * tags.spread()
    radius = apart * math.sqrt(tags.tag_SK.shape[1])
    while True:
        known = KDTree(tags.tag_SK.numpy())
        names, bins, errors = [], [], []
        for part in exact:
            named = [_named(part, own, tags, word_ST) for own in range(len(part.weight_M))]
            if any(len(name_XK) and (known.query(name_XK)[0] < radius).any() for name_XK in named):
                continue  # all its texts are known
            for own, name_XK in enumerate(named):
                names.append(name_XK)
                bins += [part.bin] * len(name_XK)
                errors += [part.noise / abs(float(part.weight_M[own]))] * len(name_XK)
        if not bins:
            return tags
        name_PK = torch.cat(names)
        votes = KDTree(name_PK.numpy()).query_pairs(radius)
        # A token on an edge is in two bins, which do not name it independently.
        agreed = {name for vote in votes if abs(bins[vote[0]] - bins[vote[1]]) > 1 for name in vote}
        if not agreed:
            return tags
        chosen = sorted(agreed)
        more = _clusters(name_PK[chosen], torch.tensor([errors[n] for n in chosen]), apart)
        new_S = torch.tensor(known.query(more.tag_SK.numpy())[0] > radius)
        if not new_S.any():
            return tags
        both = zip(tags, more, strict=True)
        tags = Tags(*(torch.cat([old, new[new_S]]) for old, new in both))
        if word_ST is not None:
            return tags  # whose texts are to be read first


def _named(part: Split, own: int, tags: Tags, word_ST: Tensor | None) -> Tensor:
    """Returns what the tag of one token of a bin would be, for all texts of the others [X, K].

    There are none (X = 0) if the bin has one token, or if they are too many.
    """
    rest_XK, others = part.tags_K[None], [m for m in range(len(part.weight_M)) if m != own]
    for other in others:
        may_SK = tags.tag_SK
        if word_ST is not None:
            read_S = word_ST[:, part.place_M[other]]
            may_SK = may_SK[(read_S < 0) | (read_S == part.word_M[other])]
        if len(may_SK) * len(rest_XK) > _NAMES:
            return rest_XK[:0]
        rest_XK = (rest_XK[:, None] - part.weight_M[other] * may_SK).flatten(0, 1)
    return rest_XK / part.weight_M[own] if others else rest_XK[:0]


@torch.no_grad()
def without_mixtures(tags: Tags) -> Tags:
    """Returns the tags that are not on a line through two others.

    Two equal tokens of two texts in one bin look like a single token, with a mixture of both tags.
    Of three tags on a line, the one that the fewest bins gave is the mixture.
    """
    kept = torch.ones(len(tags.tag_SK), dtype=torch.bool)
    size = tags.tag_SK.shape[1]
    order = sorted(range(len(kept)), key=lambda t: (int(tags.bins_S[t]), -float(tags.error_S[t])))
    for text in order:
        others_XK = tags.tag_SK[kept & (torch.arange(len(kept)) != text)] - tags.tag_SK[text]
        sizes_X = others_XK.norm(dim=1)
        cosine_XX = (others_XK / sizes_X[:, None]) @ (others_XK / sizes_X[:, None]).T
        cosine_XX.fill_diagonal_(0)
        # The sine of the angle, as far as errors of all three tags make it.
        error = float(tags.error_S[text]) + float(tags.error_S.median()) + EXACT * tags.spread()
        room_X = _ALIKE * math.sqrt(size) * error / sizes_X
        sine_XX = (1 - cosine_XX.double().square()).clamp_min(0).sqrt()
        kept[text] = not bool((sine_XX < room_X[:, None] + room_X).any())
    return Tags(*(values[kept] for values in tags))


def _clusters(points_PK: Tensor, errors_P: Tensor, exact: float) -> Tags:
    """Returns the weighted means of points that are alike; the most certain points come first.

    Args:
        points_PK: Tags that bins give.
        errors_P: Standard deviation of their numbers.
        exact: What is added to that, of a number.
    """
    room = math.sqrt(points_PK.shape[1])
    weight_P = errors_P.double().clamp_min(1e-30) ** -2
    free_P = torch.ones(len(points_PK), dtype=torch.bool)
    centres, errors, bins = [], [], []
    for point in errors_P.argsort().tolist():
        if not free_P[point]:
            continue
        apart_P = (points_PK - points_PK[point]).norm(dim=1)
        own_P = free_P & (apart_P <= room * (_ALIKE * (errors_P + errors_P[point]) + exact))
        free_P &= ~own_P
        total = weight_P[own_P].sum()
        centres.append(((points_PK[own_P] * weight_P[own_P, None]).sum(0) / total).float())
        errors.append(float(total) ** -0.5)
        bins.append(int(own_P.sum()))
    return Tags(torch.stack(centres), torch.tensor(errors), torch.tensor(bins))
