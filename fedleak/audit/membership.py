"""How well an attack tells which texts were in an update, and the epsilon that follows from it.

A row has the scores of a list of texts and who of them was in. Over all updates of a run come from
them, for each score:

- the area under the ROC curve: the chance that a text of a batch scores higher than a text that was
  not in, of the same list; 0.5 is chance, 1 is certainty;
- how many texts of batches are found where at most 1 % or 0.1 % of the others are accused
  (Carlini et al. 2022), if there are enough others to say so;
- a lower bound on epsilon (`privacy_bounds.epsilon_delta_bound`) for replacing one text by another.
  Of each pair (`audit.candidates`) the auditor guesses which text was in. A text that is in the
  lists of several updates counts once, because its coin was thrown once.

The bounds of all attacks and scores hold at once with `CONFIDENCE`.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fedleak.audit import privacy_bounds as bounds
from fedleak.audit.candidates import Questions, questions
from fedleak.audit.held_out import HeldOut
from fedleak.config.experiment import Experiment
from fedleak.metrics import intervals
from fedleak.models import CAUSAL_LM
from fedleak.store.records import Answer, MembershipRow
from fedleak.store.run import EVERYONE, Key
from fedleak.store.summaries import Estimate, MembershipFigures, MembershipSummary, RoundFigure
from fedleak.truth import GroundTruth

CONFIDENCE = 0.95
"""With which the bounds of all attacks and scores hold."""

ANNOUNCED_MU = 3.0
"""How far apart the two texts of a pair are expected to score: it decides how many are guessed."""

FALSE_POSITIVES = (0.01, 0.001)
"""Shares of the texts outside that may be accused."""


def membership_rows(
    experiment: Experiment,
    held_out: HeldOut | None,
    answers: Mapping[tuple[Key, str], Answer],
    truths: Mapping[Key, GroundTruth | None],
    earlier: Sequence[MembershipRow],
) -> list[MembershipRow]:
    """Returns the rows of membership.jsonl.

    Args:
        experiment: What was prepared.
        held_out: What no client trains on; None: it is not needed.
        answers: By update and attack.
        truths: By update; None where it is missing.
        earlier: Rows of the last time: those without a truth now stay.
    """
    rows = {row.id: row for row in earlier}
    forgotten = any(truths.get(row.key) is None for row in earlier)
    used: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for (key, attack), answer in sorted(answers.items()):
        truth = truths.get(key)
        if truth is None or held_out is None or not answer.scores:
            continue
        asked = questions(truth, held_out, experiment.seed)
        if any(len(scores) != len(asked.inside) for scores in answer.scores.values()):
            continue  # of another list: the held-out texts are others by now
        before = rows.get((key, attack))
        first = _first(asked, used[attack])
        if forgotten:  # nobody knows any more which texts the others have
            first = before.first if before else (False,) * len(first)
        rows[key, attack] = MembershipRow(
            round=key.round,
            client=key.client,
            attack=attack,
            inside=asked.inside,
            pairs=asked.pairs,
            first=first,
            scores=answer.scores,
        )
    return [rows[name] for name in sorted(rows)]


def _first(asked: Questions, used: set[tuple[int, ...]]) -> tuple[bool, ...]:
    """Returns of which pairs no text was in a list before, and notes the texts of those."""
    found = []
    for pair in asked.pairs:
        texts = {asked.asked.listed[place].ids for place in pair}
        found.append(not texts & used)
        if found[-1]:
            used |= texts
    return tuple(found)


def summarised(experiment: Experiment, rows: Sequence[MembershipRow]) -> MembershipSummary | None:
    """Returns what a run's rows say; None: there are none."""
    by_score: dict[tuple[str, str], list[MembershipRow]] = defaultdict(list)
    for row in rows:
        for score in row.scores:
            by_score[row.attack, score].append(row)
    if not by_score:
        return None
    no_bound = _no_bound(experiment)
    cells, delta = len(by_score), experiment.privacy.delta
    return MembershipSummary(
        confidence=CONFIDENCE,
        delta=delta,
        no_bound=no_bound,
        figures=tuple(
            _figures(attack, score, of, None if no_bound else cells, delta)
            for (attack, score), of in by_score.items()
        ),
    )


def _no_bound(experiment: Experiment) -> str | None:
    """Returns why nobody can say that coins were fair; None: they were."""
    if experiment.data.on_nodes or experiment.tapped is not None:
        return (
            "which texts are held out was not drawn from the clients' data, so they may differ "
            "from it in more than chance"
        )
    if experiment.model.task == CAUSAL_LM and experiment.federation.partition != "iid":
        return (
            f'federation.partition = "{experiment.federation.partition}" gives clients texts of '
            "unlike classes, and held-out texts are of all classes"
        )
    return None


