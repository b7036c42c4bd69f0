"""State pursuit: texts of a decoder, token after token, by how much of an update they explain.

In next-token training the gradient of a text is the sum over its tokens of the gradients of
-log p(token | tokens before), which no later token changes. So a right prefix explains its part of
an update, and texts grow token by token, as in orthogonal matching pursuit (Pati et al. 1993). That
needs no span, so it works with adapters, which have fewer rows than a batch has tokens, and after
Adam, whose first step leaves little more than signs: signs of Gaussian numbers still point along
them (Bussgang 1952).

- **Units.** In a linear layer a token's gradient is d x^T, with the input x and the gradient d at
  the output. The model itself writes texts, whose d and x show which directions are common. They
  whiten both sides, so that numbers of a gradient count alike (K-FAC, Martens and Grosse 2015).
  Adam's divisor is multiplied back first, as far as those texts give it.
- **Score.** Explaining a share e of the square of an update is -log(1 - e) / 2 nats for each number
  that counts as independent. The log probability that the model gives a text is added.
- **Search.** A beam of prefixes. Next tokens are tried by their log probability, by how much
  likelier a step along the update makes them, and by what their inputs explain in the first layer
  once those of the prefix are taken out. The end of a text is a token, too.
- **Mending.** Single changes anywhere in a text, as long as one explains more. There the first
  layer's inputs of all other tokens are taken out.
- **Batches.** Each text is sought, and mended, beside the texts that were found.

None of this is a proof: that takes making the client's steps again (`replay`), or recomputing the
gradient.

Shapes: N texts or prefixes, J next tokens, V vocabulary, D hidden size, T tokens, O outputs and I
inputs of a layer, A rows, or axes that stand for them, K known tokens, X any axes.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedleak.attacks import AttackSetting, OneByOne, Progress, certificate
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.attacks.subspace.answer import Judged, ranked, recovered, telling
from fedleak.models import CAUSAL_LM, LanguageModel, pad
from fedleak.models.family import lora_a, lora_b, with_adapters
from fedleak.training.observation import Observation
from fedleak.training.recipe import copied_parameters

_OWN_TEXTS, _OWN_TOKENS = 48, 16
"""Texts that the model writes, and tokens of each, which show what gradients are like."""

_RIDGE = 0.3
"""Of the mean variance, added to each direction before it is whitened."""

_INDEPENDENT = 0.1
"""Share of an update's numbers that count as independent."""

_BEGINNINGS, _FIRST, _TRIED = 16, 512, 24
"""First tokens, where none begins all texts; next tokens that are tried behind the beginning, and
behind each prefix."""

_EARLY = 192
"""Prefixes that are kept, times the square of their number of tokens, while they are short."""

_ROWS, _AXES = 16, 64
"""Rows of a weight of the first layer that count as independent, at most; axes that stand for the
rows of all of them."""

_TABLE = 0.1
"""Weight of the nats of the first layer beside log probabilities and scores."""

_LEFT, _ALIKE = 0.04, 1e-3
"""Share of the square of an input that those of known tokens must leave, or nothing is said of its
token; added to the squares of these, because some are nearly the same."""

_STALE, _BEGUN = 4, 8
"""Tokens by which the beam grows without a better text before the search ends; tokens from which on
there must be one that explains more than chance."""

_FAR = 0.003
"""How far weights move along an update, as a share of their norm, to see what it makes likelier."""

_CHANGES = 16
"""Tokens that are tried at each place of a text."""

_NEVER = -1e4
"""Log probability of a token that stands in no text."""

_AT_ONCE = 512
"""Tokens that go through the model together."""

_SMALL, _ALL = 1e-12, 1 - 1e-6
"""Added to norms that may be zero; the share from which on all is explained."""

_LORA_A, _LORA_B = lora_a(""), lora_b("")
"""Ends of the names of an adapter's matrices."""


