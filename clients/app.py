"""The ClientApp that `pyproject.toml` names. The library carries it."""

from fedleak.flower.client.app import app

__all__ = ["app"]
