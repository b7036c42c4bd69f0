"""What canaries cost a round, and what they measure, on a BERT of MiniLM's size.

    python experiments/benchmarks/canaries.py [--part cost|bounds|utility|simulated] [--size 6x384]

  cost      CPU seconds of a client's update with DP-SGD and of the server's scores, and the most
            memory that was held, by the number of canaries, beside those without; random weights
  bounds    scores of real gradients of DP-SGD at several noise multipliers, and the lower bound on
            epsilon with 64, 256 and 1024 canaries that are in
  utility   accuracy of a small federation with and without canaries, over several seeds
  simulated how often a bound is above the truth, in many simulated audits of known mechanisms

Each line of costs is a process of its own. No files are needed.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from arguments import parser_of
from material import gradient_of
from numpy.typing import NDArray
from private_training import VOCABULARY, Case, Cost, apart, cost_of, made
from scipy.optimize import brentq
from scipy.special import ndtri
from scipy.stats import kstest

from fedleak.config.loading import parse
from fedleak.models import LanguageModel
from fedleak.running import preparation
from fedleak.store.records import UTILITY
from fedleak.training.batches import Records
from fedleak.training.local import local_update_
from fedleak.training.planted import Planted
from fedleak.training.privacy.canaries import Canaries, Floats
from fedleak.training.privacy.lower_bounds import (
    epsilon_delta_bound,
    f_dp_bound,
    gaussian_bound,
    gaussian_epsilon,
    settled_rule,
)
from fedleak.training.settings import PrivateSteps
from fedleak.training.steps import Batch
from fedleak.util.rng import stream

COUNTS = (0, 64, 256, 1024)
CANARIES, CHUNK = 128, 10_000
DELTA = 1e-5


def main() -> None:
    """Prints the tables that are asked for."""
    parser = parser_of(__doc__)
    parts = {"cost": cost, "bounds": bounds, "utility": utility, "simulated": simulated}
    parser.add_argument("--part", choices=parts, action="append")
    parser.add_argument("--size", default="6x384", help="layers x width")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=10, help="of the federation of `utility`")
    parser.add_argument("--audits", type=int, default=1_000_000, help="of `simulated`")
    args = parser.parse_args()
    layers, width = map(int, args.size.split("x"))
    case = Case("bert", layers, width, False, 8, 16)
    for part in args.part or parts:
        print("\n".join(parts[part](case, args)), flush=True)


def cost(case: Case, args: argparse.Namespace) -> Iterator[str]:
    """Yields what an update costs, by the number of canaries."""
    yield "| canaries | ms | ratio | MiB | ratio |\n|---|---|---|---|---|"
    costs = {count: apart(_cost, case, count, args.repeats) for count in COUNTS}
    for count, (seconds, mib) in costs.items():
        yield (
            f"| {count} | {1000 * seconds:.0f} | {seconds / costs[0].seconds:.2f} | {mib:.0f} | "
            f"{mib / costs[0].mib:.2f} |"
        )


def _cost(case: Case, count: int, repeats: int) -> Cost:
    """Returns the cost of one update and its scores."""
    torch.set_num_threads(1)
    model = made(case)

    def work() -> None:
        canaries, _, update = _update(model, case, count, 1.0, seed=0)
        if canaries is not None:
            canaries.score(update)

    return cost_of(work, repeats)


def _update(
    model: LanguageModel, case: Case, count: int, noise: float, seed: int
) -> tuple[Canaries | None, torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the canaries, who is in, and a FedSGD update with DP-SGD."""
    rng = stream(seed, "benchmark")
    ids = torch.randint(VOCABULARY, (case.batch, case.tokens), generator=rng).tolist()
    coins_K = torch.rand(count, generator=rng) < 0.5
    canaries = planted = None
    if count:
        sizes = {name: value.numel() for name, value in model.parameters().items()}
        canaries = Canaries(sizes, count, seed)
        everyone_K = torch.ones(count, dtype=torch.bool)
        dummies = Batch([ids[0], ids[-1]], [0, 1])
        records = Records(case.batch, count, False)
        planted = Planted(canaries, coins_K, dummies, (10.0, 3.0), records, everyone_K)
    local = replace(gradient_of(case.batch), private=PrivateSteps(noise, 1.0, "fixed"))
    labels = [i % 2 for i in range(case.batch)]
    update = local_update_(model, ids, labels, local, seed=seed, planted=planted)
    return canaries, coins_K, dict(update.tensors)


