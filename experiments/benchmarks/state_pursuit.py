"""What `state_pursuit` reads of a decoder's update, and how much of it is proved.

    python experiments/benchmarks/state_pursuit.py --model FOLDER --texts FILE \
        [--attack auto] [--rank 8 [--clip 1] | --full [--clip 1] | --defense '{kind = "sign"}'] \
        [--bfloat16] [--lora-dropout 0.05]

FILE has a text on each line. Clients make steps of AdamW on adapters, or with `--full` on all
weights, which are first trained on other texts, as in earlier rounds. With `--defense` they send
one gradient of all weights, behind that defense. Beside the tokens that are read stand those that
the answer to another client's update has of them, and beside the distinct tokens that an answer
names rightly those that it names in all.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from material import known_of, lines_of, model_of, steps_of, timed, update_of

from fedleak.attacks import certificate, clock, kinds, replay
from fedleak.config.loading import with_defense
from fedleak.defenses import TrustedAggregator
from fedleak.models import CAUSAL_LM, LanguageModel
from fedleak.models.lora import Lora
from fedleak.training.local import local_update_
from fedleak.training.observation import Observation, UpdateKind
from fedleak.training.recipe import Precision, Recipe
from fedleak.training.settings import LocalTraining
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream

EARLIER = steps_of(8, 2e-4, Recipe(optimiser="adamw"))
WARM = 160
"""Texts of earlier rounds, or of none, but for the order of the others."""


def main() -> None:
    """Prints a line for each client, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", required=True, type=Path)
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument("--rank", type=int, default=8)
    trained.add_argument("--full", action="store_true")
    trained.add_argument("--defense", help="a table, as in an experiment file")
    parser.add_argument(
        "--attack", default="state_pursuit", choices=["state_pursuit", "auto", "dager"]
    )
    parser.add_argument("--clip", type=float, help="the norm of a gradient, at most")
    parser.add_argument("--rate", type=float, help="of the step (5e-5)")
    parser.add_argument("--first", action="store_true", help="the round is the first one")
    parser.add_argument("--seconds", type=float, help="for one update")
    parser.add_argument("--words", type=int, default=6, help="of a text, at least; at most 24")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--bfloat16", action="store_true", help="autocast to it")
    parser.add_argument("--lora-dropout", type=float, default=0.0, help="of adapters' inputs")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    defense = None
    of_a_step = options.clip or options.rate is not None or options.first or options.bfloat16
    if options.defense and of_a_step:
        parser.error(
            "--clip, --rate, --first and --bfloat16 are of a step of AdamW, and --defense sends "
            "one gradient: leave them out"
        )
    if options.lora_dropout and (options.full or options.defense):
        parser.error(
            "--lora-dropout is of adapters, and --full and --defense have none: leave it out"
        )
    if options.defense:
        try:  # The kind is that of the table.
            (placed,) = with_defense("sign", (f"defense=[{options.defense}]",)).defenses
        except ConfigError as error:
            parser.error(str(error))
        defense = placed.part
        if isinstance(defense, TrustedAggregator):
            parser.error(f"{defense.kind} defends sums, and here each client is attacked alone")
    whole = options.full or defense
    dropout = options.lora_dropout
    lora = None if whole else Lora(options.rank, 2 * options.rank, dropout=dropout)
    model = model_of(options.model, CAUSAL_LM, lora=lora)
    lines = lines_of(options.texts, options.words, options.seed)
    of_client = options.batch * options.steps
    needed = WARM + options.clients * of_client
    if len(lines) < needed:
        parser.error(
            f"--texts has {len(lines)} texts of {options.words} to 24 words, and {needed} are "
            "needed: lower --words, --clients, --batch or --steps"
        )
    texts = [tuple(ids) for ids in model.encode(lines[:needed])]
    precision: Precision = "bfloat16-mixed" if options.bfloat16 else "float32"
    recipe = replace(EARLIER.recipe, max_grad_norm=options.clip, precision=precision)
    rate = 5e-5 if options.rate is None else options.rate
    how = steps_of(options.batch, rate, recipe, dropout=dropout > 0)
    if defense is None and not options.first:
        earlier = replace(EARLIER, learning_rate=2e-5) if options.full else EARLIER
        local_update_(model, texts[:WARM], [0] * WARM, earlier, seed=1)
    if defense is not None:
        how = defense.training(replace(how, kind=UpdateKind.GRADIENT, recipe=Recipe()))
    kind: Any = kinds()[options.attack]
    attack = kind() if options.seconds is None else kind(seconds=options.seconds)
    # Seconds are those of the thread, also beside other programs.
    clock.now = time.process_time
    exact = proved = 0
    own_share = other_share = 0.0
    right_tokens = named_tokens = all_tokens = 0
    before: Sequence[int] = ()
    for client in range(options.clients):
        own = texts[WARM + client * of_client :][:of_client]
        seen = sent(model, own, how)
        if defense is not None:
            blurred = defense(seen.update, rng=stream(options.seed, "defense", client))
            seen = replace(seen, update=blurred)
        answer, seconds = timed(attack, seen, model, stream(options.seed, "attack", client))
        sequences = answer.sequences or ()
        if options.attack == "dager":  # It does not see the last target.
            sequences = tuple(certificate.close(model, ids) for ids in sequences)
        replayed = None if answer.verified else replay.replay(model, sequences, seen)
        right = len({*own} & {*sequences})
        certain = answer.verified or (replayed is not None and replayed.verified)
        exact, proved = exact + right, proved + certain
        named, share = answer.tokens or (), _share(own, answer.tokens or ())
        own_share, other_share = own_share + share, other_share + _share(own, before)
        before, tokens = named, {token for ids in own for token in ids}
        right_tokens += len(tokens & {*named})
        named_tokens += len(named)
        all_tokens += len(tokens)
        likely = sequences and all(answer.diagnostics.get("likely", [False]))
        verdict = "proved" if certain else "likely" if likely else "not proved"
        line = f"{right} of {len(own)} exact, {100 * share:.0f} % of tokens, {verdict}"
        print(f"{client}: {line}, {seconds:.1f} CPU-s", flush=True)
    clients = options.clients
    print(f"{right_tokens} of {all_tokens} distinct tokens right, {named_tokens} named")
    print(
        f"{exact} of {clients * of_client} texts exact, {proved} of {clients} updates proved, "
        f"{100 * own_share / clients:.0f} % of tokens, of another update's answer "
        f"{100 * other_share / max(1, clients - 1):.0f} %"
    )


def sent(model: LanguageModel, own: Sequence[tuple[int, ...]], how: LocalTraining) -> Observation:
    """Returns the update of a client; the model stays as it is."""
    update = update_of(model, own, [0] * len(own), how, seed=3)
    return Observation(round=2, client=0, update=update, knowledge=known_of(how, len(own)))


def _share(own: Sequence[tuple[int, ...]], named: Sequence[int]) -> float:
    """Returns the share of the tokens of texts, special ones left out, that are named."""
    tokens = [token for ids in own for token in ids[1:-1]]
    return sum(token in named for token in tokens) / len(tokens)


if __name__ == "__main__":
    main()
