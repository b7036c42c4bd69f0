"""The figures of a run in summary.json, and of a sweep's cells in sweep.json."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from fedleak.attacks.reconstruction import Status
from fedleak.store.lines import Document, Measured, Record
from fedleak.store.records import (
    UNSCORED,
    DefenseFigures,
    Epsilon,
    Guarantee,
    OfDetector,
    RowStatus,
    Utility,
)

NEARLY = 90.0
"""The smallest ROUGE-L of a text that is called nearly read."""

SURE = 0.05
"""The largest corrected p with which a difference counts as one."""


class MeanOfClients(Record):
    """The mean of clients' means and its 95 % interval: each client counts once."""

    mean: float
    low: float
    high: float


class Estimate(MeanOfClients):
    """A mean and its 95 % interval, in which each text, or update, counts once.

    Attributes:
        of_clients: Each client counts once; None: a version without this figure wrote the file.
    """

    of_clients: MeanOfClients | None = None


class RankBudget(Record):
    """The share of its rank budget that a batch used, over the rows that report it."""

    mean: float
    max: float
    rows: int


class KindRead(Record):
    """How many pieces of personal data of a kind are in texts for which an attack named a text.

    Attributes:
        items: All of them.
        read: Those that were read.
        control: Those that stand in an answer for another client's update.
    """

    items: int
    read: int
    control: int


class PersonalData(Record):
    """What was read of the personal data in private texts. Each piece counts once.

    Attributes:
        kinds: By kind.
        unanswered: Pieces in texts for which no attack named a text: they are in no share.
        read: The share that was read; None: no attack named texts.
        control: The share that stands in an answer for another client's update.
    """

    kinds: dict[str, KindRead]
    unanswered: int
    read: Estimate | None
    control: Estimate | None


class WithPersonalData(Record):
    """Figures with what was read of personal data; None: there is none in the private texts."""

    personal: PersonalData | None = Field(default=None, exclude_if=lambda data: data is None)

    @property
    def personal_data(self) -> Estimate | None:
        """The share of personal data that was read."""
        return None if self.personal is None else self.personal.read

    @property
    def control_personal_data(self) -> Estimate | None:
        """The share that stands in an answer for another client's update."""
        return None if self.personal is None else self.personal.control


class AttackSummary(WithPersonalData):
    """One attack, summed up over a run. None is "not measured", never zero.

    Attributes:
        rows: Its rows in leakage.jsonl.
        status: How many rows have each status.
        verified: Rows that a certificate proves.
        knows: Facts that the attacker had in any row.
        sequences, clients: Private texts of the rows with a ROUGE score, and their clients.
        exact_match, token_recall, token_precision: Shares, from 0 to 1.
        rouge1, rouge2, rougeL: From 0 to 100.
        control_rougeL, control_token_recall: The attack's answer for another client's update.
        guess_rougeL, guess_token_recall: Held-out texts, no update.
        facts: The share of rows in which each fact is right, by its name; None: not compared.
        budget: The use of the rank budget.
        candidates: How many candidates were left after each check, by its name; the mean over rows.
        margin: The smallest of all rows.
        seconds, seconds_per_update: All rows together; the mean of those that have a time.
        warning: Why the figures are examples and no rates; None if they are rates.
    """

    rows: int
    status: dict[RowStatus, int]
    verified: int
    knows: tuple[str, ...]
    sequences: int
    clients: int
    exact_match: Estimate | None
    rouge1: Estimate | None
    rouge2: Estimate | None
    rougeL: Estimate | None
    control_rougeL: Estimate | None
    guess_rougeL: Estimate | None
    token_recall: Estimate | None
    token_precision: Estimate | None
    control_token_recall: Estimate | None
    guess_token_recall: Estimate | None
    facts: dict[str, Estimate | None]
    budget: RankBudget | None
    candidates: dict[str, float] | None
    margin: float | None
    seconds: float
    seconds_per_update: float | None
    warning: str | None

    @property
    def answers(self) -> int:
        """Rows in which it gave an answer."""
        return self.status.get(Status.RECOVERED, 0) + self.unscored

    @property
    def unscored(self) -> int:
        """Rows in which it gave an answer that was compared with nothing."""
        return self.status.get(UNSCORED, 0)


