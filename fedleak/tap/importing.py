"""From the folder of a tap to a run that can be attacked: `fedleak import`."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedleak.config import checks
from fedleak.config.components import LONGEST_NAME
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import Examples
from fedleak.config.loading import parse
from fedleak.config.tables import MOST_UPDATES
from fedleak.models import CLASSIFICATION
from fedleak.running.preparation import ask_again, create, refuse_purged
from fedleak.store.files import read_file
from fedleak.store.run import EVERYONE, Capture, Key, Run
from fedleak.tap.about import About, TruthLine, load_truth
from fedleak.tap.folder import MESSAGES, Tapped
from fedleak.tap.updates import Tap, Update, about_message, number
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.logs import LOG

NAMED = 3
"""How many of the left out replies an error names at most."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an import made of a tap.

    Attributes:
        run: The run directory.
        updates: Captures in it.
        clients, rounds: Clients and rounds of these captures.
        truths: Batches of clients whose truth is there.
        left_out: Why each of the other messages is not in it.
        remarks: What else should be known.
    """

    run: Run
    updates: int
    clients: int
    rounds: int
    truths: int
    left_out: Sequence[str]
    remarks: Sequence[str]

    def refuse_gaps(self) -> None:
        """Refuses to call an import complete that is not.

        Raises:
            FedleakError: Something was left out.
        """
        if self.left_out:
            named, more = "; ".join(self.left_out[:NAMED]), len(self.left_out) - NAMED
            rest = f"; and {more} more, named in {self.run.path / 'run.json'}" if more > 0 else ""
            raise FedleakError(f"{len(self.left_out)} left out of the run: {named}{rest}")


def import_run(tapped: Tapped, about: About, out: Path) -> Imported:
    """Makes a run of what a tap kept. A second import adds what is missing, such as the truth.

    Args:
        tapped: The folder of the tap.
        about: What the messages do not say.
        out: The run directory.

    Raises:
        ConfigError: `about` does not fit what was tapped, nothing fits, or another run is in `out`.
    """
    messages, left_out = tapped.messages()
    left_out += [
        about_message(problem.round, problem.node, problem.reason) for problem in tapped.problems()
    ]
    tap = Tap(tapped, messages, about)
    # Without tensors, which are read one update at a time.
    updates = list(tap.sums(left_out) if about.reply.payload == "sum" else tap.updates(left_out))
    updates, clients = _clients(updates, about, left_out)
    lines = [] if about.truth.file is None else load_truth(Path(about.truth.file))
    updates = _counted_right(updates, clients, lines, about, left_out)
    if not updates:
        why = "; ".join(left_out[:NAMED]) or "no client has answered"
        raise ConfigError(f"{str(tapped.path)!r} has no update that can be attacked: {why}")
    experiment = _experiment(tap, out, updates, clients)
    checks.check_server(experiment, tap.model)
    checks.check_attacks(experiment, tap.model)
    truths, remarks = _truths(tap, updates, clients, lines)
    held_out = tap.held_out()
    run = _open(out, experiment, tap, clients)
    with run.lock():
        for update in updates:
            if not run.models.has(update.round):
                run.models.write(update.round, tap.model_of(update.round))
            key = Key(update.round, EVERYONE if update.summed else clients[update.nodes[0]])
            if not run.captures.has(key):
                kept = ClientUpdate(tap.kind, update.tensors(), update.num_examples)
                mode = experiment.mode_in(update.round)
                known = replace(update.sent.knowledge(), server_mode=mode.kind if mode else None)
                run.captures.write(Capture(key, kept, known))
        for truth in truths:
            run.vault.write(Key(truth.round, truth.client), truth.to_json())
        run.write_json("held_out.json", {"sequences": held_out, "labels": []})
        ask_again(run, experiment, tap.model)
        remarks = [*_remarks(about), *remarks]
        run.update_info(status="finished", left_out=left_out, remarks=remarks)
    return Imported(
        run=run,
        updates=len(updates),
        clients=len({clients[node] for update in updates for node in update.nodes}),
        rounds=len({update.round for update in updates}),
        truths=len(truths),
        left_out=left_out,
        remarks=remarks,
    )


def _clients(
    updates: Sequence[Update], about: About, left_out: list[str]
) -> tuple[list[Update], dict[int, int]]:
    """Returns the client of each node, and the updates whose node says it; notes the others.

    Raises:
        ConfigError: `about` names a client for a sum.
    """
    key = about.reply.client_key
    if key is None:
        nodes = sorted({node for update in updates for node in update.nodes})
        return list(updates), {node: client for client, node in enumerate(nodes)}
    if about.reply.payload == "sum":
        raise ConfigError("reply.client_key: a sum is of no client: leave the key out")
    most = MOST_UPDATES // max((update.round for update in updates), default=1)
    clients: dict[int, int] = {}
    reasons: dict[int, str] = {}
    for place, update in enumerate(updates):
        client, (node,) = number(update.message, key), update.nodes
        if not isinstance(client, int) or not 0 <= client < most:
            reasons[place] = f"is no number of a client, from 0 to {most - 1:,}, in it"
        elif clients.setdefault(node, client) != client:
            reasons[place] = f"is {client} in it, and was {clients[node]} before"
    numbers = Counter(clients.values())
    for place, update in enumerate(updates):
        client = clients.get(update.nodes[0], -1)
        if numbers[client] > 1:  # nobody can know which of them lies
            others = ", ".join(str(node) for node in clients if clients[node] == client)
            reasons[place] = (
                f"makes each of the nodes {others} client {client}: leave the key out, and nodes "
                "are numbered"
            )
    for place, reason in reasons.items():
        update, words = updates[place], f"reply.client_key = {key!r} {reason}"
        left_out.append(about_message(update.round, update.nodes[0], words))
    kept = [update for place, update in enumerate(updates) if place not in reasons]
    return kept, {node: client for node, client in clients.items() if numbers[client] == 1}


def _experiment(
    tap: Tap, out: Path, updates: Sequence[Update], clients: Mapping[int, int]
) -> Experiment:
    """Returns what was trained, in the words of an experiment file."""
    about, training = tap.about, tap.about.training
    of_round: dict[int, set[int]] = defaultdict(set)
    for update in updates:
        of_round[update.round].update(clients[node] for node in update.nodes)
    names = frozenset[str]().union(*(update.names for update in updates))
    share = [name for name in tap.model.trained() if name in names]
    rounds = max(of_round)
    content = read_file(tap.tapped.path / MESSAGES.name)
    known = tap.kind == UpdateKind.DELTA and training.optimiser != "other"
    steps = training.steps_said if known else {}
    table = {
        "name": _name(out),
        "model": about.model.model_dump(mode="json"),
        "data": {"name": "that of another app"},
        "federation": {
            "algorithm": "fedsgd" if tap.kind == UpdateKind.GRADIENT else "fedavg",
            "clients": max(clients.values()) + 1,
            "rounds": rounds,
            "batch_size": training.batch_size if steps else training.examples_in_step,
            "local_epochs": training.local_epochs,
            "learning_rate": training.learning_rate or updates[0].sent.learning_rate,
            "dropout": training.dropout,
        },
        "client": steps,
        "update": {"share": "all" if len(share) == len(tap.model.trained()) else share},
        "defense": [{"kind": "secure_sum"}] if about.reply.payload == "sum" else [],
        "server": about.server,
        "attack": about.attack,
        "tapped": {
            "optimiser": training.optimiser,
            "labels": tap.labels,
            "clients": [sorted(of_round[round]) for round in range(1, rounds + 1)],
            "messages": hashlib.sha256(content).hexdigest()[:16],
        },
    }
    return parse(table)


def _name(out: Path) -> str:
    """Returns a name for an experiment, made of the name of its folder."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", out.absolute().name).lstrip("._-")
    return name[:LONGEST_NAME] or "imported"


