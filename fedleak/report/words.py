"""Values of an experiment file, and figures, in few words, for people."""

from collections.abc import Mapping
from typing import Any

from fedleak.store.summaries import Estimate
from fedleak.training.observation import Sight
from fedleak.util.sanitise import printable

NOT_MEASURED = "-"

ANY_ATTACK = "any attack"
"""What all attacks together are called."""


SEES: Mapping[Sight, str] = {
    "updates": "each client's update",
    "sum": "the sum of each round's updates",
    "models": "the models that the server publishes, and so how each round changed them",
}
"""What an attacker sees."""


def said(value: Any) -> str:
    """Returns a value of the file in few words, for people."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(said, value)) or "none"
    if isinstance(value, dict):
        settings = (
            f"{printable(key)}={said(setting)}" for key, setting in value.items() if key != "kind"
        )
        return " ".join([*([said(value["kind"])] if "kind" in value else []), *settings])
    return printable(str(value))


def short_key(key: str) -> str:
    """Returns what a dotted key is called where there is little room."""
    return printable(key.rpartition(".")[2].replace("_", " "))


def plain_interval(value: Estimate, scale: float) -> str:
    """Returns `mean [low, high]`, without markup."""
    mean, low, high = (f"{scale * number:.0f}" for number in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]"


def interval(value: Estimate | None, scale: float = 1) -> str:
    """Returns `mean [low, high]`."""
    if value is None:
        return NOT_MEASURED
    mean, _, rest = plain_interval(value, scale).partition(" ")
    return f"{mean} [dim]\\{rest}[/]"