class WorstCase(WithPersonalData):
    """What all attacks together read: of each text, what the best attack read of it.

    Attributes:
        attacks: Those that gave an answer.
        texts, clients: Private texts with a score, and their clients; for sums those that share no
            text.
        unattacked: Private texts of which no attack named a sequence: they are in no `exact_match`.
        nearly: Texts that an attack read with a ROUGE-L of at least `NEARLY`, and none exactly.
        exact_match, token_recall: Shares, from 0 to 1; None: no attack says.
        rougeL: From 0 to 100.
        control_rougeL, control_token_recall: The best attack's answer for another client's update.
        first: How many texts each attack read exactly that no attack before it read exactly.
        warning: Why the figures are examples and no rates; None if they are rates.
    """

    attacks: tuple[str, ...]
    texts: int
    clients: int
    unattacked: int
    nearly: int = 0
    exact_match: Estimate | None
    rougeL: Estimate | None
    token_recall: Estimate | None
    control_rougeL: Estimate | None
    control_token_recall: Estimate | None
    first: dict[str, int]
    warning: str | None


class Direction(StrEnum):
    """What a difference says about the second of two sets of answers."""

    WORSE = "reads more"
    BETTER = "reads less"
    UNTOLD = "unclear"


class Difference(Record):
    """The difference of a figure between two sets of answers, over pairs of the same text.

    Attributes:
        attack: The attack; None: text by text the best of all attacks that both have, where each
            attack of a ladder counts once, with the most facts.
        figure: exact, rougeL, token_recall or personal_data; auc or auc_calibrated, of a text that
            was in: the share of the others of its client that score lower.
        texts, clients: Pairs, and their clients.
        before, after: Both means, over these pairs.
        mean: Of the differences.
        low, high: Its 95 % interval, for other clients like these.
        p: Of a sign-flip test over these clients: how often the mean would be so far from 0 if it
            did not matter which set is called the first.
        p_adjusted: The same, corrected for the number of differences that are shown with it.
    """

    attack: str | None
    figure: str
    texts: int
    clients: int
    before: float
    after: float
    mean: float
    low: float
    high: float
    p: float
    p_adjusted: float

    @property
    def direction(self) -> Direction:
        """What it says: nothing, unless chance would rarely make so large a difference."""
        if self.p_adjusted > SURE:
            return Direction.UNTOLD
        return Direction.WORSE if self.mean > 0 else Direction.BETTER


class Rung(Record):
    """What a server reads if it is told the same facts about every batch.

    Attributes:
        granted: These facts.
        attacks: The name of each attack's rows on this rung, by its name in the experiment. An
            attack that uses none of the facts has the same rows on every rung.
        worst_case: Over these attacks; None: none has answered.
        worth: How much more is read than with nothing told, on updates for which the facts exist:
            by each attack that uses one of them, and by the best of all attacks.
    """

    granted: tuple[str, ...]
    attacks: dict[str, str]
    worst_case: WorstCase | None
    worth: tuple[Difference, ...]

    @property
    def granted_in_words(self) -> str:
        """The facts, for a sentence."""
        return ", ".join(self.granted) or "nothing more"


class Ladder(Record):
    """What each fact is worth to the server.

    Attributes:
        rungs: Nothing told, each fact alone, and all of them where there are several.
        left_out: Facts that are on no rung, each with the reason.
        correction: How the p of all differences were corrected, together.
    """

    rungs: Annotated[tuple[Rung, ...], Field(min_length=1)]
    left_out: dict[str, str]
    correction: str

    @property
    def top(self) -> Rung:
        """All facts told."""
        return self.rungs[-1]


