"""What can be read when the clients of somebody else's app train as such apps do?

    python experiments/own_flower_app/measure.py MODEL [--attacks KIND...] [--seconds S]

Trains the app in this folder, tapped, in one process; imports each tap, attacks and scores it, and
prints a row for each way of training: a table of docs/own-flower-app.md.
"""

import argparse
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import tomli_w
from flwr.app import Context, RecordDict
from own_app import client_app, server_app

from fedleak.attacks.reconstruction import Status
from fedleak.audit import scoring
from fedleak.config.federation.lookup import stored
from fedleak.flower.inline import NODE_ID, RUN_ID, InlineGrid
from fedleak.running.dispatch.dispatcher import attack_captures
from fedleak.store.records import LeakageRow
from fedleak.tap.about import load_about
from fedleak.tap.folder import Tapped
from fedleak.tap.importing import import_run

PLAIN: dict[str, Any] = {
    "rounds": 1,
    "texts": 2,
    "batch-size": 2,
    "epochs": 1,
    "accumulate": 1,
    "optimiser": "sgd",
    "lr": 1.0,
    "weight-decay": 0.0,
    "schedule": False,
    "dropout": False,
    "precision": "float32",
}


class Way(NamedTuple):
    """A way of training: what it is called, and what it changes of `PLAIN`."""

    name: str
    changes: dict[str, Any]


ADAMW = {"optimiser": "adamw", "lr": 5e-5, "weight-decay": 0.01}
FOUR = {"texts": 4, "batch-size": 2, "epochs": 2}
WAYS = [
    Way("SGD, learning rate 1", {}),
    Way("SGD, learning rate 0.1", {"lr": 0.1}),
    Way("SGD, learning rate 0.001", {"lr": 1e-3}),
    Way("SGD, weight decay 0.01", {"weight-decay": 0.01}),
    Way("SGD, 2 batches of 1 accumulated", {"batch-size": 1, "accumulate": 2}),
    Way("SGD, bfloat16 autocast", {"precision": "bfloat16"}),
    Way("SGD, dropout", {"dropout": True}),
    Way("SGD 0.1, 4 steps", {**FOUR, "lr": 0.1}),
    Way("SGD 0.1, 4 steps, schedule", {**FOUR, "lr": 0.1, "schedule": True}),
    Way("Adam 5e-5, 1 step", {"optimiser": "adam", "lr": 5e-5}),
    Way("AdamW 5e-5, 1 step", ADAMW),
    Way("AdamW 5e-5, 1 step, dropout", {**ADAMW, "dropout": True}),
    Way("AdamW 5e-5, 4 steps", {**ADAMW, **FOUR}),
    Way(
        "AdamW 5e-5, 4 steps, dropout, schedule",
        {**ADAMW, **FOUR, "dropout": True, "schedule": True},
    ),
]


def rows_of(
    way: Way, model: str, kinds: Sequence[str], clients: int, seconds: float, folder: Path
) -> list[LeakageRow]:
    """Trains, imports, attacks and scores."""
    config = PLAIN | way.changes
    truth, mine = folder / "truth.jsonl", folder / "mine"
    context: dict[str, Any] = {**config, "model": model, "truth": str(truth), "tapped": str(mine)}
    grid = InlineGrid(client_app.app, clients, context)
    server_app.app(grid, Context(RUN_ID, NODE_ID, {}, RecordDict(), context))  # type: ignore[arg-type]
    about = {
        "model": {"name": model},
        "training": {
            "optimiser": config["optimiser"],
            "learning_rate": config["lr"] * (0.55 if config["schedule"] else 1),
            "weight_decay": config["weight-decay"],
            "batch_size": config["batch-size"],
            "accumulate": config["accumulate"],
            "local_epochs": config["epochs"],
            "dropout": config["dropout"],
        },
        "truth": {"file": str(truth)},
        "attack": [{"kind": kind, "seconds": seconds} for kind in kinds],
    }
    (folder / "about.toml").write_text(tomli_w.dumps(about))
    run = import_run(Tapped(mine), load_about(folder / "about.toml"), folder / "run").run
    with run.lock():
        attack_captures(run, stored(run), no_more=lambda: True)
        return [answer.row for answer in scoring.score_run(run)]


def cell(rows: list[LeakageRow]) -> str:
    """Returns what an attack read in all updates, in a few words."""
    read = [row for row in rows if row.status == Status.RECOVERED]
    texts = sum(row.batch_size or 0 for row in rows)
    exact = sum(text.exact or False for row in read for text in row.texts or ())
    scores = [row.rougeL or 0.0 for row in rows]
    proved = sum(row.verified for row in rows)
    words = f"{exact}/{texts}, {sum(scores) / len(scores):.0f}"
    return words + f", {proved} proved" * bool(proved)


def tokens(rows: list[LeakageRow]) -> str:
    """Returns how many of the words were found, and how many of those found are right."""
    recall = [row.token_recall or 0.0 for row in rows]
    right = [row.token_precision or 0.0 for row in rows]
    return f"{100 * sum(recall) / len(rows):.0f} %, {100 * sum(right) / len(rows):.0f} % right"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--attacks", nargs="+", default=["dager", "keyspan"])
    parser.add_argument("--only", default="", help="a part of the names of ways of training")
    parser.add_argument("--seconds", type=float, default=10.0, help="for one attack and update")
    wanted = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    names = wanted.attacks
    print("| training | words (`probes`) | " + " | ".join(f"`{name}`" for name in names) + " |")
    print("|---|---|" + "---|" * len(names))
    for way in WAYS:
        if wanted.only not in way.name:
            continue
        with TemporaryDirectory() as folder:
            rows = rows_of(way, wanted.model, names, wanted.clients, wanted.seconds, Path(folder))
        cells = [cell([row for row in rows if row.attack == name]) for name in names]
        probes = tokens([row for row in rows if row.attack == "probes"])
        print(f"| {way.name} | {probes} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
