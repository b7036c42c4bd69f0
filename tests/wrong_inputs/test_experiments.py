"""Experiment files that are wrong: refused in one line, status 2, before anything is made."""

import math
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from fedleak import attacks, defenses
from fedleak.config.experiment import Experiment
from fedleak.config.loading import load
from fedleak.running import preparation

DP_SGD = {"kind": "dp_sgd", "max_grad_norm": 1.0}

NOT_TOML = {
    "missing": (None, ("nothere.toml", "No such file")),
    "empty": (b"", ("name is missing",)),
    "syntax": (b'name = "b\n', ("cannot be read", "line 1")),
    "binary": (bytes(range(128, 256)), ("not UTF-8", "save it")),
    "byte order mark": ("\ufeffname = 3".encode(), ("name = 3",)),
    "utf-16": ('name = "b"'.encode("utf-16"), ("not UTF-8", "save it")),
    "latin-1": ('name = "caf\xe9"'.encode("latin-1"), ("not UTF-8", "save it")),
    "json": (b'{"name": "b"}', ("is JSON", "TOML")),
    "yaml": (b"name: b\n", ("cannot be read",)),
    "nul": (b"\0" * 50, ("cannot be read",)),
    "an array": (b"[1, 2]", ("cannot be read",)),
    "twice the same key": (b'name = "a"\nname = "b"\n', ("cannot be read",)),
    "twice the same table": (b"[model]\n[model]\n", ("cannot be read",)),
    "a table as a value": (b'name = "b"\nmodel = 3\n', ("model = 3",)),
    "an array of tables where one is": (b'name = "b"\n[[model]]\nname = "x"\n', ("model",)),
    "a date": (b'name = 2020-01-01\n[model]\nname="builtin/bert-tiny"\n', ("name = ",)),
}


