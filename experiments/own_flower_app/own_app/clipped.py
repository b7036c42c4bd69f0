"""The same app with Flower's differential privacy: clients clip, the server adds noise to the sum.

In pyproject.toml: `serverapp = "own_app.clipped:server"`, `clientapp = "own_app.clipped:client"`.
"""

from flwr.app import Context
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping

from . import client_app, server_app

CLIPPING_NORM, NOISE_MULTIPLIER = 0.01, 1.0

client = client_app.make([fixedclipping_mod])
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Trains."""
    clients = len(list(grid.get_node_ids()))
    strategy = DifferentialPrivacyClientSideFixedClipping(
        server_app.stock(fraction_evaluate=0.0),  # Flower's mod refuses to evaluate
        noise_multiplier=NOISE_MULTIPLIER,
        clipping_norm=CLIPPING_NORM,
        num_sampled_clients=clients,
    )
    server_app.serve(grid, context, strategy)
