"""The client: loads the weights, trains, sends the weights."""

import json
from collections.abc import Sequence
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .task import get_model, loader_of, texts_of, train


def make(mods: Sequence[Any] = ()) -> ClientApp:
    """Returns the ClientApp with mods of Flower."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        config, name = context.run_config, str(context.run_config["model"])
        model = get_model(name)
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        rows = texts_of(int(context.node_config["partition-id"]), int(config["texts"]))
        loader = loader_of(rows, name, int(config["batch-size"]))
        round_config = message.content.config_records["config"]
        loss = train(model, loader, float(str(round_config["lr"])), config)
        if config["truth"]:
            _write_truth(
                str(config["truth"]), int(str(round_config["server-round"])), context.node_id, rows
            )
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(rows)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def _write_truth(path: str, round: int, node: int, rows: Sequence[tuple[int, str]]) -> None:
    """Writes what was trained on, for an audit of one's own app: it never leaves this machine."""
    labels, texts = zip(*rows, strict=True)
    line = {"round": round, "node": node, "texts": texts, "labels": labels}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


app = make()
