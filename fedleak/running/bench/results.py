"""The result of a suite: one JSON file, from which tables are made.

It has no private text and no path of a machine, so it can be passed on. Readers should know that
anybody can write such a file.
"""

import os
import platform
from collections.abc import Iterable
from typing import Annotated

import psutil
from pydantic import Field, JsonValue

from fedleak.store.lines import Document, Record
from fedleak.store.summaries import AttackSummary, Estimate


class Machine(Record):
    """The machine that a suite ran on.

    Attributes:
        system, processor: Such as "Linux" and "x86_64".
        cores: Of the processor.
        memory_gib: GiB of memory.
        devices: Those that attacked: "cpu", or names of GPUs.
    """

    system: str
    processor: str
    cores: int
    memory_gib: float
    devices: tuple[str, ...]


class Entry(Record):
    """An attack that was run.

    Attributes:
        name: In tables.
        settings: As they were written.
        origin: The package that it comes from, with its version.
        outside: Whether no import contract holds it: another package's, or an outside program.
    """

    name: str
    settings: dict[str, JsonValue]
    origin: str
    outside: bool


class Cell(Record):
    """One attack in one setting.

    Attributes:
        attack: Its name.
        left_out: Why it was not run; None: it was.
        figures: Its scores; None if it was not run.
        reasons: Why updates have no answer, and how many have each reason.
    """

    attack: str
    left_out: str | None = None
    figures: AttackSummary | None = None
    reasons: dict[str, int] = {}


class Together(Record):
    """What all attacks together read: of each text, what the best attack read of it."""

    exact_match: Estimate | None
    rougeL: Estimate | None
    token_recall: Estimate | None


class SettingResult(Record):
    """A setting and what attacks read in it.

    Attributes:
        name, about, fingerprint: As in the suite.
        left_out: Why it was not run; None: it was.
        model: The fingerprint of the weights that training started from.
        texts: The fingerprint of the clients' texts.
        updates, sequences: Attacked updates, and texts in them.
        cells: A cell per attack.
        together: Over all attacks.
    """

    name: str
    about: str
    fingerprint: str
    left_out: str | None = None
    model: str | None = None
    texts: str | None = None
    updates: int = 0
    sequences: int = 0
    cells: tuple[Cell, ...] = ()
    together: Together | None = None


class Result(Record):
    """The result of a suite.

    Attributes:
        suite, version, fingerprint: Of the suite.
        versions: Of fedleak, Python and the main packages.
        machine: What it ran on.
        attacks: Those that were run.
        settings: All that the suite has, in its order.
        missing: What makes it incomplete.
    """

    suite: str
    version: Annotated[int, Field(ge=1)]
    fingerprint: str
    versions: dict[str, str]
    machine: Machine
    attacks: tuple[Entry, ...]
    settings: tuple[SettingResult, ...]
    missing: tuple[str, ...] = ()


RESULT = Document("bench.json", Result, "`fedleak bench` with the suite writes it anew")


def this_machine(devices: Iterable[str]) -> Machine:
    """Describes this machine, without its name.

    Args:
        devices: Those that attacked, as rows name them.
    """
    return Machine(
        system=platform.system(),
        processor=platform.machine(),
        cores=os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        devices=tuple(devices),
    )
