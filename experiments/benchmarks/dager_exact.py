"""How many sentences `dager` recovers exactly, and how fast, by batch size.

    python experiments/benchmarks/dager_exact.py --model MODEL --data FILE --text 3 --label 1

Prints a line per batch size: sentences recovered exactly (ids equal, one-to-one), how many
batches, and CPU seconds per batch on one thread. `--share` takes the patterns of [update] share.
"""

import argparse
import time
from collections import Counter

import torch

from fedleak import data, models, training
from fedleak.attacks.dager import Dager
from fedleak.observation import Knowledge, Observation, UpdateKind
from fedleak.streams import stream


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="builtin/bert-tiny")
    parser.add_argument("--task", default=models.CLASSIFICATION)
    parser.add_argument("--data", default="builtin/notes")
    parser.add_argument("--text")
    parser.add_argument("--label")
    parser.add_argument("--share", nargs="*")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = models.load(args.model, args.task, 2, seed=args.seed)
    for batch_size in args.batch_sizes:
        exact = total = 0
        seconds = 0.0
        corpus = data.read(
            args.data,
            split="train",
            text=_column(args.text),
            label=_column(args.label),
            samples=batch_size * args.batches,
            held_out=0,
            seed=args.seed,
        ).train
        ids = data.tokenise(corpus.texts, model.encode, limit=model.max_length, max_length=None)
        local = training.LocalTraining(UpdateKind.GRADIENT, batch_size, 1, 1e-4, False)
        for batch in range(args.batches):
            at = slice(batch * batch_size, (batch + 1) * batch_size)
            update = training.local_update_(model, ids[at], corpus.labels[at], local, seed=0)
            if args.share:
                update = training.share(update, args.share)
            seen = Observation(1, 0, update, Knowledge())
            start = time.process_time()
            answer = Dager()(seen, model, rng=stream(args.seed, "dager", batch))
            seconds += time.process_time() - start
            special = model.special_ids()
            content = [tuple(t for t in one if t not in special) for one in ids[at]]
            found = [tuple(t for t in one if t not in special) for one in answer.sequences or ()]
            exact += (Counter(content) & Counter(found[:batch_size])).total()
            total += batch_size
        print(
            f"B={batch_size:<3} exact {exact}/{total} ({exact / total:.1%})  "
            f"{seconds / args.batches:.2f} CPU seconds a batch"
        )


def _column(text: str | None) -> str | int | None:
    return int(text) if text is not None and text.isdigit() else text


if __name__ == "__main__":
    main()