@pytest.mark.parametrize("content", NOT_TOML)
def test_a_file_that_is_no_experiment(fedleak, refused, folder: Path, content: str) -> None:
    written, says = NOT_TOML[content]
    path = folder / ("nothere.toml" if written is None else "e.toml")
    if written is not None:
        path.write_bytes(written)
    refused(fedleak("run", path.name), *says)
    assert not (folder / "runs").exists()


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # Names of keys and tables.
    "key typo": (
        {"federation.leaning_rate": 0.1},
        ("leaning_rate", "did you mean 'learning_rate'"),
    ),
    "table typo": ({"federatoin.rounds": 1}, ("federatoin", "did you mean 'federation'")),
    "top typo": ({"defence": []}, ("defence", "did you mean 'defense'")),
    "key of another table": ({"data.rounds": 3}, ("[data]", "rounds")),
    "upper case": ({"federation.Rounds": 3}, ("Rounds", "rounds")),
    "no name": ({"name": None}, ("name is missing",)),
    "no model": ({"model": None}, ("model is missing",)),
    "no model name": ({"model": {}}, ("model.name is missing",)),
    "no data": ({"data": None}, ("data is missing",)),
    # The name.
    "name slash": ({"name": "a/b"}, ("name = 'a/b'",)),
    "name parent": ({"name": "../evil"}, ("../evil",)),
    "name dots": ({"name": ".."}, ("name = '..'",)),
    "name hidden": ({"name": ".hidden"}, ("name = '.hidden'",)),
    "name empty": ({"name": ""}, ("name = ''",)),
    "name absolute": ({"name": "/etc/passwd"}, ("/etc/passwd",)),
    "name home": ({"name": "~root"}, ("~root",)),
    "name space": ({"name": "h\xe9llo w\xf6rld \U0001f642"}, ("name = ",)),
    "name escape": ({"name": "a\x1b[2J"}, ("name = ",)),
    "name newline": ({"name": "a\nb"}, ("name = ",)),
    "name nul": ({"name": "a\0b"}, ("name = ",)),
    "name long": ({"name": "x" * 300}, ("name",)),
    "name option": ({"name": "--fresh"}, ("name = '--fresh'",)),
    # Kinds.
    "algorithm": ({"federation.algorithm": "fedprox"}, ("fedprox", "'fedsgd' or 'fedavg'")),
    "engine": ({"federation.engine": "ray"}, ("ray", "inline")),
    "partition": ({"federation.partition": "dirichelt"}, ("dirichelt",)),
    "task": ({"model.task": "classification"}, ("classification", "'sequence-classification'")),
    "loss": ({"model.loss": "mse"}, ("mse",)),
    "accountant": ({"privacy.accountant": "gdp"}, ("gdp",)),
    "attack kind": ({"attack": [{"kind": "dagger"}]}, ("attack[0].kind", "did you mean 'dager'")),
    "attack without kind": ({"attack": [{"steps": 3}]}, ("attack[0].kind is missing",)),
    "attack kind number": ({"attack": [{"kind": 3}]}, ("attack[0].kind", "3")),
    "attack table": ({"attack": {"kind": "dager"}}, ("attack = ", "list")),
    "attack string": ({"attack": ["dager"]}, ("attack", "dager")),
    "attack word": ({"attack": "dager"}, ("attack = 'dager'",)),
    "defense kind": (
        {"defense": [{"kind": "dp-sgd"}]},
        ("defense[0].kind", "did you mean 'dp_sgd'"),
    ),
    "defense without kind": ({"defense": [{"sigma": 1.0}]}, ("defense[0].kind is missing",)),
    "defense table": ({"defense": {"kind": "clip"}}, ("defense = ",)),
    # Attacks.
    "attack twice": ({"attack": [{"kind": "dlg"}] * 2}, ("two are called 'dlg'", "name = ")),
    "attack name of probes": (
        {"attack": [{"kind": "dlg", "name": "probes"}]},
        ("two are called 'probes'",),
    ),
    "attack name empty": ({"attack": [{"kind": "dlg", "name": ""}]}, ("attack[0].name = ''",)),
    "attack name number": ({"attack": [{"kind": "dlg", "name": 3}]}, ("attack[0].name = 3",)),
    "attack name markup": ({"attack": [{"kind": "dlg", "name": "a[/]b"}]}, ("attack[0].name",)),
    "attack name slash": ({"attack": [{"kind": "dlg", "name": "a/b"}]}, ("attack[0].name",)),
    "attack name escape": ({"attack": [{"kind": "dlg", "name": "a\x1bc"}]}, ("attack[0].name",)),
    "attack name newline": ({"attack": [{"kind": "dlg", "name": "a\nb"}]}, ("attack[0].name",)),
    "attack name long": ({"attack": [{"kind": "dlg", "name": "x" * 500}]}, ("attack[0].name",)),
    "setting of another attack": ({"attack": [{"kind": "dager", "preset": "best"}]}, ("preset",)),
    "attack preset": ({"attack": [{"kind": "lamp", "preset": "bests"}]}, ("preset", "bests")),
    "attack seconds": ({"attack": [{"kind": "lamp", "seconds": -1}]}, ("attack[0].seconds",)),
    "attack steps": ({"attack": [{"kind": "lamp", "steps": 0}]}, ("attack[0].steps",)),
    "attack at once": ({"attack": [{"kind": "lamp", "at_once": 8}]}, ("at_once",)),
    "prior missing": ({"attack": [{"kind": "lamp", "prior": "/nope/prior"}]}, ("/nope/prior",)),
    "prior is bert": (
        {"attack": [{"kind": "lamp", "prior": "builtin/bert-tiny"}]},
        ("builtin/bert-tiny", "causal"),
    ),
    "prior typo": ({"attack": [{"kind": "lamp", "prior": "builtin/gpt-tiny"}]}, ("gpt-tiny",)),
    # Defenses.
    "defense client": (
        {"defense": [{"kind": "clip", "norm": 1.0, "clients": [7]}]},
        ("clients = [7]", "0 to 1"),
    ),
    "defense clients empty": (
        {"defense": [{"kind": "clip", "norm": 1.0, "clients": []}]},
        ("clients = []",),
    ),
    "defense clients word": (
        {"defense": [{"kind": "clip", "norm": 1.0, "clients": "all"}]},
        ("clients = 'all'",),
    ),
    "mask": ({"defense": [{"kind": "mask", "fraction": 2.0}]}, ("fraction = 2.0",)),
    "dp both": (
        {"defense": [{**DP_SGD, "noise_multiplier": 1.0, "epsilon": 8.0}]},
        ("noise_multiplier or epsilon",),
    ),
    "dp neither": (
        {"defense": [DP_SGD]},
        ("noise_multiplier or epsilon",),
    ),
    "dp epsilon 0": (
        {"defense": [{**DP_SGD, "epsilon": 0.0}]},
        ("epsilon = 0",),
    ),
    "dp epsilon tiny": (
        {"defense": [{**DP_SGD, "epsilon": 1e-9}]},
        ("epsilon = 1e-09", "raise it"),
    ),
    "two dp": (
        {"defense": [{**DP_SGD, "noise_multiplier": 1.0}] * 2},
        ("has dp_sgd and dp_sgd", "keep one"),
    ),
    "sigma": ({"defense": [{"kind": "gaussian_noise", "sigma": -1.0}]}, ("sigma = -1",)),
    "bits 0": ({"defense": [{"kind": "quantize", "bits": 0}]}, ("bits = 0",)),
    "bits 100": ({"defense": [{"kind": "quantize", "bits": 100}]}, ("bits = 100",)),
    "freeze all": (
        {"defense": [{"kind": "freeze", "parameters": ["*"]}]},
        ("defense[0]", "freeze"),
    ),
    "freeze nothing": ({"defense": [{"kind": "freeze", "parameters": ["pooler2"]}]}, ("pooler2",)),
    "central dp": ({"defense": [{"kind": "central_dp", "max_norm": 1.0}]}, ("give either",)),
    "central dp without norm": (
        {"defense": [{"kind": "central_dp", "epsilon": 8.0}]},
        ("defense[0].max_norm is missing",),
    ),
    "central dp out of reach": (
        {"defense": [{"kind": "central_dp", "max_norm": 1.0, "epsilon": 1e-9}]},
        ("epsilon = 1e-09", "raise it"),
    ),
    "canaries of noise over rounds": (
        {
            "defense": [{"kind": "dp_ftrl", "max_norm": 1.0, "noise_multiplier": 1.0}],
            "canary.count": 4,
        },
        ("canary: the noise of dp_ftrl", "leave [canary] out"),
    ),
    "two that protect clients": (
        {
            "defense": [
                {"kind": "central_dp", "max_norm": 1.0, "noise_multiplier": 1.0},
                {"kind": "local_dp", "max_norm": 1.0, "noise_multiplier": 1.0},
            ]
        },
        ("'replace one, given n'", "'zero out one'", "keep one"),
    ),
    "secure sum of some": (
        {"defense": [{"kind": "secure_sum", "clients": [0]}]},
        ("secure_sum", "leave the key out"),
    ),
    # What is sent.
    "share nothing": ({"update.share": []}, ("update.share",)),
    "share word": ({"update.share": "q1"}, ("update.share = 'q1'",)),
    "share layer": ({"update.share": ["q99"]}, ("q99", "3 layers")),
    "share layer 0": ({"update.share": ["q0"]}, ("q0",)),
    "share unknown": ({"update.share": ["poller"]}, ("poller",)),
    "share number": ({"update.share": [3]}, ("update.share",)),
    "share without what the attack needs": (
        {"update.share": ["classifier"]},
        ("attack 'keyspan'", "update.share"),
    ),
    # Threat, privacy, utility.
    "fact": ({"threat.knows": ["label"]}, ("label", "did you mean 'labels'")),
    "fact word": ({"threat.knows": "labels"}, ("threat.knows = 'labels'",)),
    "sees word": ({"threat.sees": "model"}, ("threat.sees = 'model'",)),
    "sees a sum": ({"threat.sees": "sum"}, ("threat.sees = 'sum'", "secure_sum", "'models'")),
    "sees updates": (
        {"threat.sees": "updates", "defense": [{"kind": "secure_sum"}]},
        ("threat.sees = 'updates'", "with secure_sum", "'sum' or 'models'"),
    ),
    "sees clients of models": (
        {"threat.sees": "models", "threat.clients": [0]},
        ("threat.clients = [0]", "leave threat.clients out"),
    ),
    "threat round": ({"threat.rounds": [9]}, ("threat.rounds has 9", "from 1 to 1")),
    "threat round 0": ({"threat.rounds": [0]}, ("threat.rounds",)),
    "threat no round": ({"threat.rounds": []}, ("threat.rounds",)),
    "delta": ({"privacy.delta": 2.0}, ("privacy.delta = 2.0",)),
    "delta 0": ({"privacy.delta": 0.0}, ("privacy.delta = 0.0",)),
    "utility round": ({"utility.rounds": [7]}, ("utility.rounds has 7",)),
    "utility word": ({"utility.rounds": "some"}, ("utility.rounds",)),
    # The federation.
    "clients per round": (
        {"federation.clients_per_round": 5},
        ("clients_per_round = 5", "clients = 2"),
    ),
    "more clients than rows": ({"federation.clients": 50}, ("clients = 50", "data.samples")),
    "rounds 1e9": ({"federation.rounds": 10**9}, ("rounds = 1,000,000,000", "at most")),
    "rounds beyond 64 bits": ({"federation.rounds": 2**70}, ("rounds = 1,180", "at most")),
    "clients 1e9": (
        {"federation.clients": 10**9},
        ("federation.clients = 1000000000", "less than or equal to 1000000"),
    ),
    "epochs 1e9": (
        {"federation.algorithm": "fedavg", "federation.local_epochs": 10**9},
        ("local_epochs",),
    ),
    "alpha 0": ({"federation.partition": "dirichlet", "federation.alpha": 0.0}, ("alpha = 0",)),
    "dirichlet without classes": (
        {
            "model.name": "builtin/gpt2-tiny",
            "model.task": "causal-lm",
            "federation.partition": "dirichlet",
            "attack": [{"kind": "probes"}],
        },
        ("dirichlet", "'iid'"),
    ),
    "seed above 64 bits": ({"seed": 2**64}, ("seed",)),
    "seed huge": ({"seed": 10**30}, ("seed",)),
    # Data.
    "samples huge": ({"data.samples": 10**7}, ("data.samples",)),
    "data typo": ({"data.name": "builtin/note"}, ("builtin/note", "builtin/notes")),
    "data column": ({"data.text": ["a", "b"]}, ("data.text",)),
    "length 1": ({"data.max_length": 1}, ("max_length = 1",)),
    "length 2": ({"data.max_length": 2}, ("max_length = 2",)),
    "length 1e6": ({"data.max_length": 10**6}, ("max_length = 1000000", "64")),
    "hub data without column": ({"data.name": "no-such-org-xyz/none"}, ("data.text",)),
    "hub data": (
        {"data.name": "no-such-org-xyz/none", "data.text": "t", "data.label": "l"},
        ("no-such-org-xyz/none",),
    ),
    # Models.
    "built-in typo": ({"model.name": "builtin/bert-tinny"}, ("did you mean 'bert-tiny'",)),
    "hub model": ({"model.name": "no-such-org-xyz/no-such-model"}, ("no-such-model", "give")),
    "causal bert": ({"model.task": "causal-lm"}, ("needs a causal model",)),
    "squared next token": (
        {"model.name": "builtin/gpt2-tiny", "model.task": "causal-lm", "model.loss": "squared"},
        ("squared", "cross-entropy"),
    ),
    "lora rank": ({"model.lora.rank": 0}, ("model.lora.rank = 0",)),
    "lora target": ({"model.lora.targets": ["nope"]}, ("nope", "query")),
    "lora no target": ({"model.lora.targets": []}, ("model.lora.targets",)),
    "lora alpha": ({"model.lora.alpha": -1.0}, ("model.lora.alpha",)),
    # Workers.
    "device": ({"workers.devices": ["cuda:99"]}, ("cuda:99", "leave the key out")),
    "device typo": ({"workers.devices": ["gpu"]}, ("'gpu'",)),
    "device none": ({"workers.devices": []}, ("workers.devices",)),
    "device word": ({"workers.devices": "cpu"}, ("workers.devices = 'cpu'",)),
    "worker engine": ({"workers.engine": "slurm"}, ("workers", "engine")),
    # The environment.
    "variable": ({"model.name": "${NOPE_NOT_SET}/x"}, ("NOPE_NOT_SET", "set it")),
    "variable syntax": ({"model.name": "${NOPE"}, ("${NOPE",)),
    # A sweep.
    "sweep": ({"sweep.seed": [1, 2]}, ("[sweep]", "fedleak sweep")),
}


