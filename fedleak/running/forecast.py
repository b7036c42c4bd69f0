"""How much disk a run takes, computed exactly, and words for sizes and times."""

import shutil
from collections.abc import Callable
from pathlib import Path

from fedleak.config.experiment import Experiment
from fedleak.config.federation.schedule import expected_captures, rounds_attacked
from fedleak.config.sent_parameters import selected_parameters, sent_by
from fedleak.config.stored_parameters import stored_parameters
from fedleak.models import LanguageModel
from fedleak.store.run import EVERYONE, Run
from fedleak.util.errors import ConfigError

WORTH_SAYING_BYTES = 10**9
WORTH_SAYING_SECONDS = 600.0

_FLOAT = 4
"""Bytes of a number; a defense that casts sends fewer."""

_MOMENTS = 2
"""Moments of Adam; each is as large as the model."""


def bytes_kept(experiment: Experiment, model: LanguageModel) -> int:
    """Returns the most bytes that the captures and models of a run take at any time.

    A capture on which an attack failed stays, whatever `audit.keep` says, and does not count here.

    Args:
        experiment: The run.
        model: With its parameters' names and shapes; no weights are needed.
    """
    stored, of_model = _sizes(experiment, model)
    attacked, last = rounds_attacked(experiment), experiment.federation.rounds + 1
    published = range(1, last) if experiment.published is not None else attacked
    models = 2 + len({*published} - {1, last})
    if experiment.server_optimiser.kind == "adam":
        models += _MOMENTS * len(attacked - {1})
    models += sum(experiment.mode_in(round) is not None for round in attacked)
    kept = [stored(key.client) for key in expected_captures(experiment)]
    if experiment.audit.keep == "none" and experiment.audit.waiting is not None:
        kept = sorted(kept)[-experiment.audit.waiting :]
    return sum(kept) + models * of_model


def bytes_there(experiment: Experiment, model: LanguageModel, run: Run) -> int:
    """Returns the bytes that a run has already, counted as `bytes_kept` counts."""
    stored, of_model = _sizes(experiment, model)
    here = run.captures.stored()
    captures = [key for key in expected_captures(experiment) if key in here]
    models = len(run.models.rounds()) + len(run.sent_models.rounds())
    models += _MOMENTS * len(run.moments.rounds())
    return sum(stored(key.client) for key in captures) + models * of_model


def _sizes(experiment: Experiment, model: LanguageModel) -> tuple[Callable[[int], int], int]:
    """Returns a function from a client to the bytes of its capture, and the bytes of the model."""
    sizes = {name: _FLOAT * p.numel() for name, p in model.trained().items()}
    of_frozen: dict[tuple[str, ...] | None, int] = {}

    def stored(client: int) -> int:
        everyone = client == EVERYONE
        frozen = None if everyone else tuple(experiment.local_training_of(client).frozen)
        if frozen not in of_frozen:
            if everyone:
                sent = frozenset(selected_parameters(experiment, model))
            else:
                sent = sent_by(experiment, client, model)
            names = stored_parameters(experiment, sent, model)
            of_frozen[frozen] = sum(sizes[name] for name in names)
        return of_frozen[frozen]

    return stored, sum(sizes.values())


def refuse_full_disk(needed: int, path: Path, there: int = 0) -> None:
    """Refuses a run whose captures and models do not fit.

    Args:
        needed: Bytes of all of them.
        path: The run directory.
        there: Bytes of those that it has already.

    Raises:
        ConfigError: There is less free.
    """
    free = _free(path)
    if (missing := needed - there - free) > 0:
        raise ConfigError(
            f"{str(path)!r} needs {size(needed - there)} for captures and models, but only "
            f"{size(free)} are free, {missing:,} bytes too few: keep fewer (threat.rounds, "
            "threat.clients, audit.keep with audit.waiting, audit.store), share less "
            "(update.share), or free some"
        )


def disk(needed: int, path: Path) -> str | None:
    """Returns how much disk a run takes, in a line; None if it is too little to mention."""
    if needed < WORTH_SAYING_BYTES:
        return None
    return f"captures and models take up to {size(needed)}; {size(_free(path))} are free"


def duration(seconds: float) -> str:
    """Returns a time in one unit, for people."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def size(bytes: int) -> str:
    """Returns a number of bytes in one unit, for people."""
    for unit, length in (("TB", 10**12), ("GB", 10**9)):
        if bytes >= length:
            return f"{bytes / length:.1f} {unit}"
    return f"{bytes / 10**6:.0f} MB"


def _free(path: Path) -> int:
    """Returns the bytes that are free where a folder is, or will be."""
    there = next(folder for folder in [path, *path.absolute().parents] if folder.exists())
    return shutil.disk_usage(there).free
