"""A federation of others in this process."""

from collections.abc import Callable
from typing import Any

import others
import pytest
from own_app import client_app

from fedleak.flower.inline import InlineGrid


@pytest.fixture(scope="session")
def folder(saved) -> str:
    """The folder of a classifier, as an app names it."""
    return saved("bert", layers=3, width=48)


@pytest.fixture
def config(folder, tmp_path) -> dict[str, Any]:
    """What `flwr run` hands the app."""
    truth, mine = tmp_path / "truth.jsonl", tmp_path / "mine"
    return {**others.DEFAULTS, "model": folder, "truth": str(truth), "tapped": str(mine)}


@pytest.fixture
def grid_of(config) -> Callable[..., InlineGrid]:
    """Makes a grid of clients in this process."""

    def make(
        grid_class: type[InlineGrid] = InlineGrid, *, clients: int = 3, mods=(), **changes: Any
    ):
        return grid_class(client_app.make(mods), clients, config | changes)

    return make


@pytest.fixture
def federate(grid_of, folder, tmp_path) -> Callable[..., Any]:
    """Trains as somebody else's app does, through a tap into the folder `mine`."""

    def run(tap, change=None, rounds=1):
        mods = [others.changing(change)] if change else []
        return others.serve(tap(grid_of(mods=mods), tmp_path / "mine"), folder, rounds)

    return run
