"""LAMP: gradient matching that alternates with a language model's choice of word order.

Balunovic, Dimitrov, Jovanovic, Vechev, "LAMP: Extracting Text from Gradients with Language Model
Priors", NeurIPS 2022. `faithful` is algorithm 1 with the authors' code's constants (eth-sri/lamp at
852d12f); `best` is in `assignment`.

Where `faithful` departs from the authors' code: padding is masked, as clients mask it; a prefix
move and the first orders stay within their sentence; each sentence is judged by its own present
order and nll, without padding; the mean norm aimed at is that of the victim's own word embeddings;
equal orders are scored once; tensors whose observed gradient is zero are left out; the best guess
is the one that had the best loss, not the step after.

Shapes: R rows, K guesses for each, B sequences, T tokens, F numbers at a place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from fedleak.attacks.matching import relaxed_tokens, reorderings
from fedleak.attacks.matching.candidate_selection import (
    best_of_sequence,
    nll,
    orders_tensor,
    reordered,
    stacked,
)
from fedleak.attacks.matching.gradient_matching import Count, GradientMatching, Method
from fedleak.attacks.matching.guesses import Guess, Objective
from fedleak.attacks.matching.initialization import initial
from fedleak.attacks.matching.optimizer import (
    UNWATCHED,
    Descent,
    Found,
    Loss,
    Recipe,
    Watch,
    best_of_each,
    cosine_to_zero,
    linear,
    stepwise,
)
from fedleak.models import absolute
from fedleak.models.prior import Prior

_READ_EVERY = 50
"""Steps from one reading of tokens, to be shown, to the next: it searches the vocabulary."""

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_BASE = Recipe(
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
"""The authors' constants for base models, fine-tuned or not, and TinyBERT; and for large ones."""

BEST = Recipe(
    steps=200,
    step_size=0.3,
    schedule=cosine_to_zero,
    lm_weight=0.01,
    every=50,
    orders=32,
    sweeps=3,
)
"""For mixtures of known tokens."""

BEST_FREE = replace(BEST, steps=1000, step_size=0.01, lm_weight=0.02, norm_weight=1.0, guesses=64)
"""For free embeddings, where the tokens are not known."""


@dataclass(frozen=True)
class Lamp(GradientMatching):
    """Gradient matching with a language model's choice of word order, on all or a few tensors.

    On an update that shares only some matrices it is the partial-gradient attack (Li et al. 2024).

    Attributes:
        loss: What gradients are measured by: cosine, squared plus absolute, or squared distance.
        prior: A causal language model (hub id, folder or built-in); None goes without.
        lm_weight: Of the prior; None: as the preset has it.
        norm_weight: Of the regulariser; None: as the preset has it.
        discrete: When words change places: all along, only at the end, or never.
        guesses: Random starts that the best is chosen from, and then orders of it; None: as the
            preset has it.
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

    def method(self) -> Method:
        """Returns algorithm 1 of the paper, or our own."""
        if self.faithful:
            constants = FAITHFUL[self.size]
            recipe = self._recipe(constants if self.loss == "cos" else _for_squares(constants))
            return Method(reconstruct, recipe, recipe, self.loss, True, self.prior)
        known, free = self._recipe(BEST), self._recipe(BEST_FREE)
        return Method(relaxed_tokens.reconstruct, known, free, self.loss, True, self.prior)

    def _recipe(self, preset: Recipe) -> Recipe:
        """Returns a preset's recipe with what this attack sets otherwise."""
        return replace(
            preset.shortened(self.steps),
            discrete_at=self.discrete,
            lm_weight=preset.lm_weight if self.lm_weight is None else self.lm_weight,
            norm_weight=preset.norm_weight if self.norm_weight is None else self.norm_weight,
            guesses=preset.guesses if self.guesses is None else self.guesses,
            orders=preset.orders if self.orders is None else self.orders,
        )


def _for_squares(recipe: Recipe) -> Recipe:
    """Returns the authors' constants for a cosine as they are for squared distances."""
    return replace(recipe, lm_weight=60.0, norm_weight=25.0)


