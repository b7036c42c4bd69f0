"""One objective for several victims: for each row its victim's gradients, shape and tokens.

Shapes: U victims, R rows, T tokens, D hidden size, M tokens of a bag, P positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedleak.attacks.matching.batch_structure import Shape, frame, rows_of
from fedleak.attacks.matching.factored_gradients import BatchGradients, tables
from fedleak.attacks.matching.gradient_distance import of_nothing
from fedleak.attacks.matching.objective import Objective, lower_precision, mean_norm
from fedleak.attacks.matching.optimizer import Loss, distance_of
from fedleak.attacks.matching.parametrization import FreeEmbeddings, Space, TokenMixtures
from fedleak.attacks.matching.target import target_of
from fedleak.attacks.matching.victims import Victim
from fedleak.models import LanguageModel
from fedleak.models.prior import Prior
from fedleak.training.observation import Observation

_TERMS = 32
"""Units of float32's last digit that sums as long as a gradient may be off by."""

TABLES = 1 / 3
"""Weight of each table in a cosine, as a share of all other tensors: tables tell places."""


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
    family = model.family
    victim_R = torch.tensor([u for u, _ in of_row], device=model.device)
    rows = rows_of([shape for _, shape in of_row], frame(model), model)
    table_VD = model.module.get_parameter(family.word_embedding).detach()
    observed = [dict(victim.observed) for victim in victims]
    space: Space
    if victims[0].bag_M is None:
        space = FreeEmbeddings(
            model=model,
            table_VD=table_VD,
            allowed_M=_allowed(model, faithful),
            norm=float(mean_norm(table_VD)) if scaled else None,
        )
    else:
        ids_UM, there_UM = _padded([victim.bag_M for victim in victims if victim.bag_M is not None])
        hint_UTM = table_VD.new_zeros(len(victims), rows.length, ids_UM.shape[1])
        for u, victim in enumerate(victims):
            if victim.words_MD is not None:
                words_MD = victim.words_MD.new_zeros(ids_UM.shape[1], victim.words_MD.shape[1])
                words_MD[: len(victim.words_MD)] = victim.words_MD
                observed[u][family.word_embedding] = words_MD
                hint_UTM[u] = _hint(victim, model, hint_UTM.shape[1], words_MD)
        space = TokenMixtures(
            model=model,
            table_VD=table_VD,
            ids_RM=ids_UM[victim_R],
            there_RM=there_UM[victim_R],
            hint_RTM=hint_UTM[victim_R],
            complete=victims[0].complete,
        )
    small = [*tables(model), family.word_embedding]
    tokens = rows.mask_RBT.shape[1] * rows.length
    target = target_of(observed, tokens, whole=list(observed[0]) if loss == "l2l1" else small)
    # Among a hundred tensors the tables would hardly count.
    weights = {} if faithful else {name: TABLES * len(observed[0]) for name in small}
    distance = distance_of(loss, weights)
    # LAMP's weights are for absolute distances; ours are for shares of the observed gradient.
    zero_U = of_nothing(distance, target)
    gradients, target = BatchGradients(model, target.names), target.take(victim_R)
    exact = Objective(
        model=model,
        batch_gradients=gradients,
        distance=distance,
        target=target,
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
        batch_gradients=BatchGradients(low, target.names),
        target=target.to(torch.bfloat16),
    )
    return replace(exact, rough=rough)


def rounding(seen: Observation) -> float:
    """Returns the largest distance, as a share of the observed gradient's, that rounding leaves.

    Distances are differences of numbers about as large as the observed gradient's square, in
    float32. What was rounded when it was sent differs by half a unit of its last digit at most, and
    distances go with the square of that.
    """
    sent = max(torch.finfo(tensor.dtype).eps for tensor in seen.update.tensors.values())
    return max(_TERMS * torch.finfo(torch.float32).eps, (sent / 2) ** 2)


def _hint(victim: Victim, model: LanguageModel, length: int, words_MD: Tensor) -> Tensor:
    """Returns each token's share [T, M] of each position's gradient; 0 if that was not sent.

    A position's gradient is the sum of the gradients at its places in the batch. The gradient of a
    token that occurs once is the gradient at its place. Least squares then tells this place.
    """
    position_PD = victim.observed.get(model.family.position_embedding or "")
    share_TM = words_MD.new_zeros(length, len(words_MD))
    if position_PD is not None:
        tokens = len(victim.bag_M) if victim.bag_M is not None else 0
        wanted_TD = position_PD[:length]
        share_MT = torch.linalg.pinv(words_MD[:tokens].double().T) @ wanted_TD.double().T
        share_TM[:, :tokens] = share_MT.T.clamp(0, 1).to(share_TM)
    return share_TM


def _padded(bags_M: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns bags as ids [U, M], and where they have any."""
    ids_UM = torch.nn.utils.rnn.pad_sequence(list(bags_M), batch_first=True)
    lengths_U1 = torch.tensor([[len(bag)] for bag in bags_M], device=ids_UM.device)
    return ids_UM, torch.arange(ids_UM.shape[1], device=ids_UM.device) < lengths_U1


def _allowed(model: LanguageModel, faithful: bool) -> Tensor:
    """Returns the tokens [M] that an embedding may be read as.

    LAMP's authors leave out unused tokens, but no special ones.
    """
    tokens = model.tokenizer.convert_ids_to_tokens(range(len(model.tokenizer)))
    special = frozenset() if faithful else model.special_ids()
    allowed = [i for i, t in enumerate(tokens) if i not in special and "[unused" not in str(t)]
    return torch.tensor(allowed, device=model.device)
