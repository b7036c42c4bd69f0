"""The texts that no client trains on, as the run directory keeps them."""

from itertools import chain

from pydantic import BaseModel, ValidationError

from fedleak.errors import FedleakError
from fedleak.store import records
from fedleak.store.run import Run


class HeldOut(BaseModel):
    """Held-out texts.

    Attributes:
        sequences: Their token ids.
        labels: Their classes; none in a run of an older version.
    """

    sequences: list[tuple[int, ...]]
    labels: list[int] = []


def read_held_out(run: Run, vocabulary: int | None = None) -> HeldOut:
    """Returns the held-out texts.

    Args:
        run: The run directory.
        vocabulary: Token ids that the model has; None: not known here.

    Raises:
        FedleakError: The file is missing or damaged.
    """
    remedy = "`fedleak run` with the experiment's file makes it anew, and nothing else is lost"
    try:
        found = HeldOut.model_validate(run.read_json("held_out.json"))
    except ValidationError as error:
        raise FedleakError(
            f"{run.path / 'held_out.json'} is damaged (it has no list of texts): {remedy}"
        ) from error
    except FedleakError as error:
        raise FedleakError(f"{error}: {remedy}") from error
    if vocabulary is not None and not records.within(chain(*found.sequences), vocabulary):
        raise FedleakError(
            f"{run.path / 'held_out.json'} is damaged (token ids outside the vocabulary): {remedy}"
        )
    return found