def _open(out: Path, experiment: Experiment, tap: Tap, clients: Mapping[int, int]) -> Run:
    """Returns the run directory, which is made if it is not there.

    Raises:
        ConfigError: Something else is in the folder.
    """
    run = Run(out)
    if run.exists():
        if run.info()["fingerprint"] != experiment.fingerprint:
            raise ConfigError(
                f"{str(out)!r} holds another run, or one that was imported with another file: give "
                "--out another folder"
            )
        refuse_purged(run)
        return run
    if out.exists() and (not out.is_dir() or any(child.name != LOG for child in out.glob("[!.]*"))):
        raise ConfigError(f"{str(out)!r} is not empty: give --out another folder")
    nodes = {str(client): str(node) for node, client in clients.items()}
    source = str(tap.tapped.path.absolute())
    # Nothing is trained or measured here.
    create(run, experiment, tap.labels, Examples(0, 0), remarks=[], tapped=source, nodes=nodes)
    return run


def _round_and_client(line: TruthLine, clients: Mapping[int, int]) -> tuple[int, int]:
    """Returns the round and the client of a line of the truth; -1: its client is not here."""
    client = clients.get(line.node, -1) if line.node is not None else line.client
    assert client is not None
    return line.round, client


def _counted_right(
    updates: Sequence[Update],
    clients: Mapping[int, int],
    lines: Sequence[TruthLine],
    about: About,
    left_out: list[str],
) -> list[Update]:
    """Returns the updates that report as many texts as the truth has, and notes the others.

    An update of other texts would get scores that mean nothing.
    """
    texts = {_round_and_client(line, clients): len(line.texts) for line in lines}
    source = "reply.examples" if about.reply.examples else f"its {about.reply.examples_key!r}"
    kept = []
    for update in updates:
        node = update.nodes[0]
        count = texts.get((update.round, clients[node]), update.num_examples)
        if update.summed or count == update.num_examples:
            kept.append(update)
            continue
        reason = (
            f"in {about.truth.file} there are {count} texts, but {source} is "
            f"{update.num_examples}: where that counts batches, as len(trainloader) does, set "
            "reply.examples to the texts of a client"
        )
        left_out.append(about_message(update.round, node, reason))
    return kept


