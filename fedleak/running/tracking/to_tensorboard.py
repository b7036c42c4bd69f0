"""A scored run as a folder of event files for TensorBoard."""

from pathlib import Path

from fedleak.running.tracking.tracked import tracked
from fedleak.store.run import Run
from fedleak.util.errors import ConfigError, FedleakError

PLACE = "tensorboard"
"""The folder of all runs, if none is named."""


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
