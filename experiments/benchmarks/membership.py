"""How well `membership` tells who was in an update in FlowerTune's setting, beside other attacks.

    python experiments/benchmarks/membership.py [--model FOLDER] [--text cola] [--sums 1 2 4 8]

Clients fine-tune adapters (r = 32, alpha 64, dropout 0.075, of query and value projections) with
AdamW, 10 steps of 16 texts, clipping at 1 and bfloat16 autocast: an update is of 160 texts. Before,
`--warm` steps of 8 other texts have trained the adapters. The attacker is told nothing of a client.
It is asked about `--asked` of a client's texts and as many that are in no update, and has public
texts. A sum is of a client's update and those of the next ones; its members are the first client's.

Prints a line per sum and score: the area under the ROC curve with its 95 % interval over clients,
and the share of members found where 5 % of the others are accused. Then CPU seconds.

  residual    `membership`'s first score
  cosine      of a text's gradient and the update, each tensor in its own unit
  ProjRes     how much of a text's hidden states lies in the rows of the updates of A, mean over
              layers and tokens (arXiv 2604.21197; its own attack takes rows of whole weights, which
              no client of adapters sends)
"""

import argparse
import os
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedleak.attacks.membership.likelihood import Background, Moments, gradients, products
from fedleak.audit.estimates import estimate
from fedleak.audit.privacy.membership import shares_won
from fedleak.models import CAUSAL_LM, LanguageModel, ModelSpec, loading, pad
from fedleak.models.lora import Lora
from fedleak.training.local import local_update_
from fedleak.training.observation import Example, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.settings import LocalTraining

STEPS, BATCH, RATE = 10, 16, 5e-5
SIZE = STEPS * BATCH


