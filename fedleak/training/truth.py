"""The private batch, and which of an audit's canaries were in it.

Only data, clients (the vault), metrics and the audit may import this.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Coins:
    """What a client keeps to itself about the canaries of one update.

    Attributes:
        inside: Whether each is in; for a canary that is the whole update, whether its sign is plus.
        slot: Which of the client's sets of canaries they are: one for each step of a pass.
        copy: They are not in the update that was sent, but in an audited copy of it.
        whole: The one canary is the whole update, plus or minus.
        rate: Probability that a canary that is in takes part in a local step; None: not sampled.
        steps: Local steps whose noise is in the update.
        uses: Local steps in which a canary that is in takes part; if it is sampled, at most.
        drawn: Local steps in which each took part, or would have if it were in.
        alike: Whether local steps count alike in the update.
        joined: Each is a client of its own, there or not, whose update joins an audited copy of the
            round's sum; the server makes it.
    """

    inside: tuple[bool, ...]
    slot: int
    copy: bool
    whole: bool
    rate: float | None
    steps: int
    uses: int
    drawn: tuple[int, ...] = ()
    alike: bool = True
    joined: bool = False


@dataclass(frozen=True, kw_only=True)
class GroundTruth:
    """What one client trained on in one round.

    Attributes:
        sequences: Token ids as they were fed to the model, special tokens included, no padding.
        labels: The class of each sequence; empty for a causal language model.
        batch_size: Examples in one local step.
        noise_scale: Standard deviation of the noise on the update; None without noise.
        canaries: Of the update; None: it has none.
    """

    round: int
    client: int
    sequences: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]
    batch_size: int
    noise_scale: float | None = None
    canaries: Coins | None = None

    def facts(self, num_labels: int) -> dict[str, Any]:
        """Returns all that is known of the facts that attacks may read, by their names.

        `longest_sequence` is in tokens, special ones included; `label_counts` has how often each
        of the `num_labels` classes is in the batch, where there are labels.
        """
        facts: dict[str, Any] = {"longest_sequence": max(map(len, self.sequences))}
        if self.labels:
            facts["label_counts"] = [self.labels.count(label) for label in range(num_labels)]
        return facts

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for a JSON file."""
        return asdict(self)
