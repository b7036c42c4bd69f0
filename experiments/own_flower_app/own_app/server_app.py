"""The server: what Flower's Hugging Face example does, and one line more."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedleak.tap import tap

from .task import get_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains."""
    config = context.run_config
    model = get_model(str(config["model"]))
    strategy = FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
    strategy.start(
        grid=tap(grid, str(config["tapped"])),  # the one line
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(config["rounds"]),
        train_config=ConfigRecord({"lr": float(config["lr"])}),
    )
