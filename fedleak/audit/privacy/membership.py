"""How well an attack tells which texts were in an update, and the epsilon that follows from it.

A row has the scores of a list of texts, and which of them were in. A text that a client is asked
about in several rounds counts with the mean of its scores. These means give for each score:

- the ROC curve: the share of the texts that were in and score above a threshold, against the share
  of the other texts above it. Its points at 1 % and 0.1 % (Carlini et al. 2022) need enough others;
- the area under it (AUC), for texts of the same client: the chance that a text that was in scores
  higher than a text that was not. 0.5 is chance, 1 is certainty;
- a lower bound on epsilon (`lower_bounds.epsilon_delta_bound`) for replacing one text by another.
  For each pair (`candidates`) the auditor guesses which text was in. A pair counts once, because
  its coin was thrown once, and a text is in one pair only.

The bounds of all attacks and scores hold at once with `CONFIDENCE`.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedleak.audit.estimates import Largest, estimate
from fedleak.audit.kept_texts import KeptTexts
from fedleak.audit.metrics import intervals
from fedleak.audit.privacy.candidates import questions
from fedleak.config.experiment import Experiment
from fedleak.models import CAUSAL_LM
from fedleak.store.records import Answer, MembershipRow
from fedleak.store.run import EVERYONE, Key
from fedleak.store.summaries import (
    Estimate,
    MeanOfClients,
    MembershipFigures,
    MembershipSummary,
    RocPoint,
    RoundFigure,
)
from fedleak.training.privacy import lower_bounds
from fedleak.training.truth import GroundTruth
from fedleak.util.lists import grouped

CONFIDENCE = 0.95
"""The confidence with which the bounds of all attacks and scores hold."""

ANNOUNCED_MU = 3.0
"""How far apart the two texts of a pair should score: it decides how many pairs are guessed."""

ONE_PERCENT, A_TENTH_PERCENT = 0.01, 0.001
ACCUSED = (A_TENTH_PERCENT, ONE_PERCENT, 0.02, *(step / 20 for step in range(1, 20)))
"""Shares of the texts that were not in that may be accused: the points of a ROC curve."""


def membership_rows(
    experiment: Experiment,
    held_out: KeptTexts | None,
    from_file: Mapping[str, KeptTexts],
    answers: Mapping[tuple[Key, str], Answer],
    truths: Mapping[Key, GroundTruth | None],
    earlier: Sequence[MembershipRow],
) -> list[MembershipRow]:
    """Returns the rows of membership.jsonl.

    Args:
        experiment: What was prepared.
        held_out: Texts that no client trains on; None: they are not needed.
        from_file: For each attack whose list is from a file, that list.
        answers: By update and attack.
        truths: By update; None where it is missing.
        earlier: Rows of the last scoring; those whose truth is gone stay.
    """
    rows = {row.id: row for row in earlier}
    forgotten = any(truths.get(row.key) is None for row in earlier)
    numbers: dict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    for (key, attack), answer in sorted(answers.items()):
        truth = truths.get(key)
        if truth is None or held_out is None or not answer.scores:
            continue
        clients = experiment.federation.clients
        made = questions(truth, held_out, experiment.seed, clients, from_file.get(attack))
        if any(len(scores) != len(made.inside) for scores in answer.scores.values()):
            continue  # of another list: the held-out texts have changed
        known = numbers[attack]
        texts = made.lines or tuple(
            known.setdefault(example.ids, len(known)) for example in made.asked.listed
        )
        if forgotten and made.lines is None:
            # The texts of the other rows are not known any more.
            if (key, attack) not in rows:
                continue
            texts = rows[key, attack].texts
        rows[key, attack] = MembershipRow(
            **key._asdict(),
            attack=attack,
            texts=texts,
            inside=made.inside,
            pairs=made.pairs,
            scores=answer.scores,
        )
    return [rows[name] for name in sorted(rows)]


def summarised(
    experiment: Experiment, rows: Sequence[MembershipRow], largest: Largest
) -> MembershipSummary | None:
    """Returns the figures of a run's rows; None: there are no rows.

    Args:
        experiment: What was prepared.
        rows: Rows of membership.jsonl.
        largest: The most texts and updates of a client of the federation.
    """
    by_score: dict[tuple[str, str], list[MembershipRow]] = defaultdict(list)
    for row in rows:
        for score in row.scores:
            by_score[row.attack, score].append(row)
    if not by_score:
        return None
    cells = sum(_unfair(experiment, of_score) is None for of_score in by_score.values())
    return MembershipSummary(
        confidence=CONFIDENCE,
        delta=experiment.privacy.delta,
        figures=tuple(
            _figures(experiment, score, of_score, cells, largest.texts)
            for (_, score), of_score in by_score.items()
        ),
    )


def _unfair(experiment: Experiment, rows: Sequence[MembershipRow]) -> str | None:
    """Returns why coins may not have been fair; None: they were fair."""
    if not all(row.pairs for row in rows):
        return "the texts are those of a file, and nobody threw a coin for which of them was in"
    if experiment.model.task == CAUSAL_LM and experiment.federation.partition != "iid":
        return (
            f'federation.partition = "{experiment.federation.partition}" gives clients texts of '
            "unlike classes, and held-out texts are of all classes"
        )
    return None


def _assumed(experiment: Experiment) -> str | None:
    """Returns what p and bounds assume and nobody can check; None: they assume nothing."""
    if not experiment.data.on_nodes and experiment.tapped is None:
        return None
    return (
        "held-out texts differ from the clients' by chance alone; nobody drew them from the same "
        "data here, and another kind of text looks like a text that was not in"
    )


@dataclass(frozen=True)
class _Text:
    """A text that an attack was asked about for a client's updates.

    Attributes:
        cluster: The text's client; with one client, or with sums, the first round in which the
            attack was asked about the text. Texts of one cluster are not independent.
        score: The mean over rounds.
        inside: Whether it was in a batch.
    """

    cluster: int
    score: float
    inside: bool


_Texts = Mapping[tuple[int, int], _Text]
"""Texts by client and number."""


def _texts(rows: Sequence[MembershipRow], score: str) -> _Texts:
    """Returns the texts of all rows of an attack."""
    appearances_by_text: dict[tuple[int, int], list[tuple[float, bool, int]]] = defaultdict(list)
    for row in rows:
        of_row = zip(row.texts, row.scores[score], row.inside, strict=True)
        for number, value, inside in of_row:
            appearances_by_text[row.client, number].append((value, inside, row.round))
    several = len({client for client, _ in appearances_by_text}) > 1
    return {
        (client, number): _Text(
            cluster=client if several else min(round for *_, round in appearances),
            score=math.fsum(value for value, *_ in appearances) / len(appearances),
            inside=any(inside for _, inside, _ in appearances),
        )
        for (client, number), appearances in appearances_by_text.items()
    }


def _figures(
    experiment: Experiment, score: str, rows: Sequence[MembershipRow], cells: int, largest: int
) -> MembershipFigures:
    """Returns the figures of one score.

    Args:
        experiment: What was prepared.
        score: Its name.
        rows: Rows of one attack.
        cells: How many attacks and scores share the error of the bounds.
        largest: How many members a client has at most.
    """
    texts, unfair, delta = _texts(rows, score), _unfair(experiment, rows), experiment.privacy.delta
    members = [text for text in texts.values() if text.inside]
    controls = np.array([text.score for text in texts.values() if not text.inside])
    clients = {client for client, _ in texts}
    if len(clients) == 1:
        largest = 0  # its rounds stand for themselves
    roc = {
        accused: share
        for accused in ACCUSED
        if (share := found_where(members, controls, accused, largest)) is not None
    }
    differences, coins = _pairs(rows, texts)
    # How much members score above their partners.
    raised = [d if first else -d for d, first in zip(differences, coins, strict=True)]
    return MembershipFigures(
        attack=rows[0].attack,
        score=score,
        updates=len(rows),
        clients=None if EVERYONE in clients else len(clients),
        members=len(members),
        controls=len(controls),
        auc=_area(texts, largest),
        rounds=_by_round(rows, score),
        roc=tuple(RocPoint(accused=accused, found=share) for accused, share in roc.items()),
        found_at_1_percent=roc.get(ONE_PERCENT),
        found_at_01_percent=roc.get(A_TENTH_PERCENT),
        pairs=len(coins),
        no_bound=unfair,
        assumes=None if unfair else _assumed(experiment),
        p=None if unfair else min(1.0, cells * intervals.sign_test(raised)),
        epsilon=None if unfair else pair_bound(differences, coins, (1 - CONFIDENCE) / cells, delta),
    )


def _area(texts: _Texts, largest: int) -> Estimate | None:
    """Returns the area under the ROC curve over texts of the same client, with its interval."""
    shares = _shares_of_members(texts)
    if not shares:
        return None
    clusters = [texts[name].cluster for name in shares]
    return estimate([*shares.values()], clusters, most=1.0, largest=largest)


def shares_of_members(rows: Sequence[MembershipRow], score: str) -> dict[tuple[Key, int], float]:
    """Returns for each member the share of its client's controls that score lower.

    The mean of the shares is the area under the ROC curve. A text's key is the first update whose
    list has it, and its place in that list.

    Args:
        rows: Rows of one attack.
        score: The name of the score.
    """
    first: dict[tuple[int, int], tuple[Key, int]] = {}
    for row in sorted(rows, key=lambda row: row.key):
        for place, number in enumerate(row.texts):
            first.setdefault((row.client, number), (row.key, place))
    shares = _shares_of_members(_texts(rows, score))
    return {first[name]: share for name, share in shares.items()}


def _by_round(rows: Sequence[MembershipRow], score: str) -> tuple[RoundFigure, ...]:
    """Returns the area in each round, over texts of the same update."""
    won: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        won[row.round] += _shares_of_members(_texts([row], score)).values()
    return tuple(
        RoundFigure(round=round, auc=math.fsum(shares) / len(shares))
        for round, shares in sorted(won.items())
        if shares
    )


def _shares_of_members(texts: _Texts) -> dict[tuple[int, int], float]:
    """Returns for each member, by client and number, the share of controls that score lower."""
    shares: dict[tuple[int, int], float] = {}
    for names in grouped(texts, lambda name: name[0]).values():
        members = [name for name in names if texts[name].inside]
        controls = [texts[name].score for name in names if not texts[name].inside]
        if members and controls:
            won = shares_won([texts[name].score for name in members], controls)
            shares |= zip(members, won, strict=True)
    return shares


def shares_won(members: npt.ArrayLike, controls: npt.ArrayLike) -> list[float]:
    """Returns for each member the share of the controls that score lower; ties are half."""
    above = np.asarray(members)[:, None] - np.asarray(controls)
    shares: list[float] = ((above > 0).mean(1) + 0.5 * (above == 0).mean(1)).tolist()
    return shares


def found_where(
    members: Sequence[_Text], controls: npt.NDArray[np.float64], accused: float, largest: int
) -> Estimate | None:
    """Returns the share of members above all but a share of the controls; None: too few controls.

    Args:
        members: Texts that were in.
        controls: Scores of the others.
        accused: The largest share of the controls that may be above. The controls here are a
            sample, which the interval allows for: its ends are taken at thresholds that are surely
            high enough, and surely low enough, if controls are independent.
        largest: How many members a client has at most.
    """
    most = math.floor(accused * len(controls) + 1e-9)
    if not most or not members:
        return None
    ordered, clusters = np.sort(controls), [text.cluster for text in members]

    def above(rank: int | None, unbounded: float) -> Estimate:
        """Returns the share of members above the control that `rank` others exceed."""
        threshold = unbounded if rank is None else ordered[-rank - 1]
        values = [float(text.score > threshold) for text in members]
        return estimate(values, clusters, most=1.0, largest=largest, miss=intervals.MISS / 2)

    first, second = intervals.ranks_of_quantile(accused, len(controls), intervals.MISS / 2)
    shares = [above(most, 0.0), above(first, math.inf), above(second, -math.inf)]
    of_clients = MeanOfClients(**_ends(*filter(None, (share.of_clients for share in shares))))
    return Estimate(**_ends(*shares), of_clients=of_clients)


def _ends(measured: MeanOfClients, lower: MeanOfClients, upper: MeanOfClients) -> dict[str, Any]:
    """Returns a measured mean, with the lower end of one interval and the upper one of another."""
    return {"mean": measured.mean, "low": lower.low, "high": upper.high}


def _pairs(rows: Sequence[MembershipRow], texts: _Texts) -> tuple[list[float], list[bool]]:
    """Returns for each pair how much higher the first in the list scores, and whether it was in."""
    used: set[int] = set()
    differences, coins = [], []
    for row in rows:
        for member, control in row.pairs:
            first, second = row.texts[min(member, control)], row.texts[max(member, control)]
            if not used & {first, second}:
                used |= {first, second}
                scores = [texts[row.client, number].score for number in (first, second)]
                differences.append(scores[0] - scores[1])
                coins.append(member < control)
    return differences, coins


def pair_bound(
    differences: Sequence[float], coins: Sequence[bool], alpha: float, delta: float
) -> float:
    """Returns a lower bound on epsilon with confidence 1 - alpha; 0 where nothing was seen.

    Args:
        differences: For each pair, how much higher the first text scores.
        coins: Whether the first text was in.
        alpha: How often the bound may be wrong.
        delta: Of the guarantee.
    """
    if not coins:
        return 0.0
    rule = lower_bounds.settled_rule(len(coins), ANNOUNCED_MU, two_sided=True)
    right = rule.right(differences, coins)
    return lower_bounds.epsilon_delta_bound(len(coins), rule.count, right, alpha, delta)
