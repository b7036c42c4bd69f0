"""How often intervals over clients miss the truth, by simulation.

    python experiments/benchmarks/coverage.py [--samples 2000] [--clients 2 4 6 12 20 50]

Clients are drawn from populations of equal sizes, of unequal ones, and of sizes that say something:
who has many texts is read more, or less. The largest size of the population is known to the
interval, as a run knows it of its federation. Each line has how many per cent of the intervals end
below, and begin above, the true mean over texts and over clients (2.5 is nominal), the width, and
how many say less than the truth if the largest size is only that of the clients that were drawn.

Differences are between two tries of the same attack on the same clients: how many per cent of their
intervals leave out 0 (5 is nominal), and of their sign-flip tests have a p of at most 0.05.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedleak.audit.metrics.intervals import clustered_mean, sign_flip_test

Floats = npt.NDArray[np.float64]


class Population(NamedTuple):
    """Kinds of clients.

    Attributes:
        name: What it is called.
        shares: Of each kind among clients.
        sizes: Texts of a client of each kind.
        rates: The chance that a text of such a client is read.
        alike: Texts of a client are all read or none.
    """

    name: str
    shares: Sequence[float]
    sizes: Sequence[int]
    rates: Sequence[float]
    alike: bool = False

    @property
    def of_texts(self) -> float:
        """The mean over texts."""
        texts = np.multiply(self.shares, self.sizes)
        return float(texts @ self.rates / texts.sum())

    @property
    def of_clients(self) -> float:
        """The mean over clients."""
        return float(np.dot(self.shares, self.rates))

    def drawn(self, clients: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Returns the share of each client's texts that is read, in two tries, and its size."""
        kinds = rng.choice(len(self.shares), clients, p=self.shares)
        sizes, rates = np.asarray(self.sizes)[kinds], np.asarray(self.rates)[kinds]
        tries = (2, clients)
        if self.alike:
            return (rng.random(tries) < rates).astype(float), sizes.astype(float)
        return rng.binomial(sizes, rates, tries) / sizes, sizes.astype(float)


POPULATIONS = (
    Population("equal, all or nothing", [1.0], [4], [0.3], alike=True),
    Population("equal, rare", [0.9, 0.1], [4, 4], [0.0, 1.0]),
    Population("unequal", [0.5, 0.3, 0.2], [1, 4, 16], [0.5, 0.5, 0.5], alike=True),
    Population("large ones are read", [0.8, 0.2], [1, 16], [0.1, 0.9]),
    Population("few large ones are read", [0.9, 0.1], [2, 32], [0.0, 1.0]),
    Population("large ones are not read", [0.9, 0.1], [2, 32], [1.0, 0.0]),
)

COUNTS = (2, 4, 6, 12, 20, 50)


class Misses(NamedTuple):
    """Shares of samples, and the mean width.

    Attributes:
        below, above: Intervals over texts that end below the truth, and that begin above it.
        below_of_clients, above_of_clients: The same of the mean of clients.
        width: Of the intervals over texts.
        below_unknown: As `below`, if no larger client is known than those that were drawn.
    """

    below: float
    above: float
    below_of_clients: float
    above_of_clients: float
    width: float
    below_unknown: float


class Differences(NamedTuple):
    """Shares of samples, of differences between two treatments that do the same.

    Attributes:
        apart: Intervals that leave out 0.
        rejected: Sign-flip tests with a p of at most 0.05.
    """

    apart: float
    rejected: float


def misses(population: Population, clients: int, samples: int) -> Misses:
    """Returns how often intervals miss the truth of a population."""
    rng, ids, rows = np.random.default_rng(clients), list(range(clients)), []
    truth, once, largest = population.of_texts, population.of_clients, max(population.sizes)
    for _ in range(samples):
        (read, _), sizes = population.drawn(clients, rng)
        known = clustered_mean(read.tolist(), ids, sizes.tolist(), most=1.0, largest=largest)
        of_clients = clustered_mean(read.tolist(), ids, most=1.0)
        unknown = clustered_mean(read.tolist(), ids, sizes.tolist(), most=1.0)
        rows.append(
            (
                known.high < truth,
                known.low > truth,
                of_clients.high < once,
                of_clients.low > once,
                known.high - known.low,
                unknown.high < truth,
            )
        )
    return Misses(*np.mean(rows, axis=0).tolist())


def differences(population: Population, clients: int, samples: int) -> Differences:
    """Returns how often a difference is seen where there is none."""
    rng, ids, rows = np.random.default_rng(clients), list(range(clients)), []
    for _ in range(samples):
        (read, again), sizes = population.drawn(clients, rng)
        apart = again - read
        interval = clustered_mean(
            apart.tolist(), ids, sizes.tolist(), most=1.0, least=-1.0, largest=max(population.sizes)
        )
        p = sign_flip_test((apart * sizes).tolist())
        rows.append((not interval.low <= 0 <= interval.high, p <= 0.05))
    return Differences(*np.mean(rows, axis=0).tolist())


def lines(counts: Sequence[int], samples: int) -> Iterator[str]:
    """Yields the table."""
    yield (
        "| sizes are | clients | texts: below | above | clients: below | above | width | "
        "below, sizes unknown | differences | p |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for population in POPULATIONS:
        for clients in counts:
            missed = misses(population, clients, samples)
            none = differences(population, clients, samples)
            percents = [f"{100 * share:.1f}" for share in (*missed, *none)]
            percents[4] = f"{missed.width:.2f}"
            yield f"| {population.name} | {clients} | {' | '.join(percents)} |"


def main() -> None:
    """Prints the table that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--clients", type=int, nargs="+", default=COUNTS)
    args = parser.parse_args()
    for line in lines(args.clients, args.samples):
        print(line, flush=True)


if __name__ == "__main__":
    main()
