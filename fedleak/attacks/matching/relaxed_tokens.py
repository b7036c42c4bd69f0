"""Our own gradient matching: a search for tokens that is relaxed to mixtures of them.

If the update gives away the tokens of the batch, each place is a mixture of these tokens. The model
is then differentiable in which token is where, and the gradients of the word and position
embeddings, which say most about places, are matched with the others. Every few steps the mixtures
are read as tokens, and changes of these are tried: tokens change places within a sentence, a token
is replaced by another, two sentences exchange tokens. The change with the lowest sum of gradient
distance and prior is kept. A victim whose gradient is matched exactly is finished; rows of a victim
that lag behind are given up.

Shapes: R rows, K guesses for each, B sequences, T tokens, F variables of a place, M tokens of a
bag, N places of a sentence whose tokens are to be found, S chosen rows.
"""

import math
from dataclasses import replace
from itertools import combinations, product

import torch
from torch import Tensor

from fedleak.attacks.matching import reorderings
from fedleak.attacks.matching.candidate_selection import (
    Best,
    best_of_batch,
    best_of_sequence,
    lm_penalty,
    stacked,
)
from fedleak.attacks.matching.objective import Objective
from fedleak.attacks.matching.optimizer import (
    UNWATCHED,
    Descent,
    Found,
    MatchingConfig,
    Search,
    best_of_each,
    cosine_to_zero,
    initial,
)
from fedleak.attacks.matching.parametrization import Guess, TokenMixtures

BEST = MatchingConfig(
    steps=200,
    step_size=0.3,
    schedule=cosine_to_zero,
    lm_weight=0.01,
    every=50,
    orders=32,
    sweeps=3,
)
"""The constants where the tokens of the batch are known."""

BEST_FREE = replace(BEST, steps=1000, step_size=0.01, lm_weight=0.02, norm_weight=1.0, guesses=64)
"""The constants where they are not, for free embeddings."""


def reconstruct(search: Search) -> list[Found]:
    """Returns each victim's tokens, and their score."""
    objective, config, rng, watch = search
    everyone, alive_R = objective, torch.arange(len(rng), device=objective.victim_R.device)
    descent = Descent(initial(search), config)
    best_ids_RBT = objective.nearest_tokens(descent.now())
    best_R = torch.full_like(objective.normalizer_R, torch.inf)
    for step in (*range(0, config.steps, config.every), config.steps):
        # First without changes, so that no time is spent on rows that are exact or lag behind.
        for sweeps in (0, config.sweeps) if config.may_move(step) else (0,):
            of_row = [rng[i] for i in alive_R.tolist()]
            moving = Search(objective, replace(config, sweeps=sweeps), of_row, watch)
            ids_RBT, score_R = improved(moving, descent.now())
            if (score_R < objective.exact_R).any():
                wrong_R = (score_R < objective.exact_R) & ~objective.equal(ids_RBT)
                score_R = torch.where(wrong_R, objective.exact_R, score_R)
            better_R = score_R < best_R[alive_R]
            best_R[alive_R[better_R]] = score_R[better_R]
            best_ids_RBT[alive_R[better_R]] = ids_RBT[better_R]
            watch.at(step, best_of_each(everyone.victim_R, best_ids_RBT, best_R))
            going_S = going(
                everyone.victim_R, best_R, everyone.exact_R, alive_R, step / config.steps
            )
            if not len(going_S) or watch.up():
                return best_of_each(everyone.victim_R, best_ids_RBT, best_R)
            changed_R = (ids_RBT != objective.nearest_tokens(descent.now())).flatten(1).any(1)
            _restart_(descent, objective, ids_RBT, changed_R)
            if len(going_S) < len(alive_R):
                alive_R, objective = alive_R[going_S], objective.take(going_S)
                descent.take_(going_S)
        for number in range(step, min(step + config.every, config.steps)):
            if watch.up(descent.seconds):
                break
            descent.step(config.loss(objective, number))
            watch.at(number + 1)
    return best_of_each(everyone.victim_R, best_ids_RBT, best_R)


