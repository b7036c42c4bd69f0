"""A scored run as a run of MLflow, with its report."""

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from fedleak.running import reports
from fedleak.running.tracking.tracked import Tracked, tracked
from fedleak.store.run import Run
from fedleak.util.errors import ConfigError, FedleakError

EXPERIMENT = "fedleak"
"""The experiment of MLflow that runs belong to, unless MLFLOW_EXPERIMENT_NAME names another."""


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
    from mlflow.entities import Metric, Param

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    known = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if known is None else known.experiment_id
    made = client.create_run(experiment, run_name=tracked_run.name, tags=dict(tracked_run.tags))
    run_id: str = made.info.run_id
    now = int(1000 * time.time())
    try:
        parameters = [Param(*parameter) for parameter in tracked_run.parameters.items()]
        metrics = [Metric(row.name, row.value, now, row.round) for row in tracked_run.metrics]
        client.log_batch(run_id, metrics, parameters)  # in as many requests as it takes
        client.log_artifact(run_id, str(report))
    except BaseException:
        client.set_terminated(run_id, "FAILED")
        raise
    client.set_terminated(run_id)
    return run_id