def _figures(
    attack: str, score: str, rows: Sequence[MembershipRow], cells: int | None, delta: float
) -> MembershipFigures:
    """Returns the figures of one score.

    Args:
        attack, score: Whose, and its name.
        rows: Of the attack.
        cells: How many attacks and scores share the error; None: coins may not be fair.
        delta: Of the bound.
    """
    wins = [_wins(row, score) for row in rows]
    # Texts of one client are not independent; of one alone, or of sums, its updates must do.
    clients = [row.client for row in rows]
    alike = clients if len(set(clients)) > 1 else list(range(len(rows)))
    members, controls = (
        np.array([value for row in rows for value in _scores_of(row, score, inside=inside)])
        for inside in (True, False)
    )
    by_round: dict[int, list[float]] = defaultdict(list)
    for row, won in zip(rows, wins, strict=True):
        by_round[row.round] += won
    differences, coins = _pairs(rows, score)
    return MembershipFigures(
        attack=attack,
        score=score,
        updates=len(rows),
        clients=None if EVERYONE in clients else len(set(clients)),
        members=len(members),
        controls=len(controls),
        auc=Estimate(
            **intervals.clustered_mean(
                [value for won in wins for value in won],
                [alike[i] for i, won in enumerate(wins) for _ in won],
                most=1.0,
            )._asdict()
        ),
        rounds=tuple(
            RoundFigure(round=round, auc=sum(won) / len(won))
            for round, won in sorted(by_round.items())
        ),
        found_at_1_percent=true_positives(members, controls, FALSE_POSITIVES[0]),
        found_at_01_percent=true_positives(members, controls, FALSE_POSITIVES[1]),
        pairs=len(coins),
        p=None if cells is None else min(1.0, cells * _by_chance(differences, coins)),
        epsilon=None
        if cells is None
        else pair_bound(differences, coins, (1 - CONFIDENCE) / cells, delta),
    )


def _by_chance(differences: Sequence[float], coins: Sequence[bool]) -> float:
    """Returns the p of the texts that were in being as likely above as below those beside them."""
    pairs = zip(differences, coins, strict=True)
    return intervals.sign_test([each if first else -each for each, first in pairs])


def _scores_of(row: MembershipRow, score: str, *, inside: bool) -> list[float]:
    """Returns the scores of the texts that were in, or of the others."""
    pairs = zip(row.scores[score], row.inside, strict=True)
    return [value for value, was_in in pairs if was_in == inside]


def _wins(row: MembershipRow, score: str) -> list[float]:
    """Returns for each text of a batch the share of its list's others that score lower."""
    members, controls = (
        np.array(_scores_of(row, score, inside=inside)) for inside in (True, False)
    )
    above = (members[:, None] > controls).mean(1) + 0.5 * (members[:, None] == controls).mean(1)
    found: list[float] = above.tolist()
    return found


def true_positives(
    members: npt.NDArray[np.float64], controls: npt.NDArray[np.float64], accused: float
) -> float | None:
    """Returns the share of members above all controls but a share; None: there are too few.

    Args:
        members, controls: Scores.
        accused: The largest share of the controls that may be above.
    """
    most = math.floor(accused * len(controls) + 1e-9)
    if not most:
        return None
    return float((members > np.sort(controls)[-most - 1]).mean())


def _pairs(rows: Sequence[MembershipRow], score: str) -> tuple[list[float], list[bool]]:
    """Returns of pairs how much higher the first in the list scores, and whether it was in."""
    differences, coins = [], []
    for row in rows:
        for (member, control), counts in zip(row.pairs, row.first, strict=True):
            if counts:
                scores, was_in = row.scores[score], member < control
                differences.append(scores[min(member, control)] - scores[max(member, control)])
                coins.append(was_in)
    return differences, coins


def pair_bound(
    differences: Sequence[float], coins: Sequence[bool], alpha: float, delta: float
) -> float:
    """Returns a lower bound on epsilon with confidence 1 - alpha; 0 where nothing was seen.

    Args:
        differences: Of each pair how much higher the first text scores.
        coins: Whether the first text was in.
        alpha: How often the bound may be wrong.
        delta: Of the guarantee.
    """
    if not coins:
        return 0.0
    rule = bounds.settled_rule(len(coins), ANNOUNCED_MU, two_sided=True)
    right = rule.right(differences, coins)
    return bounds.epsilon_delta_bound(len(coins), rule.count, right, alpha, delta)
