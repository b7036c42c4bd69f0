"""How much likelier an update is with a text in it: a likelihood ratio, tensor by tensor.

An update u holds a multiple of the gradient g of each of its texts. All else in it, the other texts
and noise, is assumed to be normal with the covariance

    S = D + (s^2 / n P) G^T G,    D = s^2 r^2 / n + sigma^2 on the diagonal,

where G are the gradients of P public texts, r the root mean square of each of their numbers, n the
texts in the update, s the factor on their mean, and sigma that of the noise. So (Neyman and Pearson
1933) the statistic that tells best whether a text was in is `g S^-1 u`, here in units of its
standard deviation, the root of `g S^-1 g`. The inverse takes a matrix of P x P (Woodbury). Tensors
are assumed to be independent: statistics and variances are summed over them.

Without noise this is the residual of g outside the span of public gradients, with each number in
units of its root mean square; under much noise it is the product of g and u. Adam and its kind
divide gradients by that root themselves, so g and G are divided by it, too.

The size of the noise need not be known. The square of u, and the mean square of its products with
the public gradients, are as large as the model predicts: that gives s, and then sigma (the method
of moments). If noise alone cannot explain the products of a tensor, the tensor has an s of its own.
For any other tensor that would be chance, and would weigh the tensor by chance: it has the s that
fits all tensors best, by least squares. If noise explains all tensors, s is almost zero.

A server sees all updates of a round. The statistic of the mean of the others, in place of the
update, is a null (FedMIA, Zhu et al. 2024): what a text has in common with every update falls out.

Shapes: K candidates, P public texts, X numbers of a tensor.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

COLUMNS = 2**18
"""Numbers of each public gradient that are copied together."""

LEAST = 1e-10
"""Share of an update that gradients make up if noise explains all of it."""

SURE = 20.0
"""Standard deviations of noise above which products with public gradients determine s. The products
are squared, and few in small tensors: they are far from normal."""

_TINY = 1e-300


class Statistics(NamedTuple):
    """What the gradients of candidates have in common with an update.

    Attributes:
        residual_K: The statistic of the likelihood ratio, in standard deviations.
        calibrated_K: `residual_K` less that of the mean of the round's other updates, or None.
        cosine_K: The cosine with the update, each tensor in units of its root mean square.
        public: How many public texts were used.
    """

    residual_K: Tensor
    calibrated_K: Tensor | None
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
    model: LanguageModel,
    lists: Sequence[Sequence[Example]],
    public: Sequence[Example],
    seen: Sequence[Observation],
) -> list[Statistics]:
    """Returns the statistics of each update's candidates.

    Args:
        model: At the broadcast weights.
        lists: The candidates of each update.
        public: Texts that are in no update; the first ones that there is room for are used.
        seen: Updates of one round; each has a tensor that can be compared.
    """
    updates = [
        {name: tensors[name].flatten().cpu() for name in compared(model, tensors)}
        for tensors in map(as_gradient, seen)
    ]
    sizes = {name: len(value_X) for update in updates for name, value_X in update.items()}
    used = public[: NUMBERS // sum(sizes.values())]
    # How clients step is the server's setting: the same for all of a round.
    adaptive = (seen[0].knowledge.recipe or Recipe()).optimiser != "sgd"
    rows = gradients(model, used, sizes)
    known = {name: Public.of(rows_PX, adaptive=adaptive) for name, rows_PX in rows.items()}
    answers = []
    for listed, update, null, observation in zip(lists, updates, nulls(updates), seen, strict=True):
        backgrounds = covariance(known, update, null, observation.update.num_examples)
        parts = [
            products(gradients(model, listed[start : start + AT_ONCE], update), backgrounds)
            for start in range(0, len(listed), AT_ONCE)
        ]
        ratio_K, null_K, variance_K, inner_K, square_K = torch.cat(parts, 1)
        deviation_K = variance_K.clamp_min(_TINY).sqrt()
        # In its units the square of an update is the number of its numbers that are not zero.
        total = sum(int(value_X.count_nonzero()) for value_X in update.values())
        answers.append(
            Statistics(
                residual_K=ratio_K / deviation_K,
                calibrated_K=(ratio_K - null_K) / deviation_K if null else None,
                cosine_K=inner_K / (square_K * total).clamp_min(_TINY).sqrt(),
                public=len(used),
            )
        )
    return answers


def nulls(updates: Sequence[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yields for each update the mean of the others by tensor, as large as its own tensor is.

    All updates count alike, however large they are. Tensors that no other update has are left out.
    """
    total: dict[str, Tensor] = {}
    count: Counter[str] = Counter()
    for update in updates:
        for name, value_X in update.items():
            total[name] = total.get(name, 0) + value_X / value_X.norm()
            count[name] += 1
    for update in updates:
        yield {
            name: (total[name] * value_X.norm() - value_X) / (count[name] - 1)
            for name, value_X in update.items()
            if count[name] > 1
        }


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