class Layer(NamedTuple):
    """A weight that an update changes.

    Attributes:
        module: What multiplies by it.
        sent_OI: The gradient that the update stands for, whitened.
        out_OO: The matrix that whitens gradients of outputs, multiplied from the right.
        in_II: Likewise for inputs.
    """

    module: nn.Module
    sent_OI: Tensor
    out_OO: Tensor
    in_II: Tensor


@dataclass(frozen=True, kw_only=True)
class StatePursuit(OneByOne):
    """Texts of a decoder by what their tokens explain of an update, also of Adam on LoRA.

    Attributes:
        width: Prefixes that are kept.
        longest: Tokens of a text, at most.
        seconds: After which what was read so far counts; None: no limit.
    """

    kind: ClassVar[str] = "state_pursuit"
    version: ClassVar[int] = 3
    slow: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset()
    width: Annotated[int, Field(ge=1)] = 4
    longest: Annotated[int, Field(ge=1)] = 64
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
        update = _Update(model, seen, rng)
        if not update.layers:
            return Reconstruction.none(
                Status.ABSTAINED, "nothing read: the attention weights did not change"
            )
        longest, later = min(self.longest, model.max_length), _later(seen)
        wanted, texts = seen.update.num_examples, list[Judged]()
        while len(texts) < wanted and not clock.up():
            search = _Search(model, update, texts, longest)
            text = search.mended(search.best(self.width, clock), clock)
            if text.excess >= 0:
                break
            texts.append(text)
            tell(len(texts), wanted, text)
        for i in range(len(texts) if wanted > 1 else 0):
            search = _Search(model, update, [*texts[:i], *texts[i + 1 :]], longest)
            texts[i] = search.mended(texts[i].ids, clock)
        if not texts:
            reason = f"nothing read: no text explains more of the update than chance does{later}"
            late = {"time_up": True} if clock.rang else {}
            return Reconstruction.none(Status.ABSTAINED, reason, **late)
        end = len(certificate.close(model, ()))
        opened = [replace(text, ids=text.ids[:-end]) for text in texts]
        verdict = certificate.judge(model, [text.ids for text in opened], seen, clock)
        closed = [
            replace(text, ids=certificate.close(model, text.ids))
            for text in ranked(opened, verdict, wanted)
        ]
        return recovered(
            closed,
            verdict,
            tokens=sorted({token for text in closed for token in text.ids}),
            diagnostics={"nats": [-text.excess for text in texts]}
            | ({"time_up": True} if clock.rang else {}),
            reason="" if verdict.verified else f"nothing proved: these texts explain most{later}",
        )


