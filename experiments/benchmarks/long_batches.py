"""How much of batches of long texts `query_gradients` reads, beside `keyspan` and `auto`.

    python experiments/benchmarks/long_batches.py [--sizes 4 8 16] [--batches 5] [--seconds 60]

MiniLM (6 x 384, pretrained, heads of 32) as a classifier, whole updates of one gradient without
dropout, of reviews of Rotten Tomatoes of 20 to 30 words (28 to 42 tokens) in an order that the seed
draws. No review is in two batches of a line. `auto without` is `auto` without `query_gradients`.
Nothing is told. Seconds are CPU time of this process; an attack has `--seconds` for a batch.

Prints a line per batch size and attack:

  exact      texts with equal token ids, one to one, of all texts; 95 % Wilson interval
  proved     batches that the attack proves whole
  evidence   of query_gradients: the largest of an exact text, and the smallest of another one
  seconds    CPU time of a batch, the mean and the longest
"""

import argparse
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from subspace_attacks import MINILM, load

from fedleak import data
from fedleak.attacks import clock
from fedleak.attacks.analytic.query_gradients import QueryGradients
from fedleak.attacks.auto import attack as ensemble
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.reconstruction import Reconstruction
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.audit.metrics.intervals import wilson
from fedleak.models import LanguageModel
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation, UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream

WORDS = (20, 30)


class Answer(NamedTuple):
    """How an attack did on a batch; evidence of its exact texts, and of the others."""

    exact: int
    proved: bool
    right: list[float]
    wrong: list[float]
    seconds: float


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [QueryGradients.kind, Keyspan.kind, "auto", "auto without"]
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--batches", type=int, default=5, help="of each size")
    parser.add_argument("--seconds", type=float, default=60.0, help="for a batch")
    parser.add_argument("--attacks", nargs="+", default=names, choices=names)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--assets", type=Path, default=os.environ.get("FEDLEAK_ASSETS"))
    args = parser.parse_args()
    if args.assets is None:
        parser.error("say where models and data are: --assets, or FEDLEAK_ASSETS")
    torch.set_num_threads(1)
    args.device, clock.now = "cpu", time.process_time
    model, reviews = load(MINILM, args), read_reviews(args.assets, args.seed)
    attacks: dict[str, Callable[..., Reconstruction]] = {
        QueryGradients.kind: QueryGradients(seconds=args.seconds),
        Keyspan.kind: Keyspan(seconds=args.seconds),
        "auto": Auto(seconds=args.seconds),
        "auto without": Auto(seconds=args.seconds),
    }
    print(HEADING)
    for size in args.sizes:
        observed = [
            observe(model, reviews[size * number : size * (number + 1)])
            for number in range(args.batches)
        ]
        for name in args.attacks:
            with asked_without(name == "auto without"):
                answers = [answered(attacks[name], *batch, model, args.seed) for batch in observed]
            print(line(size, name, answers), flush=True)


def read_reviews(assets: Path, seed: int) -> list[tuple[str, int]]:
    """Returns reviews with their labels in a drawn order."""
    folder = assets / "data/rotten_tomatoes"
    every = [
        (text.strip(), label)
        for label, end in ((1, "pos"), (0, "neg"))
        for text in (folder / f"rt-polarity.utf8.{end}").read_text(encoding="utf-8").splitlines()
    ]
    some = sorted(pair for pair in every if WORDS[0] <= len(pair[0].split()) <= WORDS[1])
    random.Random(seed).shuffle(some)
    return some


def observe(
    model: LanguageModel, reviews: list[tuple[str, int]]
) -> tuple[Observation, list[tuple[int, ...]]]:
    """Returns what the server sees of a client with a batch, and the batch."""
    texts, labels = zip(*reviews, strict=True)
    ids = data.tokenise(texts, model.encode, limit=model.max_length, max_length=None)
    local = LocalTraining(
        kind=UpdateKind.GRADIENT, batch_size=len(ids), epochs=1, learning_rate=1e-4, dropout=False
    )
    update = local_update_(model, ids, labels, local, seed=0)
    seen = Observation(round=1, client=0, update=update, knowledge=Knowledge(dropout=False))
    return seen, [tuple(text) for text in ids]


@contextmanager
def asked_without(left_out: bool) -> Iterator[None]:
    """Leaves `query_gradients` out of `auto` for a while, where that is wanted."""
    whole = ensemble.ENSEMBLE
    if left_out:
        ensemble.ENSEMBLE = tuple(
            member for member in whole if not isinstance(member[0], QueryGradients)
        )
    try:
        yield
    finally:
        ensemble.ENSEMBLE = whole


def answered(
    ask: Callable[..., Reconstruction],
    seen: Observation,
    batch: list[tuple[int, ...]],
    model: LanguageModel,
    seed: int,
) -> Answer:
    """Attacks an update and scores the answer."""
    begin = time.process_time()
    answer = ask(seen, model, rng=stream(seed, "attack"))
    seconds = time.process_time() - begin
    sequences = answer.sequences or ()
    pairs = [*zip(sequences, answer.evidence or (), strict=False)]
    return Answer(
        exact=(Counter(batch) & Counter(sequences)).total(),
        proved=answer.verified,
        right=[evidence for ids, evidence in pairs if ids in batch],
        wrong=[evidence for ids, evidence in pairs if ids not in batch],
        seconds=seconds,
    )


HEADING = (
    f"{'size':>4} {'attack':<16} {'exact':>9} {'interval':>10} {'proved':>7} "
    f"{'evidence':>16} {'seconds':>8} {'longest':>8}"
)


def line(size: int, name: str, answers: list[Answer]) -> str:
    """Returns the answers of an attack as text, below HEADING."""
    texts, exact = size * len(answers), sum(answer.exact for answer in answers)
    interval = wilson(exact, texts)
    seconds = [answer.seconds for answer in answers]
    proved = f"{sum(answer.proved for answer in answers)}/{len(answers)}"
    evidence = "-"
    if name == QueryGradients.kind:
        right = max((value for answer in answers for value in answer.right), default=0.0)
        wrong = min((value for answer in answers for value in answer.wrong), default=0.0)
        evidence = f"{right:.0e}" + (f", {wrong:.0e}" if wrong else "")
    bounds = f"[{100 * interval.low:.0f}, {100 * interval.high:.0f}]"
    return (
        f"{size:>4} {name:<16} {f'{exact}/{texts}':>9} {bounds:>10} {proved:>7} "
        f"{evidence:>16} {sum(seconds) / len(seconds):>8.1f} {max(seconds):>8.1f}"
    )


if __name__ == "__main__":
    main()
