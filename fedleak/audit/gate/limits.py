"""Compares what was measured with the limits."""

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from fedleak import models
from fedleak.attacks import CALIBRATED
from fedleak.attacks.reconstruction import Status
from fedleak.audit.gate.check import Check, compared, untold
from fedleak.audit.gate.evidence import Evidence
from fedleak.audit.kept_texts import read_held_out
from fedleak.audit.metrics.utility import evaluate
from fedleak.config.federation.lookup import absent, dropped_out
from fedleak.config.federation.schedule import updates
from fedleak.config.tables import GateTable
from fedleak.models import loading
from fedleak.store.summaries import CanarySummary, Estimate, MeanOfClients, RunSummary, WorstCase
from fedleak.training.privacy.accounting import NONE
from fedleak.util.errors import FedleakError
from fedleak.util.lists import first_of


class Leak(NamedTuple):
    """A figure of the worst case that can be limited.

    Attributes:
        figure: Its name in the worst case.
        says: What it counts, for a sentence.
    """

    figure: str
    says: str


NAMED = 10
"""The most clients that a sentence names."""

SEQUENCES = frozenset({"exact", "rougeL", "personal_data"})
"""Limits that need attacks which name texts, and not only words."""

LEAKS: Mapping[str, Leak] = {
    "exact": Leak("exact_match", "share of texts read word for word"),
    "rougeL": Leak("rougeL", "mean ROUGE-L of the texts"),
    "token_recall": Leak("token_recall", "share of a text's tokens found"),
    "personal_data": Leak("personal_data", "share of the personal data in the texts read"),
}
"""Limits on the worst case over attacks, by their names."""

MEMBERSHIP: Mapping[str, Leak] = {
    "auc": Leak("auc", "area under the ROC curve of membership"),
    "tpr": Leak("found_at_1_percent", "share of members found at 1 % false accusations"),
}
"""Limits on each score of attacks on membership, by their names."""

PUBLISHED: Mapping[str, str] = {
    "exposure": "bits by which planted secrets stand out",
    "extracted": "share of planted secrets that a published model writes out",
}
"""Limits on what published models give away, by their names."""

UTILITY: Mapping[str, int] = {"accuracy": 1, "f1": 1, "mcc": 1, "perplexity": -1}
"""Limits on the trained model, by their names: 1 if more is better, else -1."""


def limit_checks(limits: GateTable, evidence: Evidence) -> list[Check]:
    """Returns a check for each limit on what was measured."""
    summary, checks = evidence.summary, list[Check]()
    for names, compare in ((LEAKS, _leak), (MEMBERSHIP, _membership), (PUBLISHED, _published)):
        checks += [compare(name, limit, evidence) for name, limit in _named(limits, names).items()]
    if limits.epsilon is not None:
        checks.append(_epsilon(limits.epsilon, evidence))
        if summary.canary is not None and limits.canary is None:
            checks.append(_bounded("epsilon by canaries", limits.epsilon, summary.canary))
    if limits.canary is not None:
        checks.append(_bounded("canary", limits.canary, summary.canary))
    if limits.alarms is not None:
        checks.append(_alarms(limits.alarms, evidence))
    if useful := _named(limits, UTILITY):
        checks += _utility(useful, evidence)
    return checks


_Figures = list[tuple[str, Estimate | MeanOfClients]]
"""Figures with their intervals, each with words that name it."""


def _named(limits: GateTable, names: Mapping[str, object]) -> dict[str, float]:
    return {name: limit for name in names if (limit := getattr(limits, name)) is not None}


class Case(NamedTuple):
    """A worst case that the limits hold for.

    Attributes:
        prefix: What the attacker is told, to begin a sentence on the case; empty without a ladder.
        attacks: Names of the attacks whose rows it is over; None: all attacks.
        worst: The figures; None: no attack gave an answer.
    """

    prefix: str
    attacks: Container[str] | None
    worst: WorstCase | None


