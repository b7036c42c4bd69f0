"""The tables of an experiment file: every key, its type, its bounds and its default.

The line below a field says what the field means. The reference of the experiment file is made
from these lines.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from fedleak.models import CAUSAL_LM, absolute
from fedleak.training.observation import GRANTABLE, Sight
from fedleak.training.privacy.accounting import Accountant
from fedleak.training.recipe import Optimiser
from fedleak.util.errors import unknown

MOST_UPDATES = 1_000_000
"""The most updates of a run: at a tenth of a second each they take a day."""

MOST_EXAMPLES = 10_000_000
"""The most examples of a run: a node makes or reads as many as the server asks for."""

SAMPLES, HELD_OUT = 400, 100
"""Default numbers of examples of a built-in data set, which can make any number."""

Positive = Annotated[int, Field(ge=1)]
Source = Annotated[str, AfterValidator(absolute)]
"""A hub id, a built-in, or a path."""


def _encoding(name: str) -> str:
    """Refuses the name of an encoding that Python does not know."""
    try:
        "".encode(name)
    except LookupError as error:
        raise ValueError(
            f"{name!r} is not an encoding of text that Python knows: write 'utf-16', 'cp1252' or "
            "'latin-1', for example"
        ) from error
    return name


class Table(BaseModel):
    """A table of the experiment file: frozen, strict, and without unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="after")
    def _without_problems(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """Yields what keys must not say together; each is right by itself."""
        yield from ()


class TappedTable(Table):
    """`[tapped]`: written by `fedleak import`; a run that has it was trained by another app."""

    optimiser: Optimiser
    """What its clients step with."""
    labels: Positive
    """Classes of its data."""
    clients: list[list[Annotated[int, Field(ge=0)]]]
    """The clients of each round whose updates are here."""
    messages: str
    """A mark of the messages that it is made of."""


class LoraTable(Table):
    """`[model.lora]`: low-rank adapters, trained and sent in place of the model."""

    rank: Positive = 8
    """Rank of the adapters (Hu et al. 2022)."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """Scale of the adapters: their product counts alpha / rank times."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] | None = None
    """Linear layers by name, or all but the last; left out: the query and value projections."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' inputs; it needs `federation.dropout`, which turns all of it on."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), as rsLoRA does (Kalajdzievski 2023)."""
    dora: bool = False
    """Train the norms of the weights' rows, too, as DoRA does (Liu et al. 2024)."""

    @property
    def settings(self) -> dict[str, Any]:
        """Its keys, without variants that are not used."""
        variants = ("dropout", "rslora", "dora")
        table = self.model_dump(mode="json")
        return {key: value for key, value in table.items() if value or key not in variants}


class ModelTable(Table):
    """`[model]`: what is trained."""

    name: Source
    """A built-in, a Hugging Face id, or the path of a model folder."""
    tokenizer: Source | None = None
    """Where the tokenizer is; left out: with the model."""
    task: Literal["sequence-classification", "causal-lm"] = "sequence-classification"
    """What the model learns: the class of a text, or the next token."""
    loss: Literal["cross-entropy", "squared"] = "cross-entropy"
    """The training loss; `squared` is for classes only."""
    response_template: str = ""
    """The words before each response, such as `### Response:`: the loss counts what stands behind
    them, and an end token. Left out: all tokens."""
    lora: LoraTable | None = None
    """Adapters; left out: the model itself is trained."""

    def _problems(self) -> Iterator[str]:
        """Yields what a loss, or words before a response, need of the task."""
        if self.response_template and self.task != CAUSAL_LM:
            yield (
                f"response_template is for task = {CAUSAL_LM!r}, and task = {self.task!r}: leave "
                "it out"
            )
        if self.task == CAUSAL_LM and self.loss == "squared":
            yield (
                f"loss = 'squared' is for classes and task = {CAUSAL_LM!r} has none: use "
                "'cross-entropy'"
            )


class DataTable(Table):
    """`[data]`: what the model is trained on."""

    name: Source
    """A built-in, a Hugging Face id, or the path of a file or folder."""
    split: str = "train"
    """The split of the data set."""
    text: str | int | None = None
    """The column of the text, by name or by number from 0; well-known data sets need none.

    Or a template of the text, with the names of columns in braces, such as
    `"### Instruction:\\n{instruction}\\n### Response: {response}"`. Built-in data has the columns
    `text`, `instruction` and `response`.
    """
    label: str | int | None = None
    """The column of the class, by name or by number from 0; well-known data sets need none."""
    samples: Annotated[int, Field(ge=1, le=MOST_EXAMPLES)] | None = None
    """Training examples of all clients; left out: all that is there, or 400 of a built-in."""
    held_out: (
        Annotated[int, Field(ge=0, le=MOST_EXAMPLES)] | Annotated[float, Field(gt=0, lt=1)] | None
    ) = None
    """Examples that no client has: they score the global model, and serve as a control.

    A number, or a share of all examples below 1. Left out: 100, or a fifth of what is there where
    `samples` is left out too and that is less.
    """
    max_length: Annotated[int, Field(ge=3)] | None = None
    """Tokens after which a text is cut off; left out: a text that is too long is refused."""
    on_nodes: bool = False
    """Each node of a federation trains on a file of its own, which its configuration names.

    The file has the same columns. What `name` says is the server's: it gives the names of the
    classes and the held-out texts, and nobody trains on it. Such an experiment runs under
    `flwr run` only.
    """
    drop_empty: bool = False
    """Leave out rows without text; otherwise they are refused."""
    encoding: Annotated[str, AfterValidator(_encoding)] | None = None
    """The encoding of a file; left out: UTF-8."""
    delimiter: Annotated[str, Field(pattern=r"^[\t !#-/:-@\[-`{-~]$")] | None = None
    """The delimiter of a csv or tsv file; left out: a comma or a tab."""

    @model_validator(mode="before")
    @classmethod
    def _sizes(cls, table: Any) -> Any:
        """Fills in the sizes that do not depend on how many rows there are."""
        if not isinstance(table, dict):
            return table
        filled = dict(table)
        if filled.get("samples") is None and str(filled.get("name")).startswith("builtin/"):
            filled["samples"] = SAMPLES
        if filled.get("samples") is not None and filled.get("held_out") is None:
            filled["held_out"] = HELD_OUT
        return filled


class FederationTable(Table):
    """`[federation]`: who trains, how, and through which engine."""

    engine: Literal["inline", "simulation"] = "inline"
    """`inline` trains in one process, `simulation` in Flower's simulation. Results are equal."""
    algorithm: Literal["fedsgd", "fedavg"] = "fedsgd"
    """What clients send: `fedsgd` a gradient, `fedavg` the difference of the weights."""
    clients: Annotated[int, Field(ge=1, le=MOST_UPDATES)] = 4
    """Clients in all."""
    clients_per_round: Positive | None = None
    """Clients that train in a round; left out: all."""
    participation: Literal["random", "cyclic"] = "random"
    """Who they are: `random` draws them anew; `cyclic` lets clients take turns.

    Then a client trains again after `clients / clients_per_round` rounds, rounded down, or more.
    """
    at_once: Positive | None = None
    """Clients that are asked at a time: so many updates a SuperLink holds at most.

    The next one is asked as an update is captured. Left out: 16, or one for each CPU core of the
    server. Results do not depend on it.
    """
    rounds: Positive = 3
    """Rounds of training."""
    batch_size: Positive = 2
    """Examples in a step."""
    local_epochs: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Passes over a client's data in a round of `fedavg`."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    """Learning rate: of the server under `fedsgd`, of the clients' plain SGD under `fedavg`."""
    server_optimiser: Literal["sgd", "adam"] = "sgd"
    """How the server steps along the mean update: plainly, or by `adam`.

    That is FedAdam (Reddi et al. 2021). Clients send the same either way. A pretrained model hardly
    learns by plain SGD.
    """
    server_learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the server's `adam` under `fedavg`; under `fedsgd` it is `learning_rate`."""
    dropout: bool = False
    """Train with the model's dropout."""
    partition: Literal["iid", "dirichlet"] = "iid"
    """How the examples are divided; `dirichlet` divides each class unevenly."""
    alpha: Annotated[float, Field(gt=0)] = 0.5
    """Concentration of the Dirichlet distribution: the smaller, the more uneven."""

    def _problems(self) -> Iterator[str]:
        """Yields why these clients and rounds cannot be, or what the server steps with."""
        if self.clients_per_round is not None and self.clients_per_round > self.clients:
            yield (
                f"clients_per_round = {self.clients_per_round} is more than "
                f"clients = {self.clients}: lower it"
            )
        needed = self.server_optimiser == "adam" and self.algorithm == "fedavg"
        if needed and self.server_learning_rate is None:
            yield (
                "server_learning_rate is missing: under fedavg learning_rate is the clients', and "
                "the server's adam needs its own: set it, such as 1e-3"
            )
        if not needed and self.server_learning_rate is not None:
            yield (
                f"server_learning_rate = {self.server_learning_rate:g} is for fedavg with "
                f"server_optimiser = 'adam', and here are {self.algorithm} and "
                f"{self.server_optimiser!r}: leave it out"
            )
        a_round = self.clients_per_round or self.clients
        if self.rounds * a_round > MOST_UPDATES:
            yield (
                f"rounds = {self.rounds:,} of {a_round:,} clients are {self.rounds * a_round:,} "
                f"updates, and a run has at most {MOST_UPDATES:,}: lower one of them"
            )


class ServerTable(Table):
    """`[server]`: what a malicious server changes of the model that it sends.

    The other keys of the table are those of its mode.
    """

    mode: str = "honest"
    """Which mode. The clients are told nothing of it."""
    rounds: Annotated[list[Positive], Field(min_length=1)] | None = None
    """The rounds in which it does so; left out: every round."""
    aggregate: bool = True
    """Whether what clients send in such a round moves the global model, from its honest weights.

    `false`: the model stays as it is in such a round.
    """


class UpdateTable(Table):
    """`[update]`: which parameters a client sends."""

    share: Literal["all"] | Annotated[list[str], Field(min_length=1)] = "all"
    """All, or parts (`fedleak.models.parameter_selection`) and patterns on parameter names."""


class ThreatTable(Table):
    """`[threat]`: what the attacker is told beyond the protocol, and which updates it keeps."""

    sees: Sight | None = None
    """What the attacker sees: the `updates` of clients, the `sum` of a round's, or `models` alone.

    Left out: `sum` with `secure_sum`, `models` with `central_dp`, else `updates`. What is attacked
    of `models` is the difference of two successive ones.
    """
    knows: list[str] = []
    """Facts about the batch that the attacker is granted."""
    ladder: bool = False
    """Run each attack told nothing, told each fact that it uses alone, and told all of them."""
    rounds: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Rounds that are attacked; no other updates and models are kept. Left out: every round."""
    clients: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Clients that are attacked; the updates of others are summed and forgotten. Left out: all."""

    def _problems(self) -> Iterator[str]:
        """Yields facts that do not exist, and those that the ladder grants by itself."""
        for fact in self.knows:
            if fact not in GRANTABLE:
                yield unknown("fact", fact, GRANTABLE)
        if self.ladder and self.knows:
            yield (
                f"ladder = true grants each fact in turn, and knows = {self.knows} would grant "
                "some from the start: keep one of them"
            )


class PrivacyTable(Table):
    """`[privacy]`: how the privacy ledger counts."""

    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The delta of every (epsilon, delta) statement."""
    accountant: Accountant = "prv"
    """How the noise of several steps is composed; "prv" is never looser."""


class CanaryTable(Table):
    """`[canary]`: made-up gradients in clients' updates, by which the audit measures privacy."""

    count: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Canaries of an update; where a whole update is protected, each in a copy of its own, which
    costs what the client's defenses cost."""
    clients: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Clients that take them in; left out: all."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """Of their places and directions, which the auditor knows; left out: the experiment's."""
    norm: Annotated[float, Field(gt=0)] = 1.0
    """L2 norm of a canary where no defense bounds what an example contributes."""


def _varies(pattern: str) -> str:
    """Refuses a part of a secret that would be the same in all texts."""
    if "{word}" not in pattern and "{digit}" not in pattern:
        raise ValueError(
            f"{pattern!r} is the same in all texts: put {{word}} or {{digit}} into it, which are "
            "drawn for each text"
        )
    return pattern


Pattern = Annotated[str, AfterValidator(_varies)]


class PublishedTable(Table):
    """`[published]`: made-up secrets in clients' data, and what the published models say of them.

    A text is a beginning and a secret. `{word}` in both is a random word of the held-out texts,
    `{digit}` a random digit.
    """

    secrets: Annotated[int, Field(ge=1, le=1_000)] = 4
    """Texts of each client for each count."""
    counts: Annotated[list[Annotated[int, Field(ge=1, le=1_000)]], Field(min_length=1)] = [1, 4, 16]
    """How many times such a text stands in its client's data."""
    clients: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Clients that have them; left out: all."""
    twins: Annotated[int, Field(ge=19, le=10_000)] = 255
    """Texts made in the same way that nobody trains on: a secret is ranked among them."""
    beginning: Pattern = "The password of {word} {word} is"
    """How a text begins. Whoever prompts the model knows it; no two texts begin alike."""
    secret: Pattern = "{word} {word} {word} {word}"
    """How it goes on."""


class UtilityTable(Table):
    """`[utility]`: when the global model is scored on held-out data."""

    rounds: Literal["all"] | list[Annotated[int, Field(ge=0)]] = "all"
    """After which rounds, besides the last; 0 is before training."""
    reference: bool = False
    """Also train one model centrally and without defenses, on as many examples."""


def _address(text: str) -> str:
    """Refuses what is not the address of a cluster's head."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in host:
        raise ValueError(f"{text!r} is not host:port: write '10.0.0.1:6379', for example")
    return text


class RayTable(Table):
    """`[workers.ray]`: the Ray cluster that attacks run on."""

    address: Annotated[str, AfterValidator(_address)]
    """`host:port` of the cluster's head. The command runs on a node of the cluster."""
    slots: Positive | None = None
    """Workers; left out: as many as the cluster has room for."""
    gpus: Annotated[float, Field(ge=0)] | None = None
    """GPUs, or the share of one, that each worker takes; 0: a CPU core each.

    Left out: 1 where the cluster has GPUs, else 0.
    """
    shared: bool = True
    """Whether all nodes see the run directory at its path; if not, it is sent to them."""


class WorkersTable(Table):
    """`[workers]`: where attacks run."""

    engine: Literal["local", "ray"] = "local"
    """`local` attacks on this machine, `ray` on a Ray cluster. Answers are equal."""
    devices: Annotated[list[str], Field(min_length=1)] | None = None
    """Torch devices, one worker process each; left out: what this machine has."""
    time_limit: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that one try of an attack may take."""
    at_once: Positive | None = None
    """Updates of a round that one call of an attack takes at most; lower it where memory is short.

    Left out: as many as the attack takes. Answers do not depend on it but in rounding, and the
    score `calibrated` of `membership`, which compares the updates of a call.
    """
    ray: RayTable | None = None
    """The cluster of the engine `ray`."""

    def _problems(self) -> Iterator[str]:
        """Yields what makes the place of the workers unclear."""
        if self.engine == "ray" and self.ray is None:
            yield "engine = 'ray' needs the cluster's address: set workers.ray.address"
        if self.engine == "ray" and self.devices is not None:
            yield (
                "devices are those of this machine, and engine = 'ray' uses the cluster's: leave "
                "devices out"
            )


class AuditTable(Table):
    """`[audit]`: how answers are scored, and how long captures stay."""

    controls: bool = True
    """Also score the answer for another client and held-out texts against the same truth."""
    personal_data: Literal["rules", "presidio", "none"] = "rules"
    """What finds personal data in private texts, to tell what share of it was read.

    `rules` find mail, web and IP addresses, IBANs, card numbers, dates, streets and numbers of six
    or more digits, and no names. `presidio` also finds names, in texts that keep their capitals.
    """
    names: Source | None = None
    """A text file of names and other terms that are personal data, too, one a line."""
    spacy_model: str = "en_core_web_sm"
    """The model of spaCy that Presidio finds names with: its name, or its folder."""
    keep: Literal["all", "unproved", "none"] = "all"
    """Which captures stay once every attack has answered.

    `unproved`: those whose texts no attack proved; `none`: none. What an attack failed on stays
    for `fedleak attack --retry`. What was deleted cannot be attacked again.
    """
    store: Literal["all", "read"] = "all"
    """What a capture holds of what the server received.

    `read`: only the tensors that the attacks of the run say they read, so that it takes less disk.
    A proof is then of these tensors. An attack that reads others needs a run of its own.
    """
    waiting: Positive | None = None
    """Captures that may wait for their attacks: then training waits, too. Left out: any number.

    With `keep` it bounds the disk that a run takes, and no more clients are asked at a time.
    """

    def _problems(self) -> Iterator[str]:
        """Yields that nothing bounds the disk."""
        if self.waiting is not None and self.keep == "all":
            yield (
                f"waiting = {self.waiting} bounds the disk only where captures are deleted: set "
                "keep to 'none' or 'unproved', or leave waiting out"
            )


Share = Annotated[float, Field(ge=0, le=1)]


class GateTable(Table):
    """`[gate]`: limits that `fedleak gate` compares the run with."""

    exact: Share | None = None
    """The largest share of texts that all attacks together may read word for word."""
    rougeL: Annotated[float, Field(ge=0, le=100)] | None = None
    """The largest mean ROUGE-L of what the best attack reads of each text."""
    token_recall: Share | None = None
    """The largest mean share of a text's tokens that the best attack finds."""
    personal_data: Share | None = None
    """The largest share of the personal data in the texts that all attacks together may read."""
    epsilon: Annotated[float, Field(ge=0)] | None = None
    """The largest epsilon of any client, accounted and, where canaries measured it, bounded."""
    canary: Annotated[float, Field(ge=0)] | None = None
    """The largest lower bound on any client's epsilon by canaries."""
    auc: Share | None = None
    """The largest area under the ROC curve of any score of an attack on membership."""
    tpr: Share | None = None
    """The largest share of members that such a score finds where it accuses 1 % of the others."""
    exposure: Annotated[float, Field(ge=0)] | None = None
    """The largest mean exposure, in bits, of planted secrets in a published model."""
    extracted: Share | None = None
    """The largest share of planted secrets that a published model writes out."""
    perplexity: Annotated[float, Field(ge=1)] | None = None
    """The largest perplexity of the trained model on held-out texts."""
    accuracy: Share | None = None
    """The least accuracy of the trained model on held-out texts."""
    f1: Share | None = None
    """The least F1 of the trained model on held-out texts."""
    mcc: Annotated[float, Field(ge=-1, le=1)] | None = None
    """The least Matthews correlation of the trained model on held-out texts."""
    alarms: Annotated[int, Field(ge=0)] | None = None
    """The most rounds of a client in which a detector may have alarmed."""
    coverage: Share | None = None
    """The least share of all private texts of the run that an attack has to have answered for."""
    seconds: Annotated[float, Field(ge=1)] = 120.0
    """The least `seconds` of an attack that used up its time; with less it was cut short."""
    require: list[str] = []
    """What has to be measured: kinds of attacks, and `canary`, canaries of every client."""
    may_abstain: list[str] = []
    """Attacks that may abstain, by name; an abstention of another one closes the gate."""

    @property
    def limits_leaks(self) -> bool:
        """Whether it limits what attacks read of texts."""
        leaks = (self.exact, self.rougeL, self.token_recall, self.personal_data)
        return any(limit is not None for limit in leaks)


CANARY_OF_EVERY_CLIENT = "canary"
"""What can be required of a run besides attacks."""

LEAST = ("accuracy", "f1", "mcc", "coverage", "seconds")
"""Limits of the gate that are the least allowed."""

MOST = tuple(
    name for name in GateTable.model_fields if name not in (*LEAST, "require", "may_abstain")
)
"""Limits of the gate that are the most allowed."""
