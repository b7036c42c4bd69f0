"""Texts of a causal model: chains of tokens that tags tie together.

A token's tag is the mean of K projections over its text up to itself. Let S be their sum: the tag
times the number of tokens. The sum of a token's predecessor is S less the token's own projections,
so a known text and a token that bins show, with up to two words between them, fit together if these
words' projections fill the difference of two sums. Few words do, because K numbers have to fit: the
tag is a checksum of all that comes before the token. The number of wrong fits that are expected is
computed as in `checksum`.

Texts with the same beginning share it, so they are one tree. The tree shows which tokens are in
which bin, and a bin of which all tokens but one are known gives the tag of that token.

Shapes: K numbers of a tag, V words, T places of the table, P nodes, Q tokens, X rows, C children.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, permutations
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.imprinted.bins import ROUNDING, Bins, Words, whitening
from fedleak.attacks.imprinted.checksum import Text, expected
from fedleak.attacks.imprinted.slots import explained, fitted
from fedleak.attacks.imprinted.tags import EXACT, SIGMAS, Split
from fedleak.attacks.server_modes.sectors import Sectors
from fedleak.models import LanguageModel

if TYPE_CHECKING:
    from scipy.spatial import KDTree

_GAPS = 2
"""Words between two tokens that are found by the tags alone, at most."""

_CERTAIN = 1e-12
"""Wrong words that may be expected to fit where words are added; many are tried in a batch."""

_MOST_SUMS = 600_000
"""Sums of the projections of words that are kept, to look differences up."""

_TWINS = 2e-3
"""Words whose embeddings differ by less than this share of their length are not told apart."""


class Token(NamedTuple):
    """A token that a bin shows.

    Attributes:
        word, place: What it is; a rotary model's bins show no place, which is None.
        tag_K: The mean of the projections up to it.
        error: Standard deviation of the numbers of that.
    """

    word: int
    place: int | None
    tag_K: Tensor
    error: float


@dataclass
class Tree:
    """Texts from their beginning: each node is a token behind its parent; node 0 is no token."""

    parents: list[int] = field(default_factory=lambda: [-1])
    words: list[int] = field(default_factory=lambda: [-1])
    places: list[int] = field(default_factory=lambda: [-1])
    sums: list[Tensor] = field(default_factory=list)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, parent: int, word: int, own_K: Tensor) -> int:
        """Returns the node of a word behind another one, a new one if there is none."""
        if (parent, word) not in self.numbers:
            self.numbers[parent, word] = len(self.words)
            self.parents.append(parent)
            self.words.append(word)
            self.places.append(self.places[parent] + 1)
            self.sums.append(self.sums[parent] + own_K)
        return self.numbers[parent, word]

    def path(self, node: int) -> list[int]:
        """Returns the nodes from the beginning to one."""
        path: list[int] = []
        while node:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def leaves(self) -> list[int]:
        """Returns the nodes that nothing follows."""
        inner = set(self.parents)
        return [node for node in range(1, len(self.words)) if node not in inner]


class Chains:
    """Grows texts out of the tokens that bins show."""

    def __init__(
        self, bins: Bins, words: Words, known: Sectors, exact: Sequence[Split], model: LanguageModel
    ) -> None:
        """Takes the tokens that are alone in a bin.

        Args:
            bins: All of them.
            words: What they may hold. If that is every word, texts are made of what `exact` names.
            known: What the layer does.
            exact: Bins of few tokens.
            model: As it was sent.
        """
        self.everything = words
        if len(words.ids_V) == model.vocabulary:  # which words are used is not known
            named_V = torch.unique(torch.cat([part.word_M for part in exact]))
            words = replace(words, ids_V=words.ids_V[named_V])
            exact = [
                part._replace(word_M=torch.searchsorted(named_V, part.word_M)) for part in exact
            ]
        self.bins, self.words, self.known = bins, words, known
        self.opening, _ = words.marks(model)
        table = model.family.token_table(model.module)
        self.rotary = table.position_PD is None
        ids_V = words.ids_V.to(model.device)
        inputs = (table(ids_V, torch.full_like(ids_V, place)) for place in range(words.places))
        self.part_VTK = torch.stack([row_VD.cpu() @ known.project_KD.T for row_VD in inputs], 1)
        flat_AK = self.part_VTK.flatten(0, 1).double()
        self.moment_KK = torch.cov(flat_AK.T)
        self.tree = Tree(sums=[torch.zeros(len(self.moment_KK))])
        if self.opening is not None:
            self.tree.add(0, self.opening, self._own(self.opening, 0))
        self.waiting = [
            self._token(part, 0, part.tags_K)
            for part in exact
            if part.single and int(part.word_M[0]) != self.opening
        ]
        self.used = set(bins.used())
        sample_VD = words.first()
        self.white_DD = whitening(sample_VD, bins.noise() * float(sample_VD.norm(dim=1).mean()))
        self.named = {part.bin: set(words.ids_V[part.word_M].tolist()) for part in exact}
        self.open = {
            part.bin: (part, list(range(len(part.weight_M)))) for part in exact if not part.single
        }
        self.trees: dict[tuple[int, int], tuple[KDTree, Tensor]] = {}
        self.chance = 0.0

    def _token(self, part: Split, own: int, tag_K: Tensor) -> Token:
        """Returns a token of a bin with the weighted tag that is left to it."""
        weight = float(part.weight_M[own])
        place = None if self.rotary else int(part.place_M[own])
        return Token(int(part.word_M[own]), place, tag_K / weight, part.noise / abs(weight))

    def grow_(self) -> None:
        """Adds tokens to the tree until none fits."""
        while self._link_(range(_GAPS)) or self._peel_() or self._fill_() or self._link_([_GAPS]):
            pass

    def _own(self, word: int, place: int) -> Tensor:
        """Returns the projections [K] of a word at a place."""
        return self.part_VTK[word, 0 if self.rotary else place]

    def _link_(self, gaps_tried: Iterable[int]) -> bool:
        """Adds waiting tokens behind nodes, with so many words between; whether there was any."""
        placed: set[int] = set()
        for gaps in gaps_tried:
            for place in sorted(set(self.tree.places)):
                nodes = [n for n, at in enumerate(self.tree.places) if at == place]
                chosen = [
                    q
                    for q, token in enumerate(self.waiting)
                    if q not in placed and token.place in (None, place + 1 + gaps)
                ]
                for node, q, between in self._fitting(nodes, chosen, place, gaps):
                    if not self._shown(node, between):
                        continue
                    for word in (*between, self.waiting[q].word):
                        own_K = self._own(word, self.tree.places[node] + 1)
                        node = self.tree.add(node, word, own_K)
                    placed.add(q)
        self.waiting = [token for q, token in enumerate(self.waiting) if q not in placed]
        return bool(placed)

    def _fitting(
        self, nodes: list[int], chosen: list[int], place: int, gaps: int
    ) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yields nodes at a place, waiting tokens and the words between them, where these fit."""
        last = place + 1 + gaps
        if not nodes or not chosen or (last >= self.words.places and not self.rotary):
            return
        tokens = [self.waiting[q] for q in chosen]
        tag_QK = torch.stack([token.tag_K for token in tokens])
        own_QK = torch.stack([self._own(token.word, last) for token in tokens])
        sum_PK = torch.stack([self.tree.sums[node] for node in nodes])
        rest_PQK = ((last + 1) * tag_QK - own_QK) - sum_PK[:, None]
        error_Q = torch.tensor([token.error for token in tokens])
        spread = float(tag_QK.square().mean().sqrt())
        size = tag_QK.shape[1]
        radius_Q = (last + 1) * math.sqrt(size) * (SIGMAS * error_Q + EXACT * spread)
        texts = math.log(len(nodes) * len(chosen)) + gaps * math.log(len(self.words.ids_V))
        sums = self._sums(place + 1, gaps)
        if sums is None:
            return
        lookup, word_XG = sums
        # Farther away, too many wrong ones are to be expected.
        most = (_CERTAIN / expected(texts, self.moment_KK, 1, 1.0)) ** (1 / size)
        bound = min(float(radius_Q.max()), most)
        apart_PQ, row_PQ = lookup.query(rest_PQK.numpy(), distance_upper_bound=bound)
        fits_PQ = torch.tensor(apart_PQ) <= radius_Q.clamp_max(most)
        for p, q in fits_PQ.nonzero().tolist():
            apart = max(float(apart_PQ[p, q]), last * ROUNDING * spread)
            self.chance = max(self.chance, expected(texts, self.moment_KK, 1, apart))
            between = word_XG[int(row_PQ[p, q])].tolist()
            # If projections do not depend on places, a sum does not determine the order.
            for order in set(permutations(between)) if self.rotary else [tuple(between)]:
                yield nodes[p], chosen[q], order

    def _shown(self, node: int, between: tuple[int, ...]) -> bool:
        """Returns whether bins may hold these words behind a node."""
        if not between:
            return True
        place, sum_K = self.tree.places[node], self.tree.sums[node]
        means = []
        for number, word in enumerate(between, 1):
            sum_K = sum_K + self._own(word, place + number)
            means.append(sum_K / (place + number + 1))
        place_X = place + 1 + torch.arange(len(between))
        ids = self.words.ids_V[list(between)].tolist()
        row_XD = self._inputs(torch.tensor(between), place_X, torch.stack(means))
        return all(
            any(number in self.used and id in self.named.get(number, {id}) for number in bins)
            for id, bins in zip(ids, self._bins_of(row_XD), strict=True)
        )

    def _sums(self, place: int, gaps: int) -> "tuple[KDTree, Tensor] | None":
        """Returns the projections of so many words from a place on, and the words [X, G]."""
        from scipy.spatial import KDTree  # here, because it takes a while

        at = 0 if self.rotary else place
        if len(self.words.ids_V) ** gaps > _MOST_SUMS:
            return None
        if (at, gaps) not in self.trees:
            vocabulary = torch.arange(len(self.words.ids_V))
            vocabulary = vocabulary[vocabulary != (-1 if self.opening is None else self.opening)]
            sum_XK, word_XG = torch.zeros(1, len(self.moment_KK)), torch.zeros(1, 0).long()
            for gap in range(gaps):
                part_VK = self.part_VTK[vocabulary, 0 if self.rotary else at + gap]
                sum_XK = (sum_XK[:, None] + part_VK).flatten(0, 1)
                before_XG = word_XG.repeat_interleave(len(vocabulary), 0)
                word_XG = torch.cat([before_XG, vocabulary.repeat(len(word_XG))[:, None]], 1)
            self.trees[at, gaps] = KDTree(sum_XK.numpy()), word_XG
        return self.trees[at, gaps]

    def _inside(self) -> dict[int, list[int]]:
        """Returns the nodes in each bin."""
        inside: dict[int, list[int]] = {}
        nodes = list(range(1, len(self.tree.words)))
        for node, bins in zip(nodes, self._bins_of(self._rows(nodes)), strict=True):
            for number in bins:
                inside.setdefault(number, []).append(node)
        return inside

    def _rows(self, nodes: Sequence[int]) -> Tensor:
        """Returns what the layer reads at nodes [X, D], but for its scale."""
        word_X = torch.tensor([self.tree.words[node] for node in nodes], dtype=torch.long)
        place_X = torch.tensor([self.tree.places[node] for node in nodes], dtype=torch.long)
        tags = [self._tag(node) for node in nodes]
        return self._inputs(
            word_X, place_X, torch.stack(tags) if tags else self.tree.sums[0][None][:0]
        )

    def _inputs(self, word_X: Tensor, place_X: Tensor, tag_XK: Tensor) -> Tensor:
        """Returns what the layer reads [X, D] of words at places with tags, but for its scale."""
        row_XD = self.words.rows(word_X, place_X)
        tag_XD = F.pad(tag_XK, (0, row_XD.shape[1] - tag_XK.shape[1]))
        return self.known.clear(row_XD + tag_XD)

    def _bins_of(self, row_XD: Tensor) -> list[range]:
        """Returns the bins that rows are in: two or three if they are on an edge."""
        angle_X, step_X = self.known.angles(row_XD)
        first_X = (torch.searchsorted(self.known.edge_N, angle_X - step_X) - 1).clamp_min(0)
        stop_X = torch.searchsorted(self.known.edge_N, angle_X + step_X)
        return list(map(range, first_X.tolist(), stop_X.tolist()))

    def _peel_(self) -> bool:
        """Takes what the tree knows out of bins, and the last token of each; whether any was."""
        inside, before = self._inside(), len(self.waiting)
        for number, (part, owns) in list(self.open.items()):
            rest_K, unknown = part.tags_K, []
            for own in owns:
                nodes = [n for n in inside.get(number, []) if self._is(n, part, own)]
                if len(nodes) == 1:
                    rest_K = rest_K - part.weight_M[own] * self._tag(nodes[0])
                else:
                    unknown.append(own)
            self.open[number] = (part._replace(tags_K=rest_K), unknown)
            if len(unknown) <= 1:
                del self.open[number]
                self.waiting += [self._token(part, own, rest_K) for own in unknown]
        return len(self.waiting) > before

    def _fill_(self) -> bool:
        """Adds words behind the ends of texts, where these explain a bin; whether there was any."""
        inside, unexplained, _ = self._explained()
        leaves = self.tree.leaves()
        behind = [
            node
            for node, place in enumerate(self.tree.places)
            if (node in leaves or place == 0) and (self.rotary or place + 1 < self.words.places)
        ]
        if not behind:
            return False
        vocabulary = torch.arange(len(self.words.ids_V))
        node_C, word_C = torch.cartesian_prod(torch.tensor(behind), vocabulary).T
        place_C = torch.tensor(self.tree.places)[node_C] + 1
        part_CK = self.part_VTK[word_C, torch.zeros_like(place_C) if self.rotary else place_C]
        sum_CK = torch.stack(self.tree.sums)[node_C] + part_CK
        row_CD = self._inputs(word_C, place_C, sum_CK / (place_C[:, None] + 1))
        angle_C, step_C = self.known.angles(row_CD)
        before = len(self.tree.words)
        for number in unexplained:
            low, high = self.bins.low_N[number], self.bins.high_N[number]
            may_X = ((angle_C + step_C >= low) & (angle_C - step_C < high)).nonzero()[:, 0]
            nodes, limit = inside.get(number, []), float(self.bins.limit_N[number])
            row_XD = torch.cat([self._rows(nodes), row_CD[may_X]])
            picks = explained(
                self.bins.sum_ND[number],
                limit,
                row_XD,
                (row_XD @ self.white_DD).norm(dim=1).clamp_min(1e-9).reciprocal(),
                self.white_DD,
            )
            for pick in picks or ():
                # Texts with the same words in another order so far go on alike.
                alike_X = (row_XD - row_XD[pick]).norm(dim=1) <= 1e-5 * row_XD[pick].norm()
                for candidate in may_X[alike_X[len(nodes) :]].tolist():
                    word, node = int(word_C[candidate]), int(node_C[candidate])
                    self.tree.add(node, word, part_CK[candidate])
        return len(self.tree.words) > before

    def _is(self, node: int, part: Split, own: int) -> bool:
        """Returns whether a node may be a token of a bin."""
        same_place = self.rotary or self.tree.places[node] == int(part.place_M[own])
        return self.tree.words[node] == int(part.word_M[own]) and same_place

    def _tag(self, node: int) -> Tensor:
        """Returns the tag [K] of a node."""
        return self.tree.sums[node] / (self.tree.places[node] + 1)

    def _explained(self) -> tuple[dict[int, list[int]], set[int], set[int]]:
        """Returns the nodes in each bin, the bins they do not explain, and the nodes in others."""
        inside, unexplained, clear = self._inside(), set[int](), set[int]()
        for number in self.used:
            nodes, limit = inside.get(number, []), float(self.bins.limit_N[number])
            _, rest_D, clear_X = fitted(self.bins.sum_ND[number], self._rows(nodes), limit)
            if float(rest_D.norm()) <= limit:
                clear.update(compress(nodes, clear_X.tolist()))
            else:
                unexplained.add(number)
        return inside, unexplained, clear

    def texts(self) -> list[Text]:
        """Returns the texts, each as far as it is read.

        Its `chance` is infinite unless bins show each of its words, and no other word has the same
        embedding. A word behind it may have too little weight to be seen, so only the whole batch
        proves it.
        """
        _, _, clear = self._explained()
        twins, texts = self._twins(), []
        for leaf in self.tree.leaves():
            path = self.tree.path(leaf)
            words = tuple(self.tree.words[node] for node in path)
            certain = clear.issuperset(path) and twins.isdisjoint(words)
            texts.append(Text(words, 0.0, self.chance if certain else math.inf))
        return texts

    def _twins(self) -> set[int]:
        """Returns the words, as indices, that differ from another one by little more than rounding.

        Words that a model has hardly met in training may have the same embedding.
        """
        own_VD, every_VD = self.words.first(), self.everything.first()
        near_VV = torch.cdist(own_VD, every_VD) <= _TWINS * own_VD.norm(dim=1, keepdim=True)
        return set((near_VV.sum(1) > 1).nonzero()[:, 0].tolist())
