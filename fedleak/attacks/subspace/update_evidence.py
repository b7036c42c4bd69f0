"""What an update says of the texts of a decoder: by states of tokens, by gradients of whole texts.

The rows of a gradient of attention weights, or of the first matrices of their adapters, are mixes
of the layer's inputs: hidden states of all tokens. So the states of a right prefix explain more of
the rows of a layer than those of other tokens, and, where states depend on it, of another order.
DAGER (Petrov et al. 2024) asks whether states lie in the span of the rows; here a share is enough.
So it works with adapters, which have fewer rows than a batch has tokens, and after Adam, whose
first step leaves little more than signs of large numbers: signs of Gaussian numbers still point
along them (Bussgang 1952).

- **Units.** The model itself writes texts, whose inputs and gradients at outputs show which
  directions are common. They whiten a gradient, together with its noise (`whitening`). Adam's
  divisor is multiplied back first, as far as those texts give it.
- **Output layer.** The gradient of its row for a token is the sum of last hidden states, each times
  the token's probability there, less the states before the token. So a row moves along the states
  that its token follows, also in signs, and names the next token of a right prefix, also where
  the layer is the word embedding.
- **Word rows.** The word embedding's gradient has a row for each token, and rows of tokens that are
  in a text are longer than most. So each row that is longer than a token's own speaks against it.
- **Score.** The gradient of a text explains a share e of the square of the update:
  -log(1 - e) / 2 nats for each number that counts as independent, which all are as far as they
  are noise. The log probability that the model gives the text is added.

Shapes: N texts or prefixes, V vocabulary, D hidden size, T tokens, O outputs and I inputs of a
weight, A axes that stand for rows, K known tokens, M tokens of all texts, X any axes.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedleak.attacks import certificate
from fedleak.attacks.listening import AllHeardError, listening
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.coarseness import coarseness
from fedleak.attacks.subspace.whitening import Layer, Spread, Weight, noise_variance, whitened
from fedleak.models import LanguageModel, pad, token_losses
from fedleak.models.family import LORA_A, LORA_B, lora_a, lora_b
from fedleak.training.observation import Observation, UpdateKind
from fedleak.training.recipe import copied_parameters

if TYPE_CHECKING:
    from transformers import DynamicCache

_OWN_TEXTS, OWN_TOKENS = 48, 16
"""Texts that the model writes, and tokens of each, which show what gradients are like."""

_ROWS, _AXES = 16, 64
"""Rows of a weight that count as independent, at most; axes that stand for the rows of all weights
of a layer."""

_LEFT, _ALIKE = 0.04, 1e-3
"""Share of the square of an input that those of known tokens must leave, or nothing is said of its
token; added to the squares of these, because some are nearly the same."""

_LIKELIER = 1.5
"""Weight of what a step along an update adds to a log probability, in standard deviations."""

_NAMED = 3.0
"""Weight of what the rows of the output layer say for a token, in standard deviations."""

_FAR, _FARTHER = 0.003, 10
"""How far weights move along an update, as a share of their norm, to see what it makes likelier;
times as far, and up to so many times, where what that adds drowns in rounding, as of the small
weights of adapters."""

NEVER = -1e4
"""Log probability of a token that stands in no text."""

_ABSENT, _ALIKE_LENGTHS, _PRESENT = 2.0, 1e-6, 32
"""Weight of the logarithm of how many rows are as long; the share by which such lengths differ;
tokens of a text that may have the longest rows."""

_NOTHING = 1e-30
"""Added to squares of gradients that may be zero."""

_SMALL, _ALL = 1e-12, 1 - 1e-6
"""Added to norms that may be zero; the share from which on all is explained."""


class LayerInputs(NamedTuple):
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
    ) -> "LayerInputs":
        """Takes the whitened gradients of weights that multiply the same inputs."""
        rows_AD = F.normalize(torch.cat(list(gradients_AD)))
        square_D, axes_DD = torch.linalg.eigh(rows_AD.T @ rows_AD)
        count = min(_AXES, len(rows_AD))
        axes_AD = square_D[-count:].clamp_min(0).sqrt()[:, None] * axes_DD[:, -count:].T
        independent = sum(min(len(rows_AD), _ROWS) for rows_AD in gradients_AD)
        return cls(number, module, axes_AD, whiten_DD, independent)

    @classmethod
    def of(cls, weights: Sequence[Weight]) -> "LayerInputs":
        """Takes weights of one layer, which multiply the same inputs."""
        first = weights[0]
        rows = [weight.inputs.whitened(weight.gradient_OI) for weight in weights]
        return cls.of_rows(first.number, first.module, rows, first.inputs.whitening())

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


class FirstLayer:
    """What an update says of the first layer's inputs, which are those of single tokens.

    Each row of a gradient there is a mix of these inputs. As in orthogonal matching pursuit, the
    inputs of known tokens are taken out of the rows, and out of the inputs of all other tokens,
    before the two are compared.
    """

    def __init__(self, model: LanguageModel, mixed: LayerInputs | None) -> None:
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
        self._unsaid = unsaid(model)
        self._kept: dict[int, Tensor] = {}

    def nats(self, known: Sequence[Collection[int]]) -> Tensor:
        """Returns the nats [N, V] that each token explains beside N sets of known tokens.

        Known tokens have what chance explains. What half of the vocabulary explains is taken off,
        because it tells no token from another: the inputs of words that a model did not meet in
        training are nearly the same.
        """
        nats_NV = torch.stack([self._explained(sorted({*tokens})) for tokens in known])
        nats_NV = (nats_NV - nats_NV.median(1, keepdim=True).values).clamp_min(0)
        nats_NV[:, self._unsaid] = NEVER
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


class Head(NamedTuple):
    """What the rows of the output layer say of next tokens.

    Attributes:
        rows_VD: What the rows moved along, whitened, of length 1.
        whiten_DD: The matrix that whitens states, multiplied from the right.
    """

    rows_VD: Tensor
    whiten_DD: Tensor

    @classmethod
    def of(
        cls, model: LanguageModel, gradients: Mapping[str, Tensor], states: Spread
    ) -> "Head | None":
        """Returns the rows of an update; None if it has none.

        Args:
            model: At the broadcast weights.
            gradients: The update.
            states: How last hidden states vary.
        """
        gradient_VD = output_rows(model, gradients)
        if gradient_VD is None or not gradient_VD.any():
            return None
        return cls(F.normalize(states.whitened(-gradient_VD)), states.whitening())

    def names(self, hidden_XD: Tensor) -> Tensor:
        """Returns what is said for each token [..., V] behind states, in standard deviations."""
        whitened_XD = F.normalize(hidden_XD @ self.whiten_DD, dim=-1)
        return _deviations(whitened_XD @ self.rows_VD.T).clamp_min(0)


class OwnTexts(NamedTuple):
    """Texts that the model itself writes, and how they vary inside the model.

    Attributes:
        ids_NT: The texts.
        outputs, inputs: A weight -> how gradients of its outputs, and its inputs, vary.
        last: How last hidden states vary.
        signs: All of it is for gradients of which only signs are left.
    """

    ids_NT: Tensor
    outputs: Mapping[str, Spread]
    inputs: Mapping[str, Spread]
    last: Spread
    signs: bool

    @classmethod
    def of(
        cls, model: LanguageModel, layers: Mapping[str, int], rng: torch.Generator, *, signs: bool
    ) -> "OwnTexts":
        """Has the model write, and reads it.

        Args:
            model: At the broadcast weights.
            layers: The name of each weight that is looked at, with the number of its layer.
            rng: A random stream.
            signs: Only signs are left of gradients.
        """
        ids_NT = own_texts(model, rng)
        modules = [model.module.get_submodule(name.removesuffix(".weight")) for name in layers]
        outputs: dict[str, Spread] = {}
        inputs: dict[str, Spread] = {}
        of_inputs: dict[int | str, Spread] = {}
        tokens = _tokens(model, modules, ids_NT)
        for (name, number), (given_MI, slope_MO) in zip(layers.items(), tokens, strict=True):
            outputs[name] = Spread.of(slope_MO, signs=signs)
            # All of a layer have the same inputs, but second matrices of adapters.
            key = name if name.endswith(LORA_B) else number
            if key not in of_inputs:
                of_inputs[key] = Spread.of(given_MI, signs=signs)
            inputs[name] = of_inputs[key]
        last = Spread.of(last_hidden(model, ids_NT[:, :-1]).flatten(0, 1), signs=signs)
        return cls(ids_NT, outputs, inputs, last, signs)


class UpdateEvidence:
    """An update, and how well gradients of single texts explain it.

    Attributes:
        layers: The attention weights that it changes, with their adapters.
        first_layer: What it says of single tokens.
        head: What it says of next tokens; None: the output layer was not trained.
        mixed: What it says of the inputs of each layer.
        one_step: The client made one step.
        absent_V: Nats against each token, by the rows of the word embedding; None: they say none.
        most_V: What has spoken for each token at most, behind any prefix of the searches so far.
    """

    def __init__(
        self,
        model: LanguageModel,
        seen: Observation,
        rng: torch.Generator,
        *,
        own: OwnTexts | None = None,
    ) -> None:
        """Takes what the model's own texts showed before; None: they are written now."""
        gradients = certificate.as_gradient(seen)
        self._model, self._seen, self._rng = model, seen, rng
        self.one_step = seen.knowledge.local_steps in (None, 1)
        self.most_V = torch.zeros(model.vocabulary, device=model.device)
        sent = {
            name: layer
            for layer in range(model.num_layers)
            for weight in model.family.attention_parameters(layer)
            for name in (weight, lora_a(weight), lora_b(weight))
            if name in gradients and gradients[name].any()
        }
        self.layers: list[Layer] = []
        # Adapters of a first round have a first matrix that does not change.
        if all(name.endswith(LORA_B) for name in sent):
            return
        if own is None:
            signs = not seen.knowledge.adds_up or coarseness(seen, sent).signs
            own = OwnTexts.of(model, sent, rng, signs=signs)
        self._own = own
        weights: list[Weight] = []
        for name, number in sent.items():
            outputs, inputs = own.outputs[name], own.inputs[name]
            gradient = gradients[name]
            turned = gradient.shape != (len(outputs.unit_D), len(inputs.unit_D))  # as GPT-2's are
            gradient_OI = gradient.T if turned else gradient
            # The singular values of an adapter's few rows are all those of texts.
            noisy = certificate.is_linear(seen) and not name.endswith((LORA_A, LORA_B))
            noise = noise_variance(gradient_OI) if noisy else 0.0
            module = model.module.get_submodule(name.removesuffix(".weight"))
            weights.append(Weight(name, number, module, gradient_OI, outputs, inputs, noise))
        self.layers, self._count = whitened(weights)
        self._square = sum(float(layer.sent_OI.square().sum()) for layer in self.layers)
        mixing = [weight for weight in weights if not weight.name.endswith(LORA_B)]
        self.mixed = [
            LayerInputs.of([*of_layer])
            for _, of_layer in groupby(mixing, lambda weight: weight.number)
        ]
        first = self.mixed[0] if mixing and mixing[0].number == 0 else None
        self.first_layer = FirstLayer(model, first)
        along: dict[str, Tensor] = {}
        for name, layer in zip(sent, self.layers, strict=True):
            if not name.endswith(LORA_A):  # which says little about outputs
                step_OI = layer.step()
                along[name] = step_OI if step_OI.shape == gradients[name].shape else step_OI.T
        self._set_step(along, own.ids_NT[:2, :-1])
        self.head = Head.of(model, gradients, own.last)
        # Rows of signs have one length.
        rows_VD = None if own.signs else gradients.get(model.family.word_embedding)
        present = _PRESENT * seen.update.num_examples
        self.absent_V = None if rows_VD is None else absence(rows_VD, present)

    def without(self, texts: Sequence[Ids]) -> "UpdateEvidence":
        """Returns what a gradient says without that of closed texts.

        Of each tensor as much is taken out as fits best.
        """
        observed = certificate.as_gradient(self._seen)
        own = certificate.mean_gradient(self._model, [(ids, 0) for ids in texts], [*observed])
        tensors = {}
        for (name, value), part in zip(observed.items(), own or (), strict=True):
            part.masked_fill_(value == 0, 0)  # A mask, or pruning, may have made a zero of any.
            share = (value * part).sum() / (part.square().sum() + _NOTHING)
            tensors[name] = value - share * part
        update = replace(self._seen.update, kind=UpdateKind.GRADIENT, tensors=tensors)
        left = replace(self._seen, update=update)
        return UpdateEvidence(self._model, left, self._rng, own=self._own)

    def _set_step(self, along: Mapping[str, Tensor], ids_NT: Tensor) -> None:
        """Sets a step along an update, so far that rounding is little of what texts gain by it."""
        weights, length = (
            math.hypot(*(float(tensors[name].norm()) for name in along))
            for tensors in (self._model.parameters(), along)
        )
        visible = math.sqrt(torch.finfo(next(self._model.module.parameters()).dtype).eps)
        size = -_FAR * weights / max(length, _SMALL)
        for _ in range(_FARTHER):
            self._step = {name: size * value for name, value in along.items()}
            if float(self._likelier(ids_NT)[2].std()) >= visible:
                break
            size *= _FARTHER

    def hints(
        self, ids_NT: Tensor, caches: Sequence["DynamicCache | None"] = (None, None)
    ) -> Tensor:
        """Returns what speaks for each next token [N, T, V], in nats, before its gradient is known.

        A trained output layer names it. Training makes likelier what it has seen: contrastive
        decoding (Li et al. 2023) of the models before and after a step along the update. What the
        step adds to a log probability counts in its standard deviations over all tokens.

        Args:
            ids_NT: The tokens.
            caches: What the two models keep of earlier tokens; these are added.
        """
        hidden_NTD, before_NTV, more_NTV = self._likelier(ids_NT, caches)
        # What is nearly sure cannot become much likelier.
        hints_NTV = before_NTV + _LIKELIER * _deviations(more_NTV) * -before_NTV.expm1()
        if self.head is not None:
            hints_NTV += _NAMED * self.head.names(hidden_NTD)
        if self.absent_V is not None:
            hints_NTV -= self.absent_V
        return hints_NTV

    def _likelier(
        self, ids_NT: Tensor, caches: Sequence["DynamicCache | None"] = (None, None)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns last hidden states [N, T, D], and two tensors [N, T, V] of next tokens.

        These are their log probabilities, and what a step along the update adds to them.
        """
        before, after = caches
        hidden_NTD = last_hidden(self._model, ids_NT, before)
        before_NTV = _next(self._model, hidden_NTD)
        weights = self._model.trained()
        with copied_parameters(weights[name] for name in self._step):
            for name, value in self._step.items():
                weights[name].data += value.to(weights[name])
            more_NTV = log_probabilities(self._model, ids_NT, after) - before_NTV
        return hidden_NTD, before_NTV, more_NTV

    def inputs(
        self, ids_NT: Tensor, layers: Sequence[LayerInputs], cache: "DynamicCache | None" = None
    ) -> list[Tensor]:
        """Returns the inputs [N, T, D] of layers, behind what a cache keeps; it grows."""
        modules = [layer.module for layer in layers]
        with listening(modules, stop=True) as heard, suppress(AllHeardError):
            last_hidden(self._model, ids_NT, cache)
        return [heard[module][0] for module in modules]

    def gradients(self, texts: Sequence[Ids]) -> tuple[Tensor, list[Tensor]]:
        """Returns log probabilities [N] of texts, and their gradients [N, O, I], whitened.

        Tokens that are absent, as rows of the word embedding tell, make a text less probable.
        """
        ids_NT, mask_NT = pad(texts, self._model.tokenizer.pad_token_id, self._model.device)
        with listening([layer.module for layer in self.layers]) as heard, torch.enable_grad():
            hidden_NTD = last_hidden(self._model, ids_NT[:, :-1])
            # As one matrix: with several, a product with each is computed, which takes longer.
            logits_MV = logits(self._model, hidden_NTD.flatten(0, 1))
            loss_M = F.cross_entropy(logits_MV, ids_NT[:, 1:].flatten(), reduction="none")
            loss_N = (loss_M.view(len(texts), -1) * mask_NT[:, 1:]).sum(1)
            given = [heard[layer.module] for layer in self.layers]
            slopes = torch.autograd.grad(loss_N.sum(), [output for _, output in given])
        gradients = [
            layer.whitened(slope_NTO, given_NTI.detach())
            for layer, slope_NTO, (given_NTI, _) in zip(self.layers, slopes, given, strict=True)
        ]
        prior_N = -loss_N.detach()
        if self.absent_V is not None:
            # The gradients of words that a model did not meet in training are nearly the same.
            prior_N -= (self.absent_V[ids_NT] * mask_NT).sum(1)
        return prior_N, gradients

    def nats(self, gradients: Sequence[Tensor]) -> Tensor:
        """Returns the nats [N] that gradients [N, O, I] of the layers explain."""
        along_N = square_N = torch.zeros(len(gradients[0]), device=self._model.device)
        for layer, gradient_NOI in zip(self.layers, gradients, strict=True):
            along_N = along_N + (gradient_NOI * layer.sent_OI).sum((1, 2))
            square_N = square_N + gradient_NOI.square().sum((1, 2))
        share_N = along_N.clamp_min(0).square() / (square_N * self._square + _SMALL)
        return -self._count / 2 * torch.log1p(-share_N.clamp(max=_ALL))


def absence(rows_VD: Tensor, present: int) -> Tensor:
    """Returns the nats [V] against each token, by how many rows of a gradient are longer than its.

    No scale of the rows need be known, nor what blurs them. Rows of one length say nothing, and
    nothing speaks against those that are among the longest, as many as may be present.
    """
    length_V = rows_VD.norm(dim=1)
    shorter_V = torch.searchsorted(length_V.sort().values, length_V * (1 - _ALIKE_LENGTHS))
    nats_V = _ABSENT * (len(length_V) - shorter_V).clamp_min(present).log()
    return nats_V - nats_V.min()


def output_rows(model: LanguageModel, gradients: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the gradient [V, D] of the output layer; None if it was not sent."""
    outer: Any = model.module
    weight = outer.get_output_embeddings().weight
    named = (name for name, value in outer.named_parameters() if value is weight)
    return gradients.get(next(named, ""))


def _deviations(values_XV: Tensor) -> Tensor:
    """Returns how far values [..., V] are above their mean, in their standard deviations."""
    deviation_X1, mean_X1 = torch.std_mean(values_XV, -1, keepdim=True)
    return (values_XV - mean_X1) / (deviation_X1 + _SMALL)


def own_texts(model: LanguageModel, rng: torch.Generator) -> Tensor:
    """Returns texts [N, T] that the model itself writes."""
    said_V = torch.ones(model.vocabulary)
    said_V[unsaid(model)] = 0
    first = first_tokens(model)
    ids_NT = torch.tensor([first] * _OWN_TEXTS, dtype=torch.long)
    if not first:
        ids_NT = torch.multinomial(said_V, _OWN_TEXTS, generator=rng)[:, None]
    # What earlier tokens give to attention is kept, not computed again.
    new_NT, cache = ids_NT, empty_cache()
    for _ in range(OWN_TOKENS):
        next_NV = _next(model, last_hidden(model, new_NT.to(model.device), cache)[:, -1]).exp()
        new_NT = _drawn(next_NV.cpu(), rng)
        ids_NT = torch.cat([ids_NT, new_NT], 1)
    return ids_NT.to(model.device)


def _drawn(share_NV: Tensor, rng: torch.Generator) -> Tensor:
    """Returns a token [N, 1] for each distribution; `torch.multinomial` takes ten times as long."""
    below_NV = share_NV.cumsum(1)
    point_N1 = torch.rand(len(share_NV), 1, generator=rng) * below_NV[:, -1:]
    return torch.searchsorted(below_NV, point_N1, right=True).clamp_max(share_NV.shape[1] - 1)


def _tokens(
    model: LanguageModel, modules: Sequence[nn.Module], ids_NT: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields inputs [N, I] of modules, and gradients [N, O] of their outputs, of all tokens."""
    given: list[list[Tensor]] = [[] for _ in modules]
    slopes: list[list[Tensor]] = [[] for _ in modules]
    for part_NT in ids_NT.tensor_split(3):
        with listening(modules) as heard, torch.enable_grad():
            logits_NTV = logits(model, last_hidden(model, part_NT[:, :-1]))
            loss = token_losses(logits_NTV, part_NT[:, 1:]).sum()
            parts = torch.autograd.grad(loss, [heard[module][1] for module in modules])
        for number, (module, slope_NTO) in enumerate(zip(modules, parts, strict=True)):
            given[number].append(heard[module][0].detach().flatten(0, 1))
            slopes[number].append(slope_NTO.flatten(0, 1))
    for inputs, outputs in zip(given, slopes, strict=True):
        yield torch.cat(inputs), torch.cat(outputs)


def last_hidden(
    model: LanguageModel, ids_NT: Tensor, cache: "DynamicCache | None" = None
) -> Tensor:
    """Returns the last hidden states [N, T, D], behind what a cache keeps; it grows."""
    outer: Any = model.module
    output = outer.base_model(input_ids=ids_NT, past_key_values=cache, use_cache=cache is not None)
    hidden_NTD: Tensor = output.last_hidden_state
    return hidden_NTD


def logits(model: LanguageModel, hidden_XD: Tensor) -> Tensor:
    """Returns the logits [..., V] of the token behind each last hidden state [..., D]."""
    outer: Any = model.module
    logits_XV: Tensor = outer.get_output_embeddings()(hidden_XD).float()
    return logits_XV


def _next(model: LanguageModel, hidden_XD: Tensor) -> Tensor:
    """Returns the log probability [..., V] of the token behind each last hidden state [..., D]."""
    logits_XV = logits(model, hidden_XD)
    logits_XV[..., unsaid(model)] = NEVER
    return logits_XV.log_softmax(-1)


def log_probabilities(
    model: LanguageModel, ids_NT: Tensor, cache: "DynamicCache | None" = None
) -> Tensor:
    """Returns the log probability [N, T, V] of each next token; special tokens have almost none."""
    return _next(model, last_hidden(model, ids_NT, cache))


def empty_cache() -> "DynamicCache":
    """Returns a cache of no tokens."""
    from transformers import DynamicCache  # What trains nothing does without it.

    return DynamicCache()


def of_rows(cache: "DynamicCache", rows_M: Tensor, layers: int | None = None) -> "DynamicCache":
    """Returns what a cache has for some rows, in the first layers."""
    chosen = empty_cache()
    for number, layer in enumerate(cache.layers[:layers]):
        chosen.update(layer.keys[rows_M], layer.values[rows_M], number)
    return chosen


def first_tokens(model: LanguageModel) -> Ids:
    """Returns the tokens that every text begins with."""
    (ids,) = model.encode([""])
    return certificate.opened(model, ids)


def unsaid(model: LanguageModel) -> list[int]:
    """Returns the token ids that stand in no text: special ones, and those without a word."""
    return [*model.special_ids(), *range(len(model.tokenizer), model.vocabulary)]
