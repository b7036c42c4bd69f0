"""What `fedleak audit --defend` tried, and which defense it names: advice.json of the run."""

from enum import StrEnum

from fedleak.store.lines import Document, Record
from fedleak.store.records import Epsilon
from fedleak.store.summaries import Estimate


class Trial(StrEnum):
    """How the try of a defense ended."""

    WITHIN = "within"
    """It keeps within all limits."""
    EXCEEDED = "exceeded"
    """A limit does not hold."""
    UNTOLD = "not told"
    """Too little was measured to tell, or the run failed."""
    IMPOSSIBLE = "not possible"
    """It does not go with the setting."""
    SKIPPED = "not tried"
    """A cheaper one keeps within the limits."""


class Tried(Record):
    """A defense, and what came of it.

    Attributes:
        name: What it is, with its strength.
        free: It leaves the numbers that are sent as they are.
        trial: How it ended.
        why: The first limit or check that does not hold, or why it was not tried.
        exact: The share of texts read word for word; None: no attack says.
        utility: Of the trained model; None: not measured.
        lost: How much less useful the model is, and 0 where chance makes as much.
        epsilon: That holds for every client.
    """

    name: str
    free: bool
    trial: Trial
    why: str = ""
    exact: Estimate | None = None
    utility: float | None = None
    lost: float | None = None
    epsilon: Epsilon | None = None


class Advice(Record):
    """What was tried on the batches of a run.

    Attributes:
        limits: That had to hold, in words.
        measure: The figure that stands for utility; None: none was measured.
        utility: Of the run itself.
        held_out: Texts that it is measured on.
        rounds: After which it is measured.
        tried: In the order of cost before utility is known.
    """

    limits: str
    measure: str | None
    utility: float | None
    held_out: int
    rounds: int
    tried: tuple[Tried, ...]

    @property
    def cheapest(self) -> Tried | None:
        """The defense within the limits that loses the least utility; of equals the first."""
        within = [tried for tried in self.tried if tried.trial is Trial.WITHIN]
        return min(within, key=lambda tried: tried.lost or 0.0, default=None)


ADVICE = Document("advice.json", Advice, "delete it, and `fedleak audit --defend` makes it anew")