def worst_cases(summary: RunSummary) -> list[Case]:
    """Returns the worst case of the run, or one for each rung of the ladder.

    An attack need not use a fact that it is told, so the rung with all facts may not be highest.
    """
    if summary.ladder is None:
        return [Case("", None, summary.worst_case)]
    return [
        Case(f"told {rung.granted_in_words}: ", set(rung.attacks.values()), rung.worst_case)
        for rung in summary.ladder.rungs
    ]


def _leak(name: str, limit: float, evidence: Evidence) -> Check:
    """Compares the figure of the highest case with a limit."""
    leak = LEAKS[name]
    figures, lacks = _Figures(), []
    for case in worst_cases(evidence.summary):
        figure = None if case.worst is None else getattr(case.worst, leak.figure)
        if name == "personal_data" and case.worst is not None and case.worst.personal is None:
            lacks.append(f"{case.prefix}no personal data was found in the private texts")
        elif figure is None:
            lacks.append(f"{case.prefix}no attack gave an answer that has a {leak.says}")
        else:
            figures += _both(case.prefix, figure)
    return _highest(name, leak.says, limit, figures, lacks)


def _both(prefix: str, figure: Estimate) -> _Figures:
    """Returns the mean over texts and the mean over clients."""
    if figure.of_clients is None:
        return [(prefix, figure)]
    return [(prefix, figure), (f"{prefix}each client counted once, ", figure.of_clients)]


def _highest(name: str, says: str, limit: float, figures: _Figures, lacks: Sequence[str]) -> Check:
    """Compares the highest upper end of an interval with a limit.

    If a figure exceeds the limit, the check fails even if another figure is not known.
    """
    prefix, highest = max(figures, key=lambda figure: figure[1].high, default=("", None))
    if highest is None or (lacks and highest.high <= limit):
        return untold(name, lacks)
    sentence = (
        f"{prefix}{says}: {highest.mean:.3g}, with its interval up to {highest.high:.3g}; "
        f"limit {limit:g}"
    )
    return compared(name, sentence, holds=highest.high <= limit)


def _membership(name: str, limit: float, evidence: Evidence) -> Check:
    """Compares the figure of the score that tells members best with a limit."""
    leak, summary = MEMBERSHIP[name], evidence.summary.membership
    if summary is None:
        return untold(name, ["no attack on membership gave an answer"])
    figures, lacks = [], []
    for scored in summary.figures:
        prefix = f"{scored.attack} by {scored.score}: "
        answers = sum(
            row.attack == scored.attack and row.status == Status.RECOVERED
            for row in evidence.rows.leakage
        )
        if scored.updates < answers and scored.score != CALIBRATED:
            lacks.append(f"{prefix}{answers - scored.updates} of {answers} answers have no score")
        figure: Estimate | None = getattr(scored, leak.figure)
        if figure is None:
            lacks.append(
                f"{prefix}{scored.members} members and {scored.controls} others are too few"
            )
        else:
            figures += _both(prefix, figure)
    return _highest(name, leak.says, limit, figures, lacks)


def _published(name: str, limit: float, evidence: Evidence) -> Check:
    """Compares what any model that was trained on secrets gives away of them with a limit."""
    if (published := evidence.summary.published) is None:
        return untold(name, ["no secrets were planted: the file has no [published]"])
    figures = []
    for figure in published.figures:
        for row in figure.rounds if figure.measure == name else ():
            if row.round == 0:
                continue  # nobody trained yet: this is the control, and no leak
            prefix = f"{figure.count} times in a client's data, {figure.by}, round {row.round}: "
            figures += _both(prefix, row.figure)
    lacks = [] if figures else ["no model was asked after training"]
    return _highest(name, PUBLISHED[name], limit, figures, lacks)