SLOW = {"dp epsilon tiny"}
"""Takes a second: tests/test_defenses.py asks for an epsilon out of reach, too."""


@pytest.mark.parametrize(
    "case", [pytest.param(w, marks=[pytest.mark.slow] if w in SLOW else []) for w in WRONG]
)
def test_a_setting_that_is_wrong(run, refused, folder: Path, case: str) -> None:
    changes, says = WRONG[case]
    refused(run(changes), *says)
    assert not (folder / "runs").exists()


NUMBERS = {
    "seed": (-1, 1.5, "3", True, []),
    "model.lora.rank": (-1, 1.5, "3", True, math.nan),
    "data.samples": (-4, 0, 1.5, "3", True),
    "data.held_out": (-1, 1.5, 1.0, 0.0, "3", True),
    "data.drop_empty": ("yes", 1, 0.5),
    "data.on_nodes": ("yes", 1, 0.5),
    "data.max_length": (-1, 0, 4.5, "9", True),
    "federation.clients": (-1, 0, 1.5, "2", True),
    "federation.clients_per_round": (-1, 0, 1.5, "2", True),
    "federation.rounds": (-1, 0, 1.5, "three", True, []),
    "federation.batch_size": (-1, 0, 1.5, "2", True),
    "federation.local_epochs": (-1, 0, 1.5, "2", True),
    "federation.learning_rate": (-0.1, 0.0, math.nan, math.inf, "5e-5", True),
    "client.momentum": (-0.1, 1.0, math.nan, "0.9", True),
    "client.weight_decay": (-0.1, math.nan, math.inf, "0", True),
    "client.final_learning_rate": (-0.1, math.nan, math.inf, "0", True),
    "client.accumulate": (-1, 0, 1.5, "2", True),
    "federation.alpha": (-1.0, 0.0, math.nan, "1", True),
    "federation.dropout": ("no", 1, 0.5),
    "privacy.delta": (-1e-5, 1.0, math.nan, "1e-5", True),
    "gate.seconds": (0, -1, math.nan, math.inf, "60", True),
    "workers.at_once": (-1, 0, 1.5, math.inf, "8", True),
    "federation.at_once": (-1, 0, 1.5, math.inf, "8", True),
    "audit.waiting": (-1, 0, 1.5, math.inf, "8", True),
    "workers.time_limit": (-1, 0, math.nan, math.inf, "60", True),
    "audit.controls": ("no", 1),
    "utility.reference": ("no", 1),
    "threat.ladder": ("yes", 1, 0.5),
    "threat.rounds": (1, "1", [1.5], [True], [-1]),
    "threat.clients": (1, "1", [1.5], [True], [-1], []),
    "audit.keep": ("some", True, 1, []),
    "utility.rounds": (1, [1.5], [True], [-1]),
}


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_is_none(run, refused, folder: Path, key: str) -> None:
    for value in NUMBERS[key]:
        refused(run({key: value}), key)
        assert not (folder / "runs").exists(), value


