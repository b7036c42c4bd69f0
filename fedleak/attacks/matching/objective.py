"""What gradient matching minimises: how far the gradients of guesses are from those observed.

Shapes: R rows, K guesses for each, B sequences, T tokens, D hidden size, M tokens that a row
chooses from, F variables of a place: D or M; S chosen rows, N sequences of all guesses, V
vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.matching.batch_structure import Rows, Shape, rows_of
from fedleak.attacks.matching.factored_gradients import (
    BatchGradients,
    class_logit_grad,
    next_token_logit_grad,
    tables,
)
from fedleak.attacks.matching.gradient_distance import (
    Cosine,
    Distance,
    Gradients,
    Loss,
    Target,
    added,
    distance_of,
    of_nothing,
    target_of,
)
from fedleak.attacks.matching.parametrization import FreeEmbeddings, Guess, Space, TokenMixtures
from fedleak.attacks.matching.victims import Victim
from fedleak.models import LanguageModel, frame
from fedleak.models.prior import Prior
from fedleak.training.observation import Observation

TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 65536}
"""Tokens that are scored in one pass: what fits a cache, or keeps a GPU busy."""

_TERMS = 32
"""Units of float32's last digit that sums as long as a gradient may be off by."""

TABLES = 1 / 3
"""Weight of each table in a cosine, as a share of all other tensors: tables show places."""


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
        """Freezes the parameters; afterwards the model is as it was before."""
        with ExitStack() as listening:
            for judge in filter(None, (self, self.rough)):
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

    def nearest_tokens(self, variables_RBTF: Tensor) -> Tensor:
        """Returns the nearest tokens [R, B, T]."""
        return self.space.nearest_tokens(self.rows, variables_RBTF[:, None])[:, 0]

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

    @torch.no_grad()
    def scores(self, guess: Guess) -> Tensor:
        """Returns the distances [R, K] of whole batches."""
        return self._distance(self.gradients(guess, self.rows, differentiable=False))

    def scores_of_tokens(self, ids_RKBT: Tensor) -> Tensor:
        """Returns the distances [R, K] of whole batches of tokens."""
        return self.scores(self.space.exact(self.rows, ids_RKBT))

    @torch.no_grad()
    def equal(self, ids_RBT: Tensor) -> Tensor:
        """Returns whether the gradients [R] of tokens are those observed, but for rounding.

        By the cosine of each tensor: large tensors hide the small ones in a squared distance.
        """
        guess = self.space.exact(self.rows, ids_RBT[:, None])
        gradients = self.gradients(guess, self.rows, differentiable=False)
        return Cosine()(gradients, self.target)[:, 0] < self.exact_R

    @torch.no_grad()
    def other_sequences(self, guess: Guess, b: int) -> Gradients | None:
        """Returns the gradients of all sequences but b; None if there are no others.

        Sequences of a batch do not interact, so this is computed once for all guesses of b.
        """
        others = [i for i in range(guess.x_RKBTD.shape[2]) if i != b]
        if not others:
            return None
        rows = self.rows.sequences_of(others)
        return self.gradients(guess.sequences(others, rows.length), rows, differentiable=False)

    @torch.no_grad()
    def scores_of_sequence(self, guess: Guess, b: int, others: Gradients | None) -> Tensor:
        """Returns the distances [R, K] of batches with these guesses of sequence b."""
        rows = self.rows.sequences_of([b])
        gradients = self.gradients(guess, rows, differentiable=False)
        return self._distance(gradients if others is None else added(others, gradients))

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


