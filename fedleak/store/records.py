"""The values in a run's JSONL files, one a line: answers of attacks, scores and other results."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, JsonValue

from fedleak.attacks.reconstruction import Status
from fedleak.store.lines import Lines, Measured, Record
from fedleak.store.run import EVERYONE, Key
from fedleak.training.privacy.accounting import NONE, Use


class _OfUpdate(Record):
    """A record of one client's update in one round, or of the sum of a round's updates."""

    round: int
    client: int

    @property
    def key(self) -> Key:
        """Which update."""
        return Key(self.round, self.client)


class _OfAttack(_OfUpdate):
    """A record of one attack on one update.

    Attributes:
        attack: The name of the attack.
    """

    attack: str

    @property
    def id(self) -> tuple[Key, str]:
        """Which update, and the name of the attack."""
        return self.key, self.attack


def _summed_up(diagnostics: dict[str, Any]) -> dict[str, Any]:
    """Refuses diagnostics that reports cannot sum up."""
    if "budget" in diagnostics:
        budget = diagnostics["budget"]
        used, available = budget if isinstance(budget, list) and len(budget) == 2 else (0, 0)
        if not ((used is None or _is_number(used)) and _is_number(available) and available > 0):
            raise ValueError("'budget' is not [used or None, available]")
    if "candidates" in diagnostics:
        counts = diagnostics["candidates"]
        if not (isinstance(counts, dict) and all(map(_is_number, counts.values()))):
            raise ValueError("'candidates' does not hold a count by name")
    return diagnostics


_LARGEST = 2.0**53
"""Counts are below this; the quotient of larger numbers may be none."""


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < _LARGEST


Name = Annotated[str, Field(min_length=1, max_length=100)]
Score = Annotated[str, Field(pattern="^[A-Za-z0-9_]{1,40}$")]


class Reconstructed(Record):
    """A `Reconstruction` in plain values, with null for each number that is not finite."""

    status: Status
    sequences: tuple[Annotated[tuple[int, ...], Field(min_length=1)], ...] | None
    evidence: tuple[float | None, ...] = ()
    margins: tuple[float | None, ...]
    tokens: tuple[int, ...] | None
    scores: Annotated[dict[Score, tuple[float, ...]], Field(max_length=20)] = {}
    facts: Annotated[dict[Name, JsonValue], Field(max_length=100)]
    diagnostics: Annotated[dict[str, JsonValue], AfterValidator(_summed_up)]
    verified: bool
    reason: str


class Answer(Reconstructed, _OfAttack):
    """What an attack answered for one capture: a line of reconstructions.jsonl.

    Attributes:
        settings: The attack's kind and hyper-parameters.
        granted: Facts that the experiment grants.
        knows: Facts that the attacker had.
        seconds, device: The attack alone, its share of the call; None if it was not called.
        together: How many captures shared the call; None if it was not called.
    """

    settings: dict[str, JsonValue]
    granted: tuple[str, ...]
    knows: tuple[str, ...]
    seconds: float | None
    device: str | None
    together: int | None = None


class Attempt(_OfAttack):
    """A try of an attack that crashed: a line of attempts.jsonl."""

    reason: str
    traceback: str = ""


class Fact(Record):
    """A fact that an attack read.

    Attributes:
        claimed: What the attack says; "found" in the file.
        true: What is true; None if that cannot be told.
    """

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    claimed: JsonValue = Field(alias="found")
    true: JsonValue = None

    @property
    def right(self) -> bool | None:
        """Whether it is right; None: not compared, because the truth is not known."""
        return None if self.true is None else self.claimed == self.true


class TextScore(Record):
    """What an attack read of one private text. None is "not measured", never zero.

    Attributes:
        exact: Whether the whole text was read; None of an attack that names no sequences.
        rougeL: Of the sequence that is paired with it, content only, 0 to 100; 0 without one.
        token_recall: The share of its distinct content tokens that the whole answer has.
        personal_data: The share of the personal data in it that was read; None: it has none.
    """

    exact: bool | None
    rougeL: float | None
    token_recall: float | None
    personal_data: float | None = Field(default=None, exclude_if=lambda share: share is None)


class PersonalItem(Record):
    """A piece of personal data in a private text, without its words, and whether it was read.

    It was read if all of its tokens stand side by side in one text that the attack named.

    Attributes:
        kind: Such as `mail address`.
        text: The place of the text in its batch.
        read: None: the attack named no texts.
        control: Whether it stands in the attack's answer for another client's update.
    """

    kind: str
    text: int
    read: bool | None
    control: bool | None = None


UNSCORED: Final = "unscored"
"""The attack gave an answer, and nobody here knows what the client trained on."""

RowStatus = Status | Literal["unscored"]
"""How an attack ended, or that its answer could not be compared with anything."""


class LeakageRow(_OfAttack):
    """One answer, scored: a line of leakage.jsonl. None is "not measured", never zero.

    Attributes:
        status: recovered, abstained, inadmissible or failed; unscored: an answer without truth.
        batch_size, num_tokens: Sequences in the batch; their tokens, special ones included. None
            without truth.
        rouge1, rouge2, rougeL: 0 to 100, content only; an unanswered sequence counts 0.
        paper_rouge1, paper_rouge2, paper_rougeL: The same pairs with special tokens kept, as
            published tables have them.
        exact_match: Share of sequences recovered exactly.
        token_recall, token_precision: Of distinct content tokens: those that the attack says were
            in the batch, or, if it names sequences only, those of its sequences.
        control_rougeL, control_token_recall: The attack's answer for another client's update.
        guess_rougeL, guess_token_recall: Held-out texts, no update.
        texts: Scores of each private text of the batch, in its order; None without an answer.
        personal: The personal data in these texts, in their order, by the rules of the experiment.
        facts: Each other fact that the attack read, by name.
        margin: The smallest margin of the sequences that the attack is certain of; None: it is
            certain of none, or rejected nothing in their place.
        diagnostics: How the attack went, in its own words.
        seconds, device: The attack alone.
        granted: Facts that the attacker was granted; None in a row of an older version.
        knows: Facts that the attacker had: the granted ones that exist for this update.
        apart: For a sum: whether none of its texts is in another sum that was attacked.
    """

    status: RowStatus
    reason: str
    verified: bool
    batch_size: int | None = None
    num_tokens: int | None = None
    rouge1: float | None = None
    rouge2: float | None = None
    rougeL: float | None = None
    paper_rouge1: float | None = None
    paper_rouge2: float | None = None
    paper_rougeL: float | None = None
    exact_match: float | None = None
    token_recall: float | None = None
    token_precision: float | None = None
    control_rougeL: float | None = None
    control_token_recall: float | None = None
    guess_rougeL: float | None = None
    guess_token_recall: float | None = None
    texts: tuple[TextScore, ...] | None = None
    personal: tuple[PersonalItem, ...] = Field(default=(), exclude_if=lambda items: not items)
    facts: dict[str, Fact]
    margin: float | None
    diagnostics: dict[str, JsonValue]
    seconds: float | None
    device: str | None
    granted: tuple[str, ...] | None = None
    knows: tuple[str, ...]
    apart: bool = Field(default=False, exclude_if=lambda apart: not apart)

    @property
    def unit(self) -> int:
        """The unit that intervals count once: a client, or a sum that shares no text with others.

        All clients are in every sum, so intervals over sums are for other rounds and not for other
        clients. Sums that share texts are one unit.
        """
        return EVERYONE - self.round if self.apart else self.client

    @property
    def of_no_text(self) -> bool:
        """Whether the update has no text, as Poisson sampling may draw none."""
        return self.texts == ()


def text_counts(rows: Iterable[LeakageRow]) -> dict[Key, int]:
    """Returns how many private texts each update was computed from, where a row knows the truth."""
    return {row.key: row.batch_size for row in rows if row.batch_size is not None}


Epsilon = float | Literal["none"]
"""A number, or "none" if nothing is guaranteed."""


class Guarantee(Record):
    """What holds of a client's privacy.

    Attributes:
        epsilon, delta: Of the guarantee.
        accountant: How the rounds were composed.
        unit, neighbouring: What is protected, and against which change of the data.
        noise_multiplier: Of each use of the mechanism.
    """

    epsilon: Epsilon
    delta: float | None
    accountant: str
    unit: str
    neighbouring: str
    noise_multiplier: float | None


class LedgerRow(Guarantee, _OfUpdate):
    """What a client has spent of its privacy by a round: a line of privacy.jsonl.

    Attributes:
        sampling, sampling_rate: How examples are drawn, as far as it amplifies the guarantee.
        steps: Uses of the mechanism so far.
        uses: All that the epsilon is composed of: noise multiplier, sampling rate, and how many.
    """

    sampling: str
    sampling_rate: float | None
    steps: int | None
    uses: tuple[Use, ...] = ()

    @classmethod
    def nothing_guaranteed(cls, key: Key) -> "LedgerRow":
        """Returns the row of a client whose defenses guarantee nothing."""
        words = ("epsilon", "accountant", "unit", "neighbouring", "sampling")
        numbers = ("delta", "sampling_rate", "steps", "noise_multiplier")
        nothing: dict[str, Any] = {**dict.fromkeys(words, NONE), **dict.fromkeys(numbers)}
        return cls(**key._asdict(), **nothing)


class CanaryRow(_OfUpdate):
    """What canaries score in one client's update: a line of canaries.jsonl.

    `inside`, `drawn` and `scores` have a value for each canary, `witnesses` for each witness, in
    their order. `inside` to `joined` are in the client's vault (`fedleak.training.truth.Coins`).

    Attributes:
        inside: Whether it is in; for a canary that is the whole update, whether its sign is plus.
        slot: Which of the client's sets of canaries they are.
        audited_copy: Whether they are not in the update that was sent, but in an audited copy.
        whole: Whether the only canary is the whole update.
        rate: Probability with which a local step takes a canary that is in; None: not sampled.
        steps, uses: Local steps in the update, and those in which a canary takes part.
        drawn: In how many steps each took part; empty: an older version did not write it down.
        alike: Whether all steps count alike in the update.
        joined: Whether each is a client of its own, there or not, in an audited copy of the sum.
        numbers: How many numbers each canary is spread over: no score exceeds the square root.
        noise_share: The share of noise in the update's squared norm, as far as the defenses say;
            None: they add none.
        scores: Of each canary: variance 1 and, for one that is out, mean 0.
        witnesses: Scores of directions that are the same in all updates, and in none.
    """

    slot: int
    audited_copy: bool
    whole: bool
    rate: float | None
    steps: int
    uses: int
    drawn: tuple[int, ...] = ()
    alike: bool = True
    joined: bool = False
    numbers: int
    noise_share: float | None
    inside: tuple[bool, ...]
    scores: tuple[float, ...]
    witnesses: tuple[float, ...]


class MembershipRow(_OfAttack):
    """How an attack scores texts that were in an update or not: a line of membership.jsonl.

    No text is in it.

    Attributes:
        texts: The number of each text of the list: its row in a file of candidates, from 0; without
            a file any number, which is the same in all rows of the attack.
        inside: Whether each text was in the batch.
        pairs: For each text of the batch its place in the list, and the place of the text that it
            is paired with; none for a list from a file.
        scores: By the name of a statistic, one for each text of the list.
    """

    texts: tuple[int, ...]
    inside: tuple[bool, ...]
    pairs: tuple[tuple[int, int], ...]
    scores: dict[str, tuple[float, ...]]


class DefenseFigures(Measured):
    """What one defense did to an update, or the means over all updates; its figures are by name.

    Attributes:
        defense: Its place in the experiment file.
        kind: Of the defense.
    """

    defense: int
    kind: str


class DefenseRow(DefenseFigures, _OfUpdate):
    """What one defense did to one update: a line of defenses.jsonl."""


Action = Literal["warn", "refuse"]
"""What a client does when a detector alarms."""


class OfDetector(Record):
    """A record of one detector.

    Attributes:
        place: Place of the detector in the experiment file.
        detector: Its kind.
        action: What an alarm makes a client do.
    """

    place: int
    detector: str
    action: Action


class DetectorFinding(OfDetector):
    """What one detector found in what a client was sent.

    Attributes:
        statistic: Its figure; None: it had nothing to look at, or the figure is not finite.
        limit: It alarms above this; None: it has no limit.
        alarm: Whether it alarmed.
        sentence: What it found, in its own words.
    """

    statistic: float | None
    limit: float | None
    alarm: bool
    sentence: str


class DetectionRow(DetectorFinding, _OfUpdate):
    """What one detector found in a round of a client: a line of detections.jsonl.

    Attributes:
        hash: Of the model that the client was sent.
        refused: Whether the client stayed out of the round.
    """

    hash: str
    refused: bool


class Utility(Measured):
    """How good the model is after a round: a line of utility.jsonl; its figures are by name."""

    round: int


class PublishedRow(Record):
    """What a published model says of planted secrets: a line of secrets.jsonl.

    Secrets that clients have come first, then twins, which nobody trains on. No text is in it.

    Attributes:
        round: After which it was published; 0: before training.
        clients: Who has each secret; -1: nobody.
        counts: How many times each stands in the client's data; 0: it is a twin.
        log_likelihoods: Of each secret after its beginning, in nats.
        written: For each decoding, whether the model wrote the first secrets word for word: all
            that clients have, and as many twins, or all twins if there are fewer.
    """

    round: int
    clients: tuple[int, ...]
    counts: tuple[int, ...]
    log_likelihoods: tuple[float, ...]
    written: dict[str, tuple[bool, ...]]


@dataclass(frozen=True)
class ScoredRows:
    """The rows of all files that scoring writes.

    Attributes:
        leakage: Answers and their scores.
        ledger: What each client has spent of its privacy.
        defended: What each defense did.
        canary: What canaries score.
        members: What attacks on membership say.
        detected: What clients' detectors found.
    """

    leakage: Sequence[LeakageRow] = ()
    ledger: Sequence[LedgerRow] = ()
    defended: Sequence[DefenseRow] = ()
    canary: Sequence[CanaryRow] = ()
    members: Sequence[MembershipRow] = ()
    detected: Sequence[DetectionRow] = ()

    @classmethod
    def read_files(cls, rows_of: Callable[[Lines[Any]], Sequence[Any]]) -> "ScoredRows":
        """Returns what the files hold.

        Args:
            rows_of: Reads the rows of a file, such as `Run.rows`.
        """
        return cls(**{name: rows_of(lines) for name, lines in _FILES.items()})

    def by_file(self) -> list[tuple[Lines[Any], Sequence[Record]]]:
        """Returns each file with its rows."""
        return [(lines, getattr(self, name)) for name, lines in _FILES.items()]


def _check_canaries(row: CanaryRow) -> None:
    if len(row.scores) != len(row.inside) or not row.scores:
        raise ValueError(f"scores: {len(row.scores)} of {len(row.inside)} canaries")
    drawn = [steps for steps in row.drawn if 0 <= steps <= row.steps]
    if len(drawn) != len(row.drawn) or len(drawn) not in (0, len(row.inside)):
        raise ValueError(f"drawn: not of {len(row.inside)} canaries in {row.steps} steps")
    if min(row.steps, row.uses, row.numbers) < 1 or not (row.rate is None or 0 < row.rate <= 1):
        raise ValueError("rate, steps, uses or numbers are out of range")


def _check_membership(row: MembershipRow) -> None:
    count = len(row.texts)
    if len(set(row.texts)) != count or len(row.inside) != count:
        raise ValueError("texts: one is there twice, or nobody knows whether it was in")
    paired = sorted(place for pair in row.pairs for place in pair)
    if paired and paired != list(range(count)):
        raise ValueError("pairs: not every text is in one")
    if not all(row.inside[member] and not row.inside[other] for member, other in row.pairs):
        raise ValueError("pairs: one of each must be in")
    if any(len(scores) != count for scores in row.scores.values()):
        raise ValueError("scores: not of every text")


def _check_published(row: PublishedRow) -> None:
    count, planted = len(row.counts), sum(times > 0 for times in row.counts)
    if not len(row.clients) == len(row.log_likelihoods) == count or not 0 < planted < count:
        raise ValueError(f"{len(row.log_likelihoods)} log-likelihoods of {count} secrets")
    if not all(row.counts[:planted]) or any(row.counts[planted:]):
        raise ValueError("counts: twins come last")
    if any(not planted < len(written) <= count for written in row.written.values()):
        raise ValueError("written: not of every secret that clients have, and of some twin")


def _check_texts(row: LeakageRow) -> None:
    if row.texts is not None and len(row.texts) != row.batch_size:
        raise ValueError(f"texts: {len(row.texts)} for a batch of {row.batch_size}")
    if not all(0 <= item.text < (row.batch_size or 0) for item in row.personal):
        raise ValueError(f"personal: of a text that a batch of {row.batch_size} has not")


ATTEMPTS = Lines("attempts.jsonl", Attempt)
LEAKAGE = Lines("leakage.jsonl", LeakageRow, check=_check_texts)
LEDGER = Lines("privacy.jsonl", LedgerRow)
CANARIES = Lines("canaries.jsonl", CanaryRow, check=_check_canaries)
MEMBERSHIP = Lines("membership.jsonl", MembershipRow, check=_check_membership)
DEFENSES = Lines("defenses.jsonl", DefenseRow)
DETECTIONS = Lines("detections.jsonl", DetectionRow)
PUBLISHED = Lines("secrets.jsonl", PublishedRow, check=_check_published, sealed=True)
UTILITY = Lines("utility.jsonl", Utility, sealed=True)

_FILES: Mapping[str, Lines[Any]] = {
    "leakage": LEAKAGE,
    "ledger": LEDGER,
    "defended": DEFENSES,
    "canary": CANARIES,
    "members": MEMBERSHIP,
    "detected": DETECTIONS,
}
"""The files that scoring writes, by their names in `ScoredRows`."""


def answers(fingerprint: str | None, vocabulary: int | None = None) -> Lines[Answer]:
    """Returns the file of answers.

    Args:
        fingerprint: Of the experiment: answers of another are refused.
        vocabulary: How many token ids the model has; None: not known here.
    """
    mark, check = {"fingerprint": fingerprint}, partial(_check_ids, vocabulary)
    return Lines("reconstructions.jsonl", Answer, mark, check, sealed=True)


def _check_ids(vocabulary: int | None, answer: Answer) -> None:
    ids = chain(answer.tokens or (), *(answer.sequences or ()))
    if vocabulary is not None and not within(ids, vocabulary):
        raise ValueError(f"it has token ids outside the vocabulary of {vocabulary}")


def within(ids: Iterable[int], vocabulary: int) -> bool:
    """Returns whether all are ids of a vocabulary of this size."""
    return all(0 <= token_id < vocabulary for token_id in ids)
