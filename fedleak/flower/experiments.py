"""Runs an experiment from Python."""

import os
from collections.abc import Mapping
from typing import Any

from fedleak.audit.gaps import refuse_gaps
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import run_folder
from fedleak.config.loading import load, parse
from fedleak.flower.engines import train
from fedleak.running import pipeline
from fedleak.running.preparation import prepare
from fedleak.running.results import Results, as_path, read_results


def run(
    experiment: str | os.PathLike[str] | Mapping[str, Any] | Experiment,
    *,
    folder: str | os.PathLike[str] | None = None,
    fresh: bool = False,
) -> Results:
    """Runs an experiment, or the rest of it: trains, captures, attacks and scores.

    Attacks run in processes of their own, so a script must call this below
    `if __name__ == "__main__":`. A notebook or a REPL need not.

    Args:
        experiment: An experiment file, or its tables as a dict; `${NAME}` in a dict stays as it is.
        folder: The run directory; left out: runs/NAME.
        fresh: Move earlier results of this name aside.

    Raises:
        ConfigError: The experiment cannot work.
        FedleakError: The run failed or is not complete; `read_results` reads what is there.
    """
    wanted = _experiment(experiment)
    path = run_folder(wanted.name) if folder is None else as_path("folder", folder)
    at = prepare(wanted, path, fresh=fresh)
    pipeline.carry_out(at, wanted, train)
    refuse_gaps(at)
    return read_results(at.path)


def _experiment(given: str | os.PathLike[str] | Mapping[str, Any] | Experiment) -> Experiment:
    if isinstance(given, Experiment):
        return given
    return parse(given) if isinstance(given, Mapping) else load(as_path("experiment", given))
