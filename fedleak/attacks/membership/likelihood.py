"""How much likelier an update is with a text in it: a likelihood ratio, tensor by tensor.

An update u holds a multiple of the gradient g of each of its texts. All else in it, the other texts
and noise, is taken for normal with the covariance

    S = D + (s^2 / n P) G^T G,    D = s^2 r^2 / n + sigma^2 on the diagonal,

where G are the gradients of P public texts, r the root mean square of each of their numbers, n the
texts in the update, s the factor on their mean, and sigma that of the noise. So (Neyman and Pearson
1933) the statistic that tells best whether a text was in is `g S^-1 u`, here in units of its
standard deviation, the root of `g S^-1 g`. The inverse takes a matrix of P x P (Woodbury). Tensors
are taken for independent: statistics and variances are summed over them.

Without noise this is the residual of g outside the span of public gradients, with each number in
units of its root mean square; under much noise it is the product of g and u. Adam and its kind
divide gradients by that root themselves, so g and G are divided by it, too.

Nobody has to tell how much noise there is. The square of u, and the mean square of its products
with the public gradients, are as large as the model says: that gives s, and then sigma (the method
of moments). A tensor whose products noise alone cannot explain has an s of its own. Of another
its own would be chance, and would weigh the tensor by chance: it has the one that fits all tensors
best, by least squares. Where noise explains all of them, s is next to none.

Shapes: K candidates, P public texts, X numbers of a tensor.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.certificate import as_gradient
from fedleak.models import LanguageModel
from fedleak.training.observation import Example, Observation
from fedleak.training.recipe import Recipe
from fedleak.training.steps import Batch, gradient

NUMBERS = 2**29
"""Numbers of public gradients that are in memory: two GiB."""

AT_ONCE = 16
"""Candidates whose gradients are in memory together."""

LEAST = 1e-10
"""Share of an update that gradients make where noise explains all of it."""

SURE = 20.0
"""Standard deviations of noise above which products with public gradients say what s is. These are
squares, and of small tensors few: they are far from normal."""

_TINY = 1e-300


class Statistics(NamedTuple):
    """What the gradients of candidates have in common with an update.

    Attributes:
        residual_K: The statistic of the likelihood ratio, in standard deviations.
        cosine_K: The cosine with the update, each tensor in units of its root mean square.
        public: How many public texts were used.
    """

    residual_K: Tensor
    cosine_K: Tensor
    public: int


def compared(model: LanguageModel, observed: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the tensors of an update that gradients can be compared with."""
    null, trained = model.family.null_parameters(observed), model.trained()
    return [
        name
        for name, value in observed.items()
        if name in trained and name not in null and float(value.double().square().sum()) > 1e-30
    ]


