"""fedleak in Python: attack an update of your own, score the answer, run an experiment, read a run.

Everything that is public stands in `fedleak` itself: `fedleak.attack`, not `fedleak.api.attack`.
The example of a gradient goes from a plain transformers model to the text that it was computed on:

>>> import fedleak, torch
>>> from transformers import AutoModelForSequenceClassification, AutoTokenizer
>>> folder = fedleak.builtin_model("bert-tiny")  # yours: a hub id, or a folder
>>> model = AutoModelForSequenceClassification.from_pretrained(folder)
>>> tokenizer = AutoTokenizer.from_pretrained(folder)
>>> texts = ["the patient has a fever", "my sister lost her job"]
>>> batch = tokenizer(texts, padding=True, return_tensors="pt")
>>> model(**batch, labels=torch.tensor([1, 0])).loss.backward()
>>> result = fedleak.attack(model, model, tokenizer, sent=fedleak.SentUpdate(num_examples=2))
>>> sorted(result.texts)
['my sister lost her job', 'the patient has a fever']
>>> result.verified
True

`score` compares the answer with the texts, and says what chance reads:

>>> scored = fedleak.score(result, texts)
>>> scored.row.exact_match, scored.row.guess_rougeL < 50
(1.0, True)

A mistake in a call raises `fedleak.ConfigError`, with one line that says what to do:

>>> fedleak.attack({"bert.pooler.dense.wieght": torch.ones(2)}, model, tokenizer, sent=result.sent)
Traceback (most recent call last):
...
fedleak.util.errors.ConfigError: the model has no parameter 'bert.pooler.dense.wieght': ...
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

from pydantic import Field, InstanceOf, SkipValidation, ValidationError, validate_call
from torch import nn

from fedleak.api.own_update import Tensors, observe
from fedleak.attacks import Equipped, Progress
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.audit.answer_scores import Scored, compared, guess
from fedleak.config.components import NamedAttack, build_attack
from fedleak.config.experiment import LARGEST_SEED, Experiment
from fedleak.config.loading import load, parse
from fedleak.config.sent_update import SentUpdate, plain_number, whole_numbers, wrong_argument
from fedleak.data.notes import notes
from fedleak.models import LanguageModel, builtin, loading
from fedleak.models.adoption import adopt, inner, without_weights_
from fedleak.running.workers import attempt
from fedleak.running.workers.model_state import changed, state
from fedleak.running.workers.process import Task, answer_of, device_name, failure
from fedleak.store.records import LEAKAGE, MEMBERSHIP, Answer, LeakageRow, MembershipRow
from fedleak.store.run import Key, Run
from fedleak.store.summaries import SUMMARY, RunSummary
from fedleak.training.observation import Observation, ThreatModel
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import ConfigError
from fedleak.util.errors import FedleakError as FedleakError
from fedleak.util.rng import stream
from fedleak.util.sanitise import is_whole, printable

if TYPE_CHECKING:
    import pandas

_log = logging.getLogger(__name__)

_HELD_OUT, _HELD_OUT_SEED = 100, 20
"""How many built-in notes serve as held-out texts if none are given, and their seed."""


@dataclass(frozen=True)
class AttackResult:
    """What an attack answered to an update.

    Attributes:
        answer: The answer, as a run keeps it: token ids, evidence, diagnostics.
        model: The model that was attacked, without its weights: scores need its tokenizer.
        sent: What the attack knew about the update.
    """

    answer: Answer
    model: LanguageModel = field(repr=False)
    sent: SentUpdate = field(repr=False)

    @property
    def status(self) -> Status:
        """Recovered, abstained, inadmissible or failed; `reason` says why it is not recovered."""
        return self.answer.status

    @property
    def reason(self) -> str:
        """Why there is no answer, or why it is not proved; may be empty."""
        return self.answer.reason

    @property
    def verified(self) -> bool:
        """Whether the whole answer is proved: its gradient, recomputed, equals the update."""
        return self.answer.verified

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that were read, best evidence first, without special tokens."""
        return tuple(self.model.decode(ids) for ids in self.answer.sequences or ())

    @property
    def words(self) -> tuple[str, ...]:
        """The tokens that the attack says were in the batch, without an order."""
        special = self.model.special_ids()
        return tuple(self.model.decode([t]) for t in self.answer.tokens or () if t not in special)

    def __str__(self) -> str:
        """Returns what was read, in lines that no terminal interprets."""
        answer = self.answer
        took = "" if answer.seconds is None else f" in {answer.seconds:.1f} s"
        proof = "proved" if answer.verified else "not proved"
        lines = [f"{answer.attack}: {answer.status}{took}, {proof}"]
        if answer.reason:
            lines.append(f"  {answer.reason}")
        for text, evidence in zip(self.texts, answer.evidence, strict=True):
            shown_evidence = "" if evidence is None else f"  (evidence {evidence:.2g})"
            lines.append(f"  {printable(text)}{shown_evidence}")
        if answer.sequences is None and self.words:
            lines.append(f"  words: {printable(' '.join(self.words))}")
        return "\n".join(lines)


_Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")


def _checked(function: Callable[_Parameters, _Returned]) -> Callable[_Parameters, _Returned]:
    """Checks the types of a call's arguments, and says in one line what is not right."""
    strict = {"strict": True, "arbitrary_types_allowed": True}
    validated = validate_call(config=strict)(function)  # type: ignore[call-overload]

    @wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Returned:
        arguments = signature(function).bind(*args, **kwargs).arguments
        try:
            returned: _Returned = validated(**{n: plain_number(v) for n, v in arguments.items()})
        except ValidationError as error:
            raise wrong_argument(error) from error
        return returned

    return call


@_checked
def attack(
    update: Annotated[Tensors, SkipValidation],
    model: Annotated[nn.Module | str | os.PathLike[str], SkipValidation],
    tokenizer: Any = None,
    *,
    sent: InstanceOf[SentUpdate],
    kind: str = "auto",
    settings: Mapping[str, Any] | None = None,
    task: str | None = None,
    seed: _Seed = 0,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> AttackResult:
    """Attacks an update of your own training.

    The model, its gradients and the tokenizer stay as they are: a copy is attacked, in float32, in
    this process, on the model's device.

    Args:
        update: Tensors by parameter name; or in the order of `model.parameters()`, as
            `torch.autograd.grad` returns them; or the module that holds them, after
            `loss.backward()`. Parameters that were not sent are absent, or None. Parts of names
            that wrappers add (`module.`, `base_model.model.`, `_orig_mod.`) do not matter. The
            type of a tensor says how exact it is: give half precision as it is.
        model: The transformers model at the weights that training started from: a BERT, GPT-2 or
            LLaMA for sequence classification or next-token prediction, in any wrapper. Or the
            name of a folder or hub id with all of its weights. A model with a head of your own
            needs `names` or `own_head` in `sent`.
        tokenizer: The model's tokenizer; only if the model is a module.
        sent: What the server knows of the update: at least how many texts it was computed on.
        kind: The attack; `fedleak list` names them.
        settings: Settings of the attack, by name, as in `[[attack]]` of an experiment file.
        task: "sequence-classification" or "causal-lm", for a model that is given by its name; left
            out: the task that the model was saved for.
        seed: Decides what the attack draws.
        on_progress: Called with the progress of a long attack.

    Returns:
        The answer. If the attack crashes, the status of the answer is "failed".

    Raises:
        ConfigError: The update does not fit the model, or something else that you can mend.
    """
    victim = _victim(model, tokenizer, task, sent)
    settings = {} if settings is None else settings
    if "kind" in settings:
        raise ConfigError(
            f"settings: kind = {settings['kind']!r} is the attack itself, and that is {kind!r}: "
            "leave it out"
        )
    named = build_attack(0, {"kind": kind, **settings})
    if isinstance(named.attack, Equipped):
        named.attack.check_equipment()
    named = replace(named, threat=ThreatModel(sent.granted))
    _whole_numbers("labels", sent.labels or (), 0, victim.num_labels - 1)
    _whole_numbers("lengths", sent.lengths or (), 1, victim.max_length)
    if sent.dropout is None:
        sent = sent.model_copy(update={"dropout": _dropout(model)})
    order = model if isinstance(model, nn.Module) else None
    if order is not None and not sent.own_head and not sent.names:
        order = inner(order)
    seen = observe(update, victim, sent, order)
    for name in seen.update.tensors:  # certificates recompute these, even if frozen since
        victim.module.get_parameter(name).requires_grad_(True)
    start = time.perf_counter()
    reconstruction = _attempt(named, seen, victim, seed, on_progress)
    answer = answer_of(
        Task(key=Key(seen.round, seen.client), attack=named, knowledge=seen.knowledge),
        reconstruction,
        seconds=round(time.perf_counter() - start, 4),
        device=device_name(str(victim.device)),
        together=1,
    )
    return AttackResult(answer, without_weights_(victim), sent)


@_checked
def score(
    result: InstanceOf[AttackResult],
    texts: Annotated[Sequence[str] | Sequence[Sequence[int]], SkipValidation],
    *,
    labels: Annotated[Sequence[int], SkipValidation] = (),
    other: InstanceOf[AttackResult] | None = None,
    held_out: Annotated[Sequence[str] | None, SkipValidation] = None,
    seed: _Seed = 0,
) -> Scored:
    """Scores an answer against the texts that the update was computed on.

    Args:
        result: What `attack` returned.
        texts: The private texts; or their token ids, if they were cut or tokenised in another way.
        labels: The class of each text, for attacks that read how many texts each class has; whole
            numbers, in a list, an array or a tensor.
        other: The answer of the same attack for an update of other texts: the first control. A
            score is a leak only as far as it exceeds the score of this control.
        held_out: Texts like these that were not in the batch. Some are drawn without the update:
            their score is the second control. Left out: fedleak's built-in notes, in English.
        seed: Decides which held-out texts are drawn.

    Returns:
        `row`, with the figures of `leakage.jsonl`, and `pairs`, each text with what was read of it.

    Raises:
        ConfigError: These cannot be the texts of the update.
    """
    model = result.model
    sequences = _token_ids("texts", texts, model)
    if len(sequences) != result.sent.num_examples:
        # An attack answers with num_examples texts, so fewer or more texts cannot be matched.
        raise ConfigError(
            f"texts: there are {len(sequences)}, but the attack was told num_examples = "
            f"{result.sent.num_examples}: give all texts of the update"
        )
    classes = _whole_numbers("labels", labels, 0, model.num_labels - 1)
    if classes and len(classes) != len(sequences):
        raise ConfigError(f"labels: {len(classes)} for {len(sequences)} texts: give one for each")
    if held_out is None:
        held_out = [note.text for note in notes(_HELD_OUT, _HELD_OUT_SEED)]
    others = [ids for ids in _token_ids("held_out", held_out, model) if ids not in sequences]
    truth = GroundTruth(
        round=result.answer.round,
        client=result.answer.client,
        sequences=tuple(sequences),
        labels=classes,
        batch_size=len(sequences),
    )
    control = None if other is None else other.answer
    guessed = guess(others, truth, model, seed)
    return compared(result.answer, truth, model, other=control, guessed=guessed)


@dataclass(frozen=True)
class Results:
    """The results of a run, as its run directory has them.

    Attributes:
        path: The run directory.
        rows: A row per update and attack, of leakage.jsonl.
        membership: A row per update and attack on membership, of membership.jsonl.
        summary: The figures of the run, with intervals.
    """

    path: Path
    rows: tuple[LeakageRow, ...] = field(repr=False)
    membership: tuple[MembershipRow, ...] = field(repr=False)
    summary: RunSummary = field(repr=False)

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns the rows as a table, a column per field; tables and lists stay what they are."""
        import pandas  # it takes a second

        return pandas.DataFrame([row.model_dump() for row in self.rows])

    def membership_to_pandas(self) -> "pandas.DataFrame":
        """Returns what attacks on membership say of each text of each update, as a table.

        Its columns are round, client, attack, text (its number, see `MembershipRow`), inside, and
        a column per score.
        """
        import pandas

        return pandas.DataFrame(
            [
                {"round": row.round, "client": row.client, "attack": row.attack, "text": number}
                | {"inside": inside}
                | {score: values[place] for score, values in row.scores.items()}
                for row in self.membership
                for place, (number, inside) in enumerate(zip(row.texts, row.inside, strict=True))
            ]
        )

    def write_report(
        self, out: str | os.PathLike[str] | None = None, *, redact: bool = False
    ) -> Path:
        """Writes the report of the run for a browser, and returns the file.

        Args:
            out: The file; left out: report.html in the run directory.
            redact: Leave private texts out.

        Raises:
            FedleakError: A file is missing or damaged, or the report cannot be written.
        """
        from fedleak.running import reports

        file = None if out is None else _path("out", out)
        return reports.report_run(Run(self.path), file, redact=redact)


def run(
    experiment: str | os.PathLike[str] | Mapping[str, Any] | Experiment,
    *,
    folder: str | os.PathLike[str] | None = None,
    fresh: bool = False,
) -> Results:
    """Runs an experiment, or the rest of it: trains, captures, attacks and scores.

    Attacks run in processes of their own, so a script must call this below
    `if __name__ == "__main__":`. A notebook or a REPL need not.

    Args:
        experiment: An experiment file, or its tables as a dict; `${NAME}` in a dict stays as it is.
        folder: The run directory; left out: runs/NAME.
        fresh: Move earlier results of this name aside.

    Raises:
        ConfigError: The experiment cannot work.
        FedleakError: The run failed or is not complete; `read_results` reads what is there.
    """
    from fedleak.audit.gaps import refuse_gaps
    from fedleak.federation.lookup import run_folder
    from fedleak.flower.engines import train  # this import takes seconds
    from fedleak.running import pipeline
    from fedleak.running.preparation import prepare

    wanted = _experiment(experiment)
    path = run_folder(wanted.name) if folder is None else _path("folder", folder)
    at = prepare(wanted, path, fresh=fresh)
    pipeline.carry_out(at, wanted, train)
    refuse_gaps(at)
    return read_results(at.path)


def read_results(folder: str | os.PathLike[str]) -> Results:
    """Reads the results of a run that was scored.

    Args:
        folder: The run directory, such as runs/NAME.

    Raises:
        ConfigError: There is no run.
        FedleakError: It was not scored, or a file is damaged.
    """
    at = Run(_path("folder", folder))
    at.info()  # refuses a folder that is no run
    return Results(
        at.path, tuple(at.rows(LEAKAGE)), tuple(at.rows(MEMBERSHIP)), at.read_document(SUMMARY)
    )


def builtin_model(name: str) -> str:
    """Returns the folder of a built-in model, which transformers loads without a network.

    Args:
        name: "bert-tiny", "gpt2-tiny" or "llama-tiny": small, with random weights. It is made on
            this machine when it is first used.

    Raises:
        ConfigError: There is no such model.
    """
    try:
        return str(builtin.folder(str(name).removeprefix("builtin/")))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _victim(
    model: nn.Module | str | os.PathLike[str], tokenizer: Any, task: str | None, sent: SentUpdate
) -> LanguageModel:
    """Returns a copy of the model, or the model of that name."""
    learned: dict[str, Any] = {"loss": sent.loss, "response_template": sent.response_template}
    learned["own_head"] = sent.own_head
    if not isinstance(model, str | os.PathLike):
        if tokenizer is None:
            raise ConfigError("tokenizer is missing: give the one that the model is trained with")
        if task is not None:
            raise ConfigError("task is what the model's class says: leave it out")
        return adopt(model, tokenizer, names=sent.names, **learned)
    if tokenizer is not None:
        raise ConfigError("tokenizer: a model that is given by its name has its own: leave it out")
    return loading.load_checkpoint(os.fspath(model), task=task, **learned)


def _dropout(model: object) -> bool | None:
    """Whether a module trains with dropout as it is now; None: a model's name does not show it."""
    if not isinstance(model, nn.Module):
        return None
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Dropout))
    return any(layer.training and layer.p > 0 for layer in layers)


