"""Before a run: checks that the experiment is possible and that the run directory is its own."""

import json
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedleak.audit.kept_texts import candidates_file
from fedleak.audit.metrics import personal_data
from fedleak.config import checks
from fedleak.config.components import NamedAttack
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import Examples, examples, stored
from fedleak.config.federation.schedule import first_of_adapters, malicious_server
from fedleak.config.federation.trainable import trainable
from fedleak.config.federation.workload import Workload, candidates, outline, read_data
from fedleak.config.stored_parameters import check_stored, read_whole
from fedleak.config.tables import WorkersTable
from fedleak.config.wording import difference
from fedleak.models import CLASSIFICATION, LanguageModel, loading
from fedleak.running import forecast
from fedleak.store.files import naming, second_name
from fedleak.store.run import Run
from fedleak.store.summaries import SWEEP
from fedleak.util import logs
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.lists import first_of
from fedleak.util.nested import merged
from fedleak.util.sanitise import printable
from fedleak.util.versions import made_by, versions

CHANGEABLE: dict[str, Any] = {"gate": True, "federation": {"at_once"}, "audit": {"keep", "waiting"}}
"""Settings that may change while a run goes on, besides the workers: no result depends on them."""

TRAINED = (
    *("captures", "checks.json", "defended", "detected", "kept", "models", "published"),
    *("reference.json", "utility.jsonl", "vault"),
)
"""What training leaves in a run directory beside run.json."""

_LONGEST = 300
"""Characters of somebody else's command that are shown."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An experiment that can work, and what its run directory starts with.

    Attributes:
        candidates: The lists of texts that attacks on membership are asked about, by their place in
            the run directory.
        classes: Names of the classes, for nodes with data of their own.
        remarks: Remarks for the user on settings that may not be intended.
        sizes: How many examples each client has; empty: only the nodes know.
        disk: Bytes of all captures and models.
    """

    experiment: Experiment
    num_labels: int
    examples: Examples
    held_out: Mapping[str, Any]
    candidates: Mapping[str, Mapping[str, Any]]
    classes: tuple[str, ...]
    remarks: tuple[str, ...]
    sizes: tuple[int, ...]
    disk: int


def prepare(experiment: Experiment, path: Path, *, fresh: bool = False) -> Run:
    """Checks the experiment, and opens its run directory or makes it.

    Args:
        experiment: What to run.
        path: The run directory.
        fresh: Move what is there out of the way.

    Raises:
        ConfigError: The experiment cannot work, or differs from the one that ran here.
    """
    return open_run(plan(experiment), path, fresh=fresh)


def plan(experiment: Experiment) -> Plan:
    """Reads the data and looks at the model, and writes nothing.

    Raises:
        ConfigError: The experiment cannot work.
    """
    split, model, workload, unknown = trainable(experiment)
    classes = split.train.label_names
    num_labels = len(classes)
    checks.check_attacks(experiment, model)
    personal_data.recogniser(experiment.audit, model)  # refuses what is not installed
    loading.check_weights(experiment.model.name, experiment.model.task, num_labels)
    held_out = {"sequences": workload.held_out, "labels": workload.held_out_labels}
    return Plan(
        experiment=experiment,
        num_labels=num_labels,
        examples=Examples(len(workload.sequences), len(workload.held_out)),
        held_out=held_out,
        candidates=read_candidates(experiment, classes, model),
        classes=classes if experiment.data.on_nodes else (),
        remarks=_remarks(experiment, model, split.dropped, unknown, workload),
        sizes=() if experiment.data.on_nodes else tuple(map(len, workload.parts)),
        disk=forecast.bytes_kept(experiment, model),
    )


def read_candidates(
    experiment: Experiment, classes: Sequence[str], model: LanguageModel
) -> dict[str, dict[str, Any]]:
    """Reads the files of texts that attacks on membership are asked about.

    Returns:
        The lists of texts, by their place in the run directory.

    Raises:
        ConfigError: A file is not right.
    """
    return {
        str(candidates_file(attack.name)): texts
        for attack in experiment.attacks
        if (texts := candidates(experiment, attack, classes, model)) is not None
    }