NO_VALUES: tuple[Any, ...] = ({}, [{"a": 1}])
"""What no setting takes; nor does any take what is no number."""

KINDS = [
    (table, kind, cls.__dataclass_fields__)
    for table, room in (("attack", attacks), ("defense", defenses))
    for kind, cls in room.kinds().items()
]


@pytest.mark.parametrize(("table", "kind", "settings"), KINDS, ids=[kind for _, kind, _ in KINDS])
def test_a_setting_of_an_attack_or_a_defense_that_has_no_such_value(
    run, refused, folder: Path, table: str, kind: str, settings: Iterable[str]
) -> None:
    for setting, value in zip(settings, cycle(NO_VALUES)):
        for no_value in (value, math.nan):
            refused(run({table: [{"kind": kind, setting: no_value}]}), f"{table}[0]", setting)
            assert not (folder / "runs").exists(), (setting, no_value)


RIGHT: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no attack": {"attack": []},
    "nothing held out": {"data.held_out": 0},
    "short texts": {"data.max_length": 3},
    "a large learning rate": {"federation.learning_rate": 1e6},
    "the batch of everybody": {"federation.batch_size": 8},
    "a fact of no defense": {"threat.knows": ["noise_scale"]},
    "a fact twice": {"threat.knows": ["labels", "labels"]},
    "epochs of fedsgd": {"federation.local_epochs": 3},
    "two dp_sgd of different clients": {
        "defense": [
            {**DP_SGD, "noise_multiplier": 1.0, "clients": [0]},
            {**DP_SGD, "noise_multiplier": 1.0, "clients": [1]},
        ]
    },
    "the longest seed": {"seed": 2**63 - 1},
    "the longest name": {"name": "x" * 100},
    "a uneven partition": {"federation.partition": "dirichlet", "federation.alpha": 0.5},
    "adapters": {"model.lora.rank": 2, "attack": []},
    "gpt2": {"model.name": "builtin/gpt2-tiny", "model.task": "causal-lm"},
    "llama": {"model.name": "builtin/llama-tiny", "model.task": "causal-lm", "attack": []},
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_is_not_refused(experiment, folder: Path, case: str) -> None:
    (folder / "e.toml").write_text(experiment(RIGHT[case]))
    assert preparation.plan(load(folder / "e.toml")).num_labels in (1, 2)