def _whole_numbers(name: str, values: Any, lowest: int, highest: int) -> tuple[int, ...]:
    """Returns numbers of any library as plain ones.

    Raises:
        ConfigError: They are something else than whole numbers from `lowest` to `highest`.
    """
    try:
        numbers = whole_numbers(values)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    if wrong := [number for number in numbers if not lowest <= number <= highest]:
        raise ConfigError(f"{name} has {wrong[0]}, a number that is not from {lowest} to {highest}")
    return numbers


def _attempt(
    named: NamedAttack,
    seen: Observation,
    model: LanguageModel,
    seed: int,
    on_progress: Callable[[Progress], None],
) -> Reconstruction:
    """Calls an attack as a worker does, and returns its checked answer."""
    if (refused := attempt.unfit(named.attack, seen, model)) is not None:
        return refused
    before, rng = state(model), stream(seed, "attack", named.name, seen.round, seen.client)
    try:
        returned = attempt.call(
            named.attack, [seen], model, rngs=[rng], report=lambda _, at: on_progress(at)
        )
    except Exception as error:  # noqa: BLE001 - it may be anybody's attack
        _log.info("the attack %s crashed", named.name, exc_info=error)
        return Reconstruction.none(Status.FAILED, failure(error))
    return attempt.answers(named.attack, returned, [seen], model, changed(model, before))[0]


