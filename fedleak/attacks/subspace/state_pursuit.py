"""State pursuit: texts of a decoder, token after token, by how much of an update they explain.

The gradient of a weight that multiplies the attention input of a layer is C X: each of its rows is
a combination of the hidden states X [T, D] of the batch's tokens. So are the rows of the first
matrix of an adapter, of which there are few. DAGER asks whether a state lies in the span of the
rows. That ends where rows are fewer than tokens, as adapters' are, and where an optimiser has
changed each number: a first step of Adam leaves little more than signs. But signs of Gaussian
combinations still point along them (Bussgang 1952): the states of the right text explain about
2 / pi of the rows' square, those of another text as much as so many random directions. So the span
is not tested, but a text is sought whose states together explain the rows of all layers best, as
simultaneous orthogonal matching pursuit does (Tropp, Gilbert and Strauss 2006).

- **Units.** The model itself writes texts, and their states say which directions are common. Rows
  and states are whitened by them; before, rows after Adam are multiplied by the states' root mean
  square, which its division took away.
- **Gain.** A token's state, less what the states before it explain, explains a share e of what is
  left of A rows. That is A D / 2 times -log(1 - e) nats, less A / 2 for what it explains by chance;
  the mean over layers counts. No more than `_ROWS` rows count: more are not independent.
- **Search.** In a causal model a state depends on the prefix alone, so a beam of prefixes grows by
  a token at a time. A token that explains much also explains some of it in a wrong place. So
  prefixes are compared as in phrase-based translation (Koehn 2004): by what they explain, the log
  probability that the model itself gives them, and a share of what the tokens that are left have
  explained where they fitted best. A second pass knows that better.
- **Batches.** What a text explains is taken from the rows, and the next text is sought.

Nothing of this is a proof. Making the client's steps again (`replay`), or recomputing the
gradient, is one.

Shapes: B prefixes, J next tokens, V vocabulary, A rows, D hidden size, T tokens, N states, K states
explained so far, H key-value heads, E head size.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedleak.attacks import AttackSetting, OneByOne, Progress, certificate
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.attacks.subspace.answer import Judged, by_excess, ranked, recovered, telling
from fedleak.models import CAUSAL_LM, LanguageModel
from fedleak.models.family import with_adapters
from fedleak.training.observation import Observation
from fedleak.training.recipe import copied_parameters

_OWN_TEXTS, _OWN_TOKENS = 96, 24
"""Texts that the model writes, and tokens of each, which say what states are like."""

_RIDGE = 0.3
"""Of the mean variance, added to each direction before it is whitened."""

_ROWS = 16
"""Rows that count as independent, at most."""

_COST = 15.0
"""Nats that a token has to explain beyond its log probability: what the best of many wrong ones
explains."""

_TOLD = 10.0
"""Nats from which on a token is taken to be in the batch somewhere."""

_FUTURE = (0.4, 0.7)
"""Share of what is left to explain that counts for a prefix, in each pass."""

_TRIED = 30
"""Next tokens that are tried of each kind: those that explain most anywhere, the likeliest, and
those that the update makes likelier."""

_PLACES = (1, 3, 7, 15)
"""Places at which all tokens are looked at where the first layer's input has the place in it."""

_STALE = 5
"""Tokens by which the beam grows without a better text before a pass ends."""

_AHEAD, _FOLLOWED = 2, 8
"""Tokens behind a change that choose the changes whose whole text is looked at, and how many."""

_STEP = 0.01
"""How far weights move along an update, as a share of their norm, to see what it makes likelier."""

_NEVER = -1e4
"""Log probability of a token that stands in no text."""

_AT_ONCE = 512
"""Prefixes that go through the model together."""

_ALONG = 0.05
"""Part of a state that must lie outside of what is explained, for its gain to be measured."""

_EXACT = 1e-6
"""Share of the rows that rounding leaves unexplained."""


class Layer(NamedTuple):
    """What an update says of the attention inputs of a layer.

    Attributes:
        module: The name of the weight that they are multiplied by, as a submodule.
        rows_AD: Combinations of states, whitened, of unit norm together.
        whiten_DD: What a state is multiplied by from the right.
    """

    module: str
    rows_AD: Tensor
    whiten_DD: Tensor


