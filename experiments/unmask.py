"""What 32-bit seeds of masks mean for Flower's SecAgg+: how long a search takes, and what it reads.

    python experiments/unmask.py

Flower folds each key into 32 bits for NumPy's RandomState. A client's masked numbers are its own
numbers, plus a private mask that the server takes off when the round ends, plus or minus a mask for
each other client, modulo 2^32. The server, which holds the masked numbers, tries seeds: with the
right one the numbers are small, as no others are. It prints the time of a seed on this machine and
of all of them. tests/server/test_secure_aggregation.py reads two clients of a real round so, with
seeds of fewer bits.
"""

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

MODULUS = 2**32
SMALL, TRIED = MODULUS // 16, 32
"""No number of an update is larger, and so many numbers are tried: with a wrong seed all are small
with a probability of 2^-128."""


def mask(seed: int, count: int) -> NDArray[np.int64]:
    """Returns the first numbers of a mask, as Flower draws them."""
    return np.random.RandomState(seed).randint(0, MODULUS - 1, count, dtype=np.int64)


def pair_seed(masked: NDArray[np.int64], seeds: Iterable[int]) -> int | None:
    """Returns the seed of the one mask that is left on a client's numbers.

    Args:
        masked: The client's numbers without its private mask.
        seeds: Those to try.

    Returns:
        The seed with which all numbers are small, whichever sign its mask has; None: there is none.
    """
    first, start, generator = masked[:TRIED], int(masked[0]), np.random.RandomState()
    for seed in seeds:
        generator.seed(seed)
        number = generator.randint(0, MODULUS - 1, dtype=np.int64)
        if min((start + number) % MODULUS, (start - number) % MODULUS) > SMALL:
            continue
        drawn = mask(seed, len(first))
        if any(((first + sign * drawn) % MODULUS <= SMALL).all() for sign in (1, -1)):
            return seed
    return None


def main() -> None:
    """Prints how long seeds take."""
    seeds, noise = 100_000, np.random.default_rng(0).integers(0, MODULUS, TRIED)
    start = time.process_time()
    pair_seed(noise, range(seeds))
    seed_seconds = (time.process_time() - start) / seeds
    hours = seed_seconds * MODULUS / 3600
    print(f"{1e6 * seed_seconds:.1f} microseconds of a core for a seed")
    print("| clients that do not collude | seeds to find together | work |\n|---|---|---|")
    print(f"| 2 | 1 | 2^32 seeds: {hours:.1f} core hours |")
    print(f"| 3 | 2 | two lists of 2^32, matched: {2 * hours:.1f} core hours, 64 GB |")
    print("| 4 | 3 | 2^64 pairs against a list of 2^32 |")


if __name__ == "__main__":
    main()