def reconstruct(
    objective: Objective,
    recipe: Recipe,
    prior: Prior | None,
    rng: Sequence[torch.Generator],
    watch: Watch,
) -> list[Found]:
    """Returns each victim's tokens, and the loss that their embeddings had.

    LAMP's algorithm 1; with a recipe without discrete steps it is DLG or TAG.
    """
    descent = Descent(initial(objective, recipe, rng, watch), recipe)
    best_RBTF, best_R = descent.now().clone(), torch.full_like(objective.unit_R, torch.inf)
    for step in range(1, recipe.steps + 1):
        before_RBTF = descent.now().clone()
        loss_R = descent.step(recipe.loss(objective, step))
        better_R = loss_R <= best_R
        best_R[better_R], best_RBTF[better_R] = loss_R[better_R], before_RBTF[better_R]
        if recipe.discrete(step) and not watch.up():
            # Adam's memory stays where it was, as in the authors' code.
            descent.change_(lambda leaf: better_order(objective, recipe, prior, leaf, rng, watch))
        if step % _READ_EVERY == 0 or step == recipe.steps:
            watch.at(step, best_of_each(objective.victim_R, objective.read(best_RBTF), best_R))
        else:
            watch.at(step)
        if watch.up():
            break
    if recipe.discrete_at == "at-end":
        for _ in range(recipe.rounds):
            if watch.up():
                break
            best_RBTF = better_order(objective, recipe, prior, best_RBTF, rng, watch)
    return best_of_each(objective.victim_R, objective.read(best_RBTF), best_R)


def better_order(
    objective: Objective,
    recipe: Recipe,
    prior: Prior | None,
    leaf_RBTF: Tensor,
    rng: Sequence[torch.Generator],
    watch: Watch = UNWATCHED,
) -> Tensor:
    """Returns the leaf with each sequence in the best of the orders tried (LAMP, section 3.2).

    The best has the lowest sum of distance and weighted negative log-likelihood. Sequences that
    there is no time for stay as they are.
    """
    space, rows = objective.space, objective.rows
    for b in range(leaf_RBTF.shape[1]):
        order_RKT = _tried(objective, recipe, b, rng).to(leaf_RBTF.device)
        ids_RT = space.read(rows, leaf_RBTF[:, None])[:, 0, b]
        now = space.guess(rows, leaf_RBTF[:, None])

        def inputs(tried_RKT: Tensor, b: int = b, leaf_RBTF: Tensor = leaf_RBTF) -> Guess:
            own = rows.sequences_of([b])
            leaf_RKTF = _each(leaf_RBTF[:, b, : own.length], tried_RKT[..., : own.length])
            return space.guess(own, leaf_RKTF[:, :, None])

        tried_RKT = _each(ids_RT[..., None], order_RKT)[..., 0]
        likely_RK = nll(prior, recipe, objective, b, tried_RKT, watch)
        if watch.up():
            break
        best = best_of_sequence(objective, now, b, inputs, order_RKT, likely_RK, watch)
        leaf_RBTF = leaf_RBTF.clone()
        leaf_RBTF[:, b] = reordered(leaf_RBTF[:, b], best.chosen_RX)
    return leaf_RBTF


def _tried(objective: Objective, recipe: Recipe, b: int, rng: Sequence[torch.Generator]) -> Tensor:
    """Returns the orders [R, K, T] to try; rows with fewer distinct ones repeat the present one."""
    length = objective.rows.length
    found = []
    for r, one in enumerate(rng):
        places = objective.rows.content(r, b)
        orders = reorderings.sampled(len(places), recipe.orders, one)
        found.append(orders_tensor(orders, places, length))
    return stacked(found)


def _each(value_RTF: Tensor, order_RKT: Tensor) -> Tensor:
    """Returns [R, K, T, F]: each row in each of its orders."""
    return reordered(value_RTF[:, None].expand(-1, order_RKT.shape[1], -1, -1), order_RKT)
