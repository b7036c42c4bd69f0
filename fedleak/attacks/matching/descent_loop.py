"""The loop of gradient matching, as DLG, TAG and LAMP have it.

Shapes: R rows, B sequences, T tokens, F variables of a place.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedleak.attacks.matching.initialization import initial
from fedleak.attacks.matching.objective import Objective
from fedleak.attacks.matching.optimizer import Descent, Found, MatchingConfig, Watch, best_of_each

_READ_EVERY = 50
"""Steps from one reading of tokens, to be shown, to the next: it searches the vocabulary."""

DiscreteStep = Callable[[Tensor], Tensor]
"""Variables [R, B, T, F] -> better ones, such as the same tokens in another order."""


def match_gradients(
    objective: Objective,
    config: MatchingConfig,
    rng: Sequence[torch.Generator],
    watch: Watch,
    discrete_step: DiscreteStep | None = None,
) -> list[Found]:
    """Returns each victim's tokens, and the lowest loss on the way to them.

    Zhu et al. 2019, algorithm 1, for the observed gradient g*; the line marked with a star is
    added by Balunovic et al. 2022, algorithm 1::

        x <- normal noise                      (LAMP: the best of several starts)
        for step = 1 ... steps:
            g <- gradient of the model's loss for the embeddings x
            D <- distance(g, g*)               (LAMP: plus the norm regulariser)
            x <- x - step size * dD/dx         (here with Adam)
          * sometimes: x <- x with the tokens of each sentence in the best order tried
        return the x of the lowest D, read as tokens
    """
    descent = Descent(initial(objective, config, rng, watch), config)
    best_RBTF, best_R = descent.now().clone(), torch.full_like(objective.normalizer_R, torch.inf)
    for step in range(1, config.steps + 1):
        if watch.up(descent.seconds):
            break
        before_RBTF = descent.now().clone()
        loss_R = descent.step(config.loss(objective, step))
        better_R = loss_R <= best_R
        best_R[better_R], best_RBTF[better_R] = loss_R[better_R], before_RBTF[better_R]
        if discrete_step and config.discrete(step) and not watch.up():
            # Adam's memory stays where it was, as in the code of LAMP's authors.
            descent.change_(discrete_step)
        if step % _READ_EVERY == 0 or step == config.steps:
            watch.at(step, best_of_each(objective.victim_R, objective.read(best_RBTF), best_R))
        else:
            watch.at(step)
    for _ in range(config.rounds if config.discrete_at == "at-end" else 0):
        if discrete_step is None or watch.up():
            break
        best_RBTF = discrete_step(best_RBTF)
    return best_of_each(objective.victim_R, objective.read(best_RBTF), best_R)
