"""The file beside a tap: what a Flower app of somebody else does, as far as messages do not say."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from fedleak.config.client_table import StepTable
from fedleak.config.tables import ModelTable, Positive, Source, Table
from fedleak.config.wording import checked
from fedleak.util.errors import ConfigError
from fedleak.util.plain_files import content
from fedleak.util.sanitise import is_whole


class TrainingTable(StepTable):
    """`[training]`: what a client does with its data in a round, in the words of `[client]`."""

    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Learning rate, the first where there is a schedule."""
    learning_rate_key: str | None = None
    """The key that it has in what is sent to a client or comes back, in place of a number."""
    batch_size: Positive
    """Examples in a batch."""
    local_epochs: Positive = 1
    """Passes over a client's data in a round."""
    local_steps: Positive | None = None
    """Steps in a round, where they do not follow from the epochs and the number of examples."""
    dropout: bool
    """Whether clients train with dropout, the model's or that of adapters; `model.train()` turns it
    on."""

    def _problems(self) -> Iterator[str]:
        """Yields that the learning rate is not said once."""
        yield from super()._problems()
        if (self.learning_rate is None) == (self.learning_rate_key is None):
            yield "give one of learning_rate and learning_rate_key"

    @property
    def examples_in_step(self) -> int:
        """Examples in a step of the optimiser."""
        return self.batch_size * self.accumulate

    def steps(self, num_examples: int) -> int:
        """Returns the optimiser's steps over so many examples."""
        return self.local_steps or self.local_epochs * -(-num_examples // self.examples_in_step)


class ReplyTable(Table):
    """`[reply]`: what a client's reply holds."""

    payload: Literal["weights", "delta", "gradient", "sum"] = "weights"
    """`weights` after training, their `delta`, or a `gradient`. `sum`: clients mask what they send
    (secure aggregation), and what is attacked is how a round changed the model."""
    records: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the array records that count; left out: all that hold parameters of the model."""
    prefix: str = ""
    """Only names that begin so count; for messages with several models. What wrappers put before
    names is found without it."""
    own_head: bool = False
    """Whether clients put a head of their own on the model, which is then what `AutoModel` makes:
    attacks that need no head read what is sent of the model."""
    names: dict[str, str] = {}
    """Names of arrays that are not those of the model's parameters, and the model's for them, such
    as `"head.weight" = "classifier.weight"` for a head that is the same as the model's."""
    examples_key: str = "num-examples"
    """The metric that says how many examples a client trained on."""
    examples: Positive | None = None
    """How many each client trained on, where no metric says it, or it counts batches."""
    client_key: str | None = None
    """The metric or config that says which client a node is; left out: nodes are numbered."""


class TruthTable(Table):
    """`[truth]`: what clients trained on, if you have it; attacks never see it."""

    file: Source | None = None
    """A jsonl file, a line per client and round: round, node or client, texts, labels."""
    held_out: Source | None = None
    """Texts that no client has: a control, scored as a guess. A csv, tsv, jsonl or parquet file
    with a column `text`, or any other file with a text a line."""
    max_length: Annotated[int, Field(ge=3)] | None = None
    """Tokens after which the app cuts a text off."""


class About(Table):
    """What a Flower app does, as far as its messages do not say it."""

    model: ModelTable
    """What is trained."""
    training: TrainingTable
    """What a client does with its data in a round."""
    reply: ReplyTable = ReplyTable()
    """What a client's reply holds."""
    truth: TruthTable = TruthTable()
    """What clients trained on, if you have it."""
    server: dict[str, Any] = {}
    """`[server]`: what the app's server changed of the model that it sent all clients, and in which
    rounds, as in an experiment file; left out: nothing."""
    attack: list[dict[str, Any]] = [{"kind": "auto"}]
    """`[[attack]]`: attacks of `fedleak attack`, as in an experiment file, besides `probes`.

    Left out: `auto`, and `membership` where `[truth]` has the texts of clients and held-out ones.
    """

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, table: Any) -> Any:
        """Fills in the attacks that the truth admits."""
        truth = table.get("truth") if isinstance(table, dict) else None
        if not isinstance(truth, dict) or "attack" in table or not {"file", "held_out"} <= {*truth}:
            return table
        if isinstance(reply := table.get("reply"), dict) and reply.get("own_head"):
            return table  # `membership` computes gradients, for which it needs the head
        return table | {"attack": [{"kind": "auto"}, {"kind": "membership"}]}


def load_about(path: Path) -> About:
    """Reads the file beside a tap.

    Paths in it are relative to the current folder, as in an experiment file.

    Raises:
        ConfigError: Anything about it that is not right.
    """
    try:
        table = tomllib.loads(content(path, linked=True).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{str(path)!r}: {error.strerror}: give a TOML file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}: give a TOML file") from error
    return checked(About, table, f"{str(path)!r}: ")


class TruthLine(Table):
    """A line of the truth: what one client trained on in one round."""

    round: Positive
    node: int | None = None
    client: Annotated[int, Field(ge=0)] | None = None
    texts: Annotated[list[str], Field(min_length=1)]
    labels: list[Annotated[int, Field(ge=0)]] = []

    def _problems(self) -> Iterator[str]:
        """Yields what is wrong with a line."""
        if (self.node is None) == (self.client is None):
            yield "give one of node and client"
        if not all(text.strip() for text in self.texts):
            yield "a text is empty"
        if not all(is_whole(text) for text in self.texts):
            yield "a text is damaged: it has half of a character (a lone surrogate)"
        if self.labels and len(self.labels) != len(self.texts):
            yield f"{len(self.labels)} labels for {len(self.texts)} texts"


def load_truth(path: Path) -> list[TruthLine]:
    """Reads what clients trained on.

    Raises:
        ConfigError: The file cannot be read, or a line of it is not right.
    """
    try:
        lines = content(path, linked=True).splitlines()
    except OSError as error:
        raise ConfigError(f"truth.file = {str(path)!r}: {error.strerror}: give a file") from error
    truth_lines = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            truth_lines.append(TruthLine.model_validate(json.loads(line)))
        except ValidationError as error:  # its words are not repeated: they may be private
            at = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(map(str, at["loc"]))
            raise ConfigError(
                f"{where}: {key}: {at['msg'].removeprefix('Value error, ')}"
            ) from None
        except (ValueError, RecursionError):
            raise ConfigError(f"{where} is not JSON: write a table a line") from None
    return truth_lines