def statistics(
    model: LanguageModel, listed: Sequence[Example], public: Sequence[Example], seen: Observation
) -> Statistics:
    """Returns the statistics of each candidate.

    Args:
        model: At the broadcast weights.
        listed: The candidates.
        public: Texts that are in no update; the first ones that there is room for are used.
        seen: An update of which some tensor can be compared.
    """
    observed = as_gradient(seen)
    names = compared(model, observed)
    used = public[: NUMBERS // sum(observed[name].numel() for name in names)]
    adaptive = (seen.knowledge.recipe or Recipe()).optimiser != "sgd"
    rows = gradients(model, used, names)
    backgrounds = covariance(rows, observed, seen.update.num_examples, adaptive=adaptive)
    parts = [
        products(gradients(model, listed[start : start + AT_ONCE], names), backgrounds)
        for start in range(0, len(listed), AT_ONCE)
    ]
    ratio_K, variance_K, inner_K, square_K = torch.cat(parts, 1)
    # In its units the square of an update is the number of its numbers that are not zero.
    total = sum(background.live for background in backgrounds.values())
    return Statistics(
        residual_K=ratio_K / variance_K.clamp_min(_TINY).sqrt(),
        cosine_K=inner_K / (square_K * total).clamp_min(_TINY).sqrt(),
        public=len(used),
    )


def gradients(
    model: LanguageModel, examples: Sequence[Example], names: Iterable[str]
) -> dict[str, Tensor]:
    """Returns the gradient of each example's loss by parameter name, a row for each [K, X]."""
    trained = model.trained()
    rows = {name: torch.empty(len(examples), trained[name].numel()) for name in names}
    for number, (ids, label) in enumerate(examples):
        of_example = gradient(model, Batch([ids], [label or 0]), Recipe())
        for name, values in rows.items():
            values[number] = of_example[name].flatten()
    return rows


class Moments(NamedTuple):
    """Public gradients of one tensor, its update, and what the model says of their squares.

    Attributes:
        public_PX: A row for each text; where the optimiser is adaptive, divided by the root mean
            square.
        scale_X: What the rows were multiplied by.
        power_X: Their mean square.
        update_X: The update, as a gradient.
        square: Of the update.
        expected: What it is without noise, in units of s^2.
        excess: How much larger the squares of the update's products with the public gradients are
            than noise alone makes them, in standard deviations of that.
        slope: What the excess is expected to be, in units of s^2.
    """

    public_PX: Tensor
    scale_X: Tensor
    power_X: Tensor
    update_X: Tensor
    square: float
    expected: float
    excess: float
    slope: float

    @classmethod
    def of(cls, public_PX: Tensor, update_X: Tensor, n: int, *, adaptive: bool) -> "Moments":
        """Returns the moments of a tensor; the rows are used up.

        Args:
            public_PX: The gradients of public texts.
            update_X: Not zero.
            n: Texts in the update.
            adaptive: The client's optimiser divides by the root mean square.
        """
        texts, numbers = public_PX.shape
        square = float(update_X.double().square().sum())
        scale_X = torch.ones(numbers)
        if texts < 2 or not public_PX.any():
            nothing = torch.zeros(numbers)
            return cls(public_PX, scale_X, nothing, update_X, square, 0.0, 0.0, 0.0)
        # Few texts say little of the square of a number: the tensor's mean counts as one more.
        power_X = public_PX.square().mean(0)
        power_X = (texts * power_X + power_X.mean()) / (texts + 1)
        if adaptive:
            scale_X = power_X.rsqrt()
            public_PX *= scale_X
            power_X = torch.ones(numbers)
        gram_PP, own_P = (public_PX @ public_PX.T).double(), (public_PX @ update_X).double()
        power, pairs = float(gram_PP.diagonal().mean()), texts * (texts - 1)
        apart_PP = gram_PP - gram_PP.diagonal().diag()

        def of_batch(text: float, shared: float) -> float:
            """Returns the mean square of a mean over n texts, from a text's and the mean's."""
            return shared + (text - shared) / n

        expected = of_batch(power, float(apart_PP.sum()) / pairs)
        mean_P = apart_PP.sum(1) / (texts - 1)
        own = of_batch(float(apart_PP.square().sum()) / pairs, float(mean_P.square().mean()))
        excess = float(own_P.square().mean()) - power * square / numbers
        slope = max(0.0, own - power * expected / numbers)
        # Under noise alone the products are normal, with the covariance of the public gradients.
        deviation = 2**0.5 * square / numbers * float(gram_PP.norm()) / texts
        return cls(
            public_PX=public_PX,
            scale_X=scale_X,
            power_X=power_X,
            update_X=update_X,
            square=square,
            expected=expected,
            excess=excess / deviation,
            slope=slope / deviation,
        )


def factors(tensors: Mapping[str, Moments]) -> dict[str, float]:
    """Returns s^2 of each tensor."""
    product = sum(tensor.excess * tensor.slope for tensor in tensors.values())
    slopes = sum(tensor.slope**2 for tensor in tensors.values())
    if product <= SURE * slopes**0.5:
        square = sum(tensor.square for tensor in tensors.values())
        expected = sum(tensor.expected for tensor in tensors.values())
        return dict.fromkeys(tensors, LEAST * square / expected if expected else 1.0)
    return {
        name: tensor.excess / tensor.slope
        if tensor.excess > SURE and tensor.slope
        else product / slopes
        for name, tensor in tensors.items()
    }


class Background(NamedTuple):
    """One tensor of an update, and the covariance S of all that is in it beside a text.

    Attributes:
        scale_X: Brings a gradient to the units in which S is the identity and the span.
        span_PX: The public gradients in these units.
        inverse_PP: Of P times the identity and the products of the span.
        update_X: The update in these units.
        own_P: Its products with the span.
        plain_X: The update as it is, in units of its root mean square.
        unit: One over that root.
        live: Numbers of the update that are not zero.
    """

    scale_X: Tensor
    span_PX: Tensor
    inverse_PP: Tensor
    update_X: Tensor
    own_P: Tensor
    plain_X: Tensor
    unit: float
    live: int

    @classmethod
    def of(cls, tensor: Moments, factor: float, n: int) -> "Background":
        """Returns the covariance in a tensor of an update of n texts; its rows are used up.

        Args:
            tensor: What is known of it.
            factor: s^2.
            n: Texts in the update.
        """
        live, share = int(tensor.update_X.count_nonzero()), factor / n
        noise = max(0.0, tensor.square - factor * tensor.expected) / len(tensor.update_X)
        weight_X = (share * tensor.power_X + noise).rsqrt()
        scaled_X = weight_X * share**0.5
        span_PX = tensor.public_PX.mul_(scaled_X)
        update_X = tensor.update_X * weight_X
        gram_PP = (span_PX @ span_PX.T).double()
        unit = (live / tensor.square) ** 0.5
        return cls(
            scale_X=tensor.scale_X * scaled_X,
            span_PX=span_PX,
            inverse_PP=torch.linalg.inv(gram_PP + len(gram_PP) * torch.eye(len(gram_PP))).float(),
            update_X=update_X,
            own_P=span_PX @ update_X,
            plain_X=tensor.update_X * unit,
            unit=unit,
            live=live,
        )

    def products(self, rows_KX: Tensor) -> Tensor:
        """Returns the statistic, its variance, the product with the update and the square [4, K].

        The last two are in units of the update's root mean square.
        """
        rows_KX = rows_KX * self.unit
        inner_K, square_K = rows_KX @ self.plain_X, rows_KX.square().sum(1)
        rows_KX *= self.scale_X / self.unit
        shared_KP = rows_KX @ self.span_PX.T
        explained_KP = shared_KP @ self.inverse_PP
        ratio_K = rows_KX @ self.update_X - explained_KP @ self.own_P
        variance_K = rows_KX.square().sum(1) - (explained_KP * shared_KP).sum(1)
        return torch.stack([ratio_K, variance_K, inner_K, square_K]).double()


def covariance(
    public: Mapping[str, Tensor], observed: Mapping[str, Tensor], n: int, *, adaptive: bool
) -> dict[str, Background]:
    """Returns the covariance in each tensor of an update.

    Args:
        public: Gradients of public texts, by tensor [P, X]; they are used up.
        observed: The update, as a gradient.
        n: Texts in it.
        adaptive: The client's optimiser divides by the root mean square.
    """
    tensors = {
        name: Moments.of(rows_PX, observed[name].flatten().cpu(), n, adaptive=adaptive)
        for name, rows_PX in public.items()
    }
    factor = factors(tensors)
    return {name: Background.of(tensor, factor[name], n) for name, tensor in tensors.items()}


def products(rows: Mapping[str, Tensor], backgrounds: Mapping[str, Background]) -> Tensor:
    """Returns the products of candidates' gradients, summed over tensors [4, K]."""
    return torch.stack([backgrounds[name].products(values) for name, values in rows.items()]).sum(0)
