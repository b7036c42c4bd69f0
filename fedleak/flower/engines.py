"""The engines by name: each trains an experiment through the same two apps."""

from collections.abc import Callable

from fedleak.config.experiment import Experiment
from fedleak.flower import inline, simulation
from fedleak.store.run import Run

ENGINES = {"inline": inline.train, "simulation": simulation.train}


def train(run: Run, experiment: Experiment, stop: Callable[[], bool] = lambda: False) -> None:
    """Trains `experiment` through the engine that it names.

    Args:
        run: The run directory.
        experiment: The experiment that was prepared there.
        stop: Called now and then; returns whether training is to end early.

    Raises:
        FedleakError: A client or the engine failed, or training was to stop.
    """
    ENGINES[experiment.federation.engine](run, experiment, stop)