class CanaryBound(Record):
    """Lower bounds on epsilon by canaries; 0: this many canaries show nothing.

    Attributes:
        client: The client; -1: the least protected of all.
        unit: What a canary stands for: an "example", or all that a "client" has.
        canaries, updates: How many were scored.
        in_copies: Whether some were not in the updates that were sent, but in audited copies.
        epsilon: What the ledger says after the same rounds.
        gaussian: The bound if the noise is Gaussian; None if canaries are sampled.
        f_dp: The bound if the mechanism's trade-off curve is that of a Gaussian mechanism.
        epsilon_delta: The bound that assumes nothing about the mechanism.
    """

    client: int
    unit: str
    canaries: int
    updates: int
    in_copies: bool
    epsilon: Epsilon
    gaussian: float | None
    f_dp: float
    epsilon_delta: float


class CanarySummary(Record):
    """What canaries say of a run's privacy.

    Attributes:
        confidence: The confidence with which each kind of bound holds in all rows at once.
        delta: Of every bound.
        bounds: All clients of a unit together first, then each alone.
        step: A lower bound on the epsilon of one step without sampling, if its noise is Gaussian;
            None: no ledger announces steps.
        alarms: What contradicts the ledger.
    """

    confidence: float
    delta: float
    bounds: tuple[CanaryBound, ...]
    step: float | None = None
    alarms: tuple[str, ...]


Measure = Literal["exposure", "extracted"]
"""What is measured of secrets: how far they stand out, in bits; the share that is written out."""


class PublishedRound(Record):
    """What the model that is published after a round gives away.

    Attributes:
        round: 0: before training.
        figure: The mean over secrets, with its interval over clients.
        control: The same for a model that learnt nothing: by chance, or of twins.
        p: How often chance ranks secrets that high among their twins, corrected for all rounds,
            counts and scores; None: nothing is ranked, or nobody trained yet.
    """

    round: int
    figure: Estimate
    control: float
    p: float | None = None


class PublishedFigure(Record):
    """A figure of secrets that stand equally often in their clients' data.

    Attributes:
        count: How often.
        by: What secrets are ranked by, or how the model was made to write.
        secrets: How many there are.
        rounds: In order.
    """

    count: int
    measure: Measure
    by: str
    secrets: int
    rounds: Annotated[tuple[PublishedRound, ...], Field(min_length=1)]


class PublishedSummary(Record):
    """What the published models give away of secrets, apart from what updates give away.

    Attributes:
        figures: By measure, way to ask, and count.
    """

    figures: tuple[PublishedFigure, ...]


class RocPoint(Record):
    """A point of a ROC curve.

    Attributes:
        accused: The share of the texts outside that score above a threshold.
        found: The share of the texts inside that do, with its interval at this threshold.
    """

    accused: float
    found: Estimate


class RoundFigure(Record):
    """The area under the ROC curve over the updates of one round."""

    round: int
    auc: float


class MembershipFigures(Record):
    """How well one score tells which texts were in the updates of a run.

    Attributes:
        attack, score: The attack, and the name of its score.
        updates, clients: Those that the attack was asked about; no clients if updates are sums.
        members, controls: Texts that were in, and texts that were not, over all rounds; a text
            counts once for each client whose updates it is looked for in.
        auc: The area under the ROC curve over all rounds, with the interval over clients, or over
            rounds where there is one client or sums; 0.5 is chance. None: no list has both kinds.
        rounds: The area in each round.
        roc: Points of the curve over all rounds.
        found_at_1_percent, found_at_01_percent: The share of the members above all but 1 %, or
            0.1 %, of the controls; None: there are fewer than 100, or 1,000, controls.
        pairs: Pairs of a member and a control; no text is in two pairs.
        no_bound: Why there is neither p nor epsilon; None: there are both.
        assumes: What p and epsilon take for granted beyond the coins; None: nothing.
        p: Of a sign test over these pairs, corrected for the number of attacks and scores; small:
            chance would rarely tell them apart so well, or so wrongly.
        epsilon: Lower bound for replacing a text by another; 0: this many pairs show nothing.
    """

    attack: str
    score: str
    updates: int
    clients: int | None
    members: int
    controls: int
    auc: Estimate | None
    rounds: tuple[RoundFigure, ...]
    roc: tuple[RocPoint, ...]
    found_at_1_percent: Estimate | None
    found_at_01_percent: Estimate | None
    pairs: int
    no_bound: str | None
    assumes: str | None = None
    p: float | None
    epsilon: float | None


