"""The ServerApp that `pyproject.toml` names. The library carries it."""

from fedleak.flower.server.app import app

__all__ = ["app"]
