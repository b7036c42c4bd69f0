"""How well `membership` tells who was in an update in FlowerTune's setting, beside other attacks.

    python experiments/benchmarks/membership.py [--model FOLDER] [--text cola] [--sums 1 2 4 8]

Clients fine-tune adapters (r = 32, alpha 64, dropout 0.075, of query and value projections) with
AdamW, 10 steps of 16 texts, clipping at 1 and bfloat16 autocast: an update is of 160 texts.
(`--precision float32` is 20 times as fast where the processor has no bfloat16.) Before, `--warm`
steps of 8 other texts have trained the adapters. The attacker is told nothing of a client. It is
asked about `--asked` of a client's texts and as many that are in no update, and has public texts. A
sum is of a client's update and those of the next ones; its members are the first client's. In each
of `--rounds` all clients train on the same texts again, and scores are means over rounds.

Prints a line per sum and score: the area under the ROC curve with its 95 % interval over clients,
and the share of members found where 5 % of the others are accused. Then CPU seconds.

  residual    `membership`'s first score
  calibrated  less what the mean of the other clients' updates of the round says of the same text
  FedMIA      residual, less the mean of the other updates' residuals, divided by their standard
              deviation (Zhu et al. 2024)
  LiRA        residual, less the mean of those of `--references` updates of texts that nobody else
              has, divided by their standard deviation (Carlini et al. 2022, offline)
  cosine      of a text's gradient and the update, each tensor in its own unit
  ProjRes     how much of a text's hidden states lies in the rows of the updates of A, mean over
              layers and tokens (arXiv 2604.21197; its own attack takes rows of whole weights, which
              no client of adapters sends)
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import torch
from arguments import parser_of, with_assets
from material import sentences, steps_of, update_of
from torch import Tensor

from fedleak.attacks.membership.likelihood import Public, covariance, gradients, nulls, products
from fedleak.audit.estimates import estimate
from fedleak.audit.privacy.membership import shares_won
from fedleak.models import CAUSAL_LM, LanguageModel, ModelSpec, loading, pad
from fedleak.models.lora import Lora
from fedleak.training.local import local_update_
from fedleak.training.observation import Example
from fedleak.training.recipe import Precision, Recipe

STEPS, BATCH, RATE = 10, 16, 5e-5
SIZE = STEPS * BATCH


class Federation(NamedTuple):
    """Updates, those of references, the texts of the former, and texts that are in none."""

    updates: list[dict[str, Tensor]]
    references: list[dict[str, Tensor]]
    members: list[list[tuple[int, ...]]]
    others: list[tuple[int, ...]]


def main() -> None:
    """Runs the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="a folder; left out: stories15m")
    parser.add_argument("--text", choices=["cola", "rotten_tomatoes"], default="cola")
    parser.add_argument("--tokens", type=int, default=64, help="of a text at most")
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--asked", type=int, default=80)
    parser.add_argument("--public", type=int, default=200)
    parser.add_argument("--references", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sums", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seed", type=int, default=1, help="of the order of the texts")
    parser.add_argument("--precision", default="bfloat16-mixed", choices=get_args(Precision))
    args = with_assets(parser)
    torch.set_num_threads(1)
    folder = args.model or args.assets / "models" / "stories15m"
    lora = Lora(32, 64.0, None, 0.075)
    spec = ModelSpec(name=str(folder), task=CAUSAL_LM, num_labels=1, seed=0, lora=lora)
    model = loading.load(spec)
    drawn = texts(args.assets / "data", args.text, args.seed)
    ids = [tuple(tokens[: args.tokens]) for tokens in model.encode(drawn)]
    corpus = [text for text in dict.fromkeys(ids) if len(text) > 5]
    pooled: dict[tuple[int, str], list[list[Tensor]]] = defaultdict(list)
    for number, trained in enumerate(rounds(model, corpus, args), 1):
        for score, of_clients in scored(model, trained, args).items():
            pooled[score].append(of_clients)
            means = [
                torch.stack(of_rounds).mean(0) for of_rounds in zip(*pooled[score], strict=True)
            ]
            print(f"{number} rounds  {line(*score, means, args.asked)}", flush=True)
        print(f"{time.process_time():.0f} CPU seconds", flush=True)


def texts(folder: Path, name: str, seed: int) -> list[str]:
    """Returns the texts of a corpus in an order that a seed makes."""
    corpus = sorted(set(sentences(folder, name)))
    random.Random(seed).shuffle(corpus)
    return corpus


