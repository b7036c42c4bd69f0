"""What imprinted models say of real sentences, plain and after what clients do to updates.

    python experiments/benchmarks/imprint.py [--batches 20] [--data cola] [--sizes 64]
        [--only plain] [--model stories15m] [--task causal-lm] [--kinds imprint decepticons]
        [--rank 8]

Needs FEDLEAK_ASSETS: MiniLM, or another model there, with CoLA and Rotten Tomatoes. Sentences and
batches are drawn with the seed; half of each data set is the clients', and 400 sentences of the
other half are public. A line for each setting and each kind of server mode and
attack: the shares of sentences that are read right, that are certified and right, and of tokens
that are read, with intervals over batches, the certified sentences that are wrong, the batches that
are proved, and CPU seconds for each. With --rank clients train adapters, as adapter_imprint needs.
Noise is relative to the root mean square of the whole update.
"""

import argparse
import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from material import sentences, timed, update_of
from torch import Tensor

from fedleak import attacks
from fedleak.attacks import server_modes
from fedleak.audit.metrics.intervals import clustered_mean
from fedleak.models import CLASSIFICATION, LanguageModel, ModelSpec, load_parameters_, loading
from fedleak.models.lora import Lora
from fedleak.report.words import interval
from fedleak.training.observation import Example, Knowledge, Observation, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream

ASSETS = Path(os.environ.get("FEDLEAK_ASSETS", "shared"))
PUBLIC = 400

SETTINGS: Mapping[str, Mapping[str, float]] = {
    "plain": {},
    "clipped to a norm of 0.1": {"clip": 0.1},
    "float16": {"half": 1},
    "noise 1e-5": {"noise": 1e-5},
    "noise 1e-4": {"noise": 1e-4},
    "noise 1e-3": {"noise": 1e-3},
    "one step, delta": {"steps": 1},
    "two steps, delta": {"steps": 2},
    "four steps, delta": {"steps": 4},
    "one step of AdamW": {"steps": 1, "adamw": 1},
    "four steps of AdamW": {"steps": 4, "adamw": 1},
}
"""By name what the client does."""

RATES = {"sgd": 0.05, "adamw": 1e-4}
"""Learning rates of clients."""


def shuffled(name: str) -> list[str]:
    """Returns all sentences of a data set, shuffled."""
    texts = sentences(ASSETS / "data", name)
    random.Random(0).shuffle(texts)
    return texts


def changed(tensors: Mapping[str, Tensor], change: Mapping[str, float]) -> dict[str, Tensor]:
    """Returns an update as it is sent."""
    square = math.fsum(float(value.double().square().sum()) for value in tensors.values())
    numbers = sum(value.numel() for value in tensors.values())
    factor = min(1.0, change.get("clip", math.inf) / math.sqrt(square))
    noise, rng = change.get("noise", 0.0) * math.sqrt(square / numbers), stream(0, "noise")
    sent = {}
    for name, value in tensors.items():
        other = factor * value
        if noise:
            other = other + noise * torch.randn(value.shape, generator=rng)
        sent[name] = other.half() if change.get("half") else other
    return sent


def observed(
    model: LanguageModel, texts: list[str], change: Mapping[str, float], kind: str, seed: int
) -> tuple[Observation, Counter[tuple[int, ...]]]:
    """Returns what the server sees of a client with these texts, and the texts."""
    ids = [tuple(text) for text in model.encode(texts)]
    labels = torch.randint(2, (len(ids),), generator=stream(seed, "labels")).tolist()
    steps = int(change.get("steps", 0))
    recipe = Recipe(optimiser="adamw" if change.get("adamw") else "sgd")
    local = LocalTraining(
        kind=UpdateKind.DELTA if steps else UpdateKind.GRADIENT,
        batch_size=math.ceil(len(ids) / max(steps, 1)),
        epochs=1,
        learning_rate=RATES[recipe.optimiser],
        dropout=False,
        recipe=recipe,
    )
    update = update_of(model, ids, labels, local, seed)
    known = Knowledge(
        learning_rate=local.learning_rate,
        local_steps=max(steps, 1),
        dropout=False,
        recipe=recipe,
        server_mode=kind,
    )
    sent = replace(update, tensors=changed(update.tensors, change))
    return Observation(round=1, client=0, update=sent, knowledge=known), Counter(ids)


def row(spec: ModelSpec, kind: str, name: str, size: int, setting: str, batches: int) -> str:
    """Returns a line of the table."""
    texts = shuffled(name)
    half = len(texts) // 2
    model = loading.load(spec)
    public = [Example(tuple(ids), 0) for ids in model.encode(texts[half : half + PUBLIC])]
    changes = server_modes.kinds()[kind]().broadcast(
        model, targeted=True, public=public, rng=stream(0, "server")
    )
    load_parameters_(model, {**model.parameters(), **changes})
    read, right, tokens, wrong, proved, seconds = [], [], [], 0, 0, 0.0
    for batch in range(batches):
        drawn = random.Random(batch).sample(texts[:half], size)
        seen, truth = observed(model, drawn, SETTINGS[setting], kind, batch)
        answer, taken = timed(attacks.kinds()[kind](), seen, model, stream(batch, "attack"))
        seconds += taken
        certain = Counter((answer.sequences or ())[: answer.diagnostics.get("certified", 0)])
        if answer.verified:
            certain = Counter(answer.sequences or ())
        read.append((Counter(answer.sequences or ()) & truth).total() / size)
        right.append((certain & truth).total() / size)
        bag = Counter(token for ids in truth.elements() for token in ids)
        named = Counter(token for ids in answer.sequences or () for token in ids)
        tokens.append((named & bag).total() / bag.total())
        wrong += (certain - truth).total()
        proved += answer.verified
    cells = " | ".join(
        interval(clustered_mean(values, list(range(batches)), most=1.0), 100, places=1)
        for values in (read, right, tokens)
    )
    return (
        f"| {kind} | {name} | {size} | {setting} | {batches} | {cells} | {wrong} | {proved} "
        f"| {seconds / batches:.1f} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="minilm-l6-h384")
    parser.add_argument("--task", default=CLASSIFICATION)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--data", nargs="+", default=["cola", "rotten_tomatoes"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--kinds", nargs="+", default=["imprint"])
    parser.add_argument("--rank", type=int, help="of adapters")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = str(ASSETS / "models" / options.model)
    lora = Lora(options.rank, 2.0 * options.rank) if options.rank else None
    spec = ModelSpec(name=model, task=options.task, num_labels=2, lora=lora)
    print(
        "| kind | data | texts | the client | batches | read, % | certified, % | tokens, % | wrong "
        "| proved | CPU seconds |"
    )
    print("|---" * 11 + "|")
    for name in options.data:
        for size in options.sizes:
            for setting, kind in itertools.product(options.only, options.kinds):
                print(row(spec, kind, name, size, setting, options.batches), flush=True)


if __name__ == "__main__":
    main()
