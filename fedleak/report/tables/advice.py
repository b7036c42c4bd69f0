"""Which defenses were tried on a run's setting, and which is the cheapest within the limits."""

from collections import Counter

from fedleak.report.table import Cell, Column, Row, Table, Tone, cells, words
from fedleak.report.table import figures as figure_columns
from fedleak.report.words import counted, few_digits, interval
from fedleak.store.audits import Advice, Trial, Tried

ORDER = (
    "Order of cost: first the utility lost, as measured, where a loss within the 95 % interval of "
    "the undefended model counts as none; of equals, what leaves the numbers that are sent as they "
    "are comes before noise, masks and DP-SGD."
)


def advice_table(advice: Advice, *, reasons: bool = True) -> Table:
    """Returns a line for each defense that was tried or could have been.

    Args:
        advice: What was tried.
        reasons: Whether to add the reasons, which have words of files and limits.
    """
    why = [Column("why", words=True, page_only=True)] if reasons else []
    return Table(
        f"defenses tried; limits: {advice.limits}",
        [
            *words("defense", "limits"),
            *figure_columns("texts exact, %", advice.measure or "utility", "lost", "epsilon"),
            *why,
        ],
        cells(_row(tried)[: 6 + len(why)] for tried in advice.tried),
        [advice_sentence(advice), ORDER],
    )


def _row(tried: Tried) -> Row:
    tone = {Trial.EXCEEDED: Tone.ALARM, Trial.UNTOLD: Tone.GAP}.get(tried.trial, Tone.PLAIN)
    return [
        tried.name,
        Cell(tried.trial, tone),
        interval(tried.exact, 100),
        few_digits(tried.utility),
        few_digits(tried.lost),
        few_digits(tried.epsilon),
        tried.why,
    ]


def advice_sentence(advice: Advice) -> str:
    """Returns which defense is the cheapest, or that none keeps within the limits."""
    of_trial = Counter(tried.trial for tried in advice.tried)
    count = len(advice.tried) - of_trial[Trial.IMPOSSIBLE] - of_trial[Trial.SKIPPED]
    of_tried = f"of {counted(count, 'defense')} that {'was' if count == 1 else 'were'} tried"
    if (best := advice.cheapest) is None:
        none = (
            f"None {of_tried} was shown to keep within the limits ({advice.limits}): "
            f"{of_trial[Trial.EXCEEDED]} exceeded one, and of {of_trial[Trial.UNTOLD]} too little "
            "was measured to tell. That says nothing about others, or about several together."
        )
        if (likely := advice.promising) is None:
            return none
        return (
            f"{none} The cheapest that exceeded none is {likely.name}: {_cost(advice, likely)}; "
            f"attacks had {advice.seconds:g} s for an update."
        )
    return (
        f"The cheapest {of_tried} and keeps within the limits ({advice.limits}) is {best.name}: "
        f"{_cost(advice, best)}. It holds against these attacks, for clients like these; another "
        "attack may read more."
    )


def _cost(advice: Advice, best: Tried) -> str:
    """Returns what a defense costs, and what it guarantees."""
    cost = "utility was not measured"
    if best.utility is not None and advice.utility is not None and advice.measure:
        cost = (
            f"{advice.measure} {few_digits(best.utility)} in place of {few_digits(advice.utility)} "
            f"on {counted(advice.held_out, 'held-out text')} after "
            f"{counted(advice.rounds, 'round')}"
        )
        if not advice.trained:
            cost += ", and so little training changed nothing that these texts show"
    epsilon = (
        "no epsilon" if best.epsilon in (None, "none") else f"epsilon {few_digits(best.epsilon)}"
    )
    return f"{cost}; {epsilon}"
