"""One line each for any Flower app: keep what its server receives, guard its clients, audit its DP.

For `fedleak import`, in a ServerApp:

    strategy.start(grid=tap(grid, "runs/mine"), ...)

To notice a malicious server, in a ClientApp:

    app = ClientApp(mods=[guard("guard/mine")])

To measure what its differential privacy is worth, in a ClientApp:

    app = ClientApp(mods=[fixedclipping_mod, canary_clients("canaries/mine", 64, norm=10.0)])
"""

from fedleak.tap.canaries import canary_clients
from fedleak.tap.grid import tap
from fedleak.tap.guard import guard

__all__ = ["canary_clients", "guard", "tap"]
