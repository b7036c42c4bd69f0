"""Takes the files of nodes' vaults into a run, when their owners hand them over.

The server of a federation on several machines does not see the vaults, so answers stay unscored
until it gets them. The files of a vault are as untrusted as what comes over the wire: all are
checked before anything is written, and nothing in the run is replaced by something else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedleak.audit.detection import DetectionNote
from fedleak.audit.gaps import Note
from fedleak.audit.privacy.ledger import ClientNote
from fedleak.audit.vault import check_truth, weight
from fedleak.config.federation.assignment import client_fingerprint
from fedleak.config.federation.lookup import examples, stored
from fedleak.config.federation.schedule import updates
from fedleak.models import CLASSIFICATION, loading
from fedleak.store import records
from fedleak.store.files import naming, parse_json, real_folder
from fedleak.store.run import Key, Run
from fedleak.store.seal import without
from fedleak.store.vault import Notes
from fedleak.training.privacy import accounting
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import CaptureError, ConfigError, FedleakError
from fedleak.util.plain_files import content
from fedleak.util.sanitise import printable

MOST_BYTES = 64 * 2**20
"""The most bytes of a file of a vault: enough for a batch of more than a million tokens."""


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """What a run did not have before.

    Attributes:
        truths, notes: Private batches, and notes on what defenses did, by round and client.
    """

    truths: tuple[Key, ...]
    notes: tuple[Key, ...]


def take_vaults(run: Run, folders: Sequence[Path]) -> HandedOver:
    """Takes the private batches of a run from the vaults of nodes.

    Whoever calls this holds the lock.

    Args:
        run: The run directory.
        folders: Each is the `vault` of a node, with a folder for each run, or such a folder.

    Raises:
        ConfigError: There is no run here, or a folder has nothing of it.
        FedleakError: A file is not what a client of this run wrote; nothing was taken then.
    """
    check, vaults = _Check(run), [_folder_of_run(run, folder) for folder in folders]
    kinds = ((run.vault, check.truth), (run.defended, check.note), (run.detected, check.detection))
    new = [_lacking(own, _collected(vaults, own.name, check, checked)) for own, checked in kinds]
    for (own, _), contents in zip(kinds, new, strict=True):
        for key, value in contents.items():
            own.write(key, value)
    truths, notes, _ = new
    return HandedOver(truths=tuple(sorted(truths)), notes=tuple(sorted(notes)))


def _collected(
    vaults: Iterable[Path], name: str, check: "_Check", checked: Callable[[Key, Path], Any]
) -> dict[Key, Any]:
    """Returns what vaults have in their folders of this name, checked."""
    contents: dict[Key, Any] = {}
    for vault in vaults:
        for key, path in check.files(vault / name):
            value = checked(key, path)
            if contents.setdefault(key, value) != value:
                raise FedleakError(
                    f"{path}: another folder has another file for {key}: name the vault of the "
                    f"node that holds the data of client {key.client}, and no other for it"
                )
    return contents


def _folder_of_run(run: Run, folder: Path) -> Path:
    """Returns the folder of a run in the vault of a node."""
    name = run.path.absolute().name
    for candidate in (folder / name, folder):
        if (candidate / "vault").is_dir():
            return candidate
    others = sorted(path.parent.name for path in folder.glob("*/vault"))
    contents = f"it has {', '.join(map(printable, others[:3]))}" if others else "it has no run's"
    raise ConfigError(
        f"--vault {str(folder)!r} holds no private batches of the run {name!r} ({contents}): "
        "name the `vault` of a node's configuration, or the folder of this run in it"
    )


def _lacking(own: Notes, collected: Mapping[Key, Any]) -> dict[Key, Any]:
    """Returns the collected files that the run does not have yet.

    Raises:
        FedleakError: The run has a file with other content.
    """
    new = {}
    for key, value in collected.items():
        try:
            before = own.read_note(key)
        except FedleakError:  # damaged: the collected one replaces it
            before = None
        if before is None:
            new[key] = value
        elif before != value:
            raise FedleakError(
                f"{own.path(key)} holds something else than the vault that was handed over, so "
                "nothing was taken: delete the file if the vault is right"
            )
    return new


class _Check:
    """Checks files against what the vaults of a run's clients can hold."""

    def __init__(self, run: Run) -> None:
        self._run, self._experiment = run, stored(run)
        self._num_labels = run.info()["num_labels"]
        model = loading.outline(self._experiment.model_spec(self._num_labels))
        self._vocabulary = model.vocabulary
        self._mark = client_fingerprint(self._experiment)
        self._captured = set(run.captures.all_keys())
        self._keys = {f"{key}.json": key for key in updates(self._experiment)}

    def files(self, folder: Path) -> Iterator[tuple[Key, Path]]:
        """Yields the files of a folder, each with its round and client."""
        real_folder(folder)
        with naming(folder, "read"):
            paths = sorted(folder.glob("*.json"))
        for path in paths:
            key = self._keys.get(path.name)
            if key is None:
                raise FedleakError(
                    f"{printable(str(path))}: in this run no client trains then: it is of another "
                    "run, so nothing was taken"
                )
            yield key, path

    def truth(self, key: Key, path: Path) -> Any:
        """Returns the content of a private batch; refuses one that cannot be of this run."""
        value = self._read_marked(path)
        try:
            truth = check_truth(value, key, path)
        except CaptureError as error:
            raise _refused(str(error)) from error
        if reason := self._why_wrong(key, truth):
            raise _refused(f"{path}: {reason}")
        return value

    def note(self, key: Key, path: Path) -> Any:
        """Returns the content of a note on defenses; refuses one that cannot be of this run."""
        value, note = self._read_note(path, ClientNote, "defenses")
        if reason := self._why_wrong_note(key.client, note):
            raise _refused(f"{path}: {reason}")
        return value

    def detection(self, key: Key, path: Path) -> Any:
        """Returns the content of a note on detectors; refuses one that cannot be of this run."""
        value, note = self._read_note(path, DetectionNote, "detectors")
        detectors = self._experiment.detectors_of(key.client)
        own = {(place, detector.kind) for place, detector in detectors.items()}
        if any((finding.place, finding.detector) not in own for finding in note.findings):
            raise _refused(f"{path}: client {key.client} has other detectors in this run")
        return value

    def _read_note(self, path: Path, kind: type[Note], of_what: str) -> tuple[Any, Note]:
        """Reads a client's note; returns it as it is written and as a checked value."""
        value = self._read_marked(path)
        try:
            return value, kind.model_validate(value)
        except ValidationError as error:
            raise _refused(f"{path} is damaged (it is no note on {of_what})") from error

    def _read_marked(self, path: Path) -> Any:
        """Reads a file that carries this experiment's mark."""
        try:
            # The seal of a node's machine has no meaning here.
            value = without(parse_json(content(path, MOST_BYTES)))
        except OSError as error:
            raise _refused(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise _refused(f"{path} is damaged (it is not JSON)") from error
        own = self._mark
        mark = value.get("fingerprint") if isinstance(value, dict) else None
        if mark != own:
            raise _refused(f"{path} is of the experiment {printable(str(mark))[:40]}, not of {own}")
        return value

    def _why_wrong(self, key: Key, truth: GroundTruth) -> str | None:
        """Returns why a batch cannot be what a client trained on; None if it can."""
        if not records.within(chain(*truth.sequences), self._vocabulary):
            return "it has token ids outside the vocabulary"
        classes = self._experiment.model.task == CLASSIFICATION
        if len(truth.labels) != len(truth.sequences) * classes:
            return f"{len(truth.labels)} labels for {len(truth.sequences)} texts"
        if not records.within(truth.labels, self._num_labels):
            return f"it has labels that are none of the {self._num_labels} classes"
        if truth.noise_scale is not None and truth.noise_scale < 0:
            return f"its noise_scale is {truth.noise_scale}"
        if (canaries := truth.canaries) is not None and (
            len(canaries.drawn) not in (0, len(canaries.inside))
            or not (canaries.rate is None or 0 < canaries.rate <= 1)
        ):
            return "its canaries cannot be of this run"
        if truth.batch_size < 1:
            return f"its batch_size is {truth.batch_size}"
        if key in self._captured:
            sent, held = self._run.captures.about(key).num_examples, weight(truth, self._experiment)
            if sent != held:
                return f"it has {held} examples, but client {key.client} sent an update of {sent}"
        return None

    def _why_wrong_note(self, client: int, note: ClientNote) -> str | None:
        """Returns why a note cannot be of a client's defenses; None if it can."""
        defenses = self._experiment.defenses_of(client)
        own = {(place, defense.kind) for place, defense in defenses.items()}
        if any((did.defense, did.kind) not in own for did in note.defenses):
            return f"client {client} has other defenses in this run"
        most = self._experiment.local_training.steps(examples(self._run).training)
        if any(not 1 <= event.steps <= most for event in note.events):
            return f"it counts more steps than the {most} that a client can make in a round"
        table = self._experiment.privacy
        try:
            accounting.compose(note.events, table.delta, table.accountant)
        except (ValueError, ArithmeticError, ConfigError):
            return "it has an event that nothing can be composed of"
        return None


def _refused(reason: str) -> FedleakError:
    return FedleakError(f"{reason}: so nothing was taken")
