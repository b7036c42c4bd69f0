"""LAMP: gradient matching in turns with discrete steps, which put words in a better order.

Balunovic, Dimitrov, Jovanovic, Vechev, "LAMP: Extracting Text from Gradients with Language Model
Priors", NeurIPS 2022. `faithful` is their algorithm 1 with the constants of their code
(eth-sri/lamp at 852d12f). `best` is our own search, in `relaxed_tokens`.

`faithful` departs from the authors' code in these points:

- Padding is masked, as clients mask it.
- A prefix move and the first orders stay within their sentence.
- Each sentence is judged by its own present order and by its own likelihood, without padding.
- The regulariser aims at the mean norm of the victim's own word embeddings.
- Equal orders are scored once.
- Tensors whose observed gradient is zero are left out.
- The answer is the guess that had the lowest loss, not the guess one step later.

Shapes: R rows, K guesses for each, B sequences, T tokens, F variables of a place.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from torch import Tensor

from fedleak.attacks.matching import relaxed_tokens, reorderings
from fedleak.attacks.matching.candidate_selection import best_of_sequence, lm_penalty, stacked
from fedleak.attacks.matching.gradient_distance import Loss
from fedleak.attacks.matching.gradient_matching import Count, GradientMatching, MatchingMethod
from fedleak.attacks.matching.optimizer import (
    Found,
    MatchingConfig,
    Search,
    linear,
    match_gradients,
    stepwise,
)
from fedleak.attacks.matching.parametrization import Guess
from fedleak.models import absolute

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_BASE = MatchingConfig(
    steps=2000,
    step_size=0.01,
    schedule=stepwise(0.89, 50),
    lm_weight=0.2,
    norm_weight=1.0,
    guesses=500,
    every=75,
)
_LARGE = replace(
    _BASE,
    steps=5000,
    schedule=linear(2.0),  # over twice the steps, so it ends at half
    every=200,
    clip=0.5,
    weight_decay=0.01,
    epsilon=1e-6,
)
FAITHFUL = {"base": _BASE, "large": _LARGE}
"""The authors' constants: "base" also for fine-tuned models and TinyBERT."""


@dataclass(frozen=True, kw_only=True)
class Lamp(GradientMatching):
    """Gradient matching with a language model's choice of word order, on all or a few tensors.

    On an update that shares only some matrices it is the partial-gradient attack (Li et al. 2024).

    Attributes:
        loss: The distance of gradients: cosine, squared plus absolute, or squared.
        prior: A causal language model (hub id, folder or built-in); None: no prior.
        lm_weight: Weight of the prior; None: as the preset has it.
        norm_weight: Weight of the regulariser; None: as the preset has it.
        discrete: When words change places: all along, only at the end, or never.
        guesses: The descent begins with the best of so many random starts, and then of so many
            orders of it; None: as the preset has it.
        orders: Orders of a sentence's words that a discrete step tries; None: as the preset has it.
    """

    kind: ClassVar[str] = "lamp"
    loss: Loss = "cos"
    prior: Annotated[str, AfterValidator(absolute)] | None = None
    lm_weight: Weight | None = None
    norm_weight: Weight | None = None
    discrete: Literal["during", "at-end", "never"] = "during"
    guesses: Count | None = None
    orders: Count | None = None

    def method(self) -> MatchingMethod:
        """Returns algorithm 1 of the paper, or our own search."""
        algorithm = relaxed_tokens.reconstruct
        known, free = relaxed_tokens.BEST, relaxed_tokens.BEST_FREE
        if self.faithful:
            algorithm, known = reconstruct, FAITHFUL[self.size]
            if self.loss != "cos":
                known = replace(known, lm_weight=60.0, norm_weight=25.0)
            free = known
        known, free = self._config(known), self._config(free)
        return MatchingMethod(algorithm, known, free, self.loss, scaled=True, prior=self.prior)

    def _config(self, preset: MatchingConfig) -> MatchingConfig:
        """Returns a preset with the settings of this attack in it."""
        names = ("lm_weight", "norm_weight", "guesses", "orders")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(preset.shortened(self.steps), discrete_at=self.discrete, **given)


def reconstruct(search: Search) -> list[Found]:
    """Returns each victim's tokens by LAMP's algorithm 1: DLG's loop, with discrete steps in it."""
    return match_gradients(search, lambda variables_RBTF: better_order(search, variables_RBTF))


def better_order(search: Search, variables_RBTF: Tensor) -> Tensor:
    """Returns the variables with each sequence in the best order tried (the paper's section 3.2).

    The best has the lowest sum of distance and weighted negative log-likelihood. Out of time, the
    other sequences stay as they are.
    """
    space, rows = search.objective.space, search.objective.rows
    for b in range(variables_RBTF.shape[1]):
        order_RKT = _orders_to_try(search, b).to(variables_RBTF.device)
        ids_RT = space.nearest_tokens(rows, variables_RBTF[:, None])[:, 0, b]
        now = space.guess(rows, variables_RBTF[:, None])

        def inputs(tried_RKT: Tensor, b: int = b, variables_RBTF: Tensor = variables_RBTF) -> Guess:
            own = rows.sequences_of([b])
            present_R1TF = variables_RBTF[:, None, b, : own.length]
            variables_RKTF = reorderings.reordered(present_R1TF, tried_RKT[..., : own.length])
            return space.guess(own, variables_RKTF[:, :, None])

        tried_RKT = ids_RT[:, None].take_along_dim(order_RKT, -1)
        lm_penalty_RK = lm_penalty(search, b, tried_RKT)
        if search.watch.up():
            break
        best = best_of_sequence(search, now, b, inputs, order_RKT, lm_penalty_RK)
        variables_RBTF = variables_RBTF.clone()
        variables_RBTF[:, b] = reorderings.reordered(variables_RBTF[:, b], best.chosen_RX)
    return variables_RBTF


def _orders_to_try(search: Search, b: int) -> Tensor:
    """Returns the orders [R, K, T] to try; a row with fewer orders repeats the present one."""
    rows, orders_KT = search.objective.rows, []
    for r, generator in enumerate(search.rng):
        places = rows.content(r, b)
        orders = reorderings.sampled(len(places), search.config.orders, generator)
        orders_KT.append(reorderings.orders_tensor(orders, places, rows.length))
    return stacked(orders_KT)