def keep_candidates(run: Run, lists: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the lists of texts that attacks are asked about into the run directory.

    Raises:
        ConfigError: An attack was asked about other texts before.
    """
    for place, texts in lists.items():
        wanted, before = json.loads(json.dumps(texts)), None
        with suppress(FedleakError):  # it is not there, or damaged
            before = run.read_json(place)
        if before is None:
            run.write_json(place, wanted)
        elif before != wanted:
            raise ConfigError(
                f"{str(run.path / place)!r}: the attack was asked about other texts before: "
                "restore its file of candidates, or give the attack another name = ..."
            )


def prepare_attacks(run: Run, experiment: Experiment) -> None:
    """Checks further attacks on a trained run, and keeps the texts that they are asked about.

    Raises:
        ConfigError: An attack cannot work in this experiment, or the captures do not hold what it
            reads; a file of candidates is not right, or had other texts before.
    """
    if (sees := stored(run).sees) != experiment.sees:
        raise ConfigError(
            f"threat.sees = {experiment.sees!r}, but {str(run.path)!r} captured what an attacker "
            f"sees who sees {sees!r}: run the experiment under another name, which captures the "
            "other"
        )
    model = outline(experiment, run.info()["num_labels"])
    checks.check_attacks(experiment, model)
    check_stored(stored(run), experiment, model)
    ask_again(run, experiment, model)


def ask_again(run: Run, experiment: Experiment, model: LanguageModel) -> None:
    """Reads files of candidates for attacks on a run that was trained, and keeps their texts.

    Raises:
        ConfigError: A file is not right, or an attack was asked about other texts before.
    """
    classes = [str(number) for number in range(run.info()["num_labels"])]
    asking = any(named_attack.candidates is not None for named_attack in experiment.attacks)
    if asking and experiment.tapped is None and experiment.model.task == CLASSIFICATION:
        classes = [*read_data(experiment).train.label_names]
    keep_candidates(run, read_candidates(experiment, classes, model))


def _remarks(
    experiment: Experiment,
    model: LanguageModel,
    dropped: int,
    unknown: float,
    workload: Workload,
) -> tuple[str, ...]:
    """Returns remarks on settings that are no mistake, but may not be intended."""
    whole = [] if experiment.audit.store == "all" else read_whole(experiment, model)
    batch, parts = experiment.federation.batch_size, workload.parts
    small = [len(part) for part in parts if 0 < len(part) < batch]
    possible = {
        f"{dropped} rows without text were dropped": dropped,
        f"{unknown:.0%} of the tokens are unknown words, which no attack can read": unknown > 0.05,
        f"federation.batch_size = {batch} is more than {len(small)} of {len(parts)} clients have: "
        f"their batches are all that they have, {min(small, default=0)} examples or more": small,
        f"audit.store = 'read' stores whole updates, because {', '.join(whole)} read them": whole,
    }
    adapters, malicious = first_of_adapters(experiment), malicious_server(experiment)
    remarks = [remark for remark, holds in possible.items() if holds]
    server = f"malicious server: {malicious}" if malicious else None
    return tuple(filter(None, (server, *remarks, adapters)))


def open_run(plan: Plan, path: Path, *, fresh: bool = False) -> Run:
    """Opens the run directory of an experiment, or makes it.

    Raises:
        ConfigError: Another experiment ran here, files here belong to no experiment, or what the
            run keeps does not fit on the disk.
    """
    run = Run(path)
    captured = 0
    if run.exists() and not fresh:
        model = outline(plan.experiment, plan.num_labels)
        captured = forecast.bytes_there(plan.experiment, model, run)
    forecast.refuse_full_disk(plan.disk, path, captured)
    if fresh:
        move_aside(path)
    if run.exists():
        refuse_another(run, plan.experiment)
        refuse_purged(run)
        refuse_other_data(run, plan)
        _renew(run, plan.experiment)
    else:
        _refuse_leftovers(path)
        known = {"node_examples": list(plan.sizes), "classes": list(plan.classes)}
        create(
            run,
            plan.experiment,
            plan.num_labels,
            plan.examples,
            remarks=list(plan.remarks),
            **{name: values for name, values in known.items() if values},
        )
    _make_held_out(run, plan)
    keep_candidates(run, plan.candidates)
    return run


def create(
    run: Run, experiment: Experiment, num_labels: int, examples: Examples, **more: Any
) -> None:
    """Makes the run.json of a run that begins now, with `more` fields."""
    run.create(
        experiment=experiment.model_dump(mode="json"),
        fingerprint=experiment.fingerprint,
        status="new",
        num_labels=num_labels,
        examples=examples._asdict(),
        versions=versions(),
        git_commit=git_commit(),
        **made_by(),
        model_fingerprint=None,
        **more,
    )


def trains_alike(experiment: Experiment, other: Experiment) -> bool:
    """Whether two experiments keep all updates and differ at most in what follows training."""
    after = {"name": True, "attack": True, "workers": True, **CHANGEABLE}
    one_way, other_way = (
        alike.model_dump(mode="json", exclude=after | {"threat": {"knows", "ladder"}})
        for alike in (experiment, other)
    )
    kept = {(alike.audit.keep, alike.audit.store) for alike in (experiment, other)}
    return one_way == other_way and kept == {("all", "all")}


def open_trained(plan: Plan, path: Path, trained: Run) -> Run:
    """Makes the run directory of an experiment from a finished run that trains alike.

    Large files get a second name, so they take no room. The directory appears whole or not at all.

    Args:
        plan: The plan of the experiment.
        path: The run directory, which is not there yet.
        trained: The other run, which is finished.
    """
    begun = path.with_name(f".{path.name}")
    shutil.rmtree(begun, ignore_errors=True)
    run = open_run(plan, begun)
    for source in filter(Path.exists, (trained.path / name for name in TRAINED)):
        if source.is_dir():
            # A note beside a capture says that every attack has answered; here none has yet.
            notes = shutil.ignore_patterns("*.json") if source.name == "captures" else None
            shutil.copytree(source, begun / source.name, copy_function=second_name, ignore=notes)
        else:  # lines may be added
            shutil.copyfile(source, begun / source.name)
    own, of_training = run.info(), trained.info()
    trained_model = {"model_fingerprint": of_training["model_fingerprint"]}
    run.update_info(**of_training | own | trained_model)
    begun.rename(path)
    return Run(path)


def _refuse_leftovers(path: Path) -> None:
    """Refuses a folder whose files could be taken for files of a new run.

    Raises:
        ConfigError: There are files of a sweep, or of unknown origin.
    """
    if (path / SWEEP.name).exists():
        raise ConfigError(
            f"{str(path)!r} holds a sweep: give this run another name, or --fresh to move the "
            "sweep aside"
        )
    # A run that was killed before its run.json was written has left no more than a log.
    if there := sorted({child.name for child in path.glob("[!.]*")} - {logs.LOG}):
        raise ConfigError(
            f"{str(path)!r} is not empty ({first_of(there, most=3)}) and has no run.json: give "
            "this run another name, delete the folder, or --fresh to move it aside"
        )


def move_aside(path: Path) -> None:
    """Moves an earlier run or sweep out of the way, if there is one."""
    if not path.is_dir():
        return
    aside = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    while aside.exists():
        aside = aside.with_name(aside.name + "x")
    with Run(path).lock(), naming(path, "moved"):
        path.rename(aside)


def _renew(run: Run, experiment: Experiment) -> None:
    """Writes the settings that may change into run.json, if they have changed."""
    recorded = run.info()["experiment"]
    renewed = merged(recorded, experiment.model_dump(mode="json", include=CHANGEABLE))
    if renewed != recorded:
        run.update_info(experiment=renewed)


def refuse_purged(run: Run) -> None:
    """Refuses to go on with a run whose private data was deleted.

    Raises:
        ConfigError: `fedleak purge` was here.
    """
    info = run.info()
    if (date := info.get("purged")) and not info.get("purge_complete", True):
        raise ConfigError(
            f"{str(run.path)!r}: a purge began on {date} and is not complete: `fedleak purge "
            f"{run.path}` goes on"
        )
    if date:
        raise ConfigError(
            f"{str(run.path)!r} was purged on {date}: its captures, models and private texts are "
            f"deleted, so nothing can be trained or attacked there: `fedleak score {run.path}` "
            "shows its figures; --fresh, or another name, runs the experiment anew"
        )


def refuse_programs_of_others(
    at: Path, attacks: Iterable[NamedAttack], workers: WorkersTable | None = None
) -> None:
    """Refuses programs and a Ray cluster of an experiment that may be somebody else's.

    Args:
        at: Where the experiment is from.
        attacks: The attacks that it names.
        workers: Where it makes attacks run.

    Raises:
        ConfigError: An attack is a command that runs here, or a Ray cluster gets the updates: its
            answers are pickles, which can run code, too.
    """
    outside = [named.attack for named in attacks if getattr(named.attack, "outside", False)]
    named = [f"the command {getattr(attack, 'command', attack.kind)!r}" for attack in outside]
    if workers is not None and workers.engine == "ray" and workers.ray is not None:
        named.append(f"the Ray cluster at {workers.ray.address!r}")
    if named:
        first = first_of((printable(name)[:_LONGEST] for name in named), most=1)
        raise ConfigError(
            f"{str(at)!r} may be the work of somebody else, and would use {first}: read it, and "
            "give --allow-commands if you want that"
        )


def refuse_data_on_nodes(experiment: Experiment) -> None:
    """Refuses to train an experiment here that nodes train, because they have the data.

    Raises:
        ConfigError: The experiment's data is on the nodes of a federation.
    """
    if experiment.data.on_nodes:
        raise ConfigError(
            f"data.on_nodes: each node trains {experiment.name!r} on a file of its own, and there "
            "are no nodes here: start it with `flwr run` in a federation (docs/deployment.md)"
        )


def refuse_other_data(run: Run, plan: Plan) -> None:
    """Refuses to go on with a run if the number of its examples has changed.

    Raises:
        ConfigError: There are more or fewer examples than when the run was made.
    """
    before = examples(run)
    if plan.experiment.data.on_nodes:  # the nodes say how many they train on
        before = before._replace(training=plan.examples.training)
    if before != plan.examples:
        raise ConfigError(
            f"{str(run.path)!r} was made with {before.training} training and {before.held_out} "
            f"held-out examples, and {plan.experiment.data.name!r} gives {plan.examples.training} "
            f"and {plan.examples.held_out} now: restore the data, give this run another name, or "
            "--fresh to move the old run aside"
        )


def refuse_another(run: Run, experiment: Experiment) -> None:
    """Refuses to go on with a run directory in which another experiment ran."""
    old, new = (
        compared.model_dump(mode="json", exclude={"workers": True, **CHANGEABLE})
        for compared in (stored(run), experiment)
    )
    changed = difference(old, new)
    if not changed:
        return
    differences, keys = "; ".join(changed[:4]), [line.partition(":")[0] for line in changed]
    threat = {f"threat.{name}": new["threat"][name] for name in ("knows", "ladder")}
    if {*keys} <= {"attack", *threat}:
        wanted = {"attack": new["attack"], **threat}
        sets = " ".join(f"--set {shlex.quote(f'{key}={_toml(wanted[key])}')}" for key in keys)
        raise ConfigError(
            f"{str(run.path)!r} was attacked otherwise ({differences}): `fedleak attack "
            f"{shlex.quote(str(run.path))} {sets}` attacks its captures so, without training "
            "again; an attack that has answered with other settings needs another name = ..."
        )
    raise ConfigError(
        f"{str(run.path)!r} holds another experiment ({differences}): give this one another name, "
        "or --fresh to move the old run aside"
    )


def _toml(value: Any) -> str:
    """Returns a value of an experiment file as it is written after `--set key=`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _make_held_out(run: Run, plan: Plan) -> None:
    """Writes the held-out texts, unless they are there."""
    with suppress(FedleakError):
        held_out = run.read_json("held_out.json")
        if isinstance(held_out, dict) and held_out.keys() >= plan.held_out.keys():
            return
    run.write_json("held_out.json", plan.held_out)


def git_commit() -> str | None:
    """Returns the commit of this checkout, with a mark if files differ; None: no checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
