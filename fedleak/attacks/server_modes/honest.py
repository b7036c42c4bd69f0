"""The honest server: it follows the protocol."""

from dataclasses import dataclass
from typing import ClassVar

from fedleak.attacks.server_modes import ServerMode


@dataclass(frozen=True)
class Honest(ServerMode):
    """Sends every client the global model, as the protocol says."""

    kind: ClassVar[str] = "honest"

    def changes(self) -> str:
        """Returns that nothing is changed."""
        return "follows the protocol"