def improved(search: Search, variables_RBTF: Tensor) -> tuple[Tensor, Tensor]:
    """Returns better tokens [R, B, T] than those read from the variables, and their score [R].

    One sentence after the other is changed, then two at a time. A row goes on as long as that helps
    and there is time. The score is the distance plus the prior's penalty; tokens that match exactly
    have no penalty.
    """
    objective, config, rng, watch = search
    ids_RBT = objective.nearest_tokens(variables_RBTF)
    lm_penalty_R = _batch_penalty(search, ids_RBT)
    apart_R = objective.scores_of_tokens(ids_RBT[:, None])[:, 0]
    going_S = torch.arange(len(rng), device=ids_RBT.device)
    for _ in range(config.sweeps):
        if not len(going_S) or watch.up():
            break
        of_row, before_SBT = [rng[r] for r in going_S.tolist()], ids_RBT[going_S]
        some = Search(objective.take(going_S), config, of_row, watch)
        ids_RBT[going_S], apart_R[going_S], lm_penalty_R[going_S] = _swept(
            some, variables_RBTF[going_S], before_SBT, apart_R[going_S]
        )
        going_S = going_S[(ids_RBT[going_S] != before_SBT).flatten(1).any(1)]
    return ids_RBT, torch.where(apart_R < objective.exact_R, apart_R, apart_R + lm_penalty_R)


def _batch_penalty(search: Search, ids_RBT: Tensor) -> Tensor:
    """Returns the prior's penalty [R] for all sequences of each row, even if time is up."""
    patient, sequences = search._replace(watch=UNWATCHED), range(ids_RBT.shape[1])
    costs = [lm_penalty(patient, b, ids_RBT[:, None, b]) for b in sequences]
    return torch.cat(costs, 1).sum(1)


def _swept(search: Search, variables_RBTF: Tensor, ids_RBT: Tensor, apart_R: Tensor) -> Best:
    """Returns the tokens [R, B, T] after each sentence was changed once, and then two at a time.

    Out of time, later sentences stay as they are.
    """
    objective, watch, sequences = search.objective, search.watch, range(ids_RBT.shape[1])
    rows, space = objective.rows, objective.space
    ids_RBT, lm_penalty_R = ids_RBT.clone(), torch.zeros_like(objective.normalizer_R)
    for b in sequences:
        tried_RKT = sequence_candidates(search, variables_RBTF, ids_RBT, b)
        lm_penalty_RK = lm_penalty(search, b, tried_RKT)
        if watch.up():
            return Best(ids_RBT, apart_R, _batch_penalty(search, ids_RBT))

        def inputs(tried_RKT: Tensor, b: int = b) -> Guess:
            own = rows.sequences_of([b])
            return space.exact(own, tried_RKT[:, :, None, : own.length])

        now = space.exact(rows, ids_RBT[:, None])
        best = best_of_sequence(search, now, b, inputs, tried_RKT, lm_penalty_RK)
        ids_RBT[:, b], apart_R = best.chosen_RX, best.apart_R
        lm_penalty_R = lm_penalty_R + best.lm_penalty_R
    if len(sequences) > 1:
        tried_RKBT = exchange_candidates(search, ids_RBT)
        costs = [lm_penalty(search, b, tried_RKBT[:, :, b]) for b in sequences]
        if not watch.up():
            return best_of_batch(search, tried_RKBT, torch.stack(costs, 1).sum(1))
    return Best(ids_RBT, apart_R, lm_penalty_R)


def going(
    victim_R: Tensor, best_R: Tensor, exact_R: Tensor, alive_R: Tensor, progress: float
) -> Tensor:
    """Returns which of the rows alive go on, as indices [S] into `alive_R`.

    If a row of a victim is exact, none of the victim's rows goes on; else its best rows do, fewer
    and fewer as `progress` goes from 0 to 1.
    """
    kept = []
    for victim in sorted(set(victim_R[alive_R].tolist())):
        started = int((victim_R == victim).sum())
        rows_S = (victim_R[alive_R] == victim).nonzero()[:, 0]
        if (best_R < exact_R)[victim_R == victim].any():
            continue
        number = max(1, math.ceil(started * 2 ** (-8 * progress)))
        order_S = best_R[alive_R[rows_S]].argsort(stable=True)
        kept.append(rows_S[order_S[:number]].sort().values)
    return torch.cat(kept) if kept else alive_R[:0]


