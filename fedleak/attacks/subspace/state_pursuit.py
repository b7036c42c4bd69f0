"""State pursuit: texts of a decoder, token after token, by the hidden states that they give.

The rows of a gradient of attention weights, or of the first matrices of their adapters, are mixes
of the layer's inputs: hidden states of all tokens. In a causal model the states of a prefix depend
on no later token. So texts grow token by token, as in orthogonal matching pursuit (Pati et al.
1993): the states of a right prefix explain more of the rows of a layer than those of other tokens,
and, where states depend on it, of another order. DAGER (Petrov et al. 2024) asks whether states lie
in the span of the rows; here a share is enough. So it works with adapters, which have fewer rows
than a batch has tokens, and after Adam, whose first step leaves little more than signs: signs of
Gaussian numbers still point along them (Bussgang 1952).

- **Units.** The model itself writes texts, whose inputs x and gradients d at the output show which
  directions are common. They whiten both sides, so that numbers of a gradient d x^T count alike
  (K-FAC, Martens and Grosse 2015). Adam's divisor is multiplied back first, as far as those texts
  give it.
- **Search.** A beam of prefixes. Next tokens are tried by their log probability, by how much
  likelier a step along the update makes them, and by what their inputs explain in the first layer
  once those of the prefix are taken out. Prefixes are ranked by what each token explains more in
  the first layers, and then, of the best, in all: words in a wrong order explain much in the first
  layers and little in the last. Of that the logarithm counts: otherwise rare words, which explain
  most, would come before their turn.
- **Score.** A prefix may be a whole text. The gradient of a text, closed by the end token,
  explains a share e of the square of the update: -log(1 - e) / 2 nats for each number that counts
  as independent. The log probability that the model gives the text is added.
- **Mending.** Single changes anywhere in a text, as long as one scores more: a token less, more or
  another one, or some in another place. Those are scored whose states explain most.
- **Proof.** A text that scores more than those before is proved, or not, by its gradient or by the
  client's steps on it (`replay`). The search for a single text ends at a proof.
- **Batches.** Each text is sought, and mended, beside the texts that were found, and once more when
  all were found. States of words of other texts explain as much, so prefixes are ranked, and
  changes chosen, by their scores alone.

Shapes: N texts or prefixes, J next tokens, V vocabulary, D hidden size, T tokens, O outputs and I
inputs of a weight, A axes that stand for rows, L layers, K known tokens, X any axes.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedleak.attacks import AttackSetting, OneByOne, Progress, certificate, replay
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.attacks.subspace.answer import Judged, ranked, recovered, telling
from fedleak.models import CAUSAL_LM, LanguageModel, pad
from fedleak.models.family import lora_a, lora_b, with_adapters
from fedleak.training.observation import Observation
from fedleak.training.recipe import copied_parameters

if TYPE_CHECKING:
    from transformers import DynamicCache

_OWN_TEXTS, _OWN_TOKENS = 48, 16
"""Texts that the model writes, and tokens of each, which show what gradients are like."""

_RIDGE = 0.3
"""Of the mean variance, added to each direction before it is whitened."""

_INDEPENDENT = 0.1
"""Share of an update's numbers that count as independent."""

_BEGINNINGS, _WIDE = 48, 256
"""First tokens, where none begins all texts; prefixes that are kept, times their tokens, while they
are short."""

_BEHIND, _TRIED = 40, 1536
"""Next tokens that are tried behind each prefix; those behind all prefixes of a single text, at
least: where few are kept, more are tried behind those that most speaks for."""

_DEPTH, _DEEP = 8, 384
"""Layers whose inputs all tokens that are tried are compared in; tokens whose inputs are compared
in all layers."""

_RANKED = 0.25
"""Weight of what speaks for a prefix where next tokens are chosen: the right one is seldom first
before it is long."""

_CLOSED = 6
"""Prefixes whose gradients are computed, as those of whole texts."""

_MENDED = 24
"""Changes of a single text whose gradients are computed."""

