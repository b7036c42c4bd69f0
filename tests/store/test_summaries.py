"""What figures say is worked out from them alone."""

import pytest

from fedleak.attacks.reconstruction import Status
from fedleak.store.records import UNSCORED, RowStatus
from fedleak.store.summaries import (
    AttackSummary,
    Difference,
    Direction,
    Ladder,
    MembershipFigures,
    MembershipSummary,
    Rung,
)

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("mean", "p", "direction"),
    [
        (0.2, 0.05, Direction.WORSE),
        (-0.2, 0.05, Direction.BETTER),
        (0.2, 0.0501, Direction.UNTOLD),
        (-0.2, 0.0501, Direction.UNTOLD),
    ],
)
def test_a_difference_says_something_where_chance_would_rarely_make_it(
    mean: float, p: float, direction: Direction
) -> None:
    difference = Difference(
        attack=None, figure="exact", texts=2, clients=2, before=0.3, after=0.3 + mean, mean=mean,
        low=-0.5, high=0.5, p=0.001, p_adjusted=p,
    )  # fmt: skip
    assert difference.direction is direction


@pytest.mark.parametrize(
    ("status", "answers", "unscored"),
    [
        ({}, 0, 0),
        ({Status.FAILED: 2}, 0, 0),
        ({Status.RECOVERED: 2, Status.FAILED: 4}, 2, 0),
        ({Status.RECOVERED: 2, UNSCORED: 3, Status.ABSTAINED: 5}, 5, 3),
    ],
)
def test_answers_are_those_with_a_score_and_those_without(
    status: dict[RowStatus, int], answers: int, unscored: int
) -> None:
    summary = AttackSummary.model_construct(status=status)
    assert (summary.answers, summary.unscored) == (answers, unscored)


def test_the_top_of_a_ladder_is_told_all() -> None:
    rungs = [
        Rung(granted=granted, attacks={}, worst_case=None, worth=())
        for granted in ((), ("labels",), ("labels", "lengths"))
    ]
    ladder = Ladder(rungs=tuple(rungs), left_out={}, correction="")
    assert ladder.top is rungs[2]
    assert [rung.granted_in_words for rung in rungs] == [
        "nothing more",
        "labels",
        "labels, lengths",
    ]


def test_the_figures_of_an_attack_are_those_of_the_score_it_names_first_or_of_another() -> None:
    pairs = [("a", "loss"), ("b", "rank"), ("b", "loss")]
    figures = tuple(MembershipFigures.model_construct(attack=a, score=score) for a, score in pairs)
    summary = MembershipSummary(confidence=0.9, delta=1e-5, figures=())
    summary = summary.model_copy(update={"figures": figures})
    assert (summary.figures_of("a"), summary.figures_of("b")) == (figures[0], figures[1])
    assert summary.figures_of("b", "loss") is figures[2]
    assert summary.figures_of("a", "rank") is summary.figures_of("c") is None