def bounds(case: Case, args: argparse.Namespace) -> Iterator[str]:
    """Yields scores of real gradients, and medians of bounds over groups of canaries."""
    torch.set_num_threads(1)
    model = made(case)
    yield (
        "| sigma | true epsilon | mean in x sigma | sd in | mean out | sd out | KS p, out | "
        "64 in | 256 in | 1024 in |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for sigma in (0.5, 1.0, 2.0, 4.0):
        inside: list[float] = []
        outside: list[float] = []
        for seed in range(2 * args.repeats):
            # Other seeds for each sigma: so their errors are independent.
            canaries, coins_K, update = _update(model, case, 1024, sigma, int(1000 * sigma) + seed)
            assert canaries is not None
            scores_K = canaries.score(update)
            inside += scores_K[coins_K.numpy()].tolist()
            outside += scores_K[~coins_K.numpy()].tolist()
        medians = []
        for size in (64, 256, 1024):
            groups = [inside[at : at + size] for at in range(0, len(inside) - size + 1, size)]
            group_bounds = [gaussian_bound(group, 0.05, DELTA) for group in groups]
            medians.append(f"{statistics.median(group_bounds):.2f}")
        yield (
            f"| {sigma:g} | {gaussian_epsilon(1 / sigma, DELTA):.2f} | "
            f"{sigma * statistics.mean(inside):.3f} | {statistics.stdev(inside):.3f} | "
            f"{statistics.mean(outside):.3f} | {statistics.stdev(outside):.3f} | "
            f"{kstest(outside, 'norm').pvalue:.2f} | {' | '.join(medians)} |"
        )


def utility(case: Case, args: argparse.Namespace) -> Iterator[str]:
    """Yields the loss and the accuracy on held-out texts with and without canaries."""
    from fedleak.flower.engines import train  # it takes seconds to import

    figures: dict[int, list[tuple[float, float]]] = {0: [], 64: []}
    for count, pairs in figures.items():
        for seed in range(args.seeds):
            table = {
                "name": "utility",
                "seed": seed,
                "model": {"name": "builtin/bert-tiny"},
                "data": {"name": "builtin/notes", "samples": 64, "held_out": 200},
                "federation": {"rounds": 4, "batch_size": 8, "learning_rate": 0.2},
                "utility": {"rounds": []},
                "defense": [{"kind": "dp_sgd", "noise_multiplier": 0.05}],
                **({"canary": {"count": count}} if count else {}),
            }
            experiment = parse(table)
            with tempfile.TemporaryDirectory() as folder:
                run = preparation.prepare(experiment, Path(folder, "run"))
                train(run, experiment, lambda: False)
                last = run.rows(UTILITY)[-1].figures
            pairs.append((float(last["loss"] or 0), float(last["accuracy"] or 0)))
    yield "| | without | with | mean difference | its standard error |\n|---|---|---|---|---|"
    for place, name in enumerate(("loss", "accuracy")):
        without, with_them = ([pair[place] for pair in figures[count]] for count in (0, 64))
        apart = [b - a for a, b in zip(without, with_them, strict=True)]
        error = statistics.stdev(apart) / math.sqrt(len(apart))
        yield (
            f"| {name} | {statistics.mean(without):.4f} | {statistics.mean(with_them):.4f} | "
            f"{statistics.mean(apart):+.1e} | {error:.1e} |"
        )


def simulated(case: Case, args: argparse.Namespace) -> Iterator[str]:
    """Yields how often each bound is above the truth, at 5 % and at 0.1 %."""
    yield (
        "| mechanism | true epsilon | Gaussian, 5 % | 0.1 % | f-DP, 5 % | 0.1 % | nothing assumed, "
        "5 % | 0.1 % |\n|---|---|---|---|---|---|---|---|"
    )
    rng = np.random.default_rng(1)
    for name, true, draw, mu in (
        ("Gaussian, noise 1", gaussian_epsilon(1.0, DELTA), _gaussian, 1.0),
        ("Gaussian, noise 1/2", gaussian_epsilon(2.0, DELTA), _gaussian, 2.0),
        ("randomised response, epsilon 1", 1.0, _randomised_response, 1.0),
    ):
        wrong = np.zeros((3, 2))
        rule = settled_rule(CANARIES, mu, two_sided=True)
        for _ in range(args.audits // CHUNK):
            scores_AK, coins_AK = draw(rng, mu)
            order_AK = np.argsort(-scores_AK, axis=1)
            inside_AK = np.take_along_axis(coins_AK, order_AK, axis=1)
            out = rule.count // 2
            right_A = inside_AK[:, : rule.count - out].sum(1) + (~inside_AK[:, -out:]).sum(1)
            inside_A = coins_AK.sum(1)
            mean_A = (scores_AK * coins_AK).sum(1) / np.maximum(inside_A, 1)
            for place, alpha in enumerate((0.05, 0.001)):
                mu_A = mean_A + ndtri(alpha) / np.sqrt(np.maximum(inside_A, 1))
                wrong[0, place] += (mu_A > gaussian_mu_of(true)).sum()
                for row, bound in ((1, f_dp_bound), (2, epsilon_delta_bound)):
                    above = [
                        bound(CANARIES, rule.count, right, alpha, DELTA) > true
                        for right in range(rule.count + 1)
                    ]
                    wrong[row, place] += np.array(above)[right_A].sum()
        cells = [f"{100 * share:.3f} %" for share in (wrong / args.audits).ravel()]
        if draw is _randomised_response:
            cells[:4] = ["-"] * 4  # they assume another mechanism
        yield f"| {name} | {true:.2f} | {' | '.join(cells)} |"


def gaussian_mu_of(epsilon: float) -> float:
    """Returns the mu of a Gaussian mechanism of this epsilon."""
    return float(brentq(lambda mu: gaussian_epsilon(mu, DELTA) - epsilon, 0.01, 20.0))


def _gaussian(rng: np.random.Generator, mu: float) -> tuple[Floats, NDArray[np.bool_]]:
    coins_AK = rng.random((CHUNK, CANARIES)) < 0.5
    return rng.standard_normal((CHUNK, CANARIES), np.float32) + np.float32(mu) * coins_AK, coins_AK


def _randomised_response(
    rng: np.random.Generator, epsilon: float
) -> tuple[Floats, NDArray[np.bool_]]:
    """Returns answers that are right as often as pure epsilon allows: the bound's worst case."""
    coins_AK = rng.random((CHUNK, CANARIES)) < 0.5
    right_AK = rng.random((CHUNK, CANARIES)) < 1 / (1 + math.exp(-epsilon))
    answers_AK = np.where(coins_AK == right_AK, 1.0, -1.0)
    return answers_AK + 1e-3 * rng.random((CHUNK, CANARIES)), coins_AK


if __name__ == "__main__":
    main()