class Public(NamedTuple):
    """Public gradients of one tensor.

    Attributes:
        rows_PX: A row for each text; where the optimiser is adaptive, divided by the root mean
            square.
        scale_X: What the rows were multiplied by.
        power_X: Their mean square.
        gram_PP: Their products.
    """

    rows_PX: Tensor
    scale_X: Tensor
    power_X: Tensor
    gram_PP: Tensor

    @classmethod
    def of(cls, rows_PX: Tensor, *, adaptive: bool) -> "Public":
        """Returns what is known of a tensor; the rows are used up.

        Args:
            rows_PX: The gradients of public texts.
            adaptive: The client's optimiser divides by the root mean square.
        """
        texts, numbers = rows_PX.shape
        scale_X, power_X = torch.ones(numbers), torch.zeros(numbers)
        if texts > 1 and rows_PX.any():
            # Few texts say little about a number's square: the tensor's mean counts as one more.
            power_X = rows_PX.square().mean(0)
            power_X = (texts * power_X + power_X.mean()) / (texts + 1)
            if adaptive:
                scale_X = power_X.rsqrt()
                rows_PX *= scale_X
                power_X = torch.ones(numbers)
        return cls(rows_PX, scale_X, power_X, (rows_PX @ rows_PX.T).double())


class Moments(NamedTuple):
    """The update in one tensor, and what the model predicts for its square and products.

    Attributes:
        public: Gradients of the tensor.
        update_X: The update, as a gradient.
        square: The square of the update.
        expected: What the square is without noise, in units of s^2.
        excess: How much larger the squares of the update's products with the public gradients are
            than noise alone makes them, in standard deviations of the latter.
        slope: What the excess is expected to be, in units of s^2.
    """

    public: Public
    update_X: Tensor
    square: float
    expected: float
    excess: float
    slope: float

    @classmethod
    def of(cls, public: Public, update_X: Tensor, n: int) -> "Moments":
        """Returns the moments of a tensor.

        Args:
            public: Its public gradients.
            update_X: Not zero.
            n: Texts in the update.
        """
        texts, numbers = public.rows_PX.shape
        square = float(update_X.double().square().sum())
        if not public.power_X.any():
            return cls(public, update_X, square, 0.0, 0.0, 0.0)
        gram_PP, own_P = public.gram_PP, (public.rows_PX @ update_X).double()
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
        return cls(public, update_X, square, expected, excess / deviation, slope / deviation)


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


Background = Callable[[Tensor], Tensor]
"""Gradients of candidates in one tensor [K, X] -> their products [5, K] with an update.

They are the statistic of the update, that of the mean of others, the variance of both, and, in
units of the update's root mean square, the product with the update and the square.
"""


def background(moments: Moments, null_X: Tensor | None, factor: float, n: int) -> Background:
    """Returns products by the covariance S of everything but a text in one tensor of an update.

    Args:
        moments: What is known of the tensor.
        null_X: The mean of other updates; None: there are none.
        factor: s^2.
        n: Texts in the update.
    """
    public, update_X, share = moments.public, moments.update_X, factor / n
    noise = max(0.0, moments.square - factor * moments.expected) / len(update_X)
    weight_X = (share * public.power_X + noise).rsqrt()
    # Brings the gradients to the units in which S is the identity and their products: the span.
    scaled_X = weight_X * share**0.5
    gram_PP = torch.zeros(len(public.rows_PX), len(public.rows_PX), dtype=torch.float64)
    for start in range(0, len(update_X), COLUMNS):
        part = slice(start, start + COLUMNS)
        span_PX = public.rows_PX[:, part] * scaled_X[part]
        gram_PP += (span_PX @ span_PX.T).double()
    inverse_PP = torch.linalg.inv(gram_PP + len(gram_PP) * torch.eye(len(gram_PP))).float()
    others_X = torch.zeros_like(update_X) if null_X is None else null_X
    updates_X2 = torch.stack([update_X, others_X], 1) * weight_X[:, None]
    own_P2 = public.rows_PX @ (scaled_X[:, None] * updates_X2)
    # One over the root mean square of the update's numbers that are not zero.
    unit = (int(update_X.count_nonzero()) / moments.square) ** 0.5
    plain_X = update_X * unit

    def products_of(rows_KX: Tensor) -> Tensor:
        rows_KX = rows_KX * unit
        inner_K, square_K = rows_KX @ plain_X, rows_KX.square().sum(1)
        rows_KX *= public.scale_X * scaled_X / unit
        ratio_K2, variance_K = rows_KX @ updates_X2, rows_KX.square().sum(1)
        rows_KX *= scaled_X
        shared_KP = rows_KX @ public.rows_PX.T
        explained_KP = shared_KP @ inverse_PP
        ratio_K2 -= explained_KP @ own_P2
        variance_K -= (explained_KP * shared_KP).sum(1)
        return torch.stack([*ratio_K2.T, variance_K, inner_K, square_K]).double()

    return products_of


def covariance(
    public: Mapping[str, Public], update: Mapping[str, Tensor], null: Mapping[str, Tensor], n: int
) -> dict[str, Background]:
    """Returns how candidates are compared with each tensor of an update, by its covariance.

    Args:
        public: Of each tensor.
        update: As a gradient, by tensor [X].
        null: The mean of other updates, where there is one.
        n: Texts in the update.
    """
    tensors = {name: Moments.of(public[name], value_X, n) for name, value_X in update.items()}
    factor = factors(tensors)
    return {
        name: background(tensor, null.get(name), factor[name], n)
        for name, tensor in tensors.items()
    }


def products(rows: Mapping[str, Tensor], backgrounds: Mapping[str, Background]) -> Tensor:
    """Returns the products of candidates' gradients, summed over tensors [5, K]."""
    return torch.stack([backgrounds[name](values) for name, values in rows.items()]).sum(0)