def _token_ids(
    name: str, texts: Sequence[str] | Sequence[Sequence[int]], model: LanguageModel
) -> list[tuple[int, ...]]:
    """Returns the token ids that a client feeds to the model for each text, cut to `max_length`.

    Raises:
        ConfigError: These are not texts or token ids.
    """
    if isinstance(texts, str):
        raise ConfigError(f"{name} is one text: give a list of texts")
    if not isinstance(texts, Iterable):
        raise ConfigError(f"{name} is {type(texts).__name__}: give a list of texts")
    most, token_ids = model.vocabulary - 1, []
    for number, text in enumerate(texts):
        at = f"{name}[{number}]"
        if isinstance(text, str):
            if not is_whole(text):
                raise ConfigError(f"{at} is damaged: it has half of a character: write it again")
            ids = tuple(model.encode([text])[0]) if text.strip() else ()
        else:
            ids = _whole_numbers(at, text, 0, most)
        if not ids:
            raise ConfigError(f"{at} is empty: give each text a token")
        token_ids.append(ids[: model.max_length])
    return token_ids


def _experiment(given: str | os.PathLike[str] | Mapping[str, Any] | Experiment) -> Experiment:
    if isinstance(given, Experiment):
        return given
    return parse(given) if isinstance(given, Mapping) else load(_path("experiment", given))


def _path(name: str, value: str | os.PathLike[str]) -> Path:
    try:
        return Path(value)
    except TypeError as error:
        raise ConfigError(f"{name} is {type(value).__name__}: give a path") from error
