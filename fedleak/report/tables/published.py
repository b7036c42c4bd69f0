"""What the published models give away of planted secrets, in words that say what that is."""

from fedleak.report.table import Column, Table, cells, figures, words
from fedleak.report.words import counted, few_digits, interval, percent
from fedleak.store.summaries import SURE, PublishedFigure, PublishedSummary

_NOTES = (
    "Exposure, in bits: log2 of among how many of its twins, made in the same way and trained on "
    "by nobody, a secret is the first. Likelihood: of the last model; rise: from one model to a "
    "later one. p: how often chance ranks secrets so high, corrected for all that is compared.",
    "Written: given its beginning, the last model goes on word for word as the text does. "
    "Contrastive: what it says otherwise than the model of the round before is amplified.",
    "Untrained: what chance says of exposure, and how many twins the model writes. Intervals: for "
    "other clients like these, against the same twins.",
    "All this is apart from updates: whoever gets the models and nothing else sees it.",
)


def given_away(summary: PublishedSummary | None) -> str | None:
    """Returns from where on published models give secrets away; None: no secrets were planted."""
    if summary is None:
        return None
    seen = [
        (figure.count, row.round)
        for figure in summary.figures
        for row in figure.rounds
        if row.p is not None and row.p <= SURE
    ]
    if not seen:
        return "Nothing was seen of planted secrets, which is no evidence that nothing is there"
    count, round = min(seen)
    extracted = (figure for figure in summary.figures if figure.measure == "extracted")
    most = max(figure.rounds[-1].figure.mean for figure in extracted)
    return (
        f"Secrets that stand {counted(count, 'time')} in a client's data are told from others from "
        f"round {round} on; the last model writes up to {percent(most)} of secrets word for word"
    )


def published_table(summary: PublishedSummary) -> Table:
    """Returns a line for each count, and how the models were asked."""
    return Table(
        "the published models: what they give away of planted secrets",
        [
            *words("measure", "by"),
            *figures("times", "mean", "untrained", "p", "secrets"),
            Column("by round", page_only=True),
        ],
        cells(map(_cells, summary.figures)),
        _NOTES,
        groups=2,
    )


def _cells(row: PublishedFigure) -> list[str]:
    last, means = row.rounds[-1], [after.figure.mean for after in row.rounds]
    measure, mean, control = "exposure", interval(last.figure, places=2), f"{last.control:.2f}"
    if row.measure == "extracted":
        measure, mean, control = "written", f"{interval(last.figure, 100)} %", percent(last.control)
    shown = [measure, row.by, str(row.count), mean, control, few_digits(last.p)]
    return [*shown, f"{row.secrets:,}", ", ".join(map(few_digits, means))]
