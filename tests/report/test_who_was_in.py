"""The first line of a run of which no text was read, and yet who was in can be told."""

import pytest
from built import summary_of

from fedleak.report.tables.membership import who_was_in
from fedleak.store.summaries import Estimate, MembershipFigures, MembershipSummary

pytestmark = pytest.mark.core


def figures(score: str, p: float | None, mean: float) -> MembershipFigures:
    return MembershipFigures(
        attack="membership", score=score, updates=10, clients=10, members=20, controls=20,
        auc=Estimate(mean=mean, low=0.1, high=1.0), rounds=(), roc=(), found_at_1_percent=None,
        found_at_01_percent=None, pairs=20, no_bound=None, p=p, epsilon=0.0,
    )  # fmt: skip


def asked(*rows: MembershipFigures) -> MembershipSummary:
    return MembershipSummary(confidence=0.95, delta=1e-5, figures=rows)


def test_without_an_answer_of_texts_nothing_is_said_of_reading() -> None:
    summary = summary_of(
        worst_case=None, attacks={}, membership=asked(figures("residual", 1e-3, 0.9))
    )
    assert who_was_in(summary) == (
        "no attack named a private text; who was in can be told with AUC 0.90 (0.5 is chance, "
        "p = 0.001; for other clients like these 0.10 to 1.00; by membership's residual)"
    )


@pytest.mark.parametrize(("p", "mean"), [(0.05, 0.9), (None, 0.9), (1e-3, 0.4)])
def test_what_chance_may_explain_is_not_said(p: float | None, mean: float) -> None:
    summary = summary_of(
        worst_case=None, attacks={}, membership=asked(figures("residual", p, mean))
    )
    assert who_was_in(summary) is None


def test_the_score_that_chance_explains_least_is_named() -> None:
    rows = figures("loss", 0.04, 0.95), figures("residual", 0.01, 0.8)
    summary = summary_of(worst_case=None, attacks={}, membership=asked(*rows))
    assert "AUC 0.80" in (who_was_in(summary) or "")