def test_a_batch_far_larger_than_the_data_is_all_of_it_and_said(experiment, folder: Path) -> None:
    (folder / "e.toml").write_text(experiment({"federation.batch_size": 10**7}))
    [remark] = preparation.plan(load(folder / "e.toml")).remarks
    assert "batch_size = 10000000" in remark


CHANGES = {
    "bad value": ("federation.rounds=two", ("federation.rounds = 'two'",)),
    "no equals": ("federation.rounds", ("dotted.key=value",)),
    "empty": ("", ("dotted.key=value",)),
    "only equals": ("=3", ("dotted.key=value",)),
    "unknown": ("federation.round=3", ("did you mean 'rounds'",)),
    "unknown table": ("federatoin.rounds=3", ("did you mean 'federation'",)),
    "into a value": ("seed.x=2", ("'seed' is not a table",)),
    "into a list": ("attack.0.kind='dager'", ("'attack' is not a table",)),
    "half a list": ("threat.knows=[1", ("threat.knows",)),
    "dots": ("..=3", ("unknown",)),
    "a table": ("model={}", ("model.name is missing",)),
    "escape": ("federation.engine=\x1bc", ("federation.engine",)),
    "markup": ("federation.engine=[red]", ("federation.engine",)),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_from_the_command_line(run, refused, folder: Path, case: str) -> None:
    change, says = CHANGES[case]
    refused(run({}, "--set", change), *says)
    assert not (folder / "runs").exists()


SWEEPS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no value": ({"seed": []}, ("sweep.seed = []",)),
    "nothing": ({}, ("sweep = {}",)),
    "a value": ({"seed": 3}, ("sweep.seed = 3",)),
    "a list": ([1, 2], ("sweep",)),
    "unknown key": ({"federation.bach_size": [1, 2]}, ("did you mean 'batch_size'",)),
    "unknown table": ({"federatoin.rounds": [1]}, ("did you mean 'federation'",)),
    "a bad value": ({"federation.batch_size": [1, -2]}, ("batch_size = -2",)),
    "a value twice": ({"seed": [1, 1]}, ("two cells", "once")),
    "the name": ({"name": ["a", "b"]}, ("sweep.name",)),
    "a million cells": (
        {"seed": list(range(1000)), "federation.batch_size": list(range(1, 1001))},
        ("cells", "1,000,000"),
    ),
    "ten to the twelve cells": (
        {f"federation.{key}": list(range(1, 1001)) for key in ("rounds", "batch_size")}
        | {"seed": list(range(1000)), "data.samples": list(range(1, 1001))},
        ("cells",),
    ),
    "a table's key": ({"model": [{"name": "builtin/bert-tinny"}]}, ("bert-tinny",)),
}