def _truths(
    tap: Tap, updates: Sequence[Update], clients: Mapping[int, int], lines: Sequence[TruthLine]
) -> tuple[list[GroundTruth], list[str]]:
    """Returns what clients trained on, as far as the user has it, and what is to be said of it.

    Raises:
        ConfigError: A text or a label that no client can have trained on, or two of one client.
    """
    file = tap.about.truth.file
    if file is None:
        return [], ["there is no truth, so answers cannot be scored"]
    training = tap.about.training
    here = {(update.round, clients[node]) for update in updates for node in update.nodes}
    truths: dict[tuple[int, int], GroundTruth] = {}
    for line in lines:
        key = _round_and_client(line, clients)
        if key not in here:
            continue
        if key in truths:
            raise ConfigError(f"{file}: two lines are of round {key[0]} and client {key[1]}")
        classifies = tap.about.model.task == CLASSIFICATION
        if classifies and (len(line.labels) != len(line.texts) or max(line.labels) >= tap.labels):
            raise ConfigError(
                f"{file}: round {line.round}: give each text a label from 0 to {tap.labels - 1}"
            )
        truths[key] = GroundTruth(
            round=line.round,
            client=key[1],
            sequences=tuple(tap.tokenised(line.texts)),
            labels=tuple(line.labels) if classifies else (),
            batch_size=min(training.examples_in_step, len(line.texts)),
        )
    strangers, bare = len(lines) - len(truths), len(here) - len(truths)
    remarks = {
        f"{strangers} lines of {file} are of no update that is here": strangers,
        f"{bare} of {len(here)} batches have no truth, so answers cannot be scored": bare,
    }
    return list(truths.values()), [remark for remark, holds in remarks.items() if holds]


def _remarks(about: About) -> list[str]:
    """Returns what the reader of a run should know of how its clients train."""
    training = about.training
    decays = training.optimiser if training.weight_decay > 0 else None
    possible = {
        "an optimiser other than plain SGD changes how large each number of an update is: answers "
        "are proved by replay alone": training.optimiser != "sgd",
        "weight decay was taken out of the updates": decays in ("sgd", "adamw"),
        "Adam's weight decay is part of its gradient and stays in the updates": decays == "adam",
        "what is attacked is the sum of each round": about.reply.payload == "sum",
    }
    return [remark for remark, holds in possible.items() if holds]