def _restart_(descent: Descent, objective: Objective, ids_RBT: Tensor, rows_R: Tensor) -> None:
    """Lets the descent of some rows go on from tokens, with Adam's memory of these rows at zero."""
    change_R111 = rows_R[:, None, None, None]
    begin_RBTF = objective.space.variables(ids_RBT)
    descent.change_(
        lambda variables: torch.where(change_R111, begin_RBTF, variables),
        lambda mean: mean.masked_fill(change_R111, 0.0),
    )


def sequence_candidates(search: Search, variables_RBTF: Tensor, ids_RBT: Tensor, b: int) -> Tensor:
    """Returns guesses [R, K, T] of sequence b: the present one, other orders, and other tokens.

    Orders are drawn at random. Another token is tried where the mixture gives it the most weight.
    """
    space, most_orders = search.objective.space, search.config.orders
    candidates = []
    for r, generator in enumerate(search.rng):
        places, now_T = search.objective.rows.content(r, b), ids_RBT[r, b]
        orders = reorderings.nearby(len(places), most_orders, generator)
        order_KT = reorderings.orders_tensor(orders, places, len(now_T)).to(now_T.device)
        tried = [now_T[None], now_T[order_KT]]
        if isinstance(space, TokenMixtures):
            bag_M = space.ids_RM[r, space.there_RM[r]]
            share_NM = variables_RBTF[r, b, places, : len(bag_M)].log_softmax(-1)
            share_NM = share_NM.masked_fill(now_T[places, None] == bag_M, -torch.inf)
            most = min(most_orders, share_NM.numel() - len(places))
            likeliest_K = share_NM.flatten().topk(max(most, 0)).indices
            other_KT = now_T.repeat(len(likeliest_K), 1)
            place_N = torch.tensor(places, dtype=torch.long, device=now_T.device)
            at_K = place_N[likeliest_K // len(bag_M)]
            other_KT[torch.arange(len(at_K)), at_K] = bag_M[likeliest_K % len(bag_M)]
            tried.append(other_KT)
        candidates.append(torch.cat(tried))
    return stacked(candidates)


def exchange_candidates(search: Search, ids_RBT: Tensor) -> Tensor:
    """Returns guesses [R, K, B, T]: the present one, then exchanges between two sentences.

    They exchange the token at one place, or all tokens from one place on. Out of time, there are
    fewer guesses.
    """
    objective, most, candidates = search.objective, 2 * search.config.orders, []
    for r, generator in enumerate(search.rng):
        free_BT, now_BT = ~objective.rows.fixed_RBT[r], ids_RBT[r]
        label_B = objective.rows.labels_RB[r].tolist()
        pairs = list(combinations(range(len(now_BT)), 2))
        tried = [now_BT]
        for (b, c), place, stop in product(pairs, range(now_BT.shape[1]), (1, now_BT.shape[1])):
            if search.watch.up():
                break
            both_T = free_BT[b] & free_BT[c]
            both_T[:place] = both_T[place + stop :] = False
            if both_T.any() and not torch.equal(now_BT[b, both_T], now_BT[c, both_T]):
                other_BT = now_BT.clone()
                other_BT[b, both_T], other_BT[c, both_T] = now_BT[c, both_T], now_BT[b, both_T]
                # Two whole sentences of one class only change their order.
                if label_B[b] != label_B[c] or not torch.equal(other_BT[b], now_BT[c]):
                    tried.append(other_BT)
        candidates.append(torch.stack([tried[0], *reorderings.at_most(tried[1:], most, generator)]))
    return stacked(candidates)