@pytest.mark.parametrize("case", SWEEPS)
def test_a_sweep_that_is_wrong(experiment, fedleak, refused, folder: Path, case: str) -> None:
    table, says = SWEEPS[case]
    (folder / "e.toml").write_text(experiment({"sweep": table}))
    refused(fedleak("sweep", "e.toml"), *says)
    assert not (folder / "runs").exists()


def test_a_sweep_without_a_sweep(experiment, fedleak, refused, folder: Path) -> None:
    (folder / "e.toml").write_text(experiment({}))
    refused(fedleak("sweep", "e.toml"), "no [sweep]", "fedleak run e.toml")


def test_the_second_of_two_files_is_checked_before_the_first_runs(
    experiment, fedleak, refused, folder: Path
) -> None:
    (folder / "a.toml").write_text(experiment({}))
    (folder / "b.toml").write_text(experiment({"federation.rounds": -1}))
    refused(fedleak("run", "a.toml", "b.toml"), "federation.rounds = -1")
    assert not (folder / "runs").exists()


def test_every_setting_of_every_table_is_tried() -> None:
    """A new number in a table is a new line above."""
    numbers = set()
    for table, field in Experiment.model_fields.items():
        inside = getattr(field.annotation, "model_fields", {})
        numbers |= {
            f"{table}.{key}"
            for key, value in inside.items()
            if value.annotation in (int, float, bool)
        }
    assert numbers <= NUMBERS.keys()
