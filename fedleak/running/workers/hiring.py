"""Workers for attacks, wherever an experiment wants them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from fedleak.config.tables import WorkersTable
from fedleak.running.workers.on_ray import ray_workers
from fedleak.running.workers.process import Worker, devices, workers


def hire(table: WorkersTable) -> AbstractContextManager[Sequence[Worker]]:
    """Starts workers, and ends them.

    Raises:
        FedleakError: The cluster that was asked for is not there, or has no room.
    """
    if table.engine == "ray":
        assert table.ray is not None  # the table is refused without it
        return ray_workers(table.ray, table.time_limit)
    return workers(devices(table.devices), table.time_limit)