def rounds(
    model: LanguageModel, corpus: Sequence[tuple[int, ...]], args: argparse.Namespace
) -> Iterator[Federation]:
    """Trains the clients, and yields each round with the model that they began with."""
    recipe = Recipe(optimiser="adamw", max_grad_norm=1.0, precision=args.precision)
    local = steps_of(BATCH, RATE, recipe, dropout=True)
    used = 8 * args.warm
    if used:
        before = replace(local, batch_size=8, learning_rate=2e-4)
        local_update_(model, corpus[:used], [0] * used, before, seed=99)
    members = [
        list(corpus[start : start + SIZE])
        for start in range(used, used + SIZE * args.clients, SIZE)
    ]
    others = list(corpus[used + SIZE * args.clients :])
    of_references = [others[-SIZE * (i + 1) :][:SIZE] for i in range(args.references)]
    others = others[: len(others) - SIZE * args.references]
    for number in range(args.rounds):
        updates = []
        for client, batch in enumerate([*members, *of_references]):
            seed = number * (args.clients + args.references) + client
            updates.append(dict(update_of(model, batch, [0] * SIZE, local, seed).tensors))
        references, updates = updates[args.clients :], updates[: args.clients]
        yield Federation(updates, references, members, others)
        step = mean(updates)
        for name, value in model.parameters().items():
            value.add_(step[name])


def mean(updates: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the mean of updates."""
    return {name: torch.stack([update[name] for update in updates]).mean(0) for name in updates[0]}


def scored(
    model: LanguageModel, trained: Federation, args: argparse.Namespace
) -> dict[tuple[int, str], list[Tensor]]:
    """Returns by sum and score, for each client the scores of its texts and then of others [K]."""
    names = list(trained.updates[0])
    public = [Example(text, None) for text in trained.others[: args.public]]
    known = {
        name: Public.of(rows_PX, adaptive=True)
        for name, rows_PX in gradients(model, public, names).items()
    }
    scores: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
    candidates, rows, of_others = [], [], defaultdict(list)
    for client, members in enumerate(trained.members):
        first = args.public + client * args.asked
        candidates.append([*members[: args.asked], *trained.others[first : first + args.asked]])
        rows.append(gradients(model, [Example(text, None) for text in candidates[-1]], names))
    flat = [
        {name: -value.flatten() / RATE for name, value in update.items()}
        for update in trained.updates
    ]
    for count in args.sums:
        sums = [
            mean([flat[(client + i) % args.clients] for i in range(count)])
            for client in range(args.clients)
        ]
        # Sums that have clients in common are no null.
        others = nulls(sums) if count == 1 else ({} for _ in sums)
        for client, (sent, null) in enumerate(zip(sums, others, strict=True)):
            backgrounds = covariance(known, sent, null, count * SIZE)
            ratio_K, null_K, variance_K, inner_K, square_K = products(rows[client], backgrounds)
            scores[count, "residual"].append(ratio_K / variance_K.sqrt())
            scores[count, "cosine"].append(inner_K / square_K.sqrt())
            shapes = {name: value.view_as(trained.updates[0][name]) for name, value in sent.items()}
            scores[count, "ProjRes"].append(
                projected(hidden_states(model, candidates[client]), shapes)
            )
            if count == 1:  # what this update says of texts that others were asked about
                scores[1, "calibrated"].append((ratio_K - null_K) / variance_K.sqrt())
                for other in range(args.clients):
                    if other != client:
                        ratio_K, _, variance_K, *_ = products(rows[other], backgrounds)
                        of_others[other].append(ratio_K / variance_K.sqrt())
    of_references = defaultdict(list)
    for update in trained.references if 1 in args.sums else ():
        sent = {name: -value.flatten() / RATE for name, value in update.items()}
        backgrounds = covariance(known, sent, {}, SIZE)
        for client in range(args.clients):
            ratio_K, _, variance_K, *_ = products(rows[client], backgrounds)
            of_references[client].append(ratio_K / variance_K.sqrt())
    for client, references in of_references.items():
        references_RK = torch.stack(references)
        own_K = scores[1, "residual"][client] - references_RK.mean(0)
        scores[1, "LiRA"].append(own_K / references_RK.var(0).mean().sqrt())
    for client, own_K in enumerate(scores.get((1, "residual"), ())):
        others_UK = torch.stack(of_others[client])
        scores[1, "FedMIA"].append((own_K - others_UK.mean(0)) / others_UK.std(0))
    return scores


def hidden_states(
    model: LanguageModel, texts: Sequence[tuple[int, ...]]
) -> list[tuple[Tensor, ...]]:
    """Returns of each text what enters each layer [T, D]."""
    states = []
    with torch.no_grad():
        for text in texts:
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


def line(count: int, name: str, of_clients: Sequence[Tensor], member_count: int) -> str:
    """Returns a sum and score's figures as text: of each client `member_count` texts were in."""
    areas, detected, clusters = [], [], []
    for client, scores_K in enumerate(of_clients):
        members_K, others_K = scores_K[:member_count], scores_K[member_count:]
        areas += shares_won(members_K.tolist(), others_K.tolist())
        threshold = np.quantile(others_K.numpy(), 0.95)
        detected += (members_K > threshold).double().tolist()
        clusters += [client] * len(members_K)
    area = estimate(areas, clusters, most=1.0, largest=0)
    return (
        f"sum of {count}  {name:<10} AUC {area.mean:.3f} [{area.low:.2f}, {area.high:.2f}]  "
        f"found at 5 % {np.mean(detected):.2f}  ({len(of_clients)} clients, {len(areas)} texts)"
    )


if __name__ == "__main__":
    main()
