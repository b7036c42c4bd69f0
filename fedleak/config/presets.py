"""Presets: what is published of how people fine-tune language models in federations."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from fedleak.util.nested import flat

PresetName = Literal["flowertune", "nvflare"]

_FILE = Path(__file__).with_suffix(".toml")
PRESETS: Mapping[str, Mapping[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
"""The tables of each preset."""


def settings(preset: str) -> Iterator[tuple[str, Any]]:
    """Yields what a preset sets, each with its dotted key."""
    yield from flat(PRESETS[preset])
