"""Finds the experiment and the run directory that belong together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedleak.config.experiment import Experiment
from fedleak.config.federation.protection import aggregator_of
from fedleak.config.federation.schedule import expected_captures
from fedleak.config.loading import load, parse
from fedleak.defenses import TrustedAggregator
from fedleak.defenses.central_dp import CentralDp
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.training.observation import UpdateKind
from fedleak.util.errors import ConfigError, FedleakError, UnknownKindError


def run_folder(name: str) -> Path:
    """Returns where an experiment of this name keeps its results."""
    return Path("runs", name).absolute()


def of_app(config: Mapping[str, object]) -> tuple[Experiment, Run]:
    """Returns the experiment and the run directory that an app's run config names.

    Flower unpacks an app far from where it was started: a relative `experiment` is in the app. A
    relative `run-dir` is below the folder that the SuperLink was started in.
    """
    experiment = load(Path(__file__).parents[3] / str(config["experiment"]))
    return experiment, Run(Path(str(config["run-dir"]) or run_folder(experiment.name)).absolute())


def stored(run: Run) -> Experiment:
    """Returns the experiment of a run without `[workers]`, which may describe another machine.

    Raises:
        ConfigError: There is no run here.
        FedleakError: The run.json is damaged, or its experiment was changed afterwards.
    """
    info, file = run.info(), run.path / "run.json"
    try:
        experiment = parse({**info["experiment"], "workers": {}})
    except UnknownKindError as error:
        raise FedleakError(
            f"{file}: {error}: install the package that this kind comes from"
        ) from error
    except ConfigError as error:
        raise FedleakError(f"{file}: {error}: restore it from a copy") from error
    if experiment.fingerprint != info["fingerprint"]:
        raise FedleakError(
            f"{file}: its experiment was changed after its updates were captured (fingerprint "
            f"{experiment.fingerprint}, not {info['fingerprint']}): undo that, or run the changed "
            "experiment under another name"
        )
    sizes, clients = info.get("node_examples"), experiment.federation.clients
    if sizes is not None and len(sizes) != clients:
        raise FedleakError(
            f"{file}: node_examples has {len(sizes)} clients, and the experiment {clients}: "
            "restore it from a copy"
        )
    return experiment


class Examples(NamedTuple):
    """How many examples a run trains on, of all clients together, and how many are held out."""

    training: int
    held_out: int


def examples(run: Run) -> Examples:
    """Returns how many examples the data of a run has.

    Raises:
        ConfigError: There is no run here.
        FedleakError: The run.json is damaged.
    """
    info = run.info()
    match info.get("examples"):
        case {"training": int(training), "held_out": int(held_out)}:
            return Examples(sum(info.get("node_examples", [training])), held_out)
    raise FedleakError(
        f"{run.path / 'run.json'} does not say how many examples there are: restore it from a copy"
    )


def client_sizes(run: Run) -> Sequence[int] | None:
    """Returns how many examples each client has; None: its node has not said so yet."""
    return run.info().get("node_examples")


def most_examples(experiment: Experiment, run: Run, client: int) -> int:
    """Returns how many examples a client can have used in a round at most, whatever it reports.

    Raises:
        ConfigError: There is no run here.
        FedleakError: The run.json is damaged.
    """
    table, sizes, training = experiment.federation, client_sizes(run), examples(run).training
    if sizes is not None:
        most = sizes[client]
    elif table.partition == "iid":  # parts of equal sizes, up to one
        most = math.ceil(training / table.clients)
    else:
        most = training - table.clients + 1  # each other client has at least one
    local = experiment.local_training
    return min(local.batch_size, most) if local.kind == UpdateKind.GRADIENT else most


def note_dropped_out(
    run: Run,
    round: int,
    clients: Sequence[int],
    refused: Sequence[int] = (),
    *,
    skipped: bool = False,
) -> None:
    """Notes in run.json which of a round's clients are not in its sum.

    Args:
        run: The run directory.
        round: The round.
        clients: All of them.
        refused: Those that refused the round.
        skipped: Whether nothing was summed.
    """
    info, key = run.info(), str(round)
    out, refusing = info.get("dropped_out", {}), info.get("refused", {})
    if clients or key in out:  # noted by an attempt that was cut short
        others = [other for other in info.get("skipped", []) if other != round]
        run.update_info(
            dropped_out=out | {key: sorted(clients)},
            refused=refusing | {key: sorted(refused)},
            skipped=sorted([*others, round] if skipped else others),
        )


def dropped_out(run: Run, round: int) -> frozenset[int]:
    """Returns which of a round's clients are not in its sum."""
    return frozenset(run.info().get("dropped_out", {}).get(str(round), ()))


def aggregator_in(run: Run, experiment: Experiment, round: int) -> TrustedAggregator | None:
    """Returns the trusted aggregator of a round, with the clipping norm from earlier rounds."""
    aggregator = aggregator_of(experiment)
    noted = run.info().get("clipping_norms", {})
    latest = max((int(other) for other in noted if int(other) <= round), default=None)
    if latest is None or not isinstance(aggregator, CentralDp):
        return aggregator
    return replace(aggregator, max_norm=noted[str(latest)])


def note_aggregator(run: Run, round: int, aggregator: TrustedAggregator) -> None:
    """Notes in run.json the clipping norm of a round, which follows from the round before."""
    if isinstance(aggregator, CentralDp):
        norms = run.info().get("clipping_norms", {})
        run.update_info(clipping_norms=norms | {str(round): aggregator.max_norm})


def absent(run: Run) -> frozenset[Key]:
    """Returns keys that never get a capture: of clients that refused, of rounds without a sum."""
    info: Mapping[str, Any] = run.info() if run.exists() else {}
    out, skipped = info.get("dropped_out", {}), info.get("skipped", [])
    not_summed = {str(round): [*out.get(str(round), ()), EVERYONE] for round in skipped}
    lost = info.get("refused", {}) | not_summed
    return frozenset(
        Key(int(round), client) for round, clients in lost.items() for client in clients
    )


def captures_of(run: Run, experiment: Experiment) -> list[Key]:
    """Returns the captures of a complete run: those that are expected and not `absent`."""
    gone = absent(run)
    return [key for key in expected_captures(experiment) if key not in gone]