class MembershipSummary(Record):
    """What attacks on membership say of a run.

    Attributes:
        confidence: The confidence with which the bounds of all attacks and scores hold at once.
        delta: Of every bound.
        figures: By attack and score; of each attack the score that it names first comes first.
    """

    confidence: float
    delta: float
    figures: tuple[MembershipFigures, ...]

    @property
    def clearest(self) -> MembershipFigures | None:
        """The figures that chance explains least; None: chance may explain all of them."""
        clear = [
            (row.p, -row.auc.mean, row)
            for row in self.figures
            if row.p is not None and row.p < 0.05 and row.auc is not None and row.auc.mean > 0.5
        ]
        return min(clear, key=lambda ranked: ranked[:2])[-1] if clear else None

    def figures_of(self, attack: str, score: str | None = None) -> MembershipFigures | None:
        """Returns the figures of an attack's score; None: there are none.

        Args:
            attack: Its name.
            score: Its name; None: the one that the attack names first.
        """
        for figures in self.figures:
            if figures.attack == attack and score in (None, figures.score):
                return figures
        return None


class DetectorSummary(OfDetector):
    """What one detector found over all clients and rounds.

    Attributes:
        looked: Rounds of a client in which it had something to look at.
        has_limit: Whether it can alarm at all.
        alarms: By round, the clients for which it alarmed.
    """

    looked: int
    has_limit: bool
    alarms: dict[int, tuple[int, ...]]


class Detections(Record):
    """What clients noticed of the server.

    Attributes:
        detectors: In the order of the experiment file.
        refused: By round, the clients that took no part.
        unequal: Rounds in which clients were sent different models, by the hashes that they noted.
    """

    detectors: tuple[DetectorSummary, ...]
    refused: dict[int, tuple[int, ...]]
    unequal: tuple[int, ...]

    @property
    def alarms(self) -> int:
        """Rounds of a client in which any detector alarmed."""
        keys = {
            (round, client)
            for detector in self.detectors
            for round, clients in detector.alarms.items()
            for client in clients
        }
        return len(keys)


class CopiesRead(Record):
    """What was read of undefended copies: the best score of each text, and 0 without an answer.

    Attributes:
        read: Copies from which a text was read word for word.
        exact, token_recall: Means over all texts, from 0 to 1.
        rougeL: From 0 to 100.
        personal_data: The share of the personal data in a text, the mean over texts that have any;
            None: none has.
    """

    read: int
    exact: float
    rougeL: float
    token_recall: float
    personal_data: float | None = Field(default=None, exclude_if=lambda share: share is None)


class PositiveControl(Record):
    """What the attacks of a run read of undefended copies of some of its batches.

    Attributes:
        copies, texts: How many were attacked.
        together: All attacks together: the best score of each text.
        attacks: Each by itself, by name.
    """

    copies: int
    texts: int
    together: CopiesRead
    attacks: dict[str, CopiesRead]


