"""Values of an experiment file in few words, for people."""

from typing import Any

from fedleak.sanitise import printable


def said(value: Any) -> str:
    """Returns a value of the file in few words, for people."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(said, value)) or "none"
    if isinstance(value, dict):
        settings = (
            f"{printable(key)}={said(each)}" for key, each in value.items() if key != "kind"
        )
        return " ".join([*([said(value["kind"])] if "kind" in value else []), *settings])
    return printable(str(value))


def short_key(key: str) -> str:
    """Returns what a dotted key is called where there is little room."""
    return printable(key.rpartition(".")[2].replace("_", " "))
