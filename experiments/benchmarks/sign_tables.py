"""What `position_marginals` reads of an encoder's whole update after one step of AdamW.

    python experiments/benchmarks/sign_tables.py --model FOLDER --texts FILE [--batch 2] [--dropout]

FILE has a text on each line. The classifier is new, with two classes.
"""

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path

import torch

from fedleak.attacks import replay
from fedleak.attacks.analytic.position_marginals import PositionMarginals
from fedleak.models import CLASSIFICATION, ModelSpec, load_parameters_, loading
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream


def main() -> None:
    """Prints a line for each client, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", required=True, type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = loading.load(ModelSpec(name=options.model, task=CLASSIFICATION, num_labels=2))
    lines = [line.strip() for line in options.texts.read_text().splitlines()]
    lines = [line for line in lines if 6 <= len(line.split()) <= 24]
    random.Random(options.seed).shuffle(lines)
    recipe = Recipe(optimiser="adamw", weight_decay=0.01)
    how = LocalTraining(
        kind=UpdateKind.DELTA,
        batch_size=options.batch,
        epochs=1,
        learning_rate=5e-5,
        dropout=options.dropout,
        recipe=recipe,
    )
    known = Knowledge(
        learning_rate=5e-5, local_steps=1, local_epochs=1, dropout=options.dropout, recipe=recipe
    )
    before = {name: value.clone() for name, value in model.parameters().items()}
    exact = proved = 0
    for client in range(options.clients):
        texts = lines[client * options.batch :][: options.batch]
        own = [tuple(ids) for ids in model.encode(texts)]
        labels = [i % 2 for i in range(options.batch)]
        update = local_update_(model, own, labels, how, seed=client)
        load_parameters_(model, before)
        tensors = {
            name: recipe.without_decay(value, before[name], 5e-5, 1)
            for name, value in update.tensors.items()
        }
        seen = Observation(
            round=1, client=0, update=replace(update, tensors=tensors), knowledge=known
        )
        begin = time.process_time()
        answer = PositionMarginals()(seen, model, rng=stream(options.seed, "attack", client))
        seconds = time.process_time() - begin
        sequences = answer.sequences or ()
        replayed = replay.replay(model, sequences, seen)
        right = len({*own} & {*sequences})
        certain = replayed is not None and replayed.verified
        exact, proved = exact + right, proved + certain
        verdict = "proved" if certain else "not proved"
        print(f"{client}: {right} of {len(own)} exact, {verdict}, {seconds:.1f} CPU-s", flush=True)
    count = options.clients
    print(f"{exact} of {count * options.batch} texts exact, {proved} of {count} updates proved")


if __name__ == "__main__":
    main()
