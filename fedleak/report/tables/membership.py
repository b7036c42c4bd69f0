"""How well texts that were in updates are told from others, in words that say what they assume."""

from fedleak.report.table import Column, Table, cells, figures, words
from fedleak.report.tables.canaries import NOTHING, bound
from fedleak.report.words import counted, interval, percent
from fedleak.store.summaries import Estimate, MembershipFigures, MembershipSummary, RunSummary
from fedleak.util.lists import first_of

TOO_FEW = "too few"
"""Stands where there are too few controls for a share of them."""

NO_BOUND = "none"
"""Stands where there is no p and no bound on epsilon."""

MOST_ROUNDS = 5
"""Rounds that are shown of each score at most: the first ones."""


def who_was_in(summary: RunSummary) -> str | None:
    """Returns the first sentence if no text was read, but who was in can be told.

    None: texts were read, or who was in is not told better than by chance.
    """
    clearest = summary.membership.clearest if summary.membership else None
    worst, attacks = summary.worst_case, summary.attacks.values()
    exact = worst.exact_match if worst else None
    read = worst is not None and (worst.nearly or (exact is not None and exact.mean > 0))
    if clearest is None or read or any(row.verified or row.unscored for row in attacks):
        return None
    texts = (
        f"none of {counted(worst.texts, 'private text')} was read word for word"
        if worst
        else "no attack named a private text"
    )
    auc = clearest.auc
    assert auc is not None
    return (
        f"{texts}; who was in can be told with AUC {auc.mean:.2f} (0.5 is chance, p = "
        f"{clearest.p:.1g}; for other clients like these {auc.low:.2f} to {auc.high:.2f}; by "
        f"{clearest.attack}'s {clearest.score})"
    )


def membership_tables(summary: MembershipSummary) -> list[Table]:
    """Returns a table for each attack, with a line for each of its scores."""
    attacks = list(dict.fromkeys(row.attack for row in summary.figures))
    headings = ("AUC", "found at 1 %", "found at 0.1 %", "p", "epsilon at least", "texts in / not")
    return [
        Table(
            "membership: which texts were in an update"
            + ("" if attack == "membership" else f" ({attack})"),
            [*words("score"), *figures(*headings), Column("AUC by round", page_only=True)],
            cells(_cells(row) for row in summary.figures if row.attack == attack),
            _notes(summary) if attack == attacks[-1] else (),
        )
        for attack in attacks
    ]


def _cells(row: MembershipFigures) -> list[str]:
    epsilon = NO_BOUND if row.epsilon is None else bound(row.epsilon)
    by_round = (f"{in_round.auc:.2f}" for in_round in row.rounds)
    return [
        row.score,
        interval(row.auc, places=2),
        _share(row.found_at_1_percent),
        _share(row.found_at_01_percent),
        NO_BOUND if row.p is None else f"{row.p:.2g}",
        epsilon,
        f"{row.members:,} / {row.controls:,}",
        first_of(by_round, MOST_ROUNDS, more=", and {} more"),
    ]


def _notes(summary: MembershipSummary) -> list[str]:
    """Returns what each column says and assumes."""
    sentences = [
        "AUC, over all rounds: the chance that a text that was in a client's updates scores higher "
        "than one that was not; 0.5 is chance. The interval is for other clients like these; of "
        "one client, or of sums, for other rounds.",
        "Found at 1 %, 0.1 %: the share of the texts that were in that are found where at most so "
        f"many others are accused; {TOO_FEW}: that takes 100, or 1,000, others.",
    ]
    bounded = [row for row in summary.figures if row.no_bound is None]
    if bounded:
        sentences += [
            "p: how often chance tells pairs of a text of a batch and a held-out text apart so, "
            f"corrected for {len(bounded)} scores. Which of a pair was in was decided before "
            "training, with the seed, when texts were held out.",
            f"Epsilon at least: at delta {summary.delta:g}, for replacing a text by another, over "
            f"all rounds that are scored; all lines hold at once with "
            f"{percent(summary.confidence)} confidence. It "
            "assumes nothing of the mechanism. A guarantee for adding or removing a text says up "
            "to twice its epsilon of that.",
            f"{NOTHING.capitalize()}: with so many pairs; more of them may see something. It is no "
            "evidence of privacy.",
        ]
    assumed = {row.attack: row.assumes for row in bounded if row.assumes is not None}
    sentences += [
        f"{name}: p and bound hold if {assumption}." for name, assumption in assumed.items()
    ]
    unbounded = {row.attack: row.no_bound for row in summary.figures if row.no_bound is not None}
    return [*sentences, *(f"{name}: no p and no bound: {why}." for name, why in unbounded.items())]


def _share(share: Estimate | None) -> str:
    return TOO_FEW if share is None else f"{interval(share, 100)} %"
