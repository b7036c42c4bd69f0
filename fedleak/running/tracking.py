"""A scored run in the trackers of others: MLflow, with its report, and TensorBoard.

A tracker receives settings and figures, and no text of a client. Sentences of attacks are left out
too, as they may quote a private text.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fedleak.audit.pairing import FIGURES, best
from fedleak.config.federation.lookup import stored
from fedleak.running import reports
from fedleak.running.export import scored_rows
from fedleak.store.records import LEDGER, UTILITY, LeakageRow, LedgerRow
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY, AttackSummary, Estimate, RunSummary, WorstCase
from fedleak.training.privacy.accounting import NONE
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.lists import grouped
from fedleak.util.nested import flat

EXPERIMENT = "fedleak"
"""The experiment of MLflow that runs belong to, unless MLFLOW_EXPERIMENT_NAME names another."""

PLACE = "tensorboard"
"""The folder of all runs for TensorBoard, if none is named."""

LONGEST_NAME, LONGEST_VALUE = 250, 6_000
"""The most characters that MLflow takes in a name and in the value of a parameter."""

CONTROLS = ("control_rougeL", "guess_rougeL", "control_token_recall", "guess_token_recall")


class Metric(NamedTuple):
    """A figure after a round; its name has several parts."""

    parts: tuple[str, ...]
    round: int
    value: float

    @property
    def name(self) -> str:
        """Its name, as trackers take it."""
        return "/".join(map(_safe, self.parts))[:LONGEST_NAME]


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """A run, for a tracker.

    Attributes:
        name: Of the run.
        parameters: Its settings, by dotted key.
        metrics: By round: utility, epsilon and what attacks read; below `total`, over all rounds.
        tags: What else is known of it.
    """

    name: str
    parameters: Mapping[str, str]
    metrics: Sequence[Metric]
    tags: Mapping[str, str]


def export_to_mlflow(run: Run, place: str | None, *, texts: bool = False) -> str:
    """Writes a scored run to MLflow: settings, figures by round, and the report as an artifact.

    Each call makes a new run of MLflow.

    Args:
        run: A run that was scored.
        place: A tracking server, database or folder; None: the one that MLflow is set to; without
            such a setting the export is refused.
        texts: The report with private texts, in place of the one without.

    Returns:
        The id of MLflow's run.

    Raises:
        ConfigError: MLflow is not installed or needs a place, or this is no run directory.
        FedleakError: The run cannot be read, or MLflow does not take it.
    """
    # Otherwise MLflow reports each call to its makers.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    if place is not None and urlsplit(place).scheme in ("", "file"):
        # MLflow keeps folders as they are and wants to be told that they are meant.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        from mlflow import is_tracking_uri_set
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise ConfigError(
            "MLflow is not installed: pip install 'fedleak[mlflow]', or write a csv file"
        ) from error
    if place is None and not is_tracking_uri_set():
        raise ConfigError(
            "MLflow is not set to any place and would write to the current folder: name one, such "
            "as --to mlflow:mlruns, or set MLFLOW_TRACKING_URI"
        )
    tracked_run = tracked(run)
    with TemporaryDirectory(prefix="fedleak-") as folder:
        report = Path(folder) / (reports.NAME if texts else reports.REDACTED)
        reports.report_run(run, report, redact=not texts)
        try:
            return _log(MlflowClient(tracking_uri=place), tracked_run, report)
        except (MlflowException, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise FedleakError(f"MLflow does not take the run: {reason}") from error


def _log(client: Any, tracked_run: Tracked, report: Path) -> str:
    """Makes MLflow's run; one that could not be completed is marked as failed."""
    from mlflow import entities

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    known = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if known is None else known.experiment_id
    made = client.create_run(experiment, run_name=tracked_run.name, tags=dict(tracked_run.tags))
    run_id: str = made.info.run_id
    now = int(1000 * time.time())
    try:
        parameters = [entities.Param(*parameter) for parameter in tracked_run.parameters.items()]
        metrics = [
            entities.Metric(row.name, row.value, now, row.round) for row in tracked_run.metrics
        ]
        client.log_batch(run_id, metrics, parameters)  # in as many requests as it takes
        client.log_artifact(run_id, str(report))
    except BaseException:
        client.set_terminated(run_id, "FAILED")
        raise
    client.set_terminated(run_id)
    return run_id


