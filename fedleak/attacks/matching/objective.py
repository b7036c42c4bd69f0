"""What gradient matching minimises: how far the gradients of guesses are from those observed.

Shapes: R rows, K guesses for each, B sequences, T tokens, D hidden size, M tokens that a row
chooses from, F variables of a place: D or M; S chosen rows, N sequences of all guesses, V
vocabulary.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedleak.attacks.matching.batch_structure import Rows
from fedleak.attacks.matching.factored_gradients import (
    BatchGradients,
    class_logit_grad,
    next_token_logit_grad,
)
from fedleak.attacks.matching.gradient_distance import Cosine, Distance, Gradients, added
from fedleak.attacks.matching.parametrization import Guess, Space
from fedleak.attacks.matching.target import Target
from fedleak.models import LanguageModel
from fedleak.models.prior import Prior

TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 65536}
"""Tokens that are scored in one pass: what fits a cache, or keeps a GPU busy."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """How far the gradients of guesses are from those observed, for each row.

    Attributes:
        model: At the broadcast weights, maybe in lower precision.
        batch_gradients: The gradients of that model.
        distance: The distance of two gradients.
        target: The observed gradients of each row.
        rows: What is known of each row.
        space: What is optimised, and how it turns into inputs of the model.
        victim_R: The victim that a row is about.
        normalizer_R: Every distance is divided by this.
        exact_R: The largest distance that rounding leaves of equal gradients.
        prior: The language model that also judges tokens in a discrete step; None without one.
        rough: The same in lower precision, to rank guesses and to start the descent with.
    """

    model: LanguageModel
    batch_gradients: BatchGradients
    distance: Distance
    target: Target
    rows: Rows
    space: Space
    victim_R: Tensor
    normalizer_R: Tensor
    exact_R: Tensor
    prior: Prior | None = None
    rough: "Objective | None" = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Freezes the parameters and listens; afterwards the model is as it was before."""
        with ExitStack() as listening:
            for judge in (self, self.rough):
                if judge is not None:
                    listening.enter_context(judge.batch_gradients.ready())
            yield

    def take(self, chosen_S: Tensor) -> "Objective":
        """Returns the objective of some of the rows."""
        return replace(
            self,
            target=self.target.take(chosen_S),
            rows=self.rows.take(chosen_S),
            space=self.space.take(chosen_S),
            victim_R=self.victim_R[chosen_S],
            normalizer_R=self.normalizer_R[chosen_S],
            exact_R=self.exact_R[chosen_S],
            rough=None if self.rough is None else self.rough.take(chosen_S),
        )

    def loss(self, variables_RBTF: Tensor) -> Tensor:
        """Returns the distances [R], differentiable."""
        guess = self.space.guess(self.rows, variables_RBTF[:, None])
        gradients = self.gradients(guess, self.rows, differentiable=True)
        return self._distance(gradients)[:, 0]

    def read(self, variables_RBTF: Tensor) -> Tensor:
        """Returns the nearest tokens [R, B, T]."""
        return self.space.read(self.rows, variables_RBTF[:, None])[:, 0]

    def norm_gap(self, variables_RBTF: Tensor) -> Tensor:
        """Returns the squared difference [R] of mean embedding norms: a row's and the table's.

        Balunovic et al. 2022, equation 4.
        """
        x_RBTD = self.space.guess(self.rows, variables_RBTF[:, None]).x_RKBTD[:, 0]
        there_RBT = self.rows.mask_RBT * (self.rows.weights_RB > 0)[..., None]
        mean_R = (x_RBTD.norm(dim=-1) * there_RBT).sum((1, 2)) / there_RBT.sum((1, 2))
        gap_R: Tensor = (mean_R - self._norm).square()
        return gap_R

    @cached_property
    def _norm(self) -> Tensor:
        return mean_norm(self.space.table_VD)

    def scores(self, guess: Guess) -> Tensor:
        """Returns the distances [R, K] of whole batches."""
        with torch.no_grad():
            gradients = self.gradients(guess, self.rows, differentiable=False)
            return self._distance(gradients)

    def equal(self, ids_RBT: Tensor) -> Tensor:
        """Returns whether the gradients [R] of tokens are those observed, but for rounding.

        By the cosine of each tensor: large tensors hide the small ones in a squared distance.
        """
        guess = self.space.exact(self.rows, ids_RBT[:, None])
        with torch.no_grad():
            gradients = self.gradients(guess, self.rows, differentiable=False)
            equal_R: Tensor = Cosine()(gradients, self.target)[:, 0] < self.exact_R
        return equal_R

    def other_sequences(self, guess: Guess, b: int) -> Gradients | None:
        """Returns the gradients of all sequences but b; None if there are no others.

        Sequences of a batch do not interact, so this is computed once for all guesses of b.
        """
        others = [i for i in range(guess.x_RKBTD.shape[2]) if i != b]
        if not others:
            return None
        rows = self.rows.sequences_of(others)
        with torch.no_grad():
            return self.gradients(guess.sequences(others, rows.length), rows, differentiable=False)

    def scores_of_sequence(self, guess: Guess, b: int, others: Gradients | None) -> Tensor:
        """Returns the distances [R, K] of batches with these guesses of sequence b."""
        rows = self.rows.sequences_of([b])
        with torch.no_grad():
            gradients = self.gradients(guess, rows, differentiable=False)
            whole = gradients if others is None else added(others, gradients)
            return self._distance(whole)

    def chunks(self, guesses: int, sequences: int) -> Iterator[slice]:
        """Yields slices of every row's guesses: as many as are scored in one pass."""
        tokens = len(self.rows.mask_RBT) * sequences * self.rows.length
        at_once = TOKENS_AT_ONCE.get(self.model.device.type, TOKENS_AT_ONCE["cpu"])
        size = max(1, at_once // tokens)
        for start in range(0, guesses, size):
            yield slice(start, min(start + size, guesses))

    def _distance(self, gradients: Gradients) -> Tensor:
        return self.distance(gradients, self.target) / self.normalizer_R[:, None]

    def gradients(self, guess: Guess, rows: Rows, *, differentiable: bool) -> Gradients:
        """Returns the gradients of each guess's loss, by parameter name."""
        dtype = next(self.model.module.parameters()).dtype
        guesses = guess.x_RKBTD.shape[1]
        if guess.targets_RKBTV is None:
            labels_N = rows.labels_RB[:, None].expand(-1, guesses, -1).flatten()
            weights_N = rows.weights_RB[:, None].expand(-1, guesses, -1).flatten()
            logit_grad = class_logit_grad(self.model, labels_N, weights_N.to(dtype))
        else:
            # A first token is no target, and neither is padding.
            counts_RBT = rows.mask_RBT * rows.weights_RB[..., None]
            weights_NT = counts_RBT[:, None].expand(-1, guesses, -1, -1).flatten(0, 2)
            logit_grad = next_token_logit_grad(
                guess.targets_RKBTV.flatten(0, 2).to(dtype), weights_NT.to(dtype)
            )
        return self.batch_gradients(
            guess.x_RKBTD.to(dtype),
            rows.mask_RBT,
            logit_grad,
            differentiable=differentiable,
            mixture_RKBTM=guess.mixture_RKBTM,
        )


def mean_norm(table_VD: Tensor) -> Tensor:
    """Returns the mean norm of word embeddings."""
    mean: Tensor = table_VD.norm(dim=-1).mean()
    return mean


def lower_precision(model: LanguageModel) -> LanguageModel:
    """Returns a copy in bfloat16."""
    return replace(model, module=copy.deepcopy(model.module).to(torch.bfloat16))
