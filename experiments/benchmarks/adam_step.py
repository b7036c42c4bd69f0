"""What attacks read of an encoder's update, whole or of adapters, after a step of AdamW, or SGD.

    python experiments/benchmarks/adam_step.py --model FOLDER --texts FILE [--batch 4]
        [--attack auto] [--seconds 60] [--rate 5e-5] [--clip 1] [--dropout] [--rank 8] [--sgd]
        [--steps 4] [--bfloat16]

FILE has a text on each line. The classifier is new, with two classes. With `--rank` adapters are
trained, on other texts first, as in earlier rounds. Seconds are CPU time of this process. Beside
the ROUGE-L of an answer stands that of the answer to the client before, and beside the tokens that
it names rightly, those that it names in all.
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from material import known_of, lines_of, model_of, steps_of, timed, update_of
from state_pursuit import EARLIER, WARM

from fedleak.attacks import clock, kinds, replay
from fedleak.audit.answer_scores import score_sequences
from fedleak.audit.metrics.intervals import wilson
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.models.lora import Lora
from fedleak.training.local import local_update_
from fedleak.training.observation import Observation
from fedleak.training.recipe import Recipe
from fedleak.util.rng import stream


def main() -> None:
    """Prints a line for each client, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", required=True, type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--attack", default="auto", choices=["auto", "dager", "keyspan", "position_marginals"]
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for one update")
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--clip", type=float, help="the norm of a gradient, at most")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", action="store_true")
    parser.add_argument("--rank", type=int, help="of adapters (all weights)")
    parser.add_argument("--sgd", action="store_true", help="steps of SGD, each of one text")
    parser.add_argument("--steps", type=int, default=1, help="of AdamW, each of as many texts")
    parser.add_argument("--bfloat16", action="store_true", help="autocast to it")
    options = parser.parse_args()
    if options.sgd and options.steps != 1:
        parser.error("--steps are of AdamW, and --sgd makes one of each text: use --batch")
    torch.set_num_threads(1)
    lora = Lora(options.rank, 2 * options.rank) if options.rank else None
    model = model_of(options.model, CLASSIFICATION, lora=lora)
    lines = lines_of(options.texts, 6, options.seed)
    of_client = options.batch * options.steps
    needed = options.clients * of_client + (WARM if lora else 0)
    if len(lines) < needed:
        parser.error(
            f"--texts has {len(lines)} texts of 6 to 24 words, and {needed} are needed: lower "
            "--clients or --batch"
        )
    clock.now = time.process_time
    made: Any = kinds()[options.attack]
    attack = made(seconds=options.seconds)
    recipe = Recipe(
        optimiser="sgd" if options.sgd else "adamw",
        weight_decay=0.0 if options.sgd else 0.01,
        max_grad_norm=options.clip,
        precision="bfloat16-mixed" if options.bfloat16 else "float32",
    )
    size = 1 if options.sgd else options.batch
    how = steps_of(size, options.rate, recipe, dropout=options.dropout)
    known = known_of(how, of_client)
    if lora:
        warm, lines = model.encode(lines[:WARM]), lines[WARM:]
        local_update_(model, warm, [i % 2 for i in range(WARM)], EARLIER, seed=1)
    before = model.parameters()
    exact = proved = right_tokens = named_tokens = all_tokens = 0
    alike: list[tuple[float, float]] = []
    previous: Sequence[tuple[int, ...]] = ()
    for client in range(options.clients):
        texts = lines[client * of_client :][:of_client]
        own = [tuple(ids) for ids in model.encode(texts)]
        labels = [i % 2 for i in range(of_client)]
        update = update_of(model, own, labels, how, seed=client)
        tensors = {
            name: recipe.without_decay(value, before[name], options.rate, how.steps(of_client))
            for name, value in update.tensors.items()
        }
        seen = Observation(
            round=1, client=0, update=replace(update, tensors=tensors), knowledge=known
        )
        answer, seconds = timed(attack, seen, model, stream(options.seed, "attack", client))
        sequences = answer.sequences or ()
        replayed = None if answer.verified else replay.replay(model, sequences, seen)
        right = (Counter(own) & Counter(sequences)).total()
        named, tokens = {*(answer.tokens or ())}, {token for ids in own for token in ids}
        right_tokens, named_tokens = right_tokens + len(named & tokens), named_tokens + len(named)
        all_tokens += len(tokens)
        certain = answer.verified or (replayed is not None and replayed.verified)
        exact, proved = exact + right, proved + certain
        verdict = "proved" if certain else "not proved"
        rouge, other = _rouge(sequences, own, model), _rouge(previous, own, model)
        alike, previous = [*alike, (rouge, other)], sequences
        print(
            f"{client}: {right} of {len(own)} exact, {verdict}, ROUGE-L {rouge:.0f} ({other:.0f}), "
            f"{seconds:.1f} CPU-s",
            flush=True,
        )
    count, share = options.clients, wilson(exact, options.clients * of_client)
    print(f"{right_tokens} of {all_tokens} tokens right, {named_tokens} named")
    rouge, others = mean(own for own, _ in alike), [other for _, other in alike[1:]]
    print(
        f"{exact} of {count * of_client} texts exact [{100 * share.low:.0f}, "
        f"{100 * share.high:.0f}], {proved} of {count} updates proved, ROUGE-L {rouge:.0f} "
        f"(another update's {mean(others) if others else math.nan:.0f})"
    )


def _rouge(
    sequences: Sequence[tuple[int, ...]], own: Sequence[tuple[int, ...]], model: LanguageModel
) -> float:
    """Returns the mean ROUGE-L of texts in their best match."""
    texts = score_sequences(sequences, own, model).texts or ()
    return mean([text.rougeL or 0.0 for text in texts] or [0.0])


if __name__ == "__main__":
    main()