def export_to_tensorboard(run: Run, place: str | None) -> Path:
    """Writes the figures of a scored run by round, and its settings as a text.

    Args:
        run: A run that was scored.
        place: The folder of all runs; None: `tensorboard` in the current one.

    Returns:
        The folder of this run, inside.

    Raises:
        ConfigError: TensorBoard is not installed, this is no run directory, or the run is there
            already.
        FedleakError: The run cannot be read, or the folder cannot be written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "TensorBoard is not installed: pip install 'fedleak[tensorboard]', or write a csv file"
        ) from error
    tracked_run = tracked(run)
    folder = Path(place or PLACE) / tracked_run.name
    if folder.exists():
        # TensorBoard would draw the points of both.
        raise ConfigError(f"{str(folder)!r} exists: delete it, or name another folder")
    settings = {**tracked_run.parameters, **tracked_run.tags}
    try:
        with SummaryWriter(str(folder)) as writer:
            for metric in tracked_run.metrics:
                writer.add_scalar(metric.name, metric.value, metric.round)
            # Four spaces make it code, which is shown as it is.
            lines = (f"    {name} = {' '.join(value.split())}" for name, value in settings.items())
            writer.add_text("settings", "\n".join(lines))
    except OSError as error:
        raise FedleakError(f"{str(folder)!r} cannot be written: {error.strerror}") from error
    return folder


def tracked(run: Run) -> Tracked:
    """Returns what a tracker receives of a scored run.

    Raises:
        ConfigError: This is no run directory.
        FedleakError: It was not scored, or a file is damaged.
    """
    experiment, summary = stored(run), run.read_document(SUMMARY)
    rows, ledger = scored_rows(run), run.rows(LEDGER)
    settings = experiment.model_dump(mode="json", exclude_none=True)
    metrics = [
        *(
            Metric(("utility", name), row.round, value)
            for row in run.rows(UTILITY)
            for name, value in row.figures.items()
            if value is not None
        ),
        *_epsilons(ledger),
        *_alarms(summary),
        *_published(summary),
        *_leakage(rows, summary),
        *_totals(summary, experiment.federation.rounds),
    ]
    return Tracked(
        name=experiment.name,
        parameters={
            _safe(key)[:LONGEST_NAME]: value[:LONGEST_VALUE] for key, value in _flat(settings)
        },
        metrics=metrics,
        tags=_tags(run.info(), summary),
    )


def _alarms(summary: RunSummary) -> Iterator[Metric]:
    """Yields how many clients warned by each detector, and how many refused, in each round."""
    if (detections := summary.detections) is None:
        return
    for detector in detections.detectors:
        for round, clients in detector.alarms.items():
            yield Metric(("alarms", detector.detector), round, len(clients))
    for round, clients in detections.refused.items():
        yield Metric(("refused",), round, len(clients))


def _published(summary: RunSummary) -> Iterator[Metric]:
    """Yields what each published model gives away of planted secrets."""
    for row in summary.published.figures if summary.published else ():
        for after in row.rounds:
            parts = ("published", row.measure, f"{row.count}_times", row.by)
            yield Metric(parts, after.round, after.figure.mean)


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields the settings by dotted key; tables in a list by their number."""
    if isinstance(value, list) and any(isinstance(element, dict) for element in value):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value)


def _safe(text: str) -> str:
    """Returns a name that trackers accept and that is no path to another place.

    >>> _safe("lamp+lengths"), _safe("../x"), _safe("..")
    ('lamp:lengths', '.._x', '_')
    """
    safe = re.sub(r"[^A-Za-z0-9_.:-]", "_", text.replace("+", ":"))
    return "_" if safe in ("", ".", "..") else safe


