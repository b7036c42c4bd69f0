"""Presets: what is published of how people fine-tune language models in federations."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

PresetName = Literal["flowertune", "nvflare"]

_FILE = Path(__file__).with_suffix(".toml")
PRESETS: Mapping[str, Mapping[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
"""The tables of each preset."""
