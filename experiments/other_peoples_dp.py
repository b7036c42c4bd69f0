"""Does the differential privacy of other people's libraries do what it announces?

    python experiments/other_peoples_dp.py [--seed N]

Audits Opacus's DP-SGD, with fixed batches and with Poisson sampling, and Flower's mods: fixed and
adaptive clipping with the server's noise, and local DP. It prints a row for each: what is
announced, and lower bounds on epsilon from canaries. Rows with half the noise have a bug that is
planted here. Last it prints where Flower's adaptive clipping takes the norm, and the noise that it
adds. It takes CPU minutes.
"""

import argparse
import itertools
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    FedAvg,
    Strategy,
)
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedleak.flower.inline import InlineGrid
from fedleak.tap import canary_clients
from fedleak.tap.canaries import coins
from fedleak.training import privacy

DELTA, CLIPPING_NORM, NOISE = 1e-5, 0.5, 1.0
HEADER = "| mechanism | announced epsilon | Gaussian | f-DP | nothing assumed | contradicted |"


def main() -> None:
    """Prints the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # Flower's noise comes from here
    print(f"{HEADER}\n|---|---|---|---|---|---|")
    for row in (*opacus(), *flower()):
        print(row, flush=True)
    print(f"\n{adaptive_norm()}")


def shown(value: float | None) -> str:
    """Returns a bound in a table."""
    return "-" if value is None else f"{value:.3g}"


# --- Opacus -------------------------------------------------------------------------------------


def opacus() -> Iterator[str]:
    """Yields a row for each way of training with Opacus."""
    for poisson in (False, True):
        for noise, name in ((NOISE, ""), (NOISE / 2, ", half the noise")):
            sampling = "Poisson sampling" if poisson else "whole batches"
            findings, epsilon = opacus_run(noise, poisson)
            whole = findings.training
            bounds = map(shown, (whole.gaussian, whole.f_dp, whole.epsilon_delta))
            alarms = "; ".join(findings.alarms) or "no"
            yield (
                f"| Opacus, {sampling}, {findings.steps} steps{name} | {epsilon:.2f} | "
                f"{' | '.join(bounds)} | {alarms} |"
            )


def opacus_run(noise: float, poisson: bool, steps: int = 8) -> tuple[privacy.Findings, float]:
    """Trains with Opacus; returns what canaries find, and the epsilon that it announces."""
    audit = privacy.Audit(256, norm=10 * CLIPPING_NORM, seed=7)
    records: Any = audit.records(TensorDataset(torch.randn(256, 300), torch.randint(10, (256,))))
    model: Any = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records, batch_size=128 if poisson else len(records)),
        noise_multiplier=noise,
        max_grad_norm=CLIPPING_NORM,
        poisson_sampling=poisson,
    )
    batches = (batch for _ in range(steps) for batch in loader)
    for _, ((features, labels), canary) in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        parameters = dict(model.named_parameters())
        audit.put_({name: p.grad_sample for name, p in parameters.items()}, canary)
        optimizer.step()
        audit.score({name: p.grad for name, p in parameters.items()})
    rate = 1 / len(loader)
    epsilon = accounted(NOISE, steps, rate)
    return (
        audit.findings(epsilon=epsilon, delta=DELTA, noise_multiplier=NOISE, sampling_rate=rate),
        epsilon,
    )


# --- Flower -------------------------------------------------------------------------------------


def flower() -> Iterator[str]:
    """Yields a row for each of Flower's ways."""
    half = mock.patch(
        "flwr.serverapp.strategy.dp_fixed_clipping.compute_stdv",
        lambda noise, norm, clients: noise / 2 * norm / clients,
    )
    yield central("fixed clipping", fixedclipping_mod, fixed)
    yield central("adaptive clipping", adaptiveclipping_mod, adaptive)
    with half:
        yield central("fixed clipping, half the noise", fixedclipping_mod, fixed)
    yield local("sensitivity of the clipping norm, client left out", 1.0, signed=False)
    yield local("sensitivity of the clipping norm, client replaced", 1.0, signed=True)
    yield local("sensitivity of twice the norm, client replaced", 2.0, signed=True)


def fixed(strategy: FedAvg, clients: int) -> Strategy:
    """Returns Flower's strategy with fixed clipping."""
    return DifferentialPrivacyClientSideFixedClipping(strategy, NOISE, CLIPPING_NORM, clients)


def adaptive(strategy: FedAvg, clients: int) -> Strategy:
    """Returns Flower's strategy with adaptive clipping."""
    return DifferentialPrivacyClientSideAdaptiveClipping(strategy, NOISE, clients)