class _FirstLayer:
    """What an update says of the first layer's inputs, which are those of single tokens.

    Each row of a gradient there is a mix of these inputs. As in orthogonal matching pursuit, the
    inputs of known tokens are taken out of the rows, and out of the inputs of all other tokens,
    before the two are compared.
    """

    def __init__(
        self, model: LanguageModel, gradients_AD: Sequence[Tensor], whiten_DD: Tensor | None
    ) -> None:
        """Takes the gradients of the weights that multiply these inputs, whitened, if any came."""
        table = model.family.token_table(model.module)
        ids_V = torch.arange(model.vocabulary, device=model.device)
        # Where there are positions, any place will do.
        states_VD = table(ids_V, torch.full_like(ids_V, 3)).detach()
        rows_AD = F.normalize(torch.cat([states_VD[:0], *gradients_AD]))
        # The main axes of the rows, which stand for all of them.
        square_D, axes_DD = torch.linalg.eigh(rows_AD.T @ rows_AD)
        square_A, axes_DA = square_D[-_AXES:].clamp_min(0), axes_DD[:, -_AXES:]
        self._states_VD = F.normalize(states_VD if whiten_DD is None else states_VD @ whiten_DD)
        self._rows_AV = square_A.sqrt()[:, None] * (axes_DA.T @ self._states_VD.T)
        self._square = float(square_A.sum())
        self._count = sum(min(len(rows_AD), _ROWS) for rows_AD in gradients_AD)
        self._unsaid = _unsaid(model)

    def nats(self, known: Sequence[Collection[int]]) -> Tensor:
        """Returns the nats [N, V] that each token explains beside N sets of known tokens.

        Known tokens have what chance explains. What half of the vocabulary explains is taken off,
        because it tells no token from another: the inputs of words that a model did not meet in
        training are nearly the same.
        """
        nats_NV = torch.stack([self._explained(sorted({*tokens})) for tokens in known])
        nats_NV = (nats_NV - nats_NV.median(1, keepdim=True).values).clamp_min(0)
        nats_NV[:, self._unsaid] = _NEVER
        return nats_NV

    def _explained(self, tokens_K: list[int]) -> Tensor:
        """Returns the nats [V] of tokens beyond chance, beside K others."""
        products_KV = self._states_VD[tokens_K] @ self._states_VD.T
        ridge_KK = _ALIKE * torch.eye(len(tokens_K), device=products_KV.device)
        root_KK = torch.linalg.cholesky(products_KV[:, tokens_K] + ridge_KK)
        parts_KV = torch.linalg.solve_triangular(root_KK, products_KV, upper=False)
        known_KA = self._rows_AV[:, tokens_K].T
        parts_KA = torch.linalg.solve_triangular(root_KK, known_KA, upper=False)
        left_V = 1 - parts_KV.square().sum(0)
        left = max(self._square - float(parts_KA.square().sum()), _SMALL)
        along_AV = self._rows_AV - parts_KA.T @ parts_KV
        share_V = (along_AV.square().sum(0) / (left_V * left)).clamp(max=_ALL)
        width = max(self._states_VD.shape[1] - len(tokens_K), 0)
        nats_V = -self._count / 2 * (width * torch.log1p(-share_V) + 1)
        return nats_V.masked_fill(left_V < _LEFT, 0)


