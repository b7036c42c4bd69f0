"""Texts of a decoder's batch, of whose tokens the shares in the first layer are known.

Few rows of adapters name the tokens of a batch, and give each token's shares: the sum of the
gradients at the adapter's outputs in all of the token's places (`sparse_bayes`). A token that
stands in one place of the batch has the shares of this place. So a text can be checked by itself,
whatever the others are: its own gradient gives its tokens' shares, all times one factor.

- **Search.** A beam of prefixes of the batch's tokens. For a next token speak its log probability,
  less that of other places, because it stands somewhere, and what its state explains of the rows of
  deeper layers (`state_blocks`). Of these nats the sign and the logarithm count, as a mean over
  layers, because rows are no Gaussian numbers. The first layers choose what all are asked about.
- **Check.** Likely ends are closed, and each closed text is compared by its tokens' shares
  (`text_shares`).
- **Edits.** A beam seldom holds the whole of a right text, but often a text with a few words wrong.
  Shares tell which of two wrong texts is nearer. So closed texts are climbed from: a text with one
  token more, less or other takes the place of a text if its shares agree better. First those are
  tried that put a likely token where shares agree least. A word that is not known to be in the
  batch may be put there, too.
- **Batches.** The shares of a text are taken out of all, before the others are weighed anew. Each
  search has other prefixes that the model writes, as which ones these are decides what is found.
  It knows the states of texts that were read.
- **The rest.** Without the gradients of texts that were read a batch may have fewer tokens than
  rows, or hardly more. Then spans of layers tell its other texts (`depth_search`), where nothing
  blurs the rows.

Nothing but the model and the rows is used. A batch is proved as any other, by its gradient or by
the client's steps.

Shapes: N tokens of the batch, O rows of adapters, D columns, V vocabulary, B prefixes, T tokens of
a prefix, X any axes.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedleak.attacks import certificate
from fedleak.attacks.clock import Clock
from fedleak.attacks.listening import AllHeardError, listening
from fedleak.attacks.measured_gradient import MeasuredGradient
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.answer import Judged, OnJudged
from fedleak.attacks.subspace.depth_search import BEYOND, adapters_of, layer_rows, read_depths
from fedleak.attacks.subspace.own_shares import OwnShares
from fedleak.attacks.subspace.sparse_bayes import Bag
from fedleak.attacks.subspace.state_blocks import StateBlocks
from fedleak.attacks.subspace.text_shares import Checked, Shares
from fedleak.attacks.subspace.update_evidence import (
    empty_cache,
    first_tokens,
    last_hidden,
    logits,
    of_rows,
    unsaid,
)
from fedleak.models import LanguageModel
from fedleak.models.family import LORA_A, LORA_B

if TYPE_CHECKING:
    from transformers import DynamicCache

_WIDTHS = (36, 36, 108)
"""Prefixes that are kept in each search, while it finds any text, and in the next one."""

_EARLY = 4
"""Times as many are kept at first, over the number of tokens."""

_NEAR, _FAR = 4, 3
"""First layers beyond the very first, whose rows are used, and of the others each third one."""

_TRIED = 3
"""Times as many prefixes as are kept are tried in all layers, those that most speaks for in the
first ones."""

_WRITTEN, _LONG = 48, 12
"""Prefixes that the model writes, and their tokens at most."""

_STATES = 1.5
"""Weight of what states explain."""

_CLOSED = 8
"""Prefixes that are closed at each length, at most."""

_STARTS, _BEGIN, _NEARLY = 3, 15.0, 0.5
"""Closed texts that are edited in vain, before a search ends; and nats of a text to begin with, in
all and for each row and token."""

_EDITS, _VAIN, _BETTER = 32, 4, 10.0
"""Edits that are checked at once, times that this is done in vain, and nats that an edit brings."""

_PLACE = 8.0
"""Ranks of a token for each nat in each row that speaks for the tokens around its place."""

_UNNAMED, _WORSE = 32, 4
"""Words that are not known to be in the batch, which the model finds likely at a place, and ranks
by which they come later than those of the batch."""

_LONGER, _ENDS = 6, 4
"""Tokens that a beam puts at the end of a text, and its width."""

_STALE, _MORE = 3, 2
"""Tokens by which a beam grows in vain, or once there is a text that agrees, before it ends: longer
ones may agree better."""

_RESTS = 2
"""Part of the time that is left for the rest of a batch."""

_LONGEST, _REPEATED = 64, 2
"""Tokens of a text, at most, and as a multiple of the distinct tokens that are left."""

_AT_ONCE = 512
"""Tokens that go through the model together."""


class _Beam(NamedTuple):
    """Prefixes of one length.

    Attributes:
        ids: The prefixes.
        nats_B: What speaks for them, by words and states.
        parts: What their states have each beside those before it, whitened, [B, T, D], of layers.
        hidden_BD: The last hidden states.
        cache: What the model keeps of their tokens.
    """

    ids: list[Ids]
    nats_B: Tensor
    parts: list[Tensor]
    hidden_BD: Tensor
    cache: "DynamicCache"


def texts_of_bag(
    model: LanguageModel, gradient: MeasuredGradient, bag: Bag, clock: Clock, tell: OnJudged
) -> list[Judged]:
    """Returns the texts of a batch that its tokens' shares agree with.

    Args:
        model: A decoder at the broadcast weights.
        gradient: Of adapters that earlier rounds trained.
        bag: The tokens of the batch.
        clock: When time is up, no more texts are sought.
        tell: Called with the number of texts, and the last one.
    """
    search, texts, seed = _Search(model, gradient, bag), list[Judged](), 0
    wanted = gradient.update.num_examples
    for width in _WIDTHS:
        before = -1
        while before < len(texts) < wanted and not clock.up():
            before = len(texts)
            if not search.standing:  # a text that occurs again may have taken all
                return texts
            search.begin(seed, clock)
            texts += search.texts(width, wanted - before, clock)
            if before < len(texts) < wanted and not bag.noise:
                texts += search.rest(wanted - len(texts), clock)
            for number, text in enumerate(texts[before:], before + 1):
                tell(number, wanted, text)
            seed += 1
    return texts


class _Search:
    """The search for the texts of a batch, in which the shares of those that were read are gone."""

    def __init__(self, model: LanguageModel, gradient: MeasuredGradient, bag: Bag) -> None:
        """Takes the tokens of a batch, and the rows of layers."""
        self._model, self._gradient, self._bag = model, gradient, bag
        self._first, (self._end,) = first_tokens(model), certificate.close(model, ())
        self._own = OwnShares(model, gradient, bag)
        self._shares = Shares.of(bag, self._own.size_O)
        came = [n for n in range(1, model.num_layers) if _shows_inputs(model, gradient, n)]
        numbers = [*came[:_NEAR], *came[_NEAR::_FAR]]
        self._rows = [layer_rows(model, gradient, number) for number in numbers]
        self._last = max(came[:_NEAR], default=0)
        self._inputs_of = list[nn.Module]()
        self._blocks = list[StateBlocks]()
        self._usual_N = bag.share_NO.new_zeros(0)
        self._ended = list[Checked]()

    @property
    def standing(self) -> bool:
        """Whether some tokens may stand in other texts than those that were read."""
        return bool(self._shares.standing.any())

    def begin(self, seed: int, clock: Clock) -> None:
        """Learns what states say in as many layers as time allows, behind prefixes of a seed."""
        self._inputs_of = [module for _, module, _ in self._rows]
        prefixes, self._usual_N = self._written(seed)
        behind = [self._states_behind(prefixes_CT) for prefixes_CT in clock.paced(prefixes)]
        states = [torch.cat(of_layer).transpose(0, 1) for of_layer in zip(*behind, strict=True)]
        self._put_in(states)
        self._blocks = [
            StateBlocks.learned(matrix, state_NKD)
            for (matrix, _, _), state_NKD in clock.paced(zip(self._rows, states, strict=False))
        ]
        del self._inputs_of[len(self._blocks) :]

    def _put_in(self, states: Sequence[Tensor]) -> None:
        """Puts the states of texts that were read in place of those of tokens of no other text.

        Args:
            states: Of the tokens in layers, [N, K, D].
        """
        tokens, states_of = self._bag.tokens_N.tolist(), dict[int, list[list[Tensor]]]()
        for text in self._ended:
            with listening(self._inputs_of) as heard:
                last_hidden(self._model, torch.tensor([text.ids[:-1]], device=self._model.device))
            inputs = [heard[module][0][0] for module in self._inputs_of]
            for token, *of_layers in zip(text.ids, *inputs, strict=False):
                states_of.setdefault(token, []).append(of_layers)
        for row in (~self._shares.standing).nonzero()[:, 0].tolist():
            places = states_of.get(tokens[row], [])
            for state_NKD, *vectors in zip(states, *places, strict=False):  # not all in time
                if vectors:
                    again = -(-state_NKD.shape[1] // len(vectors))
                    state_NKD[row] = torch.stack(vectors).repeat(again, 1)[: state_NKD.shape[1]]

    def texts(self, width: int, most: int, clock: Clock) -> list[Judged]:
        """Returns texts, `most` at most, whose tokens' shares agree, and takes these out."""
        rows_N = (self._shares.standing & self._usual_N.isfinite()).nonzero()[:, 0]
        closed = self._closed(width, most, rows_N, clock)
        closed |= self._edited(closed, most, rows_N, clock)
        return self._taken(closed, most)

    def rest(self, most: int, clock: Clock) -> list[Judged]:
        """Returns texts, `most` at most, that spans of what is left tell, and takes these out.

        Their tokens' shares must agree, as those of all.
        """
        bag = self._bag.only(self._shares.standing)
        if most > 1 and len(bag.tokens_N) > len(self._own.size_O) + BEYOND:
            return []
        left = self._remainder()
        texts = read_depths(self._model, left, bag, clock.part(_RESTS), lambda *_: None) or []
        return self._taken(self._with_shares([(*text.ids, self._end) for text in texts]), most)

    def _remainder(self) -> MeasuredGradient:
        """Returns the gradient without those of texts that were read."""
        left = self._gradient
        names = [name for name in left.update.tensors if name.endswith((LORA_A, LORA_B))]
        for text in self._ended:
            (unit,) = certificate.units(self._model, [text.ids[:-1]], names)
            (gradients,) = unit.gradients
            left = left.without({name: text.factor * value for name, value in gradients.items()})
        return left

    def _taken(self, closed: Mapping[Ids, Tensor], most: int) -> list[Judged]:
        """Returns texts, `most` at most, of some closed ones that agree, and takes these out."""
        texts, self._shares = self._shares.read(closed)
        self._ended += texts
        return [Judged(text.ids[:-1], -text.nats, math.inf) for text in texts[:most]]

    def _closed(self, width: int, most: int, rows_N: Tensor, clock: Clock) -> dict[Ids, Tensor]:
        """Returns likely texts, with the shares of their own gradients.

        A beam grows until some agree, and by a few more tokens, or until nothing speaks for more.
        """
        longest = min(_LONGEST, _REPEATED * len(rows_N), self._model.max_length - 1)
        closed, beam = dict[Ids, Tensor](), self._begun()
        highest, stale, more = -math.inf, 0, 0
        lengths = range(len(self._first), longest if self._blocks else 0)
        for _ in clock.paced(lengths):
            count = max(width, _EARLY * width // (len(beam.ids[0]) + 1))
            beam = self._grown(beam, rows_N, count)
            nats = float(beam.nats_B.max())
            stale, highest = (0, nats) if nats > highest else (stale + 1, highest)
            end_B = self._log_probabilities(beam.hidden_BD)[:, self._end]
            likely = (beam.nats_B + end_B).topk(min(_CLOSED, len(end_B))).indices
            closed |= self._with_shares([(*beam.ids[row], self._end) for row in likely.tolist()])
            texts, _ = self._shares.read(closed)
            more += bool(texts)
            if stale == _STALE or more > _MORE or len(texts) >= most:
                break
        return closed

    def _edited(
        self, closed: Mapping[Ids, Tensor], most: int, rows_N: Tensor, clock: Clock
    ) -> dict[Ids, Tensor]:
        """Returns texts that agree, to which edits of closed texts lead, with their part of shares.

        Each time it begins with the text that has the most nats of tokens that none had before.
        """
        starts, better, vain = dict(closed), dict[Ids, Tensor](), 0
        tokens_N = self._shares.tokens_N
        new_N = torch.ones_like(tokens_N, dtype=torch.bool)
        while starts and vain < _STARTS and not clock.up():
            texts, rest = self._shares.read({**closed, **better})
            checked = (rest.checked(*pair) for pair in starts.items())
            near = (text for text in checked if text.nats > self._nearly(text.ids))
            start = max(near, key=lambda text: text.nats_N[new_N].sum(), default=None)
            if start is None or len(texts) >= most or start.nats_N[new_N].sum() < _BEGIN:
                break
            del starts[start.ids]
            last = self._climbed(start, rest, rows_N, clock)
            new_N &= ~torch.isin(tokens_N, tokens_N.new_tensor([*start.ids, *last.ids]))
            vain += 1
            if last.agrees:
                better[last.ids], vain = last.part_NO, 0
        return better

    def _nearly(self, ids: Ids) -> float:
        """Returns the nats of a text that edits may mend."""
        return _NEARLY * len(self._own.size_O) * len({*ids[:-1]})

    def _climbed(self, text: Checked, shares: Shares, rows_N: Tensor, clock: Clock) -> Checked:
        """Returns what edits of a text lead to that agree ever better."""
        tried, edits, vain = {text.ids}, self._edits(text, rows_N), 0
        while edits and not text.agrees and vain < _VAIN and not clock.up():
            closed, edits = self._with_shares(edits[:_EDITS]), edits[_EDITS:]
            checked = (shares.checked(*pair) for pair in closed.items())
            best = max(checked, key=lambda text: text.nats)
            tried |= {*closed}
            vain += 1
            if best.nats > text.nats + _BETTER:
                text, vain = best, 0
                edits = [ids for ids in self._edits(text, rows_N) if ids not in tried]
        return text

    def _edits(self, text: Checked, rows_N: Tensor) -> list[Ids]:
        """Returns texts with one token more, less or other than a text, the likeliest first.

        Before all stand those that a beam makes longer. A token is likely that is so behind those
        before it, by words or by states; a place is, where little speaks for the tokens around.
        """
        (*words, end), named_N = text.ids, self._bag.tokens_N
        nats_of = dict(zip(named_N.tolist(), text.nats_N.tolist(), strict=True))
        nats = [nats_of.get(word, 0.0) for word in words]
        beam, ranks = self._begun(), dict[Ids, float]()
        for place in range(len(self._first), len(words) + 1):
            before, token, after = words[:place], words[place : place + 1], words[place + 1 :]
            around = nats[max(place - 1, 0) : place + 2]
            sure = _PLACE * sum(around) / len(around) / len(self._own.size_O)
            for other, rank in self._likely(beam, rows_N).items():
                for ids in ((*before, other, *token, *after, end), (*before, other, *after, end)):
                    ranks[ids] = min(ranks.get(ids, math.inf), rank + sure)
            if token:
                ranks[*before, *after, end] = sure
                zero_1 = rows_N.new_zeros(1)
                beam, _ = self._longer(beam, zero_1, zero_1 + token[0])
        for _ in range(min(_LONGER, self._model.max_length - 1 - len(words))):
            beam = self._grown(beam, rows_N, _ENDS)
            ranks |= {(*ids, end): -1.0 for ids in beam.ids}
        shortest, longest = len(self._first) + 2, self._model.max_length
        edits = (ids for ids in ranks if shortest <= len(ids) <= longest and ids != text.ids)
        return sorted(edits, key=lambda ids: ranks[ids])

    def _likely(self, beam: _Beam, rows_N: Tensor) -> dict[int, float]:
        """Returns the rank of tokens of the batch behind a prefix, and of some other words."""
        _, nats_BN, ranked_BN = self._ranked(beam, rows_N)
        rank_2N = torch.cat([nats_BN, ranked_BN]).argsort(descending=True).argsort()
        tokens = self._bag.tokens_N[rows_N].tolist()
        ranks = dict(zip(tokens, rank_2N.min(0).values.tolist(), strict=True))
        if beam.ids[0]:
            (likely_V,) = self._log_probabilities(beam.hidden_BD)
            likely_V[[*self._bag.tokens_N.tolist(), self._end]] = -math.inf
            unnamed = likely_V.topk(min(_UNNAMED, int(likely_V.isfinite().sum()))).indices.tolist()
            ranks |= {word: _WORSE + rank / 2 for rank, word in enumerate(unnamed)}
        return ranks

    def _with_shares(self, texts: Sequence[Ids]) -> dict[Ids, Tensor]:
        """Returns closed texts, with the shares of their own gradients."""
        return dict(zip(texts, self._own.of_closed(texts), strict=True)) if texts else {}

    def _begun(self) -> _Beam:
        """Returns what begins all texts."""
        zero_1 = self._usual_N.new_zeros(1)
        parts = [zero_1.new_zeros((1, 0, len(blocks.whiten_DD))) for blocks in self._blocks]
        beam = _Beam([()], zero_1, parts, zero_1.new_zeros((1, 0)), empty_cache())
        for token in self._first:
            token_1 = torch.tensor([token], device=self._model.device)
            beam, _ = self._longer(beam, zero_1.long(), token_1)
        return beam

    def _ranked(self, beam: _Beam, rows_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what speaks for prefixes with one more of some tokens.

        Returns:
            Which tokens [B, N] a prefix has already, what speaks for it by words, and by the states
            of the first layers, too.
        """
        tokens_N = self._bag.tokens_N[rows_N]
        again_BN = torch.tensor(
            [[token in ids for token in tokens_N.tolist()] for ids in beam.ids],
            device=self._model.device,
        )
        nats_BN = beam.nats_B[:, None].expand(again_BN.shape)
        if beam.ids[0]:
            likely_BV = self._log_probabilities(beam.hidden_BD)
            nats_BN = nats_BN + likely_BV[:, tokens_N] - self._usual_N[rows_N].where(~again_BN, 0)
        states = self._states(beam.cache, len(beam.ids), tokens_N)
        near = zip(self._blocks[:_NEAR], states, beam.parts[:_NEAR], strict=True)
        whites = [blocks.beside(state_BND, part) for blocks, state_BND, part in near]
        return again_BN, nats_BN, nats_BN + self._explained(whites, rows_N, again_BN)

    def _grown(self, beam: _Beam, rows_N: Tensor, count: int) -> _Beam:
        """Returns the best of the prefixes with one more of some tokens."""
        tokens_N = self._bag.tokens_N[rows_N]
        again_BN, nats_BN, ranked_BN = self._ranked(beam, rows_N)
        tried = ranked_BN.flatten().topk(min(_TRIED * count, ranked_BN.numel())).indices
        rows_B, columns_B = tried // len(tokens_N), tried % len(tokens_N)
        longer, whites = self._longer(beam, rows_B, tokens_N[columns_B])
        again_1B = again_BN.flatten()[None, tried]
        more_1B = self._explained(whites, rows_N[columns_B], again_1B)
        nats_B = nats_BN.flatten()[tried] + more_1B[0]
        best = nats_B.topk(min(count, len(nats_B))).indices
        return _Beam(
            ids=[longer.ids[row] for row in best.tolist()],
            nats_B=nats_B[best],
            parts=[part[best] for part in longer.parts],
            hidden_BD=longer.hidden_BD[best],
            cache=of_rows(longer.cache, best),
        )

    def _longer(self, beam: _Beam, rows_B: Tensor, tokens_B: Tensor) -> tuple[_Beam, list[Tensor]]:
        """Returns some prefixes, each with one more token, and what its states have beside them.

        That is [1, B, D] for each layer, whitened. Nats are those of the prefixes.
        """
        pairs = zip(rows_B.tolist(), tokens_B.tolist(), strict=True)
        cache = of_rows(beam.cache, rows_B)
        with listening(self._inputs_of) as heard:
            hidden_BD = last_hidden(self._model, tokens_B[:, None], cache)[:, -1]
        parts = [part[rows_B] for part in beam.parts]
        layers = zip(self._blocks, self._inputs_of, parts, strict=True)
        whites = [blocks.beside(heard[module][0], part) for blocks, module, part in layers]
        longer = _Beam(
            ids=[(*beam.ids[row], token) for row, token in pairs],
            nats_B=beam.nats_B[rows_B],
            parts=[
                torch.cat([part, F.normalize(white, dim=-1)], 1)
                for part, white in zip(parts, whites, strict=True)
            ],
            hidden_BD=hidden_BD,
            cache=cache,
        )
        return longer, [white.transpose(0, 1) for white in whites]

    def _explained(self, whites: Sequence[Tensor], rows_N: Tensor, again_BN: Tensor) -> Tensor:
        """Returns what speaks for tokens [B, N] by what their states explain of layers' rows."""
        nats_LBN = torch.stack(
            [
                blocks.nats(white_BND, rows_N, again_BN)
                for blocks, white_BND in zip(self._blocks, whites, strict=False)
            ]
        )
        return _STATES * (nats_LBN.sign() * nats_LBN.abs().log1p()).mean(0)

    def _states(self, cache: "DynamicCache", prefixes: int, tokens_N: Tensor) -> list[Tensor]:
        """Returns the inputs [B, N, D] of the first layers, of tokens behind what a cache keeps."""
        modules = self._inputs_of[:_NEAR]
        heard: list[list[Tensor]] = [[] for _ in modules]
        rows_X = torch.arange(prefixes, device=tokens_N.device).repeat_interleave(len(tokens_N))
        tokens_X = tokens_N.repeat(prefixes)
        for begin in range(0, len(rows_X), _AT_ONCE):
            some_X = slice(begin, begin + _AT_ONCE)
            behind = of_rows(cache, rows_X[some_X], self._last)
            with listening(modules, stop=True) as given, suppress(AllHeardError):
                last_hidden(self._model, tokens_X[some_X, None], behind)
            for inputs, module in zip(heard, modules, strict=True):
                inputs.append(given[module][0][:, -1])
        return [torch.cat(inputs).view(prefixes, len(tokens_N), -1) for inputs in heard]

    def _states_behind(self, prefixes_CT: Tensor) -> list[Tensor]:
        """Returns the inputs [C, N, D] of layers, of all tokens behind C prefixes."""
        count, tokens_N = len(prefixes_CT), self._bag.tokens_N
        cache = empty_cache()
        if prefixes_CT.shape[1]:
            last_hidden(self._model, prefixes_CT, cache)
        rows_X = torch.arange(count, device=tokens_N.device).repeat_interleave(len(tokens_N))
        with listening(self._inputs_of) as heard:
            last_hidden(self._model, tokens_N.repeat(count)[:, None], of_rows(cache, rows_X))
        inputs = (heard[module][0] for module in self._inputs_of)
        return [input_X1D.view(count, len(tokens_N), -1) for input_X1D in inputs]

    def _written(self, seed: int) -> tuple[list[Tensor], Tensor]:
        """Returns prefixes that the model writes with the tokens, and how likely each is there.

        As many [C, T] have each number of tokens, up to the longest; of all places and each token
        the logarithm of the mean probability [N].
        """
        device, tokens_N = self._model.device, self._bag.tokens_N
        rng = torch.Generator().manual_seed(seed)
        begun = torch.randint(len(tokens_N), (_WRITTEN, 1), generator=rng).to(device)
        first_CT = torch.tensor([self._first] * _WRITTEN, dtype=torch.long, device=device)
        ids_CT, cache, likely = torch.cat([first_CT, tokens_N[begun]], 1), empty_cache(), []
        new_CT = ids_CT
        for _ in range(_LONG):
            hidden_CD = last_hidden(self._model, new_CT, cache)[:, -1]
            likely_CN = self._log_probabilities(hidden_CD)[:, tokens_N]
            likely.append(likely_CN)
            drawn = torch.multinomial(likely_CN.softmax(-1).cpu(), 1, generator=rng).to(device)
            new_CT = tokens_N[drawn]
            ids_CT = torch.cat([ids_CT, new_CT], 1)
        usual_N = torch.cat(likely).logsumexp(0) - math.log(_LONG * _WRITTEN)
        begin = len(self._first)
        return [ids_CT[n::_LONG, : begin + n] for n in range(_LONG)], usual_N

    def _log_probabilities(self, hidden_BD: Tensor) -> Tensor:
        """Returns those [B, V] of the next token; of special ones only the end is likely."""
        logits_BV = logits(self._model, hidden_BD)
        logits_BV[:, [token for token in unsaid(self._model) if token != self._end]] = -math.inf
        return logits_BV.log_softmax(-1)


def _shows_inputs(model: LanguageModel, gradient: MeasuredGradient, layer: int) -> bool:
    """Whether rows of a layer are mixes of its inputs: some first matrix of its adapters came."""
    names = adapters_of(model, gradient, layer)
    return bool(names) and names[0].endswith(LORA_A)