def _epsilon(limit: float, evidence: Evidence) -> Check:
    """Compares the weakest client's epsilon with its limit; without a guarantee there is none.

    An epsilon is computed, not estimated, so it has no interval.
    """
    privacy, experiment = evidence.summary.privacy, evidence.experiment
    trained = {key.client for key in updates(experiment)}
    if without := sorted(trained - {row.client for row in evidence.rows.ledger}):
        return untold("epsilon", [f"the ledger has no clients {first_of(without, NAMED)}"])
    if privacy is None or privacy.epsilon == NONE:
        return untold("epsilon", [f"nothing is guaranteed; limit {limit:g}"])
    sentence = (
        f"epsilon {privacy.epsilon:.4g} at delta {privacy.delta:g}, of one {privacy.unit} by the "
        f"accountant {privacy.accountant}; limit {limit:g}"
    )
    return compared("epsilon", sentence, holds=float(privacy.epsilon) <= limit)


def _alarms(limit: int, evidence: Evidence) -> Check:
    """Compares the rounds in which clients noticed something with their limit."""
    run, experiment = evidence.run, evidence.experiment
    if (detections := evidence.summary.detections) is None:
        return untold("alarms", ["no client looked: the file has no [[detector]]"])
    sentence = f"detectors alarmed in {detections.alarms} rounds of a client; limit {limit}"
    # A client that dropped out may not have looked; one that refused did.
    looking = [
        key
        for key in updates(experiment)
        if experiment.detectors_of(key.client)
        and (key in absent(run) or key.client not in dropped_out(run, key.round))
    ]
    silent = len({*looking} - {row.key for row in evidence.rows.detected})
    if silent and detections.alarms <= limit:
        lack = f"of {silent} of {len(looking)} rounds of a client no note of its detectors is here"
        return untold("alarms", [f"{sentence}; {lack}"])
    return compared("alarms", sentence, holds=detections.alarms <= limit)


def _bounded(name: str, limit: float, canary: CanarySummary | None) -> Check:
    """Compares the largest lower bound on any client's epsilon with a limit.

    Every kind of bound holds in all rows at once, so the largest may be taken. A bound below the
    limit shows nothing: the accounted epsilon opens the gate.
    """
    if canary is None:
        return untold(name, [f"there are no canaries; limit {limit:g}"])
    kinds = {
        "if the noise is Gaussian": [row.gaussian or 0.0 for row in canary.bounds],
        "if the trade-off curve is Gaussian": [row.f_dp for row in canary.bounds],
        "assuming nothing": [row.epsilon_delta for row in canary.bounds],
    }
    assumed, largest = max(
        ((kind, max(bounds)) for kind, bounds in kinds.items()), key=lambda bound: bound[1]
    )
    sentence = f"canaries show {largest:.4g} or more ({assumed}); limit {limit:g}"
    return compared(name, sentence, holds=largest <= limit)


def _utility(limits: Mapping[str, float], evidence: Evidence) -> list[Check]:
    """Measures the trained model anew and compares it with limits.

    The held-out texts are fixed, so the figures have no interval.
    """
    try:
        measured = _evaluated(evidence)
    except FedleakError as error:
        return [untold(name, [str(error)]) for name in limits]
    checks = []
    for name, limit in limits.items():
        if (figure := measured.get(name)) is None:
            checks.append(untold(name, [f"no {name} was measured on held-out texts"]))
            continue
        sentence = f"{figure:.3g} on {evidence.summary.held_out} held-out texts; limit {limit:g}"
        checks.append(compared(name, sentence, holds=(figure - limit) * UTILITY[name] >= 0))
    return checks


def _evaluated(evidence: Evidence) -> Mapping[str, float | None]:
    """Returns the figures of the trained model on held-out texts.

    Raises:
        FedleakError: The model or the texts cannot be read.
    """
    run, experiment = evidence.run, evidence.experiment
    if evidence.summary.utility is None or evidence.purged:
        return {} if evidence.summary.utility is None else evidence.summary.utility.figures
    held_out = read_held_out(run)
    model = loading.load(experiment.model_spec(run.info()["num_labels"]), weights=False)
    models.lend_parameters_(model, run.models.read_model(experiment.federation.rounds + 1))
    return evaluate(model, held_out.sequences, held_out.labels)
