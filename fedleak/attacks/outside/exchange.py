"""The files that pass between fedleak and an outside program, whose format has a version.

An observation is a folder. It has nothing of the truth:

    observation.json      what the attacker knows, as `observation_table` makes it
    update.safetensors    the update's tensors, by parameter name
    model/                config.json, model.safetensors and tokenizer, at the broadcast weights

An answer is one JSON file, an `AnswerFile`. `docs/outside-attacks.md` describes both.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from safetensors.torch import save_file

from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.models import CLASS_LOSSES, CLASSIFICATION, LanguageModel
from fedleak.training.observation import QUESTIONS, Observation
from fedleak.util.plain_files import content

VERSION = 1
"""The version of both formats."""

OBSERVATION, ANSWER = "fedleak-observation", "fedleak-answer"
"""Values of the key `format`."""

MOST_BYTES = 10_000_000
"""Bytes of the largest answer file."""

MOST_SEQUENCES, LONGEST_TEXT = 10_000, 100_000
"""The most sequences of an answer, and the most characters of a sequence that is a text."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]


class AnswerFileError(ValueError):
    """A file that is no valid answer; the text says why."""


class AnswerFile(BaseModel):
    """What a program answers; all but the first three keys may be left out.

    Attributes:
        sequences: Best first, each as token ids, special tokens included, or as a text.
        evidence: For each sequence the program's own statistic, lower is better.
        tokens: The distinct tokens of the batch, as the program read them.
        facts, diagnostics, reason: As in a `Reconstruction`.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal["fedleak-answer"]
    version: Literal[1]
    status: Literal["recovered", "abstained", "inadmissible", "failed"]
    sequences: Annotated[list[Text | list[TokenId]], Field(max_length=MOST_SEQUENCES)] | None = None
    evidence: list[float | None] | None = None
    tokens: list[TokenId] | None = None
    facts: dict[str, JsonValue] = {}
    diagnostics: dict[str, JsonValue] = {}
    reason: Annotated[str, Field(max_length=LONGEST_TEXT)] = ""


def write_observation(
    folder: Path, seen: Observation, model: LanguageModel, *, seconds: float, seed: int
) -> None:
    """Writes all that an attacker sees into a new folder.

    Args:
        folder: The folder, which is created.
        seen: The update, and what is known.
        model: At the broadcast weights.
        seconds: How long the program may take.
        seed: For the program's random numbers.
    """
    folder.mkdir()
    tensors = {name: t.detach().cpu().contiguous() for name, t in seen.update.tensors.items()}
    save_file(tensors, folder / "update.safetensors")
    model.module.save_pretrained(folder / "model")  # type: ignore[operator]
    model.tokenizer.save_pretrained(folder / "model")
    table = observation_table(seen, model, seconds=seconds, seed=seed)
    (folder / "observation.json").write_text(json.dumps(table, indent=1) + "\n")


def observation_table(
    seen: Observation, model: LanguageModel, *, seconds: float, seed: int
) -> dict[str, Any]:
    """Returns observation.json; a fact that was not granted is null."""
    losses = [name for name, loss in CLASS_LOSSES.items() if loss is model.class_loss]
    return {
        "format": OBSERVATION,
        "version": VERSION,
        "round": seen.round,
        "client": seen.client,
        "update": {"kind": str(seen.update.kind), "num_examples": seen.update.num_examples},
        "knowledge": {
            name: value
            for name, value in dataclasses.asdict(seen.knowledge).items()
            if name not in QUESTIONS
        },
        "model": {
            "type": model.family.model_type,
            "task": model.task,
            "loss": losses[0] if model.task == CLASSIFICATION else "cross-entropy",
            "response_template": model.response_template,
            "num_labels": model.num_labels if model.task == CLASSIFICATION else None,
            "max_length": model.max_length,
            "word_embedding": model.family.word_embedding,
        },
        "device": str(model.device),
        "seconds": seconds,
        "seed": seed,
    }


def read_answer(path: Path, model: LanguageModel) -> Reconstruction:
    """Reads what a program answered; a text becomes the tokens that a client feeds for it.

    Raises:
        AnswerFileError: There is no answer, or it is not a valid one.
    """
    try:
        # A plain file that is not too large: a pipe would never end, a link leads anywhere.
        file = AnswerFile.model_validate_json(content(path, MOST_BYTES))
    except FileNotFoundError:
        raise AnswerFileError("it wrote no answer") from None
    except OSError as error:
        raise AnswerFileError(f"its answer cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise AnswerFileError(f"{where}: {first['msg']}" if where else first["msg"]) from None
    sequences = None if file.sequences is None else tuple(_ids(s, model) for s in file.sequences)
    something = bool(sequences) or file.tokens is not None or bool(file.facts)
    if (file.status == "recovered") != something:
        holding = "holds nothing" if not something else "holds sequences, tokens or facts"
        raise AnswerFileError(f"status is {file.status!r} and it {holding}")
    if file.evidence is not None and sequences is None:
        raise AnswerFileError("evidence is given and sequences are not")
    return Reconstruction(
        status=Status(file.status),
        sequences=sequences,
        evidence=_evidence(file.evidence, len(sequences or ())),
        tokens=None if file.tokens is None else tuple(sorted(set(file.tokens))),
        facts=file.facts,
        diagnostics=file.diagnostics,
        reason=file.reason or ("" if something else "the program gave no reason"),
    )


def _evidence(evidence: list[float | None] | None, sequences: int) -> tuple[float, ...]:
    """Returns the evidence, with null for what is unknown."""
    known = [None] * sequences if evidence is None else evidence
    return tuple(number if number is None or math.isfinite(number) else None for number in known)  # type: ignore[misc]


def _ids(sequence: str | list[int], model: LanguageModel) -> tuple[int, ...]:
    return tuple(model.encode([sequence])[0]) if isinstance(sequence, str) else tuple(sequence)
