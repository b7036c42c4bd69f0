"""Whether the server asks for another training than it did when the client joined."""

from dataclasses import dataclass
from typing import ClassVar

from fedleak.detectors import Detector, Finding, Seen


@dataclass(frozen=True, kw_only=True)
class Settings(Detector):
    """Compares what the server asks for with the contract: what it asked for at first.

    That is all settings of the training: dropout, batch size, steps, learning rate, what is trained
    and what is sent. Any change is an alarm; a server that changes a setting by schedule has to be
    allowed to. It finds no server that asked for the worst from the start: compare the contract
    with what the federation is said to do.

    Attributes:
        may_change: Names of settings that change by agreement.
    """

    kind: ClassVar[str] = "settings"
    cost: ClassVar[str] = "nothing to speak of"
    reads: ClassVar = "settings"
    may_change: tuple[str, ...] = ()

    def __call__(self, seen: Seen) -> Finding:
        """Returns how many settings changed."""
        names = sorted((seen.settings.keys() | seen.contract.keys()) - set(self.may_change))
        changed = [
            f"{name} from {seen.contract.get(name)!r} to {seen.settings.get(name)!r}"
            for name in names
            if seen.settings.get(name) != seen.contract.get(name)
        ]
        first = f", such as {changed[0]}" if changed else ""
        return Finding(
            f"{len(changed)} of {len(names)} settings changed{first}", float(len(changed)), 0.0
        )
