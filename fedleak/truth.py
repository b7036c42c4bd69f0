"""The private batch. Only data, clients (the vault), metrics and the audit may import this."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GroundTruth:
    """What one client trained on in one round.

    Attributes:
        sequences: Token ids as they were fed to the model, special tokens included, no padding.
        labels: The class of each sequence; empty for a causal language model.
        batch_size: Examples in one local step.
        noise_scale: Standard deviation of the noise on the update; None without noise.
    """

    round: int
    client: int
    sequences: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]
    batch_size: int
    noise_scale: float | None = None

    def facts(self, num_labels: int) -> dict[str, Any]:
        """Returns all that is known of the facts that attacks may read, by their names.

        `longest_sequence` is in tokens, special ones included; `label_counts` has how often each
        of the `num_labels` classes is in the batch, where there are labels.
        """
        found: dict[str, Any] = {"longest_sequence": max(map(len, self.sequences))}
        if self.labels:
            found["label_counts"] = [self.labels.count(label) for label in range(num_labels)]
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for a JSON file."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "GroundTruth":
        """Reads what `to_json` gave."""
        return cls(
            **value
            | {
                "sequences": tuple(map(tuple, value["sequences"])),
                "labels": tuple(value["labels"]),
            }
        )