def _epsilons(ledger: Sequence[LedgerRow]) -> Iterator[Metric]:
    """Yields the largest epsilon of any client after each round, unless a client has none."""
    of_client: dict[int, float | None] = {}
    for round, of_round in sorted(grouped(ledger, lambda row: row.round).items()):
        for client, own in grouped(of_round, lambda row: row.client).items():
            epsilons = [row.epsilon for row in own]
            # Several statements about one client all hold, so the smallest counts.
            of_client[client] = None if NONE in epsilons else min(map(float, epsilons))
        largest = [epsilon for epsilon in of_client.values() if epsilon is not None]
        if len(largest) == len(of_client):
            yield Metric(("privacy", "epsilon"), round, max(largest))


def _leakage(rows: Sequence[LeakageRow], summary: RunSummary) -> Iterator[Metric]:
    """Yields what attacks read in each round, with the controls, and what all read together."""
    of_attack = grouped(rows, lambda row: row.attack)
    for name, attack_rows in of_attack.items():
        yield from _by_round(("attack", name), attack_rows)
        for control in CONTROLS:
            values = ((row.round, getattr(row, control)) for row in attack_rows)
            yield from _means(("attack", name, control), values)
    most = set(summary.ladder.top.attacks.values()) if summary.ladder else of_attack.keys()
    yield from _by_round(("any_attack",), [row for row in rows if row.attack in most])


def _by_round(parts: tuple[str, ...], rows: Sequence[LeakageRow]) -> Iterator[Metric]:
    """Yields, by round, the mean over texts of the best score of these rows."""
    for figure in FIGURES:
        best_scores = best(rows, figure)
        scores = ((text.key.round, score) for text, score in best_scores.items())
        yield from _means((*parts, figure), scores)


def _means(parts: tuple[str, ...], values: Iterable[tuple[int, float | None]]) -> Iterator[Metric]:
    """Yields the mean of each round that has values; None is no value."""
    measured = ((round, value) for round, value in values if value is not None)
    for round, of_round in sorted(grouped(measured, lambda pair: pair[0]).items()):
        yield Metric(parts, round, sum(value for _, value in of_round) / len(of_round))


def _totals(summary: RunSummary, last: int) -> Iterator[Metric]:
    """Yields the figures of the summary with both ends of their intervals, after the last round."""
    of_all: dict[tuple[str, ...], AttackSummary | WorstCase] = {
        ("attack", name): attack_summary for name, attack_summary in summary.attacks.items()
    }
    if summary.worst_case is not None:
        of_all["any_attack",] = summary.worst_case
    for parts, figures in of_all.items():
        for figure in ("exact_match", "rougeL", "token_recall", "personal_data"):
            estimate: Estimate | None = getattr(figures, figure)
            for end, value in flat(estimate.model_dump() if estimate else {}):
                if value is not None:
                    yield Metric(("total", *parts, figure, *end.split(".")), last, value)


def _tags(info: Mapping[str, Any], summary: RunSummary) -> dict[str, str]:
    """Returns what is known of a run beside settings and figures."""
    held, worst = summary.privacy, summary.worst_case
    tags = {
        "fedleak.version": summary.fedleak,
        "fedleak.commit": info.get("git_commit"),
        "fedleak.fingerprint": info["fingerprint"],
        "fedleak.weights": summary.model_fingerprint,
        "fedleak.status": summary.status,
        "fedleak.malicious_server": summary.server,
        "fedleak.missing": len(summary.missing) or None,
        "fedleak.epsilon": held and held.epsilon,
        "fedleak.delta": held and held.delta,
        "fedleak.warning": worst and worst.warning,
        "fedleak.told": summary.ladder and summary.ladder.top.granted_in_words,
    }
    return {name: str(value) for name, value in tags.items() if value is not None}
