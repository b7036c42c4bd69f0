"""The server: what Flower's Hugging Face example does, and one line more."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedleak.tap import tap

from .task import get_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains."""
    serve(grid, context, stock())


def stock(fraction_evaluate: float = 1.0) -> FedAvg:
    """Returns Flower's strategy."""
    return FedAvg(
        fraction_evaluate=fraction_evaluate,
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
    )


def serve(grid: Grid, context: Context, strategy: Strategy) -> None:
    """Trains with a strategy."""
    config = context.run_config
    model = get_model(str(config["model"]))
    strategy.start(
        grid=tap(grid, str(config["tapped"])),  # the one line
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(config["rounds"]),
        train_config=ConfigRecord({"lr": float(config["lr"])}),
    )