class Circumstances(Record):
    """All that is in the way of an attack: defenses, and by name the settings that act as such."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    defense: tuple[dict[str, JsonValue], ...]

    @property
    def settings(self) -> dict[str, JsonValue]:
        """The settings, by name."""
        return self.__pydantic_extra__


class Baseline(Measured):
    """How good a model is that one party trained on all data, and its steps: reference.json."""

    steps: int


class RunSummary(Record):
    """A run's figures.

    Attributes:
        name: Of the run.
        status: Of the run when this was written.
        server: What a malicious server did; None: it followed the protocol.
        fedleak: The version that made the run.
        model_fingerprint: Of the weights that training started from.
        captures: How many are here.
        attacks: The figures of each attack, by name.
        worst_case: Over all attacks, with a ladder those of its top; None: an older version scored
            the run.
        ladder: What each fact is worth; None: that was not asked for.
        defenses: What is in the way of attacks.
        defended: What each defense did: each figure is the mean over all updates that have it.
        privacy: What holds for every client after its last round; None before anybody has trained.
        canary: What canaries measured of it; None: there are none.
        membership: How well texts that were in updates are told from others; None: nobody asked.
        published: What the published models give away; None: no secrets were planted.
        positive_control: What attacks read of undefended copies; None: there are none.
        detections: What clients noticed of the server; None: no client looked.
        utility_before, utility: Of the model before training, and now, if measured.
        held_out: Texts that utility is measured on.
        utility_reference: Of the central baseline, if it was asked for.
        missing: What makes the results incomplete, and the command that mends it.
        awaited: The part of `missing` that nodes keep by design, until their owners hand it over.
        looked_for: What counts as personal data.
        notes: What else should be known.
        unscored: Answers that should have a score and have none.
    """

    name: str
    status: str
    server: str | None = None
    fedleak: str | None
    model_fingerprint: str | None
    captures: int
    attacks: dict[str, AttackSummary]
    worst_case: WorstCase | None = None
    ladder: Ladder | None = None
    defenses: Circumstances
    defended: tuple[DefenseFigures, ...]
    privacy: Guarantee | None
    canary: CanarySummary | None = None
    membership: MembershipSummary | None = None
    published: PublishedSummary | None = None
    positive_control: PositiveControl | None = None
    detections: Detections | None = None
    utility_before: Utility | None
    utility: Utility | None
    held_out: int
    utility_reference: Baseline | None
    missing: tuple[str, ...]
    awaited: tuple[str, ...] = ()
    looked_for: str = ""
    notes: tuple[str, ...]
    unscored: int

    @property
    def wrong(self) -> tuple[str, ...]:
        """What makes the results incomplete, and what contradicts the ledger."""
        return (*(self.canary.alarms if self.canary else ()), *self.missing)


class CellSummary(Record):
    """What sweep.json holds of a cell; no figures before the cell is finished.

    Attributes:
        cell: Its name.
        values: Its value of each swept key.
        status: Of its run.
        server, missing, attacks, worst_case, utility, utility_reference, privacy, canary,
            membership: As in a `RunSummary`.
    """

    cell: str
    values: dict[str, JsonValue]
    status: str
    server: str | None = None
    missing: tuple[str, ...] = ()
    attacks: dict[str, AttackSummary] = {}
    worst_case: WorstCase | None = None
    utility: Utility | None = None
    utility_reference: Baseline | None = None
    privacy: Guarantee | None = None
    canary: CanarySummary | None = None
    membership: MembershipSummary | None = None


class SweepSummary(Record):
    """A sweep's keys with their values, and its cells.

    Attributes:
        name: Of its folder.
        axes: The values of each key; those of `family` are tables with a `kind` and a `strength`.
        cells: A cell for every combination, or for some.
        units: What the strengths of each family count.
    """

    name: str
    axes: dict[str, list[JsonValue]]
    cells: tuple[CellSummary, ...]
    units: dict[str, str] = {}


SUMMARY = Document(
    "summary.json", RunSummary, "`fedleak score` with the run's folder writes it anew"
)
SWEEP = Document("sweep.json", SweepSummary, "`fedleak sweep` with the experiment's file writes it")
