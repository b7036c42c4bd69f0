"""What a report shows, as values. Texts in them are as others wrote them: `render` escapes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fedleak.report.table import Table


@dataclass(frozen=True)
class Entry:
    """A word and its explanation."""

    word: str
    value: str


class Level(StrEnum):
    """What the test has shown; there is no level for "safe", which no test can show."""

    READ = "read"
    """At least one private text was read word for word, or a proof says that a batch was."""
    PARTLY = "partly"
    """No text was read word for word, but attacks answered."""
    UNKNOWN = "unknown"
    """No attack gave an answer, or none that could be compared with anything."""


@dataclass(frozen=True)
class Verdict:
    """What a reader must know.

    Attributes:
        level: What the test has shown.
        headline: The worst that was found, with the epsilon that holds.
        paragraphs: By their headings: what could be read by whom, what is guaranteed, what the
            model is worth, how sure that is, what was not measured, and what to do next.
    """

    level: Level
    headline: str
    paragraphs: tuple[Entry, ...]


@dataclass(frozen=True)
class Picture:
    """A drawing.

    Attributes:
        caption: What it shows.
        words: The same in words, for readers who cannot see it.
        drawing: SVG.
        wide: Whether it takes the width of the page.
    """

    caption: str
    words: str
    drawing: bytes
    wide: bool = False


Shown = Picture | Table
"""A part of a section, which shows its parts one below the other."""


@dataclass(frozen=True, kw_only=True)
class TextAnswer:
    """What one attack read of a private text.

    Attributes:
        attack: Its name.
        text: What it read; None: it has no answer for this text.
        rougeL: From 0 to 100; None without a text.
        tokens: The share of the text's distinct tokens that the whole answer has; None: unknown.
        exact: Whether it is right word for word.
        proved: Whether a certificate proves the whole answer of the batch.
        margin: The smallest margin of the batch, in words; None: nothing was rejected.
    """

    attack: str
    text: str | None
    rougeL: float | None
    tokens: float | None
    exact: bool
    proved: bool
    margin: str | None


@dataclass(frozen=True)
class PrivateText:
    """A private text of a client, and the answers of attacks, the best first."""

    round: int
    client: str
    truth: str
    answers: Sequence[TextAnswer]

    @property
    def best(self) -> TextAnswer:
        """The best answer."""
        return self.answers[0]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What every page has.

    Attributes:
        name: The name of the run, the sweep or the folder.
        redacted: Whether private texts, and what attacks and files say in words, are left out.
        verdict: What a reader must know.
        missing: Why the results are not complete.
    """

    name: str
    redacted: bool
    verdict: Verdict
    missing: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class RunPage(Page):
    """The report of a run.

    Attributes:
        begun: When it began.
        audit: The plan of an audit and the result of its limits; empty if there was no audit.
        notes: What else should be known.
        setting, threat: How clients train; what the attacker sees and is told.
        leakage: What was read, by round and client.
        training: Utility and epsilon, by round.
        attacks: Attacks side by side.
        ladder: What each fact is worth.
        membership: How well texts that were in updates are told from others.
        published: What the published models give away of planted secrets.
        texts: Private texts, the worst first; empty if they are left out or gone.
        texts_note: Why texts are not listed.
        defenses: What defenses do, did, and what their check found.
        canary_alarms: What canaries found that contradicts the ledger.
        ledger: The last row of each client, and what canaries measured.
        versions: What the figures depend on.
        repeat: A command.
        experiment: The experiment as TOML.
    """

    begun: str
    audit: Sequence[Table]
    notes: Sequence[str]
    setting: Sequence[Entry]
    threat: Sequence[Entry]
    leakage: Sequence[Shown]
    training: Sequence[Shown]
    attacks: Sequence[Shown]
    ladder: Sequence[Shown]
    membership: Sequence[Shown]
    published: Sequence[Table]
    texts: Sequence[PrivateText]
    texts_note: str
    defenses: Sequence[Shown]
    canary_alarms: Sequence[str]
    ledger: Sequence[Shown]
    versions: Sequence[Entry]
    repeat: str
    experiment: str


@dataclass(frozen=True, kw_only=True)
class TrendsPage(Page):
    """The page of a folder of runs.

    Attributes:
        tables: A line per run, and one per round.
    """

    tables: Sequence[Table]


@dataclass(frozen=True, kw_only=True)
class SweepPage(Page):
    """The report of a sweep.

    Attributes:
        axes: The swept keys and their values.
        grid: A line per cell.
        pictures: The drawings of the sweep.
        attack_table: A line per cell and attack.
        repeat: A command.
    """

    axes: Sequence[Entry]
    grid: Table
    pictures: Sequence[Picture]
    attack_table: Table
    repeat: str
