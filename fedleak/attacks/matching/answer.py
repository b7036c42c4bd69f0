"""From the tokens found for a victim to the answer of an attack.

Shapes: U victims, R rows, B sequences, T tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedleak.attacks.certificate import proves
from fedleak.attacks.clock import Clock
from fedleak.attacks.matching.objective import Objective
from fedleak.attacks.matching.optimizer import Found
from fedleak.attacks.matching.victims import Victim
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.models import LanguageModel

_CHANCE = 0.5
"""Lengths that were only tried are believed below this share of a random text's distance."""


def distances(objective: Objective, guesses: Sequence[Found]) -> Tensor:
    """Returns the distance [U] of each victim's tokens."""
    rows_U = torch.tensor([guess.row_index for guess in guesses], device=objective.victim_R.device)
    of_each = objective.take(rows_U)
    ids_UBT = torch.stack([guess.ids_BT for guess in guesses])
    apart_U = of_each.scores(of_each.space.exact(of_each.rows, ids_UBT[:, None]))[:, 0]
    return apart_U.clamp_min(0)  # of equal gradients rounding may leave less


def by_chance(objective: Objective, victims: int) -> list[Found]:
    """Returns random tokens for each of so many victims."""
    rows = [int((objective.victim_R == u).nonzero()[0]) for u in range(victims)]
    of_each = objective.take(torch.tensor(rows, device=objective.victim_R.device))
    rng = [torch.Generator().manual_seed(0) for _ in rows]
    # Not a start, which may follow the update's hint.
    ids_UBT = of_each.read(of_each.space.random(of_each.rows, rng))
    return [Found(row, ids_BT, 0.0) for row, ids_BT in zip(rows, ids_UBT, strict=True)]


def answer(
    victim: Victim,
    model: LanguageModel,
    sequences: Sequence[tuple[int, ...]],
    *,
    apart: float,
    chance: float,
    clock: Clock,
) -> Reconstruction:
    """Returns the answer for a victim.

    Args:
        victim: The victim.
        model: The model that it trained.
        sequences: The tokens found.
        apart: The distance of their gradient to the observed one.
        chance: The distance that random tokens have.
        clock: Of the proof.
    """
    if not victim.shapes.told and not apart < _CHANCE * chance:
        reason = "lengths are not known, and none of those tried comes near the update"
        return Reconstruction.none(Status.ABSTAINED, reason, distance=apart)
    seen = victim.seen
    return Reconstruction(
        status=Status.RECOVERED,
        sequences=tuple(sequences),
        evidence=(apart,) * len(sequences),
        tokens=tuple(sorted({token for ids in sequences for token in ids})),
        diagnostics={
            "distance": apart,
            "distance_by_chance": chance,
            "left_out": victim.left_out,
            "candidates": {"shapes": len(victim.shapes.each)}
            | ({} if victim.bag_M is None else {"tokens": len(victim.bag_M)}),
        },
        verified=proves(model, sequences, seen, clock),
    )
