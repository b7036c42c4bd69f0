"""Texts of a classifier's batch, of whose tokens and positions the shares are known.

Adapters of few rows name the tokens of a batch, and give the shares of each token and of each
position: sums of the gradients h at the adapters' outputs over the places that have it
(`sparse_bayes`). With one text that is its order. In a batch several texts share a position.

- **Places.** A token that stands in one place has the shares of this place, so the shares of a
  position are the sum of those of its tokens: Q_p = sum over tokens n of x_pn S_n, with x_pn >= 0
  and sum over p of x_pn = 1. Least squares give a table that is wrong mostly for tokens that stand
  in several places, because their shares are sums.
- **Texts.** No language model is needed: the gradient of a text by itself gives its tokens' shares,
  all times one factor, and they agree or not (`text_shares`). Words that are right have nearly
  right shares also beside wrong words. So a text is drawn from the table and climbed from, place by
  place: another token of the place's, or another length, is taken if shares agree better. Where no
  change does, the words that agree least are drawn anew (iterated local search, Lourenco, Martin
  and Stutzle 2003).
- **Near texts** are mended by all tokens of the batch.
- **Batches.** A text that agrees is taken out of all shares, and a new table is of the others.

A batch is proved as any other, by its gradient or by the client's steps. It takes thousands of
gradients of texts, and ends in vain where texts share most of their words.

Shapes: N tokens of the batch, P positions, O rows of adapters, M directions of first inputs.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.clock import Clock
from fedleak.attacks.measured_gradient import MeasuredGradient
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.answer import Judged, OnJudged
from fedleak.attacks.subspace.own_shares import OwnShares
from fedleak.attacks.subspace.sparse_bayes import Bag
from fedleak.attacks.subspace.text_shares import Checked, Shares
from fedleak.models import LanguageModel, frame

_CELLS = 3072
"""Places times tokens, at most: so many take two seconds, and the time grows by their square."""

_KNOWN = 8192
"""Texts whose shares are kept: climbs meet many of them again."""

_FEW = 6
"""Tokens that are tried at a place, the likeliest."""

_RARE, _END = 1e-3, 0.1
"""Weight of a token, and of an end, that the table does not have at a place."""

_BETTER, _LITTLE = 0.5, 1.0
"""Nats by which a change is better, and by which one look at all places must be."""

_NEARLY = 0.5
"""Nats for each row and token of a text that all tokens are tried to mend."""

_AGREES, _STAYS, _ENDS = 4.0, 0.3, 0.5
"""Nats of a token that is not drawn anew; share of others that stay, too; and how often a new
length is drawn."""

_KICKS, _DRAWN = 4, 16
"""Times that tokens are drawn anew in vain, and texts that are begun in vain."""

_NO_END = -1
"""Stands behind a classifier's text in place of the end token of next-token training."""


class _Draft(NamedTuple):
    """A text that may be in the batch.

    Attributes:
        tokens: One for each place, also behind the end.
        length: Places of the text.
    """

    tokens: Ids
    length: int


class _Tried(NamedTuple):
    """A draft, and how its tokens' shares agree.

    Attributes:
        draft: The text.
        label: The class for which they agree best.
        checked: How they do.
        share_MO: Shares of all directions in its own gradient.
    """

    draft: _Draft
    label: int
    checked: Checked
    share_MO: Tensor


def texts_of_places(
    model: LanguageModel, gradient: MeasuredGradient, bag: Bag, clock: Clock, tell: OnJudged
) -> list[Judged]:
    """Returns the texts of a batch that its tokens' shares agree with.

    Args:
        model: A classifier with learned positions at the broadcast weights.
        gradient: Of adapters that earlier rounds trained.
        bag: The tokens of the batch.
        clock: When time is up, no more texts are sought.
        tell: Called with the number of texts, and the last one.
    """
    search, texts, vain = _Search(model, gradient, bag), list[Judged](), 0
    wanted = gradient.update.num_examples
    while len(texts) < wanted and vain < _DRAWN and not clock.up():
        text = search.text(clock)
        if text is None:
            vain += 1
            continue
        texts, vain = [*texts, text], 0
        tell(len(texts), wanted, text)
    return texts