class Federation(NamedTuple):
    """Updates, the texts of each, and texts that are in none of them."""

    updates: list[dict[str, Tensor]]
    members: list[list[tuple[int, ...]]]
    others: list[tuple[int, ...]]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder; left out: stories15m")
    parser.add_argument("--text", choices=["cola", "rotten_tomatoes"], default="cola")
    parser.add_argument("--tokens", type=int, default=64, help="of a text at most")
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--asked", type=int, default=80)
    parser.add_argument("--public", type=int, default=200)
    parser.add_argument("--sums", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--assets", type=Path, default=os.environ.get("FEDLEAK_ASSETS"))
    args = parser.parse_args()
    if args.assets is None:
        parser.error("say where models and data are: --assets, or FEDLEAK_ASSETS")
    torch.set_num_threads(1)
    folder = args.model or args.assets / "models" / "stories15m"
    lora = Lora(32, 64.0, None, 0.075)
    spec = ModelSpec(name=str(folder), task=CAUSAL_LM, num_labels=1, seed=0, lora=lora)
    model = loading.load(spec)
    corpus = texts(args.assets / "data", args.text)
    ids = [tuple(tokens[: args.tokens]) for tokens in model.encode(corpus)]
    trained = federation(model, [text for text in dict.fromkeys(ids) if len(text) > 5], args)
    print(f"training: {time.process_time():.0f} CPU seconds", flush=True)
    begin = time.process_time()
    scores = scored(model, trained, args)
    for (count, name), of_clients in scores.items():
        print(line(count, name, of_clients), flush=True)
    print(f"attacks: {time.process_time() - begin:.0f} CPU seconds")


def texts(folder: Path, name: str) -> list[str]:
    """Returns the texts of a corpus in an order that is always the same."""
    if name == "cola":
        lines = (folder / "cola" / "in_domain_train.tsv").read_text("utf-8").splitlines()
        corpus = [row.split("\t")[3] for row in lines]
    else:
        files = sorted((folder / "rotten_tomatoes").glob("rt-polarity.utf8.*"))
        corpus = [row.strip() for file in files for row in file.read_text("utf-8").splitlines()]
    corpus = sorted(set(corpus))
    random.Random(1).shuffle(corpus)
    return corpus


def federation(
    model: LanguageModel, corpus: Sequence[tuple[int, ...]], args: argparse.Namespace
) -> Federation:
    """Trains the clients; the model then has the weights that they began with."""
    local = LocalTraining(
        kind=UpdateKind.DELTA,
        batch_size=BATCH,
        epochs=1,
        learning_rate=RATE,
        dropout=True,
        recipe=Recipe(optimiser="adamw", max_grad_norm=1.0, precision="bfloat16-mixed"),
    )
    used = 8 * args.warm
    if used:
        before = replace(local, batch_size=8, learning_rate=2e-4)
        local_update_(model, corpus[:used], [0] * used, before, seed=99)
    start = {name: value.clone() for name, value in model.parameters().items()}
    updates, members = [], []
    for client in range(args.clients):
        batch = list(corpus[used : used + SIZE])
        updates.append(dict(local_update_(model, batch, [0] * SIZE, local, seed=client).tensors))
        members.append(batch)
        used += SIZE
        with torch.no_grad():
            for name, value in model.trained().items():
                value.copy_(start[name])
    return Federation(updates, members, list(corpus[used:]))


def scored(
    model: LanguageModel, trained: Federation, args: argparse.Namespace
) -> Mapping[tuple[int, str], list[tuple[Tensor, Tensor]]]:
    """Returns by sum and score, for each client the scores of its texts and of others."""
    names = list(trained.updates[0])
    public = [Example(text, None) for text in trained.others[: args.public]]
    background = gradients(model, public, names)
    scores: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for client, members in enumerate(trained.members):
        first = args.public + client * args.asked
        asked = [*members[: args.asked], *trained.others[first : first + args.asked]]
        rows = gradients(model, [Example(text, None) for text in asked], names)
        states = hidden_states(model, asked)
        for count in args.sums:
            summed = [(client + i) % args.clients for i in range(count)]
            sent = {
                name: torch.stack([trained.updates[i][name] for i in summed]).mean(0)
                for name in names
            }
            covariance = {}
            for name in names:
                update_X, n = -sent[name].flatten() / RATE, count * SIZE
                moments = Moments.of(background[name].clone(), update_X, n, adaptive=True)
                covariance[name] = Background.of(moments, n)
            ratio_K, variance_K, inner_K, square_K = products(rows, covariance)
            of_name = {
                "residual": ratio_K / variance_K.sqrt(),
                "cosine": inner_K / square_K.sqrt(),
                "ProjRes": projected(states, sent),
            }
            for name, values_K in of_name.items():
                pair = (values_K[: args.asked], values_K[args.asked :])
                scores[count, name].append(pair)
    return scores


def hidden_states(
    model: LanguageModel, asked: Sequence[tuple[int, ...]]
) -> list[tuple[Tensor, ...]]:
    """Returns of each text what enters each layer [T, D]."""
    states = []
    with torch.no_grad():
        for text in asked:
            ids_1T, mask_1T = pad([text], model.tokenizer.pad_token_id, model.device)
            out = model.module(input_ids=ids_1T, attention_mask=mask_1T, output_hidden_states=True)
            states.append(tuple(state[0] for state in out.hidden_states[:-1]))
    return states


def projected(states: Sequence[tuple[Tensor, ...]], sent: Mapping[str, Tensor]) -> Tensor:
    """Returns minus the mean residual of each text's hidden states outside the rows of A [K]."""
    bases = {
        int(name.split(".layers.")[1].split(".")[0]): torch.linalg.qr(delta.T).Q
        for name, delta in sent.items()
        if "q_proj.lora_A" in name
    }

    def residual(layers: tuple[Tensor, ...]) -> float:
        apart = []
        for number, basis_DR in bases.items():
            unit_TD = torch.nn.functional.normalize(layers[number], dim=1)
            apart.append((unit_TD - unit_TD @ basis_DR @ basis_DR.T).norm(dim=1).mean())
        return float(torch.stack(apart).mean())

    return -torch.tensor([residual(layers) for layers in states])


def line(count: int, name: str, of_clients: Sequence[tuple[Tensor, Tensor]]) -> str:
    """Returns the figures of a sum and score as text."""
    areas, found, clusters = [], [], []
    for client, (members_K, others_K) in enumerate(of_clients):
        areas += shares_won(members_K.tolist(), others_K.tolist())
        threshold = np.quantile(others_K.numpy(), 0.95)
        found += (members_K > threshold).double().tolist()
        clusters += [client] * len(members_K)
    area = estimate(areas, clusters, most=1.0, largest=0)
    return (
        f"sum of {count}  {name:<9} AUC {area.mean:.3f} [{area.low:.2f}, {area.high:.2f}]  "
        f"found at 5 % {np.mean(found):.2f}  ({len(of_clients)} clients, {len(areas)} texts)"
    )


if __name__ == "__main__":
    main()