@dataclass(frozen=True, kw_only=True)
class Beam:
    """Prefixes of one text.

    Attributes:
        prefixes: B tuples of tokens.
        gain_B: Nats that they explain, less the cost of their tokens.
        prior_B: Their log probability by the model itself.
        next_BV: Log probability of each next token.
        used_BV: Which tokens they hold.
        left_LBAD: The rows that are left, of each layer.
        basis_LBKD: What is explained: orthonormal rows, of zeros where a state brought nothing new.
        cache: Keys and values [B, H, T, E] of each layer of the model.
    """

    prefixes: tuple[tuple[int, ...], ...]
    gain_B: Tensor
    prior_B: Tensor
    next_BV: Tensor
    used_BV: Tensor
    left_LBAD: Sequence[Tensor]
    basis_LBKD: Sequence[Tensor]
    cache: Sequence[tuple[Tensor, Tensor]]

    @property
    def scores(self) -> Tensor:
        """How good the prefixes are as whole texts."""
        return self.gain_B + self.prior_B

    def of(self, rows_B: Tensor) -> "Beam":
        """Returns the beam of some of the prefixes."""
        return Beam(
            prefixes=tuple(self.prefixes[row] for row in rows_B.tolist()),
            gain_B=self.gain_B[rows_B],
            prior_B=self.prior_B[rows_B],
            next_BV=self.next_BV[rows_B],
            used_BV=self.used_BV[rows_B],
            left_LBAD=[left_BAD[rows_B] for left_BAD in self.left_LBAD],
            basis_LBKD=[basis_BKD[rows_B] for basis_BKD in self.basis_LBKD],
            cache=[(keys[rows_B], values[rows_B]) for keys, values in self.cache],
        )


