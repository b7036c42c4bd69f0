"""What `fedleak audit` planned for a run, and what came of it: audit.json."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pydantic import JsonValue

from fedleak.store.lines import Document, Record
from fedleak.store.records import Epsilon
from fedleak.store.summaries import Estimate


class Timings(Record):
    """What a rehearsal measured, in seconds.

    Attributes:
        rehearsal: All of it.
        around: Workers that start and end, scores, and all else beside training and attacks.
        training: Training, without the updates of clients and without utility.
        update: One client's update: training, defenses, the wire and the capture.
        utility: The score of the model on the held-out texts.
        attacks, copies: Each attack, by its name, on one update, and on one undefended copy.
        late: Attacks whose time was up on an update: they take all the time that they get.
        late_copies: The same on copies.
    """

    rehearsal: float
    around: float
    training: float = 0.0
    update: float = 0.0
    utility: float = 0.0
    attacks: Mapping[str, float] = {}
    copies: Mapping[str, float] = {}
    late: tuple[str, ...] = ()
    late_copies: tuple[str, ...] = ()


class AuditPart(Record):
    """A part of an audit, and the seconds that it was planned to take."""

    what: str
    seconds: float


class Outcome(StrEnum):
    """How one check of the gate ended.

    Attributes:
        WITHIN: The limit holds, or enough was measured.
        EXCEEDED: The limit does not hold.
        UNTOLD: Too little was measured to tell.
    """

    WITHIN = "within"
    EXCEEDED = "exceeded"
    UNTOLD = "untold"


@dataclass(frozen=True)
class Check:
    """One check of the gate.

    Attributes:
        name: What is checked: a limit, such as `exact`, or what has to be measured for the limits.
        outcome: How it ended.
        sentence: What was found, in one line.
    """

    name: str
    outcome: Outcome
    sentence: str

    @property
    def passed(self) -> bool:
        """Whether the gate may open, as far as this check goes."""
        return self.outcome is Outcome.WITHIN


class AuditPage(Record):
    """What an audit found: the verdict of the report, paragraph by paragraph.

    Attributes:
        level: What the test has shown.
        headline: The worst that was found.
        paragraphs: By their headings.
    """

    level: str
    headline: str
    paragraphs: dict[str, str]


class Trial(StrEnum):
    """How the try of a defense ended.

    Attributes:
        WITHIN: It keeps within all limits.
        EXCEEDED: A limit does not hold.
        UNTOLD: Too little was measured to tell, or the run failed.
        IMPOSSIBLE: It does not go with the setting.
        SKIPPED: A cheaper one keeps within the limits, or there was no time for it.
    """

    WITHIN = "within"
    EXCEEDED = "exceeded"
    UNTOLD = "not told"
    IMPOSSIBLE = "not possible"
    SKIPPED = "not tried"


class Tried(Record):
    """A defense, and what came of it.

    Attributes:
        name: What it is, with its strength.
        free: Whether it leaves the numbers that are sent as they are.
        trial: How it ended.
        why: The first limit or check that does not hold, or why it was not tried.
        exact: The share of texts read word for word; None: no attack says, or the try ended early.
        utility: Of the trained model; None: not measured.
        lost: How much less useful the model is; 0 if chance explains the loss.
        epsilon: The epsilon that holds for every client.
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
    """Which defenses `fedleak audit --defend` tried on the setting of a run.

    Attributes:
        limits: The limits that had to hold, in words.
        seconds: The time that an attack got for an update.
        measure: The figure that stands for utility; None: none was measured.
        utility: Of the run itself.
        trained: Whether training made the model of the run more useful, beyond chance.
        held_out: Texts that utility is measured on.
        rounds: The number of rounds after which utility is measured.
        tried: In the order of cost before utility is known.
    """

    limits: str
    seconds: float
    measure: str | None
    utility: float | None
    trained: bool
    held_out: int
    rounds: int
    tried: tuple[Tried, ...]

    @property
    def cheapest(self) -> Tried | None:
        """The defense within the limits that loses the least utility; the first of equal ones."""
        return _cheapest(row for row in self.tried if row.trial is Trial.WITHIN)

    @property
    def promising(self) -> Tried | None:
        """The same among defenses that exceed no limit, if too little was measured to tell."""
        return _cheapest(
            row for row in self.tried if row.trial is Trial.UNTOLD and row.exact is not None
        )


def _cheapest(tried: Iterable[Tried]) -> Tried | None:
    return min(tried, key=lambda row: row.lost or 0.0, default=None)


class Audit(Record):
    """An audit.

    Attributes:
        source: A mark of the experiment that is audited.
        minutes: The most minutes that it was to take.
        attack: The attacks, as in an experiment file.
        timings: What the plan was made from.
        parts: What was planned.
        left_out: What is not part of it, and why.
        interrupted: Whether it was stopped and begun again, so that nobody knows how long it took.
        seconds: How long it took; None: it is not finished.
        cut: Whether its time was up before all of it was done.
        checks: The checks of the gate; none if the experiment has no limits.
        page: What it found; None: it is not finished.
        advice: Which defenses were tried; None: none.
    """

    source: str
    minutes: float
    attack: tuple[dict[str, JsonValue], ...]
    timings: Timings
    parts: tuple[AuditPart, ...]
    left_out: tuple[str, ...]
    interrupted: bool = False
    seconds: float | None = None
    cut: bool = False
    checks: tuple[Check, ...] = ()
    page: AuditPage | None = None
    advice: Advice | None = None

    @property
    def estimate(self) -> float:
        """The seconds that all parts were planned to take."""
        return sum(part.seconds for part in self.parts)


class Rehearsal(Record):
    """A rehearsal from which no audit was planned yet.

    Attributes:
        source: A mark of what is to be audited.
        timings: What it measured.
    """

    source: str
    timings: Timings


REHEARSAL = Document("rehearsal.json", Rehearsal, "delete it, and `fedleak audit` rehearses anew")
AUDIT = Document("audit.json", Audit, "delete it, and `fedleak audit` plans anew")
