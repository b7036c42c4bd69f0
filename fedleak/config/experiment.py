"""One run as one frozen, validated value."""

from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Annotated, Any

from pydantic import Field, model_validator

from fedleak import defenses, detectors
from fedleak.attacks import always_on
from fedleak.attacks.server_modes import ServerMode
from fedleak.config import components, tables
from fedleak.config.client_table import ClientTable
from fedleak.config.components import NamedAttack, Placed, Server
from fedleak.config.presets import PRESETS, PresetName
from fedleak.defenses import Defense, TrustedAggregator
from fedleak.detectors import Detector
from fedleak.models import CAUSAL_LM, ModelSpec
from fedleak.models.lora import Lora
from fedleak.training.observation import GRANTABLE, Sight, ThreatModel, UpdateKind
from fedleak.training.settings import LocalTraining, ServerOptimiser
from fedleak.util.errors import ConfigError
from fedleak.util.nested import digest, merged

LARGEST_SEED = 2**63 - 1
"""The largest seed that random generators take."""


class Experiment(tables.Table):
    """One run, with the tables of its experiment file."""

    preset: PresetName | None = None
    """Published settings that fill in what the file leaves out: see [presets](#presets)."""
    name: Annotated[str, Field(pattern=f"^{components.NAME}$", max_length=components.LONGEST_NAME)]
    """Of the run; its results are in `runs/<name>`."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    """Everything random follows from it."""
    model: tables.ModelTable
    """What is trained."""
    data: tables.DataTable
    """What the model is trained on."""
    federation: tables.FederationTable = tables.FederationTable()
    """Who trains, how, and through which engine."""
    client: ClientTable = ClientTable()
    """How a client steps under `fedavg`."""
    server: dict[str, Any] = {}
    """`[server]`: what a malicious server changes of the model that it sends; left out: nothing."""
    update: tables.UpdateTable = tables.UpdateTable()
    """Which parameters a client sends."""
    defense: list[dict[str, Any]] = []
    """`[[defense]]`: what clients do for their privacy, in this order."""
    detector: list[dict[str, Any]] = []
    """`[[detector]]`: what clients look for before they train, to notice a malicious server."""
    threat: tables.ThreatTable = tables.ThreatTable()
    """What the attacker sees and is told, and which updates it keeps."""
    attack: list[dict[str, Any]] = [{"kind": "auto"}]
    """`[[attack]]`: what the attacker does with each update, besides what is on in every run.

    Left out: the strongest that the setting admits, and `membership` too where clients step with
    Adam or AdamW, after several steps of which few texts can be read, and the attack that reads
    what a malicious server planted, which `auto` does not ask; `attack = []`: nothing more.
    """
    privacy: tables.PrivacyTable = tables.PrivacyTable()
    """How the privacy ledger counts."""
    canary: tables.CanaryTable | None = None
    """Canaries that measure privacy; left out: none."""
    published: tables.PublishedTable | None = None
    """Secrets that are planted to audit what the published models give away; left out: none."""
    utility: tables.UtilityTable = tables.UtilityTable()
    """When the global model is scored on held-out data."""
    workers: tables.WorkersTable = tables.WorkersTable()
    """Where attacks run."""
    audit: tables.AuditTable = tables.AuditTable()
    """How answers are scored, and how long captures stay."""
    gate: tables.GateTable = tables.GateTable()
    """Limits that `fedleak gate` compares the run with."""
    tapped: tables.TappedTable | None = None
    """What another app trained; left out: fedleak trains."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, table: Any) -> Any:
        """Fills in what a preset says and the file does not, and the attacks that suit it."""
        if not isinstance(table, dict):
            return table
        # An unknown preset is refused below, as any other wrong value.
        filled = merged(PRESETS.get(str(table.get("preset")), {}), table)
        client = filled.get("client")
        adaptive = isinstance(client, dict) and client.get("optimiser") in ("adam", "adamw")
        suited = ["membership"] * adaptive + components.reading_planted(filled.get("server"))
        if suited and "attack" not in filled:
            filled["attack"] = [{"kind": kind} for kind in ("auto", *suited)]
        return filled

    def __hash__(self) -> int:
        """Lets an experiment be the key of a cache; equal ones have equal names and seeds."""
        return hash((self.name, self.seed))

    @cached_property
    def attacks(self) -> tuple[NamedAttack, ...]:
        """The attacks, built, with what each is told; those that are on in every run come first.

        With `threat.ladder` there is one for each rung.
        """
        built = [components.build_attack(i, table) for i, table in enumerate(self.attack)]
        listed = {named.attack.kind for named in built}
        others = [kind for kind in always_on() if kind not in listed]
        built[:0] = [components.build_attack(0, {"kind": kind}) for kind in others]
        names = [named.name for named in built]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"attack: two are called {name!r}: give one of them another name = ..."
                )
        if self.threat.ladder:
            facts = GRANTABLE - self.absent_facts.keys()
            return tuple(rung for named in built for rung in components.on_each_rung(named, facts))
        return tuple(
            replace(named, threat=ThreatModel(named.threat.knows.union(self.threat.knows)))
            for named in built
        )

    @cached_property
    def defenses(self) -> tuple[Placed[Defense], ...]:
        """The defenses, built, in the order in which a client applies them."""
        return components.build_placed("defense", defenses, self.defense, self.federation.clients)

    @cached_property
    def detectors(self) -> tuple[Placed[Detector], ...]:
        """The detectors, built, in the order of the file."""
        clients = self.federation.clients
        return components.build_placed("detector", detectors, self.detector, clients)

    @cached_property
    def server_built(self) -> Server:
        """What the server does to the model that it sends, and when."""
        return components.build_server(self.server)

    def mode_in(self, round: int) -> ServerMode | None:
        """Returns what a malicious server does in a round; None: it is honest then."""
        server = self.server_built
        chosen = server.rounds is None or round in server.rounds
        return server.mode if server.malicious and chosen else None

    @property
    def modes_attacked(self) -> list[ServerMode | None]:
        """What the server does in the rounds that are attacked: each once; None is honest."""
        rounds = self.threat.rounds or range(1, self.federation.rounds + 1)
        malicious = {self.mode_in(round) is not None for round in rounds}
        return [self.server_built.mode if bad else None for bad in sorted(malicious)]

    @property
    def fingerprint(self) -> str:
        """The mark of what these clients send, in 16 hex digits.

        It depends on the seed and the tables model, data, federation, client, server (unless it is
        honest), update, defense, detector (a client may refuse a round), canary, published and
        privacy (whose delta decides how much noise an epsilon takes), and not on what is done with
        updates afterwards, nor on the engine and how many clients it asks at once: all give the
        same. A setting left out and its default are the same. What the attacker sees counts if it
        is not the default of the defenses, because captures differ then. Sizes of the data are left
        out if they are 400 and 100: these were once the defaults, and runs of that time can go on.
        """
        after = ["attack", "threat", "utility", "audit", "gate", "workers"]
        others = dict.fromkeys(["name", "preset", *after], True)
        exclude: dict[str, Any] = {**others, "federation": {"engine", "at_once"}}
        table = self.model_dump(mode="json", exclude=exclude, exclude_defaults=True)
        data = table["data"]
        if self.data.samples is None:
            data["samples"] = None
        else:
            once_left_out = {"samples": tables.SAMPLES, "held_out": tables.HELD_OUT}
            for key in [key for key, size in once_left_out.items() if data.get(key) == size]:
                del data[key]
        if self.sees != self.possible_sights[0]:
            table["sees"] = self.sees
        if not self.server_built.malicious:
            table.pop("server", None)
        return digest(table)[:16]

    @property
    def aggregator(self) -> TrustedAggregator | None:
        """The trusted aggregator; None: the attacker may see each client's update."""
        parts = (placed.part for placed in self.defenses)
        return next((defense for defense in parts if isinstance(defense, TrustedAggregator)), None)

    @property
    def possible_sights(self) -> tuple[Sight, ...]:
        """What an attacker may see under these defenses; the first is the default."""
        return ("updates", "models") if self.aggregator is None else self.aggregator.sights

    @property
    def sees(self) -> Sight:
        """What the attacker sees."""
        return self.threat.sees or self.possible_sights[0]

    def defenses_of(self, client: int) -> dict[int, Defense]:
        """Returns the defenses that a client uses, in their order, by their place in the file."""
        used = components.used_by(client, self.defenses)
        # The trusted aggregator comes after all that clients do.
        return dict(sorted(used.items(), key=lambda item: isinstance(item[1], TrustedAggregator)))

    def detectors_of(self, client: int) -> dict[int, Detector]:
        """Returns the detectors that a client uses, by their place in the file."""
        return components.used_by(client, self.detectors)

    def carries_canaries(self, client: int) -> bool:
        """Whether a client takes in canaries."""
        table = self.canary
        return table is not None and (table.clients is None or client in table.clients)

    @property
    def unlike_clients(self) -> list[int]:
        """A client of each group that uses the same defenses."""
        named = {client for placed in self.defenses for client in placed.clients or ()}
        others = (c for c in range(self.federation.clients) if c not in named)
        last_first = sorted({*named, *islice(others, 1)}, reverse=True)
        client_by_defenses = {tuple(self.defenses_of(c)): c for c in last_first}
        return sorted(client_by_defenses.values())

    def local_training_of(self, client: int) -> LocalTraining:
        """Returns how a client trains, with its defenses."""
        local = self.local_training
        for defense in self.defenses_of(client).values():
            local = defense.training(local)
        return local

    @property
    def trains_privately(self) -> bool:
        """Whether a client makes steps of DP-SGD."""
        return any(self.local_training_of(c).private is not None for c in self.unlike_clients)

    def attacked(self, round: int, client: int) -> bool:
        """Whether the update of a client in a round is kept and attacked."""
        rounds, clients = self.threat.rounds, self.threat.clients
        return (rounds is None or round in rounds) and (clients is None or client in clients)

    def evaluated(self, round: int) -> bool:
        """Whether the global model is scored after a round."""
        chosen = self.utility.rounds
        return chosen == "all" or round in chosen or round == self.federation.rounds

    @property
    def clients_per_round(self) -> int:
        """How many clients train in a round."""
        return self.federation.clients_per_round or self.federation.clients

    def model_spec(self, num_labels: int) -> ModelSpec:
        """Returns what server, clients and attackers load their model from."""
        table, adapters = self.model, self.model.lora
        lora = None
        if adapters is not None:
            targets = adapters.targets
            names = tuple(targets) if isinstance(targets, list) else targets
            lora = Lora(**{**dict(adapters), "targets": names})
        return ModelSpec(**{**dict(table), "lora": lora}, num_labels=num_labels, seed=self.seed)

    @property
    def local_training(self) -> LocalTraining:
        """How a client trains."""
        table = self.federation
        kind = UpdateKind.GRADIENT if table.algorithm == "fedsgd" else UpdateKind.DELTA
        return LocalTraining(
            kind=kind,
            batch_size=table.batch_size * self.client.accumulate,
            epochs=table.local_epochs,
            learning_rate=table.learning_rate,
            dropout=table.dropout,
            recipe=self.client.recipe,
            schedule=self.client.schedule_of_rate,
            max_steps=self.client.max_steps,
        )

    @property
    def server_optimiser(self) -> ServerOptimiser:
        """How the server moves the global model."""
        table = self.federation
        rate = table.server_learning_rate or table.learning_rate
        return ServerOptimiser(table.server_optimiser, rate)

    @property
    def absent_facts(self) -> dict[str, str]:
        """Facts that do not exist in this experiment, each with the reason."""
        absent = {}
        if self.model.task == CAUSAL_LM:
            absent["labels"] = f"a text has no class under {CAUSAL_LM}"
        if not any(placed.part.noisy for placed in self.defenses):
            absent["noise_scale"] = "no defense adds noise"
        elif not self.client.recipe.plain and self.trains_privately:
            absent["noise_scale"] = "the clients' optimiser scales noise as it scales the gradient"
        elif any(placed.part.scales_with_update for placed in self.defenses):
            absent["noise_scale"] = "noise that is relative to an update has a scale in each"
        return absent

    @property
    def server_facts(self) -> frozenset[str]:
        """Facts that the server set itself, so every observation of it has them."""
        facts = {"learning_rate", "local_steps", "dropout"}
        if self.local_training.kind == UpdateKind.DELTA:
            facts |= {"local_epochs", "recipe"}
        return frozenset(facts)
