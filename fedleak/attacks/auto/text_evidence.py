"""What a noisy gradient of a batch says of one text, whatever the other texts are.

Most of a batch's gradient is one direction that all its texts share, so a sum of squares says
little of a single text. Whitened, numbers count as far as neither noise nor what all texts share
hides them (`whitening`). Let G be the whitened gradient and g that of a text with its class. Then
g explains the share e = <G, g>^2 / (|G|^2 |g|^2) of G, at whatever weight: a matched filter. That
is worth -log(1 - e) / 2 nats for each number that counts as independent. Wrong words take little of
it away each: a text with half of its words wrong still explains far more than other texts do. So a
search can climb, which it cannot where a test sees nothing but whether a text is right.

Counted are the weights of values and of attention outputs, which say most for their size, as far as
they were sent; and, likewise, the rows of the words that a text uses.

<G, g> and |g| are computed from the factors of g, without g: <G, g> = sum over tokens of d^T S x,
with inputs x, gradients d at outputs, and S the gradient whitened twice. |g|^2 needs the squares of
the whitening, a smooth matrix of few singular values (`separated`).

Shapes: N texts, T tokens, D hidden size, V words, O outputs and I inputs of a weight, K singular
values.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedleak.attacks.auto.evidence import gradients_of
from fedleak.attacks.auto.joint_likelihood import AT_ONCE, Joint
from fedleak.attacks.listening import AllHeardError, listening
from fedleak.attacks.matching.batch_structure import frame
from fedleak.attacks.matching.factored_gradients import BatchGradients
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.whitening import Spread, Weight, whitened
from fedleak.models import LanguageModel, pad

_OWN_TEXTS, _OWN_WORDS = 48, 10
"""Texts of random words whose gradients show what all texts share, and their words."""

_KEPT = 4
"""Singular values of the squares of a whitening: what the others add is a thousandth."""

_SMALL, _ALL = 1e-12, 1 - 1e-6
"""Added to squares that may be zero; the share from which on all is explained."""


class Explained(NamedTuple):
    """What an update says of a text.

    Attributes:
        nats: That speak for it.
        place_TD: The gradients at its places, in units of the noise.
    """

    nats: float
    place_TD: Tensor


class Separated(NamedTuple):
    """A matrix as a sum of products of columns and rows.

    Attributes:
        left_OK, right_KI: The columns and the rows.
    """

    left_OK: Tensor
    right_KI: Tensor


class Slopes(NamedTuple):
    """The gradients of a text at a weight's outputs, and what they make of inputs.

    Attributes:
        module: What multiplies by the weight.
        along_TI: The gradients times the update, whitened twice.
        products_KTT: The products of each two of them, for each singular value.
        in_II, right_KI: The main axes of inputs, and the weights of these.
    """

    module: nn.Module
    along_TI: Tensor
    products_KTT: Tensor
    in_II: Tensor
    right_KI: Tensor


class TextEvidence:
    """Says how well single texts explain what others leave of an update.

    Attributes:
        names: The weights that count.
        layers: They, whitened.
        count: How many of their numbers count as independent.

    Args:
        model: At the broadcast weights.
        observed: The mean gradient by parameter name.
        noise: Its standard deviation.
        joint: Of the same gradient.
        rng: Draws the texts that show what all texts share.
    """

    def __init__(
        self,
        model: LanguageModel,
        observed: Mapping[str, Tensor],
        noise: float,
        joint: Joint,
        rng: torch.Generator,
    ) -> None:
        self._model, self._joint, self._noise = model, joint, noise
        self._places = str(model.family.position_embedding)
        self.names = [
            name
            for layer in range(model.num_layers)
            for letters, names in model.family.modules(layer).items()
            if {*letters} & {*"vo"}
            for name in names
            if name in observed
        ]
        # A Conv1D has inputs first.
        self._turned = {
            name
            for name in self.names
            if not isinstance(model.module.get_submodule(name.removesuffix(".weight")), nn.Linear)
        }
        self._own = BatchGradients(model, [*self.names, self._places])
        self._known: dict[tuple[Ids, int], Explained] = {}
        self._last: tuple[tuple[Ids, int], list[Slopes]] | None = None
        factors = self._factors(_random_texts(model, rng), 0)
        weights = []
        for name in self.names:
            left_NTO, right_NTI = factors[name]
            outputs, inputs = (
                Spread.of(rows.flatten(0, 1), signs=False) for rows in (left_NTO, right_NTI)
            )
            gradient_OI = observed[name].T if name in self._turned else observed[name]
            module = model.module.get_submodule(name.removesuffix(".weight"))
            weights.append(Weight(name, 0, module, gradient_OI, outputs, inputs, noise**2))
        self.layers, self.count = whitened(weights) if weights else ([], 0.0)
        self._squares = [separated(layer.white_OI.square()) for layer in self.layers]
        self.beside({})

    def beside(self, texts: Mapping[int, Ids]) -> tuple[Tensor, Tensor]:
        """Takes texts, by their number in the batch, out of the update.

        Returns:
            What they leave of the rows of words [V, D] and of places, in units of the noise.
        """
        self._known, self._last = {}, None
        left = [layer.sent_OI.clone() for layer in self.layers]
        for number, ids in texts.items():
            factors = self._factors([ids], self._joint.labels[number])
            for name, layer, left_OI in zip(self.names, self.layers, left, strict=True):
                (own_OI,) = layer.whitened(*factors[name])
                left_OI.sub_(own_OI, alpha=1 / len(self._joint.labels))
        self._square = sum(float(left_OI.square().sum()) for left_OI in left)
        self._steps = [
            layer._replace(sent_OI=left_OI).step()
            for layer, left_OI in zip(self.layers, left, strict=True)
        ]
        self._word_VD, place_PD = self._joint.left(texts)
        return self._word_VD, place_PD

    def of(self, texts: Sequence[Ids], label: int) -> list[Explained]:
        """Returns what the update says of texts of a class."""
        new = [ids for ids in dict.fromkeys(texts) if (ids, label) not in self._known]
        new.sort(key=lambda ids: (len(ids), ids))
        for start in range(0, len(new), AT_ONCE):
            part = new[start : start + AT_ONCE]
            factors = self._factors(part, label)
            nats_N, rows_NTD = self._nats(factors), factors[self._places][1] / self._noise
            for ids, nats, rows_TD in zip(part, nats_N.tolist(), rows_NTD, strict=True):
                place_TD = rows_TD[: len(ids)].clone()
                self._known[ids, label] = Explained(nats + self._of_rows(ids, place_TD), place_TD)
        return [self._known[ids, label] for ids in texts]

    def promising(self, ids: Ids, label: int, changed: Sequence[Ids], most: int) -> list[Ids]:
        """Returns the changes of a text that seem to explain most, by half of a forward pass.

        A change moves the inputs of the first half of the weights more than the gradients at their
        outputs, which are taken from the text itself.
        """
        if len(changed) <= most:
            return [*changed]
        of_text = self._of_text(ids, label)
        ids_NT, mask_NT = pad(changed, self._model.tokenizer.pad_token_id, self._model.device)
        old_NT = torch.tensor([places_before(ids, other, ids_NT.shape[1]) for other in changed])
        modules = [part.module for part in of_text]
        with listening(modules, stop=True) as heard, suppress(AllHeardError), torch.no_grad():
            self._model.family.logits(self._model.module, mask_NT, ids_BT=ids_NT, embeds_BTD=None)
        along_N = square_N = torch.zeros(len(changed), device=self._model.device)
        old_NTT = old_NT[:, :, None], old_NT[:, None, :]
        for part in of_text:
            inputs_NTI = heard[part.module][0] * mask_NT[..., None]
            along_N = along_N + (part.along_TI[old_NT] * inputs_NTI).sum((1, 2))
            inputs_NTI = inputs_NTI @ part.in_II
            for products_TT, right_I in zip(part.products_KTT, part.right_KI, strict=True):
                of_inputs_NTT = (inputs_NTI * right_I) @ inputs_NTI.mT
                square_N = square_N + (products_TT[old_NTT] * of_inputs_NTT).sum((1, 2))
        best = (along_N.clamp_min(0).square() / (square_N + _SMALL)).topk(most).indices
        return [changed[i] for i in best.tolist()]

    def _of_text(self, ids: Ids, label: int) -> list[Slopes]:
        """Returns the gradients at outputs of a text, for `promising`."""
        if self._last is None or self._last[0] != (ids, label):
            factors, parts = self._factors([ids], label), []
            first = self.names[: len(self.names) // 2]
            for name, layer, step_OI, squares in zip(
                first, self.layers, self._steps, self._squares, strict=False
            ):
                ((slopes_TO,), _) = factors[name]
                along_TI = slopes_TO @ step_OI
                slopes_TO = slopes_TO @ layer.out_OO
                products_KTT = (slopes_TO * squares.left_OK.T[:, None]) @ slopes_TO.T
                parts.append(
                    Slopes(layer.module, along_TI, products_KTT, layer.in_II, squares.right_KI)
                )
            self._last = ((ids, label), parts)
        return self._last[1]

    def _factors(self, texts: Sequence[Ids], label: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns gradients at outputs [N, T, O] and inputs [N, T, I] of each weight.

        Those of places are both the gradients at places [N, T, D].
        """
        labels_N1 = torch.full((len(texts), 1), label, device=self._model.device)
        with self._own.ready():
            by_name = gradients_of(self._model, self._own, texts, labels_N1)
        factors = {}
        for name, gradient in by_name.items():
            if isinstance(gradient, Tensor):
                factors[name] = (gradient[:, 0], gradient[:, 0])
            else:
                left, right = (torch.cat(side, 2)[:, 0] for side in zip(*gradient, strict=True))
                factors[name] = (right, left) if name in self._turned else (left, right)
        return factors

    def _nats(self, factors: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Returns the nats [N] that weights give texts."""
        texts = len(factors[self._places][1])
        along_N = square_N = torch.zeros(texts, device=self._model.device)
        for name, layer, step_OI, squares in zip(
            self.names, self.layers, self._steps, self._squares, strict=True
        ):
            slopes_NTO, inputs_NTI = factors[name]
            along_N = along_N + ((slopes_NTO @ step_OI) * inputs_NTI).sum((1, 2))
            slopes_NTO, inputs_NTI = slopes_NTO @ layer.out_OO, inputs_NTI @ layer.in_II
            for left_O, right_I in zip(squares.left_OK.T, squares.right_KI, strict=True):
                of_slopes_NTT = (slopes_NTO * left_O) @ slopes_NTO.mT
                of_inputs_NTT = (inputs_NTI * right_I) @ inputs_NTI.mT
                square_N = square_N + (of_slopes_NTT * of_inputs_NTT).sum((1, 2))
        share_N = along_N.clamp_min(0).square() / (square_N * self._square + _SMALL)
        return -self.count / 2 * torch.log1p(-share_N.clamp(max=_ALL))

    def _of_rows(self, ids: Ids, place_TD: Tensor) -> float:
        """Returns the nats that the rows of its words give a text."""
        words, row_T = torch.unique(torch.tensor(ids).to(place_TD.device), return_inverse=True)
        own_MD = torch.zeros(len(words), place_TD.shape[1]).to(place_TD)
        own_MD.index_add_(0, row_T, place_TD / len(self._joint.labels))
        marks = torch.tensor([*self._model.special_ids()]).to(words)
        own_MD[torch.isin(words, marks)] = 0
        along = max(float((own_MD * self._word_VD[words]).sum()), 0.0)
        return along**2 / (2 * float(own_MD.square().sum()) + _SMALL)


def places_before(ids: Ids, changed: Ids, length: int) -> list[int]:
    """Returns the place of a text that each place [length] of a change of it comes from."""
    pairs = zip(ids[::-1], changed[::-1], strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    behind, longer = len(changed) - alike, len(changed) - len(ids)
    places = (place - longer if place >= behind else place for place in range(length))
    return [min(place, len(ids) - 1) for place in places]


def _random_texts(model: LanguageModel, rng: torch.Generator) -> list[Ids]:
    """Returns texts of random words between the marks of a text."""
    first, last = frame(model)
    words = [*{*range(model.vocabulary)} - model.special_ids()]
    drawn_NT = torch.randint(len(words), (_OWN_TEXTS, _OWN_WORDS), generator=rng)
    return [(*first, *(words[i] for i in row), *last) for row in drawn_NT.tolist()]


def separated(square_OI: Tensor) -> Separated:
    """Returns a smooth matrix by its largest singular values (Halko et al. 2011)."""
    rng = torch.Generator().manual_seed(0)
    start_IK = torch.randn(square_OI.shape[1], min(_KEPT, *square_OI.shape), generator=rng)
    right_IK = start_IK.to(square_OI)
    for _ in range(2):
        right_IK = torch.linalg.qr(square_OI.T @ torch.linalg.qr(square_OI @ right_IK)[0])[0]
    return Separated(square_OI @ right_IK, right_IK.T)