def app_of(mods: Sequence[Any], norms: Sequence[float] = ()) -> ClientApp:
    """Returns a client that moves the model by its norm; without norms it does not."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        if norms:
            moved = weights(arrays)["weight"].copy()
            moved[0] += norms[int(context.node_config["partition-id"])]
            arrays = ArrayRecord({"weight": Array(moved)})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    return app


class Watching(FedAvg):
    """FedAvg that keeps the models it sent, and the last replies."""

    def __init__(self) -> None:
        super().__init__(
            fraction_evaluate=0.0, min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1
        )
        self.models: list[dict[str, Any]] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any
    ) -> Any:
        """Keeps the model."""
        self.models.append(weights(arrays))
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """Keeps what clients sent."""
        self.replies = list(replies)
        return super().aggregate_train(server_round, self.replies)


def weights(arrays: ArrayRecord) -> dict[str, Any]:
    """Returns the arrays by name."""
    return {name: array.numpy() for name, array in arrays.items()}


def trained(
    app: ClientApp, clients: int, rounds: int, strategy: Strategy, numbers: int
) -> dict[str, Any]:
    """Trains a model of so many numbers, and returns it."""
    result = strategy.start(
        grid=InlineGrid(app, clients, {}),  # type: ignore[arg-type]
        initial_arrays=ArrayRecord({"weight": Array(np.zeros(numbers, np.float32))}),
        num_rounds=rounds,
    )
    return weights(result.arrays)


def central(
    name: str,
    clip: Any,
    wrapped: Callable[[FedAvg, int], Strategy],
    clients: int = 256,
    rounds: int = 4,
) -> str:
    """Returns the row of a noise that the server adds: what is audited is its models."""
    with tempfile.TemporaryDirectory() as folder:
        canary = canary_clients(folder, clients, norm=10 * CLIPPING_NORM, seed=7)
        strategy, app = Watching(), app_of([clip, canary])
        last = trained(app, clients, rounds, wrapped(strategy, clients), 256 * clients)
        secret = coins(folder, clients)
    models = [*strategy.models, last]
    scores = [
        directions.score({key: after[key] - before[key] for key in after})
        for step, (before, after) in enumerate(itertools.pairwise(models), start=1)
        for directions in [privacy.directions(before, clients, seed=7, step=step)]
    ]
    announced = accounted(NOISE, rounds)
    return flower_row(f"{name}, {rounds} rounds", announced, scores, secret, signed=False)


def accounted(noise: float, steps: int, rate: float = 1.0) -> float:
    """Returns the epsilon of steps, or rounds, in each of which a record is with such a rate."""
    accountant = RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    return float(accountant.get_epsilon(DELTA))


def adaptive_norm(clients: int = 256, rounds: int = 20) -> str:
    """Returns where adaptive clipping takes the norm, if clients' norms are about 1, and its noise.

    Both from updates and models alone: what clients sent were clipped to, and what the model moved
    beyond their mean.
    """
    norms = np.exp(np.random.normal(size=clients)).tolist()
    sent: list[float] = []
    noises: list[float] = []

    class Measuring(Watching):
        mean: Any = None

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            clipped = [weights(r.content.array_records["arrays"])["weight"] for r in replies]
            before = self.models[-1]["weight"]
            sent.append(max(float(np.linalg.norm(arrays - before)) for arrays in clipped))
            if len(self.models) > 1:
                noises.append(float(np.std(before - self.mean)))
            self.mean = np.mean(clipped, 0)
            return super().aggregate_train(server_round, replies)

    app = app_of([adaptiveclipping_mod], norms)
    trained(app, clients, rounds, adaptive(Measuring(), clients), 10_000)
    announced = (NOISE**-2 - (2 * clients / 20) ** -2) ** -0.5
    shares = [clients * noise / norm / announced for noise, norm in zip(noises, sent, strict=False)]
    spent = [accounted(noise, rounds) for noise in (NOISE * float(np.mean(shares)), NOISE)]
    return (
        f"Flower's adaptive clipping, {clients} clients with the median norm "
        f"{np.median(norms):.3g}: the norm goes from {sent[0]:.3g} to {sent[-1]:.3g} in {rounds} "
        f"rounds, and the noise is {np.mean(shares):.3g} of what is announced "
        f"({min(shares):.3g} to {max(shares):.3g}): an epsilon of {spent[0]:.4g} where "
        f"{spent[1]:.4g} is announced"
    )


def local(name: str, sensitivity: float, *, signed: bool, clients: int = 1024) -> str:
    """Returns the row of a noise that clients add: what is audited is their updates."""
    announced = 1.0
    mod = LocalDpMod(CLIPPING_NORM, sensitivity * CLIPPING_NORM, announced, DELTA)
    with tempfile.TemporaryDirectory() as folder:
        canary = canary_clients(folder, clients, norm=10 * CLIPPING_NORM, seed=7, signed=signed)
        strategy = Watching()
        trained(app_of([mod, canary]), clients, 1, strategy, 256 * clients)
        secret = coins(folder, clients)
    directions = privacy.directions(strategy.models[0], clients, seed=7, step=1)
    # The replies are in the order of the nodes, and these in that of the partitions.
    replies = sorted(strategy.replies, key=lambda reply: reply.metadata.src_node_id)
    scores = [
        directions.score(weights(reply.content.array_records["arrays"]))[client]
        for client, reply in enumerate(replies)
    ]
    return flower_row(f"local DP, {name}", announced, [np.array(scores)], secret, signed=signed)


def flower_row(
    name: str, announced: float, scores: Sequence[Any], secret: Any, *, signed: bool
) -> str:
    """Returns a row of the table."""
    arguments: dict[str, Any] = {"delta": DELTA, "noise_multiplier": NOISE, "signed": signed}
    row = privacy.bounds(scores, secret, **arguments)
    sure = privacy.bounds(scores, secret, **arguments, confidence=1 - 0.001 / 3)
    bounds = map(shown, (row.gaussian, row.f_dp, row.epsilon_delta))
    verdict = f"**yes**: at least {sure.largest:.3g}" if sure.largest > announced else "no"
    return f"| Flower, {name} | {announced:.2f} | {' | '.join(bounds)} | {verdict} |"


if __name__ == "__main__":
    main()
