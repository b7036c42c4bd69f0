"""What a proof by replay costs, right and wrong answers apart: CPU seconds of one answer.

    python experiments/benchmarks/replay.py [--models builtin/bert-tiny ...]

A client of FedAvg makes two steps of two texts. The right answer has its texts in another order;
the wrong one has other texts. Classes are not granted.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from material import known_of, model_of, steps_of

from fedleak.attacks import replay
from fedleak.data.notes import notes
from fedleak.models import CAUSAL_LM, CLASSIFICATION, LanguageModel, load_parameters_
from fedleak.training.local import local_update_
from fedleak.training.observation import Observation
from fedleak.training.recipe import Recipe

RATE: Mapping[Literal["sgd", "adamw"], float] = {"sgd": 0.05, "adamw": 1e-4}


def main() -> None:
    """Prints a line for each model and optimiser."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["builtin/bert-tiny", "builtin/llama-tiny"])
    parser.add_argument("--texts", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model, optimiser | a step | right answer | wrong answer |\n|---|---|---|---|")
    for name in options.models:
        task = CAUSAL_LM if "llama" in name or "stories" in name else CLASSIFICATION
        model = model_of(name, task)
        ids = [tuple(ids) for ids in model.encode([n.text for n in notes(2 * options.texts, 5)])]
        own, others = ids[: options.texts], ids[options.texts :]
        for optimiser, rate in RATE.items():
            print(f"| {name}, {optimiser} | {_line(model, own, others, optimiser, rate)} |")


def _line(
    model: LanguageModel,
    own: Sequence[tuple[int, ...]],
    others: Sequence[tuple[int, ...]],
    optimiser: Literal["sgd", "adamw"],
    rate: float,
) -> str:
    how = steps_of(2, rate, Recipe(optimiser=optimiser))
    before = {name: value.clone() for name, value in model.parameters().items()}
    begin = time.process_time()
    update = local_update_(model, own, [i % 2 for i in range(len(own))], how, seed=3)
    step = (time.process_time() - begin) / how.steps(len(own))
    load_parameters_(model, before)
    seen = Observation(round=1, client=0, update=update, knowledge=known_of(how, len(own)))
    cells = [f"{step:.2f} s"]
    for answer in (own[::-1], others):
        begin = time.process_time()
        replayed = replay.replay(model, answer, seen)
        proved = "proved" if replayed is not None and replayed.verified else "not proved"
        cells.append(f"{time.process_time() - begin:.1f} s, {proved}")
    return " | ".join(cells)


if __name__ == "__main__":
    main()