def joint_objective(
    victims: Sequence[Victim],
    model: LanguageModel,
    of_row: Sequence[tuple[int, Shape]],
    *,
    loss: Loss,
    scaled: bool,
    faithful: bool,
    mixed: bool,
    prior: Prior | None,
) -> Objective:
    """Returns the objective of several victims.

    Args:
        victims: Victims that are alike.
        model: The model that they trained.
        of_row: The victim and the shape of each row.
        loss: The distance of gradients.
        scaled: Free embeddings start with the mean norm of word embeddings.
        faithful: As LAMP's authors do it: special tokens may be read, tables weigh as other
            tensors, and distances are not normalized.
        mixed: With a `rough` objective in bfloat16.
        prior: The language model.
    """
    victim_R = torch.tensor([u for u, _ in of_row], device=model.device)
    rows = rows_of([shape for _, shape in of_row], frame(model), model)
    words = model.family.word_embedding
    table_VD = model.module.get_parameter(words).detach()
    observed = [dict(victim.observed) for victim in victims]
    space: Space
    if victims[0].bag_M is None:
        norm = float(mean_norm(table_VD)) if scaled else None
        space = FreeEmbeddings(
            model=model, table_VD=table_VD, allowed_M=_allowed(model, faithful), norm=norm
        )
    else:
        space, rows_of_bags = _mixtures(victims, model, table_VD, rows.length)
        space = space.take(victim_R)
        for gradients, rows_MD in zip(observed, rows_of_bags, strict=True):
            if rows_MD is not None:
                gradients[words] = rows_MD
    small = [*tables(model), words]
    tokens = rows.mask_RBT.shape[1] * rows.length
    target = target_of(observed, tokens, whole=list(observed[0]) if loss == "l2l1" else small)
    # Among a hundred tensors the tables would hardly count.
    weights = {} if faithful else {name: TABLES * len(observed[0]) for name in small}
    distance = distance_of(loss, weights)
    # LAMP's weights are for absolute distances; ours are for shares of the observed gradient.
    zero_U = of_nothing(distance, target)
    exact = Objective(
        model=model,
        batch_gradients=BatchGradients(model, list(target.tensors)),
        distance=distance,
        target=target.take(victim_R),
        rows=rows,
        space=space,
        victim_R=victim_R,
        normalizer_R=(torch.ones_like(zero_U) if faithful else zero_U)[victim_R],
        exact_R=zero_U.new_tensor([rounding(victim.seen) for victim in victims])[victim_R],
        prior=prior.to(torch.bfloat16) if prior is not None and mixed else prior,
    )
    if not mixed:
        return exact
    low = lower_precision(model)
    rough = replace(
        exact,
        model=low,
        batch_gradients=BatchGradients(low, list(target.tensors)),
        target=exact.target.to(torch.bfloat16),
    )
    return replace(exact, rough=rough)


def _mixtures(
    victims: Sequence[Victim], model: LanguageModel, table_VD: Tensor, length: int
) -> tuple[TokenMixtures, list[Tensor | None]]:
    """Returns a row for each victim, and the word embedding's gradient [M, D] at its tokens."""
    bags_M = [victim.bag_M for victim in victims if victim.bag_M is not None]
    ids_UM = torch.nn.utils.rnn.pad_sequence(bags_M, batch_first=True)
    lengths_U1 = torch.tensor([[len(bag_M)] for bag_M in bags_M], device=ids_UM.device)
    hint_UTM = table_VD.new_zeros(len(victims), length, ids_UM.shape[1])
    padded: list[Tensor | None] = []
    for hint_TM, victim in zip(hint_UTM, victims, strict=True):
        words_MD = victim.words_MD
        if words_MD is not None:
            hint_TM[:, : len(words_MD)] = _hint(victim, model, length, words_MD)
            words_MD = F.pad(words_MD, (0, 0, 0, ids_UM.shape[1] - len(words_MD)))
        padded.append(words_MD)
    space = TokenMixtures(
        model=model,
        table_VD=table_VD,
        ids_RM=ids_UM,
        there_RM=torch.arange(ids_UM.shape[1], device=ids_UM.device) < lengths_U1,
        hint_RTM=hint_UTM,
        complete=victims[0].complete,
    )
    return space, padded


def rounding(seen: Observation) -> float:
    """Returns the largest distance, as a share of the observed gradient's, that rounding leaves.

    Distances are differences of numbers about as large as the observed gradient's square, in
    float32. Numbers that were rounded for sending differ by half a unit of their last digit at
    most, and distances grow with the square of that.
    """
    sent = max(torch.finfo(tensor.dtype).eps for tensor in seen.update.tensors.values())
    return max(_TERMS * torch.finfo(torch.float32).eps, (sent / 2) ** 2)


def _hint(victim: Victim, model: LanguageModel, length: int, words_MD: Tensor) -> Tensor:
    """Returns each token's share [T, M] of each position's gradient; 0 if that was not sent.

    A position's gradient is the sum of the gradients at its places in the batch. The gradient of a
    token that occurs once is the gradient at its place. Least squares then finds this place.
    """
    position_PD = victim.observed.get(model.family.position_embedding or "")
    if position_PD is None:
        return words_MD.new_zeros(length, len(words_MD))
    share_MT: Tensor = torch.linalg.pinv(words_MD.double().T) @ position_PD[:length].double().T
    return share_MT.T.clamp(0, 1).to(words_MD)


def _allowed(model: LanguageModel, faithful: bool) -> Tensor:
    """Returns the tokens [M] that an embedding may be read as.

    LAMP's authors leave out unused tokens, but no special ones.
    """
    tokens = model.tokenizer.convert_ids_to_tokens(range(len(model.tokenizer)))
    special = frozenset() if faithful else model.special_ids()
    allowed = [i for i, t in enumerate(tokens) if i not in special and "[unused" not in str(t)]
    return torch.tensor(allowed, device=model.device)
