"""Finds the experiments that come with fedleak."""

from pathlib import Path


def shipped(name: str) -> Path:
    """Returns where an experiment or a folder of them is: in the wheel, or in the checkout.

    Args:
        name: Below `experiments`.
    """
    package = Path(__file__).parents[1]
    in_wheel = package / "experiments"
    return (in_wheel if in_wheel.exists() else package.parent / "experiments") / name