@dataclass(frozen=True, kw_only=True)
class StatePursuit(OneByOne):
    """Texts of a decoder by what their hidden states explain of an update, also of Adam on LoRA.

    Attributes:
        width: Prefixes that are kept.
        longest: Tokens of a text, at most.
        passes: Searches for each text, at most two; the second knows what the first learned.
        seconds: After which what was read so far counts; None: no limit.
    """

    kind: ClassVar[str] = "state_pursuit"
    slow: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset()
    width: Annotated[int, Field(ge=1)] = 16
    longest: Annotated[int, Field(ge=1)] = 64
    passes: Annotated[int, Field(ge=1, le=len(_FUTURE))] = len(_FUTURE)
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs attention weights of a causal model, or their adapters, of some layer."""
        if setting.task != CAUSAL_LM:
            return (
                f"reads next-token training, and the task is {setting.task!r}: use kind = 'dager'"
            )
        layers = range(setting.num_layers)
        needed = (with_adapters(setting.family.attention_parameters(layer)) for layer in layers)
        if setting.shared.isdisjoint(frozenset().union(*needed)):
            return (
                "needs attention weights or adapters of them, and clients send none: see "
                "update.share and model.lora.targets"
            )
        return None

    @torch.no_grad()
    def __call__(
        self,
        seen: Observation,
        model: LanguageModel,
        *,
        rng: torch.Generator,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> Reconstruction:
        """Returns the texts that explain most, those with the most evidence first."""
        clock, tell = Clock(self.seconds), telling(on_progress, model)
        layers = _layers(seen, model, rng)
        if not layers:
            return Reconstruction.none(
                Status.ABSTAINED, "nothing read: the attention weights did not change"
            )
        change = {name: -value for name, value in certificate.as_gradient(seen).items()}
        wanted, texts = seen.update.num_examples, list[Judged]()
        explained = [layer.whiten_DD.new_empty(0, len(layer.whiten_DD)) for layer in layers]
        while len(texts) < wanted and not clock.up():
            search = _Search(model, layers, explained, change, self.width, self.longest)
            text = max(
                (search.best(future, clock) for future in _FUTURE[: self.passes]), key=_score
            )
            text = search.mended(text, clock)
            if _score(text) <= 0:
                break
            texts.append(text)
            explained = search.explained_with(text.ids)
            tell(len(texts), wanted, text)
        if not texts:
            reason = "nothing read: no text explains more of the update than chance does"
            late = {"time_up": True} if clock.rang else {}
            return Reconstruction.none(Status.ABSTAINED, reason, **late)
        linear = certificate.is_linear(seen)
        ids = [text.ids for text in texts]
        members = certificate.explain(model, ids, seen, clock) if linear else []
        verdict = certificate.verify(model, members, seen, clock)
        closed = [
            replace(text, ids=certificate.close(model, text.ids))
            for text in ranked(texts, verdict, wanted)
        ]
        return recovered(
            closed,
            verdict,
            tokens=sorted({token for text in closed for token in text.ids}),
            diagnostics={"nats": [_score(text) for text in texts]}
            | ({"time_up": True} if clock.rang else {}),
            reason="" if verdict.verified else "nothing proved: these texts explain most",
        )


def _score(text: Judged) -> float:
    """Returns the nats of a text."""
    return -text.excess


class _Search:
    """The search for one text of a batch, beside those whose states are explained.

    It remembers over its passes the most that each token explained in any place.
    """

    def __init__(
        self,
        model: LanguageModel,
        layers: Sequence[Layer],
        explained: Sequence[Tensor],
        change: Mapping[str, Tensor],
        width: int,
        longest: int,
    ) -> None:
        self._model, self._layers, self._explained = model, layers, explained
        self._change, self._width = change, width
        weight, length = (
            math.hypot(*(float(tensors[name].norm()) for name in change))
            for tensors in (model.trained(), change)
        )
        self._step = _STEP * weight / length
        self._modules = [layer.module for layer in layers]
        self._first = _first(model)
        self._longest = min(longest, model.max_length - len(certificate.close(model, ())))
        # What a token explains of the first layer depends on its place at most.
        table = model.family.token_table(model.module)
        ids_V = torch.arange(len(table.token_VD), device=table.token_VD.device)
        left_AD = _left(layers[0].rows_AD, explained[0])
        self._most_V = left_AD.new_zeros(len(ids_V))
        for place in _PLACES if table.position_PD is not None else (0,):
            state_VD = table(ids_V, torch.full_like(ids_V, place)) @ layers[0].whiten_DD
            unit_VD = _unit(_outside(state_VD, explained[0]), of=state_VD)
            self._most_V = self._most_V.maximum(_nats(left_AD, unit_VD) / len(layers))
        self._most_V[_unsaid(model)] = 0

    def best(self, future: float, clock: Clock) -> Judged:
        """Returns the text of most nats that a pass finds."""
        beam, most, stale = self._begin(), -math.inf, 0
        ids: tuple[int, ...] = ()
        while True:
            score, i = beam.scores.max(0)
            stale = 0 if float(score) > most else stale + 1
            if stale == 0:
                most, ids = float(score), beam.prefixes[int(i)]
            if stale == _STALE or len(beam.prefixes[0]) >= self._longest or clock.up():
                return Judged(ids, -most, math.inf)
            beam = self._grown(beam, future)

    def mended(self, text: Judged, clock: Clock) -> Judged:
        """Returns the text after single changes that make it better, from the left to the right.

        A wrong token spoils what all tokens behind it explain, so a right one pays at once.
        """
        place, since = len(self._first), 0
        while since <= len(text.ids) and not clock.up():
            best = min(self._changed(text, place), key=by_excess)
            if best.excess < text.excess - 1:  # a nat; less is no evidence
                text, since = best, 0
                continue
            since += 1
            place = place + 1 if place < len(text.ids) else len(self._first)
        return text

    def _changed(self, text: Judged, place: int) -> Iterator[Judged]:
        """Yields the best texts with a token less, two exchanged, another one, or one more."""
        before = self._followed(self._begin(), text.ids[len(self._first) : place])
        next_J = self._candidates(before)[0]
        grown = self._extended(before, torch.zeros_like(next_J), next_J)
        shorter = (before, text.ids[place + 1 :])
        exchanged = (before, (*text.ids[place : place + 2][::-1], *text.ids[place + 2 :]))
        other = (grown, text.ids[place + 1 :])
        longer = (grown, text.ids[place:])
        room = len(text.ids) < self._longest
        for beam, behind in (shorter, exchanged, other, *([longer] if room else [])):
            near = self._followed(beam, behind[:_AHEAD])
            best_B = near.scores.topk(min(_FOLLOWED, len(near.prefixes))).indices
            whole = self._followed(near.of(best_B), behind[_AHEAD:])
            score, i = whole.scores.max(0)
            yield Judged(whole.prefixes[int(i)], -float(score), math.inf)

    def explained_with(self, ids: Sequence[int]) -> list[Tensor]:
        """Returns what is explained in each layer together with a text, orthonormal [K, D]."""
        states_L1TD, _, _ = _run(self._model, self._modules, torch.tensor([ids]), ())
        bases = []
        for layer, states_1TD, basis_KD in zip(
            self._layers, states_L1TD, self._explained, strict=True
        ):
            for state_D in states_1TD[0] @ layer.whiten_DD:
                unit_1D = _unit(_outside(state_D[None], basis_KD), of=state_D[None])
                basis_KD = torch.cat([basis_KD, unit_1D[unit_1D.any(1)]])
            bases.append(basis_KD)
        return bases

    def _begin(self) -> Beam:
        """Returns the beam of what every text begins with; of nothing, where that differs."""
        count = len(self._most_V)
        empty = Beam(
            prefixes=((),),
            gain_B=self._most_V.new_zeros(1),
            prior_B=self._most_V.new_zeros(1),
            next_BV=self._most_V.new_full((1, count), -math.log(count)),
            used_BV=torch.zeros(1, count, dtype=torch.bool, device=self._most_V.device),
            left_LBAD=[
                _left(layer.rows_AD, basis_KD)[None]
                for layer, basis_KD in zip(self._layers, self._explained, strict=True)
            ],
            basis_LBKD=[basis_KD[None] for basis_KD in self._explained],
            cache=(),
        )
        begun = self._followed(empty, self._first)
        # What is certain costs nothing, and says nothing.
        return replace(begun, gain_B=empty.gain_B, prior_B=empty.prior_B)

    def _grown(self, beam: Beam, future: float) -> Beam:
        """Returns the best prefixes with one token more."""
        next_BJ = self._candidates(beam)
        nats_BJ = self._nats_of(beam, next_BJ)
        self._most_V.scatter_reduce_(0, next_BJ.flatten(), nats_BJ.flatten(), "amax")

        gain_BJ = beam.gain_B[:, None] + nats_BJ - _COST
        prior_BJ = beam.prior_B[:, None] + beam.next_BV.gather(1, next_BJ)
        worth_V = torch.where(self._most_V > _TOLD, self._most_V, 0)
        to_come_B = ((~beam.used_BV) * worth_V).sum(1)
        to_come_BJ = to_come_B[:, None] - worth_V[next_BJ] * ~beam.used_BV.gather(1, next_BJ)
        rank_BJ = gain_BJ + prior_BJ + future * to_come_BJ
        order_B = rank_BJ.flatten().topk(min(self._width, rank_BJ.numel())).indices
        return self._extended(beam, order_B // next_BJ.shape[1], next_BJ.flatten()[order_B])

    def _candidates(self, beam: Beam) -> Tensor:
        """Returns the next tokens [B, J] that are tried behind each prefix."""
        count = len(beam.prefixes)
        telling_BJ = self._most_V.topk(_TRIED).indices.expand(count, -1)
        ranks = [beam.next_BV, self._made_likelier(beam)] if beam.cache else [beam.next_BV]
        return torch.cat([telling_BJ, *(rank_BV.topk(_TRIED).indices for rank_BV in ranks)], 1)

    def _made_likelier(self, beam: Beam) -> Tensor:
        """Returns how much the update adds to the log probability [B, V] of each next token.

        Training makes likelier what it has seen: contrastive decoding (Li et al. 2023) of the
        models a step along the update and a step against it.
        """
        ids_BT = torch.tensor(beam.prefixes, device=self._model.device)
        after_BV, before_BV = (self._moved_by(way * self._step, ids_BT) for way in (1, -1))
        return after_BV - before_BV

    def _moved_by(self, factor: float, ids_BT: Tensor) -> Tensor:
        """Returns the log probability [B, V] of each next token after so much of the update."""
        weights = self._model.trained()
        with copied_parameters(weights.values()):
            for name, value in self._change.items():
                weights[name].data += factor * value.to(weights[name])
            _, last_BD, _ = _run(self._model, [], ids_BT, ())
            # Those that stand in no text must not differ by infinity less infinity.
            return _next_tokens(self._model, last_BD).clamp_min(_NEVER)

    def _nats_of(self, beam: Beam, next_BJ: Tensor) -> Tensor:
        """Returns the nats [B, J] that each next token of each prefix explains."""
        nats_BJ = self._most_V.new_zeros(next_BJ.shape)
        count = next_BJ.shape[1]
        for rows_S in torch.arange(len(next_BJ), device=next_BJ.device).tensor_split(
            -(-len(next_BJ) * count // _AT_ONCE)
        ):
            rows_N = rows_S.repeat_interleave(count)
            cache = [(keys[rows_N], values[rows_N]) for keys, values in beam.cache]
            ids_N1 = next_BJ[rows_S].flatten()[:, None]
            states_LN1D, _, _ = _run(self._model, self._modules, ids_N1, cache)
            for number, layer in enumerate(self._layers):
                state_SJD = (states_LN1D[number] @ layer.whiten_DD).view(len(rows_S), count, -1)
                unit_SJD = _unit(_outside(state_SJD, beam.basis_LBKD[number][rows_S]), of=state_SJD)
                nats_BJ[rows_S] += _nats(beam.left_LBAD[number][rows_S], unit_SJD)
        return nats_BJ / len(self._layers)

    def _followed(self, beam: Beam, tokens: Sequence[int]) -> Beam:
        """Returns the beam with the same tokens behind all prefixes."""
        for token in tokens:
            rows_B = torch.arange(len(beam.prefixes), device=beam.gain_B.device)
            beam = self._extended(beam, rows_B, torch.full_like(rows_B, token))
        return beam

    def _extended(self, beam: Beam, parents_B: Tensor, tokens_B: Tensor) -> Beam:
        """Returns the beam of these parents, each with a token more."""
        beam = beam.of(parents_B)
        states_LB1D, last_BD, cache = _run(
            self._model, self._modules, tokens_B[:, None], beam.cache
        )
        left_LBAD, basis_LBKD = [], []
        nats_B = beam.gain_B.new_zeros(len(tokens_B))
        for layer, states_B1D, left_BAD, basis_BKD in zip(
            self._layers, states_LB1D, beam.left_LBAD, beam.basis_LBKD, strict=True
        ):
            state_B1D = states_B1D @ layer.whiten_DD
            unit_B1D = _unit(_outside(state_B1D, basis_BKD), of=state_B1D)
            nats_B += _nats(left_BAD, unit_B1D)[:, 0] / len(self._layers)
            left_LBAD.append(_left(left_BAD, unit_B1D))
            basis_LBKD.append(torch.cat([basis_BKD, unit_B1D], 1))
        return Beam(
            prefixes=tuple(
                (*prefix, token)
                for prefix, token in zip(beam.prefixes, tokens_B.tolist(), strict=True)
            ),
            gain_B=beam.gain_B + nats_B - _COST,
            prior_B=beam.prior_B + beam.next_BV.gather(1, tokens_B[:, None])[:, 0],
            next_BV=_next_tokens(self._model, last_BD),
            used_BV=beam.used_BV.scatter(1, tokens_B[:, None], True),
            left_LBAD=left_LBAD,
            basis_LBKD=basis_LBKD,
            cache=cache,
        )


def _layers(seen: Observation, model: LanguageModel, rng: torch.Generator) -> list[Layer]:
    """Returns the layers whose attention inputs the update says something of."""
    family, gradients = model.family, certificate.as_gradient(seen)
    held = {
        layer: family.attention_gradients(gradients, layer) for layer in range(model.num_layers)
    }
    rows = {
        layer: torch.cat(tensors)
        for layer, tensors in held.items()
        if any(tensor.any() for tensor in tensors)
    }
    modules = {
        layer: family.attention_parameters(layer)[0].removesuffix(".weight") for layer in rows
    }
    recipe = seen.knowledge.recipe
    divided = recipe is not None and not recipe.adds_up
    own_LND = _own_states(model, list(modules.values()), rng) if rows else []
    layers = []
    for own_ND, (layer, rows_AD) in zip(own_LND, rows.items(), strict=True):
        size_D = own_ND.square().mean(0).sqrt().clamp_min(_EXACT)
        scaled_ND = own_ND / size_D
        covariance_DD = scaled_ND.T @ scaled_ND / len(scaled_ND)
        covariance_DD += _RIDGE * torch.eye(len(size_D), device=size_D.device)
        whiten_DD = torch.linalg.inv(torch.linalg.cholesky(covariance_DD)).T / size_D[:, None]
        rows_AD = rows_AD[rows_AD.any(1)] * (size_D if divided else 1.0) @ whiten_DD
        rows_AD = rows_AD / rows_AD.norm(dim=1, keepdim=True)
        layers.append(Layer(modules[layer], rows_AD / len(rows_AD) ** 0.5, whiten_DD))
    return layers


def _own_states(model: LanguageModel, modules: Sequence[str], rng: torch.Generator) -> list[Tensor]:
    """Returns the attention inputs [N, D] of each layer for texts that the model itself writes."""
    in_texts_V = torch.ones(model.vocabulary, dtype=torch.bool, device=model.device)
    in_texts_V[_unsaid(model)] = False
    first = _first(model)
    ids_BT = torch.tensor([first] * _OWN_TEXTS, dtype=torch.long, device=model.device)
    if not first:
        ids_BT = torch.multinomial(in_texts_V.float().cpu(), _OWN_TEXTS, generator=rng)[:, None]
    cache: Sequence[tuple[Tensor, Tensor]] = ()
    states_LBD: list[list[Tensor]] = [[] for _ in modules]
    for _ in range(_OWN_TOKENS):
        states_LBTD, last_BD, cache = _run(model, modules, ids_BT, cache)
        for states, states_BTD in zip(states_LBD, states_LBTD, strict=True):
            states.append(states_BTD[:, -1])
        probability_BV = _next_tokens(model, last_BD).exp()
        ids_BT = torch.multinomial(probability_BV.cpu(), 1, generator=rng).to(model.device)
    return [torch.cat(states[1:]) for states in states_LBD]  # the first are the same in all texts


def _run(
    model: LanguageModel,
    modules: Sequence[str],
    ids_BT: Tensor,
    cache: Sequence[tuple[Tensor, Tensor]],
) -> tuple[list[Tensor], Tensor, list[tuple[Tensor, Tensor]]]:
    """Returns attention inputs [B, T, D] of layers, last hidden states [B, D], and the cache."""
    from transformers import DynamicCache  # here, because it takes seconds

    states: list[Tensor] = []
    outer: Any = model.module
    past = DynamicCache()
    for number, (keys, values) in enumerate(cache):
        past.update(keys, values, number)
    handles = [
        outer.get_submodule(name).register_forward_pre_hook(lambda _, args: states.append(args[0]))
        for name in modules
    ]
    try:
        hidden_BTD = outer.base_model(
            input_ids=ids_BT.to(model.device), past_key_values=past, use_cache=True
        ).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    return states, hidden_BTD[:, -1], [(layer.keys, layer.values) for layer in past.layers]


def _next_tokens(model: LanguageModel, hidden_BD: Tensor) -> Tensor:
    """Returns the log probability [B, V] of each next token; none of special ones."""
    outer: Any = model.module
    logits_BV: Tensor = outer.get_output_embeddings()(hidden_BD).float()
    logits_BV[:, _unsaid(model)] = -math.inf
    return logits_BV.log_softmax(-1)


def _first(model: LanguageModel) -> tuple[int, ...]:
    """Returns the tokens that every text begins with."""
    (ids,) = model.encode([""])
    return tuple(ids[: len(ids) - len(certificate.close(model, ()))])


def _unsaid(model: LanguageModel) -> list[int]:
    """Returns the token ids that stand in no text: special ones, and those without a word."""
    return [*model.special_ids(), *range(len(model.tokenizer), model.vocabulary)]


def _outside(state_XJD: Tensor, basis_XKD: Tensor) -> Tensor:
    """Returns states less what lies in the span of orthonormal rows."""
    for _ in range(2):  # once is not enough in float32
        state_XJD = state_XJD - (state_XJD @ basis_XKD.mT) @ basis_XKD
    return state_XJD


def _left(rows_XAD: Tensor, basis_XKD: Tensor) -> Tensor:
    """Returns rows less what lies in the span of orthonormal rows."""
    return rows_XAD - (rows_XAD @ basis_XKD.mT) @ basis_XKD


def _unit(rest_XD: Tensor, of: Tensor) -> Tensor:
    """Returns directions of unit length, or zeros where hardly anything is left of a state."""
    norm_X1 = rest_XD.norm(dim=-1, keepdim=True)
    unit_XD = rest_XD / norm_X1.clamp_min(_EXACT)
    return torch.where(norm_X1 > _ALONG * of.norm(dim=-1, keepdim=True), unit_XD, 0)


def _nats(left_XAD: Tensor, unit_XJD: Tensor) -> Tensor:
    """Returns the nats [..., J] that directions explain of rows, beyond what they do by chance."""
    count, width = min(left_XAD.shape[-2], _ROWS), left_XAD.shape[-1]
    whole_X1 = left_XAD.square().sum((-2, -1)).clamp_min(_EXACT)[..., None]
    share_XJ = (left_XAD @ unit_XJD.mT).square().sum(-2) / whole_X1
    nats_XJ = -0.5 * count * width * torch.log1p(-share_XJ.clamp(max=1 - _EXACT)) - count / 2
    return torch.where(unit_XJD.any(-1), nats_XJ, 0)