_ROWS, _AXES = 16, 64
"""Rows of a weight that count as independent, at most; axes that stand for the rows of all weights
of a layer."""

_TABLE = 0.1
"""Weight of the nats of the first layer beside log probabilities and scores."""

_LEFT, _ALIKE = 0.04, 1e-3
"""Share of the square of an input that those of known tokens must leave, or nothing is said of its
token; added to the squares of these, because some are nearly the same."""

_LAYERS = 12.0
"""Weight, beside log probabilities, of the logarithm of the nats that a token explains in a layer,
a mean over layers."""

_EARLY, _COST = 192, 3
"""Of a batch: prefixes that are kept, times the square of their number of tokens, while they are
short; times as many are kept of a single text, whose prefixes need no gradient."""

_STALE, _BEGUN = 6, 8
"""Tokens by which the beam grows without a better text before the search ends; tokens from which on
there must be one that explains more than chance."""

_LIKELIER = 1.5
"""Weight of what a step along an update adds to a log probability, in standard deviations."""

_FAR, _FARTHER = 0.003, 10
"""How far weights move along an update, as a share of their norm, to see what it makes likelier;
times as far, and up to so many times, where what that adds drowns in rounding, as of the small
weights of adapters."""

_CHANGES, _MOVED = 20, 3
"""Tokens that are tried at each place of a text; successive ones that are moved together."""

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
    version: ClassVar[int] = 5
    slow: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset()
    width: Annotated[int, Field(ge=1)] = 12
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
        proves = partial(_proves, model, seen, clock) if wanted == 1 else None
        while len(texts) < wanted and not clock.up():
            search = _Search(model, update, texts, longest, proves)
            text = search.mended(search.best(self.width, clock), clock)
            if text.excess >= 0:
                break
            texts.append(text)
            tell(len(texts), wanted, text)
        for i in range(len(texts) if wanted > 1 else 0):
            if clock.up():
                break
            beside = [*texts[:i], *texts[i + 1 :]]
            search = _Search(model, update, beside, longest, proves)
            texts[i] = search.mended(search.best(self.width, clock, texts[i].ids), clock)
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


