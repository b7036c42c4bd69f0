"""The Flower app of experiments/own_flower_app, which stands for apps of others."""

import logging
import random
import tomllib
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvg
from own_app import task

APP = Path(task.__file__).parents[1]
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]

logging.getLogger("flwr").setLevel(logging.ERROR)


class Lenient(FedAvg):
    """Takes what it knows out of replies that hold more."""

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        for reply in (reply for reply in replies if reply.has_content()):
            for name in reply.content.keys() - {"arrays", "metrics"}:
                del reply.content[name]
        return super().aggregate_train(server_round, replies)


def serve(grid, folder, rounds=1, strategy=None):
    """Does what the app's server does, with any strategy."""
    random.seed(0)  # of which Flower draws the order of clients
    few = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    return (strategy or Lenient)(**few).start(
        grid=grid,
        initial_arrays=ArrayRecord(task.get_model(folder).state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": 0.5}),
    )


def changing(change):
    """Returns a mod that changes what training sends."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        if message.metadata.message_type == "train":
            reply.content = change(reply.content, context)
        return reply

    return mod