class _Update:
    """An update, and how well gradients of single texts explain it.

    Attributes:
        layers: The attention weights that it changes, with their adapters.
    """

    def __init__(self, model: LanguageModel, seen: Observation, rng: torch.Generator) -> None:
        self._model = model
        gradients = certificate.as_gradient(seen)
        names = [
            name
            for layer in range(model.num_layers)
            for weight in model.family.attention_parameters(layer)
            for name in (weight, lora_a(weight), lora_b(weight))
            if name in gradients and gradients[name].any()
        ]
        self.layers: list[Layer] = []
        # Adapters of a first round have a first matrix that does not change.
        if all(name.endswith(_LORA_B) for name in names):
            return
        modules = [model.module.get_submodule(name.removesuffix(".weight")) for name in names]
        recipe = seen.knowledge.recipe
        divided = recipe is not None and not recipe.adds_up
        states = with_adapters(model.family.attention_parameters(0))
        first_rows, first_II = list[Tensor](), None
        along: dict[str, Tensor] = {}
        for name, module, (given_MI, slope_MO) in zip(
            names, modules, _tokens(model, modules, _own_texts(model, rng)), strict=True
        ):
            (out_OO, size_O), (in_II, size_I) = _whitening(slope_MO), _whitening(given_MI)
            gradient = gradients[name]
            turned = gradient.shape != (len(size_O), len(size_I))  # a weight of GPT-2's
            gradient_OI = gradient.T if turned else gradient
            if divided:
                gradient_OI = gradient_OI * size_O[:, None] * size_I
            rows_OI = gradient_OI @ in_II
            layer = Layer(module, out_OO.T @ rows_OI, out_OO, in_II)
            self.layers.append(layer)
            if not name.endswith(_LORA_A):  # which says little about outputs
                along_OI = out_OO @ layer.sent_OI @ in_II.T
                along[name] = along_OI.T if turned else along_OI
            if name in states:  # All of them have the same inputs.
                first_rows.append(rows_OI)
                first_II = in_II
        self.first_layer = _FirstLayer(model, first_rows, first_II)
        weights, length = (
            math.hypot(*(float(tensors[name].norm()) for name in along))
            for tensors in (model.parameters(), along)
        )
        self._step = {
            name: -_FAR * weights / max(length, _SMALL) * value for name, value in along.items()
        }
        self._square = sum(float(layer.sent_OI.square().sum()) for layer in self.layers)
        self._count = _INDEPENDENT * sum(layer.sent_OI.numel() for layer in self.layers)

    def hints(self, texts: Sequence[tuple[int, ...]], last: bool = False) -> Tensor:
        """Returns what speaks for each next token [N, T, V], in nats, before its gradient is known.

        Training makes likelier what it has seen: contrastive decoding (Li et al. 2023) of the
        models before and after a step along the update. What the step adds to a log probability
        counts in its standard deviations over all tokens.
        """
        ids_NT = torch.tensor(texts, device=self._model.device)
        before_NTV = _log_probabilities(self._model, ids_NT, last)
        weights = self._model.trained()
        with copied_parameters(weights[name] for name in self._step):
            for name, value in self._step.items():
                weights[name].data += value.to(weights[name])
            more_NTV = _log_probabilities(self._model, ids_NT, last) - before_NTV
        deviation_NT1, mean_NT1 = torch.std_mean(more_NTV, -1, keepdim=True)
        more_NTV = (more_NTV - mean_NT1) / (deviation_NT1 + _SMALL)
        return before_NTV + more_NTV

    def gradients(
        self, texts: Sequence[tuple[int, ...]], since: int = 1
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns log probabilities [N] of texts, and their gradients [N, O, I], whitened.

        Both are sums over the tokens from a place on.
        """
        ids_NT, mask_NT = pad(texts, self._model.tokenizer.pad_token_id, self._model.device)
        with _listening([layer.module for layer in self.layers]) as heard, torch.enable_grad():
            outer: Any = self._model.module
            hidden_NTD = outer.base_model(input_ids=ids_NT[:, :-1]).last_hidden_state
            # As one matrix: with several, a product with each is computed, which takes longer.
            logits_MV = outer.get_output_embeddings()(hidden_NTD[:, since - 1 :].flatten(0, 1))
            loss_M = F.cross_entropy(
                logits_MV.float(), ids_NT[:, since:].flatten(), reduction="none"
            )
            loss_N = (loss_M.view(len(texts), -1) * mask_NT[:, since:]).sum(1)
            slopes = torch.autograd.grad(loss_N.sum(), [output for _, output in heard])
        gradients = [
            _times(slope_NTO, layer.out_OO).mT @ _times(given_NTI, layer.in_II)
            for layer, slope_NTO, (given_NTI, _) in zip(self.layers, slopes, heard, strict=True)
        ]
        return -loss_N.detach(), gradients

    def nats(self, gradients: Sequence[Tensor]) -> Tensor:
        """Returns the nats [N] that gradients [N, O, I] of the layers explain."""
        along_N = square_N = torch.zeros(len(gradients[0]), device=self._model.device)
        for layer, gradient_NOI in zip(self.layers, gradients, strict=True):
            along_N = along_N + (gradient_NOI * layer.sent_OI).sum((1, 2))
            square_N = square_N + gradient_NOI.square().sum((1, 2))
        share_N = along_N.clamp_min(0).square() / (square_N * self._square + _SMALL)
        return -self._count / 2 * torch.log1p(-share_N.clamp(max=_ALL))


class _Prefixes(NamedTuple):
    """Beginnings of a text, beside other texts.

    Attributes:
        ids: N tuples of tokens, of one length.
        prior_N: Their log probabilities.
        sums: Their gradients [N, O, I] of each layer, those of the other texts added.
    """

    ids: Sequence[tuple[int, ...]]
    prior_N: Tensor
    sums: list[Tensor]


class _Search:
    """The search for one text of a batch, beside others."""

    def __init__(
        self, model: LanguageModel, update: _Update, beside: Sequence[Judged], longest: int
    ) -> None:
        self._update, self._longest = update, longest
        self._first = _first(model)
        (self._end,) = certificate.close(model, ())
        self._known = {token for text in beside for token in text.ids}
        self._beside = [torch.zeros_like(layer.sent_OI)[None] for layer in update.layers]
        for text in beside:
            _, gradients = update.gradients([text.ids])
            self._beside = [a + b for a, b in zip(self._beside, gradients, strict=True)]

    def best(self, width: int, clock: Clock) -> tuple[int, ...]:
        """Returns the text of the best score that a beam finds, closed."""
        beam = self._begun(self._beginnings())
        ended, most, stale = dict[tuple[int, ...], float](), -math.inf, 0
        while True:
            nats_NV = self._update.first_layer.nats([{*ids, *self._known} for ids in beam.ids])
            hints_NV = self._update.hints(beam.ids, last=True)[:, 0] + _TABLE * nats_NV
            count = _TRIED if len(beam.ids) > 1 else _FIRST
            tried_NJ = hints_NV.topk(min(count, hints_NV.shape[1])).indices
            texts = [
                (*prefix, token)
                for prefix, tried in zip(beam.ids, tried_NJ.tolist(), strict=True)
                for token in (self._end, *tried)
            ]
            per_prefix = 1 + tried_NJ.shape[1]
            rows = torch.arange(len(beam.ids)).repeat_interleave(per_prefix)
            scores_N = self._scores(texts, beam, rows, clock)
            best = float(scores_N.max())
            stale, most = (0, best) if best > most else (stale + 1, most)
            ended |= zip(texts[::per_prefix], scores_N[::per_prefix].tolist(), strict=True)
            given_up = stale >= _STALE and (most > 0 or len(texts[0]) > _BEGUN)
            if given_up or len(texts[0]) >= self._longest or clock.up():
                return max(ended, key=ended.__getitem__)
            scores_N[::per_prefix] = -math.inf
            # A token's own gradient does not contain its effect on later tokens, so half of the
            # prefixes are those whose last token the first layer supports.
            last_N = torch.tensor([ids[-1] for ids in texts], device=nats_NV.device)
            count = max(width, _EARLY // len(texts[0]) ** 2)
            ranks = (scores_N, scores_N + _TABLE * nats_NV[rows, last_N])
            kept = sorted(
                {i for rank_N in ranks for i in rank_N.topk(-(-count // 2)).indices.tolist()}
            )
            beam = self._grown([texts[i] for i in kept], beam, rows[kept])

    def _beginnings(self) -> list[tuple[int, ...]]:
        """Returns what begins all texts, or the first tokens that the first layer supports."""
        if self._first:
            return [self._first]
        # The first token is no target, so that nothing else is known of it.
        (nats_V,) = self._update.first_layer.nats([self._known])
        return [(token,) for token in nats_V.topk(min(_BEGINNINGS, len(nats_V))).indices.tolist()]

    def mended(self, ids: tuple[int, ...], clock: Clock) -> Judged:
        """Returns a closed text after single changes that explain more, the best one first."""
        score = float(self._whole([ids]))
        while not clock.up():
            # Sorted, so that those of one length go through the model together.
            texts = sorted(self._changed(ids), key=len)
            best, i = self._whole(texts, clock).max(0)
            if best <= score:
                break
            ids, score = texts[int(i)], float(best)
        return Judged(ids, -score, math.inf)

    def _changed(self, ids: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yields texts with a token less, two exchanged, another one, or one more."""
        places = range(len(self._first), len(ids))
        others = [{*ids[:place], *ids[place + 1 :], *self._known} for place in places]
        # A first token is no target: all are as likely.
        hints_TV = F.pad(self._update.hints([ids[:-1]])[0], (0, 0, 1, 0))[len(self._first) :]
        hints_TV = hints_TV + _TABLE * self._update.first_layer.nats(others)
        for place, tried in zip(places, hints_TV.topk(_CHANGES).indices.tolist(), strict=True):
            before, behind = ids[:place], ids[place + 1 :]
            for token in tried:
                if len(ids) < self._longest:
                    yield (*before, token, *ids[place:])
                if behind:
                    yield (*before, token, *behind)
            if behind and len(ids) > 2:
                yield before + behind
            if len(behind) > 1:
                yield (*before, behind[0], ids[place], *behind[1:])

    def _whole(self, texts: Sequence[tuple[int, ...]], clock: Clock = UNLIMITED) -> Tensor:
        """Returns the scores [N] of texts."""
        start = self._begun([ids[:1] for ids in texts])
        return self._scores(texts, start, torch.arange(len(texts)), clock)

    def _begun(self, ids: Sequence[tuple[int, ...]]) -> _Prefixes:
        """Returns prefixes of which no token is a target."""
        sums = [sum_1OI.expand(len(ids), -1, -1) for sum_1OI in self._beside]
        return _Prefixes(ids, torch.zeros(len(ids), device=self._beside[0].device), sums)

    def _grown(self, ids: Sequence[tuple[int, ...]], beam: _Prefixes, rows_N: Tensor) -> _Prefixes:
        """Returns prefixes that are a token longer than these rows of the beam."""
        prior_N, gradients = self._update.gradients(ids, len(beam.ids[0]))
        pairs = zip(beam.sums, gradients, strict=True)
        sums = [sum_NOI[rows_N] + more_NOI for sum_NOI, more_NOI in pairs]
        return _Prefixes(ids, beam.prior_N[rows_N] + prior_N, sums)

    def _scores(
        self, texts: Sequence[tuple[int, ...]], beam: _Prefixes, rows_N: Tensor, clock: Clock
    ) -> Tensor:
        """Returns the nats that texts explain beside the others, and their log probability [N].

        Texts that time does not reach have a score below all others.

        Args:
            texts: Each goes on where a prefix ends.
            beam: The prefixes.
            rows_N: Which of them each text begins with.
            clock: Read between parts of the texts; the first part is always scored.
        """
        size = max(1, _AT_ONCE // max(map(len, texts)))
        scores_N = beam.prior_N.new_full((len(texts),), -math.inf)
        for start in clock.paced(range(0, len(texts), size), least=1):
            some = slice(start, start + size)
            part = self._grown(texts[some], beam, rows_N[some])
            scores_N[some] = part.prior_N + self._update.nats(part.sums)
        return scores_N - self._update.nats(self._beside)


def _times(rows_NTX: Tensor, matrix_XX: Tensor) -> Tensor:
    """Returns rows times a matrix, as a product of two matrices: several times faster."""
    return (rows_NTX.flatten(0, 1) @ matrix_XX).view(rows_NTX.shape)


@contextmanager
def _listening(modules: Sequence[nn.Module]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Keeps what goes into and comes out of modules, within the block, in their order."""
    heard: list[Any] = [None] * len(modules)

    def listen(number: int) -> Any:
        def hook(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            heard[number] = (inputs[0].detach(), output)

        return hook

    handles = [
        module.register_forward_hook(listen(number)) for number, module in enumerate(modules)
    ]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _own_texts(model: LanguageModel, rng: torch.Generator) -> Tensor:
    """Returns texts [N, T] that the model itself writes."""
    said_V = torch.ones(model.vocabulary)
    said_V[_unsaid(model)] = 0
    first = _first(model)
    ids_NT = torch.tensor([first] * _OWN_TEXTS, dtype=torch.long)
    if not first:
        ids_NT = torch.multinomial(said_V, _OWN_TEXTS, generator=rng)[:, None]
    outer: Any = model.module
    new_NT, past = ids_NT, None
    for _ in range(_OWN_TOKENS):
        # What earlier tokens give to attention is kept, not computed again.
        output = outer.base_model(
            input_ids=new_NT.to(model.device), past_key_values=past, use_cache=True
        )
        past = output.past_key_values
        next_NV = _next(model, output.last_hidden_state[:, -1]).exp()
        new_NT = torch.multinomial(next_NV.cpu(), 1, generator=rng)
        ids_NT = torch.cat([ids_NT, new_NT], 1)
    return ids_NT.to(model.device)


def _tokens(
    model: LanguageModel, modules: Sequence[nn.Module], ids_NT: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields inputs [N, I] of modules, and gradients [N, O] of their outputs, of all tokens."""
    outer: Any = model.module
    given: list[list[Tensor]] = [[] for _ in modules]
    slopes: list[list[Tensor]] = [[] for _ in modules]
    for part_NT in ids_NT.tensor_split(3):
        with _listening(modules) as heard, torch.enable_grad():
            hidden_NTD = outer.base_model(input_ids=part_NT[:, :-1]).last_hidden_state
            logits_NTV = outer.get_output_embeddings()(hidden_NTD).float()
            loss = F.cross_entropy(logits_NTV.mT, part_NT[:, 1:], reduction="sum")
            parts = torch.autograd.grad(loss, [output for _, output in heard])
        for number, (slope_NTO, (given_NTI, _)) in enumerate(zip(parts, heard, strict=True)):
            given[number].append(given_NTI.flatten(0, 1))
            slopes[number].append(slope_NTO.flatten(0, 1))
    for inputs, outputs in zip(given, slopes, strict=True):
        yield torch.cat(inputs), torch.cat(outputs)


def _whitening(rows_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what whitens rows from the right [D, D], and the root mean square of columns [D]."""
    size_D = rows_ND.square().mean(0).sqrt() + _SMALL
    scaled_ND = rows_ND / size_D
    covariance_DD = scaled_ND.T @ scaled_ND / len(scaled_ND)
    covariance_DD += _RIDGE * torch.eye(len(size_D), device=size_D.device)
    root_DD = torch.linalg.inv(torch.linalg.cholesky(covariance_DD)).T
    return root_DD / size_D[:, None], size_D


def _log_probabilities(model: LanguageModel, ids_NT: Tensor, last: bool = False) -> Tensor:
    """Returns the log probability [N, T, V] of each next token; special tokens have almost none."""
    outer: Any = model.module
    hidden_NTD = outer.base_model(input_ids=ids_NT).last_hidden_state
    return _next(model, hidden_NTD[:, -1:] if last else hidden_NTD)


def _next(model: LanguageModel, hidden_XD: Tensor) -> Tensor:
    """Returns the log probability [..., V] of the token behind each last hidden state [..., D]."""
    outer: Any = model.module
    logits_XV: Tensor = outer.get_output_embeddings()(hidden_XD).float()
    logits_XV[..., _unsaid(model)] = _NEVER
    return logits_XV.log_softmax(-1)


def _first(model: LanguageModel) -> tuple[int, ...]:
    """Returns the tokens that every text begins with."""
    (ids,) = model.encode([""])
    return tuple(ids[: len(ids) - len(certificate.close(model, ()))])


def _unsaid(model: LanguageModel) -> list[int]:
    """Returns the token ids that stand in no text: special ones, and those without a word."""
    return [*model.special_ids(), *range(len(model.tokenizer), model.vocabulary)]


def _later(seen: Observation) -> str:
    """Returns what an update of several steps of Adam lacks, as the end of a sentence."""
    known, steps = seen.knowledge, seen.knowledge.local_steps or 1
    if steps == 1 or known.recipe is None or known.recipe.optimiser == "sgd":
        return ""
    return f"; of {steps} local steps the texts of the first count most"
