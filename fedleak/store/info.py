"""What run.json holds: every command reads it first, and it may come from anybody."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from fedleak.store.lines import Document

MOST_CLASSES = 1_000_000
"""Classes of a model: each has a name in its configuration, and a count in each batch."""

REMEDY = (
    "restore it from a copy, or start anew with `fedleak run FILE --fresh`, which keeps this "
    "folder under another name"
)

Count = Annotated[int, Field(ge=0)]

RoundName = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")]
"""A round as the key of a table."""


class Sizes(TypedDict):
    """How many examples all clients have together, and how many nobody trains on."""

    training: Count
    held_out: Count


class Begun(TypedDict):
    """The fields that run.json has from the first moment."""

    experiment: dict[str, Any]
    fingerprint: str
    status: Literal["new", "running", "interrupted", "failed", "finished"]
    num_labels: Annotated[int, Field(ge=0, le=MOST_CLASSES)]


class Info(Begun, total=False):
    """All fields of run.json, and maybe fields of another version.

    Attributes:
        begun, user, machine: When, by whom and where the run was made.
        classes: Names of the classes, which nodes with data of their own receive.
        node_examples: How many examples each client has; if data is on nodes, as its node reports.
        dropped_out: By round, the clients that were asked and whose updates are not in the sum.
        refused: By round, those among them that refused the round.
        skipped: Rounds with too few updates to sum: the model stayed as it was.
        clipping_norms: By round, the norm that clients were clipped to, if it follows from others.
        failure: Why the run failed.
        tapped, nodes: The folder of a tap, and the tap's node of each client.
        left_out: Messages of the tap that are not in the run.
        purged: When the private data was deleted.
        purge_complete: Whether no private data was left then.
        figures: The mark of the rows that a purge has left.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # type: ignore[misc]

    examples: Sizes
    classes: list[str]
    versions: dict[str, str]
    git_commit: str | None
    begun: str
    user: str | None
    machine: str
    model_fingerprint: str | None
    remarks: list[str]
    node_examples: list[Annotated[int, Field(gt=0)]]
    dropped_out: dict[str, list[Count]]
    refused: dict[RoundName, list[Count]]
    skipped: list[Count]
    clipping_norms: dict[RoundName, Annotated[float, Field(gt=0)]]
    failure: dict[str, str] | None
    tapped: str
    nodes: dict[str, str]
    left_out: list[str]
    purged: str
    purge_complete: bool
    figures: str


INFO = Document("run.json", Info, REMEDY)