class _Search:
    """The search for the texts of a batch, in which the shares of those that were read are gone."""

    def __init__(self, model: LanguageModel, gradient: MeasuredGradient, bag: Bag) -> None:
        """Takes the shares of tokens and positions."""
        self._own, self._classes = OwnShares(model, gradient, bag), range(model.num_labels)
        used_P = bag.used_positions
        places = int(used_P.nonzero()[-1]) + 1 if used_P.any() else 0
        self._place_PO = bag.position_PO[:places] * bag.error_O / self._own.size_O
        self._shares = Shares.of(bag, self._own.size_O)._replace(late=places)
        self._known = dict[tuple[Ids, int], _Tried]()
        self._frame, self._rng = frame(model), torch.Generator().manual_seed(0)
        self._tokens = bag.tokens_N.tolist()
        self._table_PN, self._end_P = bag.share_NO.new_zeros((0, 0)), bag.share_NO.new_zeros(0)
        self._words = [
            token for token in self._tokens if token not in {*self._frame.first, *self._frame.last}
        ]

    def text(self, clock: Clock) -> Judged | None:
        """Returns a text whose tokens' shares agree, and takes them out; None: none was found."""
        first, last = self._frame
        cells = len(self._place_PO) * len(self._tokens)
        if len(self._place_PO) <= len(first) + len(last) or not self._words or cells > _CELLS:
            return None
        if not self._table_PN.numel():
            self._learn()
        best, vain = self._mended(self._climbed(self._try([self._drawn()])[0], clock), clock), 0
        while not best.checked.agrees and vain < _KICKS and not clock.up():
            (kicked,) = self._try([self._kicked(best)])
            other, vain = self._climbed(kicked, clock), vain + 1
            if other.checked.nats > best.checked.nats + _LITTLE:
                best, vain = self._mended(other, clock), 0
        if not best.checked.agrees:
            return None
        part_PO = best.checked.factor * best.share_MO[: len(self._place_PO)]
        self._place_PO = self._place_PO - part_PO
        self._shares, self._known = self._shares.without(best.checked), {}
        self._table_PN = self._table_PN[:0]
        return Judged(self._ids(best.draft), -best.checked.nats, math.inf)

    def _learn(self) -> None:
        """Learns which tokens are likely at each place, and where texts may end."""
        from scipy.optimize import nnls  # here, because it takes a while

        left_NO = self._shares.left_NO * self._shares.standing[:, None]
        places, count = len(self._place_PO), len(left_NO)
        once = left_NO.norm(dim=1).mean()
        eye_PP, eye_NN = torch.eye(places).to(left_NO), torch.eye(count).to(left_NO)
        sums = [torch.kron(eye_PP, left_NO.T.contiguous()), once * eye_NN.repeat(1, places)]
        wanted = [self._place_PO.flatten(), once.expand(count)]
        x, _ = nnls(torch.cat(sums).cpu().numpy(), torch.cat(wanted).cpu().numpy(), maxiter=10**5)
        table_PN = torch.from_numpy(x).view(places, count) + _RARE
        column_of = {token: column for column, token in enumerate(self._tokens)}
        self._table_PN = table_PN[:, [column_of[word] for word in self._words]]
        mark = self._frame.last[-1:]
        known = [column_of[token] for token in mark if token in column_of]
        self._end_P = (table_PN[:, known].sum(1) if known else 0) + torch.full_like(
            table_PN[:, 0], _END
        )
        self._end_P[: len(self._frame.first) + len(self._frame.last)] = 0

    def _climbed(self, best: _Tried, clock: Clock, weak: Sequence[int] | None = None) -> _Tried:
        """Returns the text to which better and better changes lead.

        Args:
            best: The text to begin with.
            clock: When time is up, it is as it is.
            weak: Places at which all tokens are tried; None: the likeliest ones, at all places.
        """
        classes: Iterable[int] = self._classes
        while True:
            before = best.checked.nats
            order = torch.randperm(len(self._place_PO), generator=self._rng).tolist()
            for place in clock.paced([None, *order] if weak is None else weak):
                draft = best.draft
                others = (
                    self._lengths(draft) if place is None else self._exchanged(draft, place, weak)
                )
                for other in self._try(others, classes):
                    if other.checked.nats > best.checked.nats + _BETTER:
                        best = other
            classes = [best.label]
            if best.checked.nats < before + _LITTLE or clock.up():
                return best

    def _mended(self, best: _Tried, clock: Clock) -> _Tried:
        """Returns a near text with other tokens at the places that agree least, if these do."""
        words = self._words_of(best.draft)
        if best.checked.nats < _NEARLY * len(self._own.size_O) * len({*words.values()}):
            return best
        nats = self._nats(best.checked)
        return self._climbed(best, clock, [p for p, word in words.items() if nats[word] < _AGREES])

    def _lengths(self, draft: _Draft) -> list[_Draft]:
        """Returns the text with other lengths."""
        ends = self._end_P.nonzero()[:, 0].tolist()
        return [draft._replace(length=end + 1) for end in ends if end + 1 != draft.length]

    def _exchanged(self, draft: _Draft, place: int, weak: Sequence[int] | None) -> list[_Draft]:
        """Returns the text with other tokens at a place."""
        if place not in self._words_of(draft):
            return []
        likely = self._words
        if weak is None:
            count = min(_FEW, len(self._words))
            likely = [self._words[n] for n in self._table_PN[place].topk(count).indices.tolist()]
        before, (token, *after) = draft.tokens[:place], draft.tokens[place:]
        return [draft._replace(tokens=(*before, o, *after)) for o in likely if o != token]

    def _drawn(self) -> _Draft:
        """Returns a text that the table makes likely."""
        drawn_P = torch.multinomial(self._table_PN.cpu(), 1, generator=self._rng)[:, 0].tolist()
        return _Draft(tuple(self._words[n] for n in drawn_P), self._drawn_length())

    def _kicked(self, tried: _Tried) -> _Draft:
        """Returns a text in which tokens that agree least are drawn anew."""
        words, nats = self._words_of(tried.draft), self._nats(tried.checked)
        stays = (torch.rand(len(self._place_PO), generator=self._rng) < _STAYS).tolist()
        tokens = [
            old if stays[place] or (place in words and nats[old] > _AGREES) else new
            for place, (old, new) in enumerate(
                zip(tried.draft.tokens, self._drawn().tokens, strict=True)
            )
        ]
        again = float(torch.rand(1, generator=self._rng)) < _ENDS
        return _Draft(tuple(tokens), self._drawn_length() if again else tried.draft.length)

    def _drawn_length(self) -> int:
        return int(torch.multinomial(self._end_P.cpu(), 1, generator=self._rng)) + 1

    def _try(self, drafts: Sequence[_Draft], classes: Iterable[int] | None = None) -> list[_Tried]:
        """Returns how the shares of texts' tokens agree, each for the best of some classes."""
        labels = [*(self._classes if classes is None else classes)]
        new = [
            draft
            for draft in drafts
            if any((self._ids(draft), label) not in self._known for label in labels)
        ]
        if len(self._known) > _KNOWN:
            self._known, new = {}, [*drafts]
        if new:
            texts = [self._ids(draft) for draft in new]
            for label, share_BMO in zip(labels, self._own.of_classes(texts, labels), strict=True):
                for draft, ids, share_MO in zip(new, texts, share_BMO, strict=True):
                    checked = self._checked(draft, share_MO)
                    self._known[ids, label] = _Tried(draft, label, checked, share_MO)
        tried = list[_Tried]()
        for draft in drafts:
            of_labels = (self._known[self._ids(draft), label] for label in labels)
            best = max(of_labels, key=lambda text: text.checked.nats)
            tried.append(best._replace(draft=draft))
        return tried

    def _checked(self, draft: _Draft, share_MO: Tensor) -> Checked:
        """Compares the shares of a text's words: marks stand in all texts."""
        words = self._words_of(draft).values()
        return self._shares.checked((*words, _NO_END), share_MO[-len(self._tokens) :])

    def _ids(self, draft: _Draft) -> Ids:
        first, last = self._frame
        return (*first, *self._words_of(draft).values(), *last)

    def _words_of(self, draft: _Draft) -> dict[int, int]:
        """Returns the words of a text by their places."""
        begin, end = len(self._frame.first), draft.length - len(self._frame.last)
        return dict(zip(range(begin, end), draft.tokens[begin:end], strict=True))

    def _nats(self, checked: Checked) -> dict[int, float]:
        """Returns what speaks for each token of the batch in a text."""
        return dict(zip(self._tokens, checked.nats_N.tolist(), strict=True))
