"""Two lines for any Flower app: one keeps what its server receives, one guards its clients.

For `fedleak import`, in a ServerApp:

    strategy.start(grid=tap(grid, "runs/mine"), ...)

To notice a malicious server, in a ClientApp:

    app = ClientApp(mods=[guard("guard/mine")])
"""

from fedleak.tap.grid import tap
from fedleak.tap.guard import guard

__all__ = ["guard", "tap"]
