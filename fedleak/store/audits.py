"""What `fedleak audit` planned for a run, and what came of it: audit.json."""

from pydantic import JsonValue

from fedleak.store.lines import Document, Record


class AuditPart(Record):
    """A part of an audit, and the seconds that it was planned to take."""

    what: str
    seconds: float


class GateCheck(Record):
    """One check of the gate, how it ended, and what was found."""

    name: str
    outcome: str
    sentence: str


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


class Audit(Record):
    """An audit.

    Attributes:
        source: A mark of what was asked for.
        minutes: That it was to take at most.
        attack: The attacks, as in an experiment file.
        parts: What was planned.
        left_out: What is not part of it, and why.
        interrupted: Whether it was stopped and begun again, so that nobody knows how long it took.
        seconds: That it took; None: it is not finished.
        checks: Of the gate; none where the experiment has no limits.
        page: What it found; None: it is not finished.
    """

    source: str
    minutes: float
    attack: tuple[dict[str, JsonValue], ...]
    parts: tuple[AuditPart, ...]
    left_out: tuple[str, ...]
    interrupted: bool = False
    seconds: float | None = None
    checks: tuple[GateCheck, ...] = ()
    page: AuditPage | None = None

    @property
    def estimate(self) -> float:
        """The seconds that all parts were planned to take."""
        return sum(part.seconds for part in self.parts)


AUDIT = Document("audit.json", Audit, "delete it, and `fedleak audit` plans anew")