class _Inputs(NamedTuple):
    """What an update says of the inputs of a layer: rows of its gradients are mixes of them.

    Attributes:
        number: Of the layer.
        module: What multiplies the inputs.
        rows_AD: The main axes of the whitened rows, which stand for all of them.
        whiten_DD: The matrix that whitens inputs, multiplied from the right.
        independent: Rows that count as independent.
    """

    number: int
    module: nn.Module
    rows_AD: Tensor
    whiten_DD: Tensor
    independent: int

    @classmethod
    def of_rows(
        cls,
        number: int,
        module: nn.Module,
        gradients_AD: Sequence[Tensor],
        whiten_DD: Tensor,
    ) -> "_Inputs":
        """Takes the whitened gradients of weights that multiply the same inputs."""
        rows_AD = F.normalize(torch.cat(list(gradients_AD)))
        square_D, axes_DD = torch.linalg.eigh(rows_AD.T @ rows_AD)
        count = min(_AXES, len(rows_AD))
        axes_AD = square_D[-count:].clamp_min(0).sqrt()[:, None] * axes_DD[:, -count:].T
        independent = sum(min(len(rows_AD), _ROWS) for rows_AD in gradients_AD)
        return cls(number, module, axes_AD, whiten_DD, independent)

    def more(self, inputs_ND: Tensor, parts_NKD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what one more input of N texts has beside K others, and the share it explains.

        Args:
            inputs_ND: The inputs.
            parts_NKD: What the others have each beside those before it.
        """
        inputs_ND = F.normalize(inputs_ND @ self.whiten_DD, dim=-1)
        along_NK = (parts_NKD @ inputs_ND[:, :, None]).squeeze(2)
        left_N = (1 + _ALIKE - along_NK.square().sum(1)).clamp_min(_ALIKE)
        known_ND = (along_NK[:, None] @ parts_NKD).squeeze(1)
        part_ND = (inputs_ND - known_ND) / left_N.sqrt()[:, None]
        share_N = (part_ND @ self.rows_AD.T).square().sum(1)
        return part_ND, share_N / (self.rows_AD.square().sum() + _SMALL)

    def nats_of(self, share_N: Tensor, count: int) -> Tensor:
        """Returns the nats [N] of shares that so many inputs explain."""
        width = len(self.whiten_DD)
        nats_N = width * torch.log1p(-share_N.clamp(max=_ALL)) + count
        return -self.independent / 2 * nats_N

    def nats(self, inputs_NTD: Tensor) -> Tensor:
        """Returns the nats [N] that the inputs of texts explain, each text's together."""
        inputs_NTD = F.normalize(inputs_NTD @ self.whiten_DD, dim=-1)
        length = inputs_NTD.shape[1]
        products_NTT = inputs_NTD @ inputs_NTD.mT
        products_NTT += _ALIKE * torch.eye(length, device=inputs_NTD.device)
        root_NTT = torch.linalg.cholesky(products_NTT)
        along_NTA = inputs_NTD @ self.rows_AD.T
        parts_NTA = torch.linalg.solve_triangular(root_NTT, along_NTA, upper=False)
        share_N = parts_NTA.square().sum((1, 2)) / (self.rows_AD.square().sum() + _SMALL)
        return self.nats_of(share_N, length)


class _FirstLayer:
    """What an update says of the first layer's inputs, which are those of single tokens.

    Each row of a gradient there is a mix of these inputs. As in orthogonal matching pursuit, the
    inputs of known tokens are taken out of the rows, and out of the inputs of all other tokens,
    before the two are compared.
    """

    def __init__(self, model: LanguageModel, mixed: _Inputs | None) -> None:
        """Takes what came of the gradients of the weights that multiply these inputs."""
        table = model.family.token_table(model.module)
        ids_V = torch.arange(model.vocabulary, device=model.device)
        # Where there are positions, any place will do.
        states_VD = table(ids_V, torch.full_like(ids_V, 3)).detach()
        if mixed is not None:
            states_VD = states_VD @ mixed.whiten_DD
        self._states_VD = F.normalize(states_VD)
        rows_AD = states_VD[:0] if mixed is None else mixed.rows_AD
        self._rows_AV = rows_AD @ self._states_VD.T
        self._square = float(rows_AD.square().sum())
        self._count = 0 if mixed is None else mixed.independent
        self._unsaid = _unsaid(model)
        self._kept: dict[int, Tensor] = {}

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

    def _products(self, token: int) -> Tensor:
        """Returns the products [V] of a token's input with all; prefixes share tokens."""
        if token not in self._kept:
            self._kept[token] = self._states_VD @ self._states_VD[token]
        return self._kept[token]

    def _explained(self, tokens_K: list[int]) -> Tensor:
        """Returns the nats [V] of tokens beyond chance, beside K others."""
        products_KV = self._rows_AV.new_zeros((len(tokens_K), len(self._states_VD)))
        for row_V, token in zip(products_KV, tokens_K, strict=True):
            row_V[:] = self._products(token)
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
        first_layer: What it says of single tokens.
        mixed: What it says of the inputs of each layer.
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
        layer_of = {
            name: layer
            for layer in range(model.num_layers)
            for name in with_adapters(model.family.attention_parameters(layer))
        }
        rows: dict[int, list[Tensor]] = {}
        whiten: dict[int, tuple[nn.Module, Tensor]] = {}
        along: dict[str, Tensor] = {}
        own_NT = _own_texts(model, rng)
        for name, module, (given_MI, slope_MO) in zip(
            names, modules, _tokens(model, modules, own_NT), strict=True
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
            if name in layer_of:  # All of a layer have the same inputs.
                rows.setdefault(layer_of[name], []).append(rows_OI)
                whiten[layer_of[name]] = module, in_II
        mixed = {
            layer: _Inputs.of_rows(layer, module, rows[layer], in_II)
            for layer, (module, in_II) in whiten.items()
        }
        self.first_layer = _FirstLayer(model, mixed.get(0))
        self.mixed = [mixed[layer] for layer in sorted(mixed)]
        self._square = sum(float(layer.sent_OI.square().sum()) for layer in self.layers)
        self._count = _INDEPENDENT * sum(layer.sent_OI.numel() for layer in self.layers)
        self._set_step(along, own_NT[:2, :-1])

    def _set_step(self, along: Mapping[str, Tensor], ids_NT: Tensor) -> None:
        """Sets a step along an update, so far that rounding is little of what texts gain by it."""
        weights, length = (
            math.hypot(*(float(tensors[name].norm()) for name in along))
            for tensors in (self._model.parameters(), along)
        )
        outer: Any = self._model.module
        visible = math.sqrt(torch.finfo(outer.dtype).eps)
        size = -_FAR * weights / max(length, _SMALL)
        for _ in range(_FARTHER):
            self._step = {name: size * value for name, value in along.items()}
            if float(self._likelier(ids_NT)[1].std()) >= visible:
                break
            size *= _FARTHER

    def hints(
        self, ids_NT: Tensor, caches: Sequence["DynamicCache | None"] = (None, None)
    ) -> Tensor:
        """Returns what speaks for each next token [N, T, V], in nats, before its gradient is known.

        Training makes likelier what it has seen: contrastive decoding (Li et al. 2023) of the
        models before and after a step along the update. What the step adds to a log probability
        counts in its standard deviations over all tokens.

        Args:
            ids_NT: The tokens.
            caches: What the two models keep of earlier tokens; these are added.
        """
        before_NTV, more_NTV = self._likelier(ids_NT, caches)
        deviation_NT1, mean_NT1 = torch.std_mean(more_NTV, -1, keepdim=True)
        more_NTV = (more_NTV - mean_NT1) / (deviation_NT1 + _SMALL)
        return before_NTV + _LIKELIER * more_NTV

    def _likelier(
        self, ids_NT: Tensor, caches: Sequence["DynamicCache | None"] = (None, None)
    ) -> tuple[Tensor, Tensor]:
        """Returns log probabilities [N, T, V] of next tokens, and what a step adds to them."""
        before, after = caches
        before_NTV = _log_probabilities(self._model, ids_NT, before)
        weights = self._model.trained()
        with copied_parameters(weights[name] for name in self._step):
            for name, value in self._step.items():
                weights[name].data += value.to(weights[name])
            more_NTV = _log_probabilities(self._model, ids_NT, after) - before_NTV
        return before_NTV, more_NTV

    def inputs(
        self, ids_NT: Tensor, layers: Sequence[_Inputs], cache: "DynamicCache | None" = None
    ) -> list[Tensor]:
        """Returns the inputs [N, T, D] of layers, behind what a cache keeps; it grows."""
        outer: Any = self._model.module
        modules = [layer.module for layer in layers]
        with _listening(modules, last=True) as heard, suppress(_ReachedError):
            outer.base_model(input_ids=ids_NT, past_key_values=cache, use_cache=cache is not None)
        return [inputs_NTD for inputs_NTD, _ in heard]

    def gradients(self, texts: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[Tensor]]:
        """Returns log probabilities [N] of texts, and their gradients [N, O, I], whitened."""
        ids_NT, mask_NT = pad(texts, self._model.tokenizer.pad_token_id, self._model.device)
        with _listening([layer.module for layer in self.layers]) as heard, torch.enable_grad():
            outer: Any = self._model.module
            hidden_NTD = outer.base_model(input_ids=ids_NT[:, :-1]).last_hidden_state
            # As one matrix: with several, a product with each is computed, which takes longer.
            logits_MV = outer.get_output_embeddings()(hidden_NTD.flatten(0, 1))
            loss_M = F.cross_entropy(logits_MV.float(), ids_NT[:, 1:].flatten(), reduction="none")
            loss_N = (loss_M.view(len(texts), -1) * mask_NT[:, 1:]).sum(1)
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


class _Beam(NamedTuple):
    """Prefixes of one length, and what was computed of them.

    Attributes:
        ids: The prefixes.
        support_N: What speaks for them.
        parts_LNKD: What each of K inputs has beside those before it, in each layer.
        share_LN: The share of a layer's rows that they explain.
        caches: What the models before and after a step along the update keep of the tokens.
        hints_NV: What speaks for each next token.
    """

    ids: list[tuple[int, ...]]
    support_N: Tensor
    parts_LNKD: Tensor
    share_LN: Tensor
    caches: "tuple[DynamicCache, DynamicCache]"
    hints_NV: Tensor


class _Search:
    """The search for one text of a batch, beside others."""

    def __init__(
        self,
        model: LanguageModel,
        update: _Update,
        beside: Sequence[Judged],
        longest: int,
        proves: Callable[[tuple[int, ...]], bool] | None,
    ) -> None:
        """Takes what tells whether a text is the whole update; None for a text of a batch."""
        self._update, self._longest = update, longest
        self._device, self._proves = model.device, proves
        self._first = _first(model)
        (self._end,) = certificate.close(model, ())
        self._known = {token for text in beside for token in text.ids}
        self._beside = [torch.zeros_like(layer.sent_OI)[None] for layer in update.layers]
        for text in beside:
            _, gradients = update.gradients([text.ids])
            self._beside = [a + b for a, b in zip(self._beside, gradients, strict=True)]

    def best(self, width: int, clock: Clock, *known: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the text of the best score among known ones and those of a beam, closed."""
        beam = self._begun()
        ended, most, stale = {ids: float(self._scores([ids])) for ids in known}, -math.inf, 0
        while True:
            likely_N = beam.support_N + beam.hints_NV[:, self._end]
            likely = likely_N.topk(min(_CLOSED, len(beam.ids))).indices.tolist()
            closed = [(*beam.ids[row], self._end) for row in likely]
            scores_N = self._scores(closed, clock)
            ended |= zip(closed, scores_N.tolist(), strict=True)
            best = max(closed, key=ended.__getitem__)
            if ended[best] > most and self._proved(best):
                return best
            stale, most = (0, ended[best]) if ended[best] > most else (stale + 1, most)
            given_up = stale >= _STALE and (most > 0 or len(closed[0]) > _BEGUN)
            if given_up or len(closed[0]) >= self._longest or clock.up():
                return max(ended, key=ended.__getitem__)
            kept = self._scored if self._proves is None else self._explaining
            beam = self._grown(beam, *kept(beam, width, clock))

    def _begun(self) -> _Beam:
        """Returns what begins all texts, or the first tokens that the first layer supports."""
        if self._first:
            ids_NT = torch.tensor([self._first], device=self._device)
        else:
            # The first token is no target, so that nothing else is known of it.
            (nats_V,) = self._update.first_layer.nats([self._known])
            ids_NT = nats_V.topk(min(_BEGINNINGS, len(nats_V))).indices[:, None]
        layers, count = self._update.mixed, len(ids_NT)
        zeros = partial(torch.zeros, device=self._device)
        beam = _Beam(
            ids=[()] * count,
            support_N=zeros(count),
            parts_LNKD=zeros((len(layers), count, 0, len(layers[0].whiten_DD))),
            share_LN=zeros((len(layers), count)),
            caches=(_empty(), _empty()),
            hints_NV=zeros((count, 0)),
        )
        rows_N = torch.arange(count, device=self._device)
        for tokens_N in ids_NT.T:
            beam = self._grown(beam, rows_N, tokens_N, beam.support_N)
        return beam

    def _grown(self, beam: _Beam, rows_N: Tensor, tokens_N: Tensor, support_N: Tensor) -> _Beam:
        """Returns some prefixes of a beam, each with one more token."""
        _, parts_LND, share_LN = self._gain(beam, rows_N, tokens_N, self._update.mixed, UNLIMITED)
        before, after = (_of_rows(cache, rows_N) for cache in beam.caches)
        hints_NTV = self._update.hints(tokens_N[:, None], (before, after))
        return _Beam(
            ids=_longer(beam, rows_N, tokens_N),
            support_N=support_N,
            parts_LNKD=torch.cat([beam.parts_LNKD[:, rows_N], parts_LND[:, :, None]], 2),
            share_LN=share_LN,
            caches=(before, after),
            hints_NV=hints_NTV[:, -1],
        )

    def _next_words(self, beam: _Beam) -> tuple[Tensor, Tensor]:
        """Returns hints [N, V] without the end token, and nats [N, V] of the first layer."""
        hints_NV = beam.hints_NV.clone()
        hints_NV[:, self._end] = _NEVER
        return hints_NV, self._update.first_layer.nats([{*ids, *self._known} for ids in beam.ids])

    def _explaining(self, beam: _Beam, width: int, clock: Clock) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the prefixes [N] and their next tokens [N] that explain most, and support [N]."""
        hints_NV, table_NV = self._next_words(beam)
        tried_NV = _RANKED * beam.support_N[:, None] + hints_NV + _TABLE * table_NV
        vocabulary = tried_NV.shape[1]
        behind_NJ = _tried(hints_NV, table_NV, _BEHIND)
        tried_N = tried_NV.scatter_(1, behind_NJ, math.inf).flatten()
        tried = max(_TRIED, behind_NJ.numel())
        pairs_M = tried_N.topk(min(tried, len(tried_N))).indices
        layers = self._update.mixed
        kept = max(width, _WIDE // (len(beam.ids[0]) + 1))
        for some, count in ((layers[:_DEPTH], _DEEP), (layers, kept)):
            rows_M, tokens_M = pairs_M // vocabulary, pairs_M % vocabulary
            more_M, _, _ = self._gain(beam, rows_M, tokens_M, some, clock)
            support_M = beam.support_N[rows_M] + hints_NV[rows_M, tokens_M] + more_M
            support_M, best_M = support_M.topk(min(count, len(support_M)))
            pairs_M = pairs_M[best_M]
        return pairs_M // vocabulary, pairs_M % vocabulary, support_M

    def _scored(self, beam: _Beam, width: int, clock: Clock) -> tuple[Tensor, Tensor, Tensor]:
        """Likewise, of a batch, by scores: states of words of other texts explain as much.

        A score does not contain a token's effect on later ones, so half of the prefixes are those
        whose last token the first layer supports.
        """
        hints_NV, table_NV = self._next_words(beam)
        tokens_NJ = _tried(hints_NV, table_NV, _BEHIND)
        rows_M = torch.arange(len(beam.ids), device=self._device)
        rows_M, tokens_M = rows_M.repeat_interleave(tokens_NJ.shape[1]), tokens_NJ.flatten()
        scores_M = self._scores(_longer(beam, rows_M, tokens_M), clock)
        count = max(width // _COST, _EARLY // (len(beam.ids[0]) + 1) ** 2)
        half = min(-(-count // 2), len(rows_M))
        ranks = (scores_M, scores_M + _TABLE * table_NV[rows_M, tokens_M])
        best_N = sorted({i for rank_M in ranks for i in rank_M.topk(half).indices.tolist()})
        return rows_M[best_N], tokens_M[best_N], scores_M[best_N]

    def _gain(
        self, beam: _Beam, rows_M: Tensor, tokens_M: Tensor, layers: Sequence[_Inputs], clock: Clock
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what speaks for tokens [M] by what they explain in layers, each after a prefix.

        Beside it: what their inputs have beside those of the prefix [L, M, D], and the share of
        each layer's rows that all explain [L, M]. What time does not reach explains nothing.
        """
        known = beam.parts_LNKD.shape[2]
        share_LM = beam.share_LN[: len(layers), rows_M]
        before_LM, after_LM = torch.empty_like(share_LM), torch.empty_like(share_LM)
        parts_LMD = share_LM.new_zeros((*share_LM.shape, beam.parts_LNKD.shape[3]))
        for number, layer in enumerate(layers):
            before_LM[number] = layer.nats_of(share_LM[number], known)
        size = max(1, _AT_ONCE // (known + 1))
        for start in clock.paced(range(0, len(rows_M), size), least=1):
            some = slice(start, start + size)
            cache = _of_rows(beam.caches[0], rows_M[some], layers[-1].number)
            given = self._update.inputs(tokens_M[some, None], layers, cache)
            for number, (layer, inputs_NTD) in enumerate(zip(layers, given, strict=True)):
                known_NKD = beam.parts_LNKD[number, rows_M[some]]
                parts_LMD[number, some], more_N = layer.more(inputs_NTD[:, 0], known_NKD)
                share_LM[number, some] += more_N
        for number, layer in enumerate(layers):
            after_LM[number] = layer.nats_of(share_LM[number], known + 1)
        more_M = (after_LM - before_LM).clamp_min(0).log1p().mean(0)
        return _LAYERS * more_M, parts_LMD, share_LM

    def mended(self, ids: tuple[int, ...], clock: Clock) -> Judged:
        """Returns a closed text after single changes that explain more, the best one first."""
        score = float(self._scores([ids]))
        while not self._proved(ids) and not clock.up():
            # Sorted, so that those of one length go through the model together.
            texts = sorted(self._changed(ids), key=len)
            if self._proves is not None:
                texts = self._supported(texts, clock)
            best, i = self._scores(texts, clock).max(0)
            if best <= score:
                break
            ids, score = texts[int(i)], float(best)
        return Judged(ids, -score, math.inf)

    def _proved(self, ids: tuple[int, ...]) -> bool:
        return self._proves is not None and self._proves(ids)

    def _supported(self, texts: Sequence[tuple[int, ...]], clock: Clock) -> list[tuple[int, ...]]:
        """Returns the closed texts, sorted by length, whose states explain most."""
        support_N = torch.cat(
            [
                self._explained([ids[:-1] for ids in of_length], clock).sum(1)
                for _, of_length in groupby(texts, len)
            ]
        )
        likely = support_N.topk(min(_MENDED, len(texts))).indices.sort().values
        return [texts[i] for i in likely.tolist()]

    def _changed(self, ids: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yields texts with a token less, another one, one more, or some in another place."""
        places = range(len(self._first), len(ids))
        others = [{*ids[:place], *ids[place + 1 :], *self._known} for place in places]
        # A first token is no target: all are as likely.
        hints_TV = self._update.hints(torch.tensor([ids[:-1]], device=self._device))[0]
        hints_TV = F.pad(hints_TV, (0, 0, 1, 0))[len(self._first) :]
        tried_TJ = _tried(hints_TV, self._update.first_layer.nats(others), _CHANGES)
        for place, tried in zip(places, tried_TJ.tolist(), strict=True):
            before, behind = ids[:place], ids[place + 1 :]
            for token in tried:
                if len(ids) < self._longest:
                    yield (*before, token, *ids[place:])
                if behind:
                    yield (*before, token, *behind)
            if behind and len(ids) > 2:
                yield before + behind
        # Of a batch, whose changes all need a gradient, only single tokens.
        for count in range(1, _MOVED + 1 if self._proves is not None else 2):
            for place in places[:-count]:
                moved, left = ids[place : place + count], ids[:place] + ids[place + count :]
                for to in places[:-count]:
                    if to != place:
                        yield left[:to] + moved + left[to:]

    def _explained(self, texts: Sequence[tuple[int, ...]], clock: Clock) -> Tensor:
        """Returns the nats [N, L] that the inputs of tokens explain in L layers.

        Texts, of one length, that time does not reach explain nothing.
        """
        size = max(1, _AT_ONCE // len(texts[0]))
        layers = self._update.mixed[:_DEPTH]
        nats_NL = self._beside[0].new_full((len(texts), len(layers)), _NEVER)
        for start in clock.paced(range(0, len(texts), size), least=1):
            some = slice(start, start + size)
            given = self._update.inputs(torch.tensor(texts[some], device=self._device), layers)
            nats_NL[some] = torch.stack(
                [layer.nats(x) for layer, x in zip(layers, given, strict=True)], 1
            )
        return nats_NL

    def _scores(self, texts: Sequence[tuple[int, ...]], clock: Clock = UNLIMITED) -> Tensor:
        """Returns the nats that texts explain beside the others, and their log probability [N].

        Texts that time does not reach have a score below all others.
        """
        size = max(1, _AT_ONCE // max(map(len, texts)))
        scores_N = self._beside[0].new_full((len(texts),), -math.inf)
        for start in clock.paced(range(0, len(texts), size), least=1):
            some = slice(start, start + size)
            prior_N, gradients = self._update.gradients(texts[some])
            sums = [a + b for a, b in zip(self._beside, gradients, strict=True)]
            scores_N[some] = prior_N + self._update.nats(sums)
        return scores_N - self._update.nats(self._beside)


def _proves(model: LanguageModel, seen: Observation, clock: Clock, ids: tuple[int, ...]) -> bool:
    """Whether a closed text gives the update: its gradient, or the client's steps on it."""
    opened = ids[: -len(certificate.close(model, ()))]
    if certificate.judge(model, [opened], seen, clock).verified:
        return True
    made = replay.replay(model, [ids], seen, clock.left())
    return made is not None and made.verified


def _longer(beam: _Beam, rows_M: Tensor, tokens_M: Tensor) -> list[tuple[int, ...]]:
    """Returns prefixes of a beam, each with one more token."""
    pairs = zip(rows_M.tolist(), tokens_M.tolist(), strict=True)
    return [(*beam.ids[row], token) for row, token in pairs]


def _tried(hints_NV: Tensor, table_NV: Tensor, count: int) -> Tensor:
    """Returns the tokens [N, J] that most speaks for; for a quarter, what the first layer says."""
    both_NV = hints_NV + _TABLE * table_NV
    count = min(count, both_NV.shape[1])
    both_NV.scatter_(1, table_NV.topk(count // 4).indices, math.inf)
    return both_NV.topk(count).indices


def _times(rows_NTX: Tensor, matrix_XX: Tensor) -> Tensor:
    """Returns rows times a matrix, as a product of two matrices: several times faster."""
    return (rows_NTX.flatten(0, 1) @ matrix_XX).view(rows_NTX.shape)


class _ReachedError(Exception):
    """The last module that is listened to was reached."""


@contextmanager
def _listening(
    modules: Sequence[nn.Module], last: bool = False
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Keeps what goes into and comes out of modules, within the block, in their order.

    Args:
        modules: Whose inputs and outputs are kept.
        last: End the computation with `_ReachedError` once all were reached.
    """
    heard: list[Any] = [None] * len(modules)

    def listen(number: int) -> Any:
        def hook(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            heard[number] = (inputs[0].detach(), output)
            if last and number == len(modules) - 1:
                raise _ReachedError

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


def _log_probabilities(
    model: LanguageModel, ids_NT: Tensor, cache: "DynamicCache | None" = None
) -> Tensor:
    """Returns the log probability [N, T, V] of each next token; special tokens have almost none."""
    outer: Any = model.module
    output = outer.base_model(input_ids=ids_NT, past_key_values=cache, use_cache=cache is not None)
    return _next(model, output.last_hidden_state)


def _empty() -> "DynamicCache":
    """Returns a cache of no tokens."""
    from transformers import DynamicCache  # What trains nothing does without it.

    return DynamicCache()


def _of_rows(cache: "DynamicCache", rows_M: Tensor, layers: int | None = None) -> "DynamicCache":
    """Returns what a cache has for some rows, in the first layers."""
    chosen = _empty()
    for number, layer in enumerate(cache.layers[:layers]):
        chosen.update(layer.keys[rows_M], layer.values[rows_M], number)
    return chosen


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
