import copy
import json
import os
import tomllib
from functools import reduce
from pathlib import Path
from threading import Thread

import pytest
import tomli_w

from fedleak.attacks.analytic.probes import Probes
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.matching.dlg import Dlg
from fedleak.attacks.subspace.dager import Dager
from fedleak.cli.options import PRESET
from fedleak.config.checks import (
    attack_settings,
    check_attacks,
    check_canaries,
    check_defenses,
)
from fedleak.config.federation.lookup import stored
from fedleak.config.federation.workload import outline
from fedleak.config.loading import load, parse
from fedleak.config.presets import PRESETS
from fedleak.config.sent_parameters import captured_parameters
from fedleak.config.wording import difference
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.models import CLASSIFICATION, ModelSpec
from fedleak.models.lora import Lora
from fedleak.running import sweep
from fedleak.running.bench import markdown
from fedleak.store.run import Run
from fedleak.training.observation import UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.util import plain_files
from fedleak.util.errors import ConfigError, FedleakError, unknown
from fedleak.util.nested import flat

pytestmark = pytest.mark.core

GOOD = {"name": "good", "model": {"name": "builtin/bert-tiny"}, "data": {"name": "builtin/notes"}}


def table_of(**tables):
    table = copy.deepcopy(GOOD)
    for key, value in tables.items():
        old = table.get(key)
        table[key] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    return table


# What is wrong, and what the one line must hold: the key, what was found, what is right.
BAD = [
    ({"attak": []}, ["'attak'", "did you mean 'attack'?"]),
    ({"federation": {"round": 3}}, ["[federation]", "'round'", "'rounds'"]),
    ({"model": {"nam": "x"}}, ["[model]", "'nam'", "'name'"]),
    ({"name": "a/b"}, ["name = 'a/b'", "pattern"]),
    ({"seed": -1}, ["seed = -1", "greater than or equal to 0"]),
    ({"seed": 1.5}, ["seed = 1.5", "integer"]),
    *(
        (
            {
                "federation": {"clients": 2, "rounds": 2},
                "tapped": {"optimiser": "sgd", "labels": 2, "clients": clients, "messages": ""},
            },
            ["tapped.clients has", "federation has 2 rounds", "up to 1", "`fedleak import`"],
        )
        for clients in ([[0, 1]], [[0, 1], [0, 2]])
    ),
    ({"model": 3}, ["model = 3", "dictionary"]),
    ({"model": {"task": "translation"}}, ["model.task", "'translation'", "'causal-lm'"]),
    ({"model": {"loss": "mse"}}, ["model.loss", "'mse'", "'squared'"]),
    (
        {"model": {"task": "causal-lm", "loss": "squared"}},
        ["model", "loss = 'squared'", "'causal-lm'", "'cross-entropy'"],
    ),
    ({"model": {"lora": {"rank": 0}}}, ["model.lora.rank = 0", "greater than or equal to 1"]),
    ({"model": {"lora": {"rank": 2.5}}}, ["model.lora.rank = 2.5", "integer"]),
    ({"model": {"lora": {"alpha": 0}}}, ["model.lora.alpha = 0", "greater than 0"]),
    ({"model": {"lora": {"targets": []}}}, ["model.lora.targets = []", "at least 1"]),
    ({"model": {"lora": {"targets": [3]}}}, ["model.lora.targets.0 = 3", "string"]),
    ({"model": {"lora": {"ranks": 3}}}, ["[model.lora]", "'ranks'", "did you mean 'rank'?"]),
    ({"model": {"lora": 8}}, ["model.lora = 8", "dictionary"]),
    ({"data": {"samples": 0}}, ["data.samples = 0", "greater than or equal to 1"]),
    ({"data": {"samples": "many"}}, ["data.samples = 'many'", "integer"]),
    ({"federation": {"rounds": "3"}}, ["federation.rounds = '3'", "integer"]),
    ({"federation": {"dropout": 1}}, ["federation.dropout = 1", "boolean"]),
    ({"federation": {"learning_rate": 0.0}}, ["federation.learning_rate = 0.0", "greater than 0"]),
    ({"federation": {"algorithm": "fedprox"}}, ["federation.algorithm", "fedprox", "'fedavg'"]),
    (
        {"federation": {"clients": 2, "clients_per_round": 3}},
        ["federation", "clients_per_round = 3", "clients = 2", "lower it"],
    ),
    ({"federation": {"server_optimiser": "adagrad"}}, ["federation.server_optimiser", "'adam'"]),
    (
        {"federation": {"server_optimiser": "adam", "algorithm": "fedavg"}},
        ["federation", "server_learning_rate is missing", "set it"],
    ),
    (
        {"federation": {"server_optimiser": "adam", "server_learning_rate": 0.5}},
        ["federation", "server_learning_rate = 0.5", "fedsgd", "leave it out"],
    ),
    (
        {"federation": {"algorithm": "fedavg", "server_learning_rate": 0.5}},
        ["federation", "server_learning_rate = 0.5", "'sgd'", "leave it out"],
    ),
    (
        {"federation": {"server_optimiser": "adam"}, "threat": {"sees": "models"}},
        ["federation.server_optimiser = 'adam'", "models alone", "use 'sgd'"],
    ),
    ({"client": {"optimiser": "adagrad"}}, ["client.optimiser", "'adamw'"]),
    ({"client": {"precision": "float16"}}, ["client.precision: 'float16' needs its loss scaled"]),
    (
        {"client": {"precision": "bf16"}},
        ["client.precision", "'bf16'", "known: bfloat16, bfloat16-mixed"],
    ),
    ({"client": {"optimiser": "adamw"}}, ["client.optimiser", "fedsgd", "'fedavg'"]),
    (
        {"client": {"optimiser": "adam", "momentum": 0.5}},
        ["client", "momentum", "'sgd'", "leave it out"],
    ),
    ({"client": {"final_learning_rate": 1e-6}}, ["client", "final_learning_rate", "set schedule"]),
    (
        {"client": {"schedule": "linear", "final_learning_rate": 0.1}}
        | {"federation": {"algorithm": "fedavg", "learning_rate": 1e-3}},
        ["client.final_learning_rate = 0.1", "federation.learning_rate = 0.001", "or less"],
    ),
    (
        {"client": {"optimiser": "adam"}, "utility": {"reference": True}}
        | {"federation": {"algorithm": "fedavg"}},
        ["utility.reference", "client.optimiser", "leave one of them out"],
    ),
    (
        {"client": {"optimiser": "adam"}, "federation": {"algorithm": "fedavg"}}
        | {"threat": {"knows": ["noise_scale"]}}
        | {"defense": [{"kind": "dp_sgd", "noise_multiplier": 1.0}]},
        ["threat.knows has noise_scale", "optimiser", "do not grant it"],
    ),
    ({"model": {"response_template": "A:"}}, ["response_template is for task = 'causal-lm'"]),
    ({"preset": "flowertunes"}, ["preset = 'flowertunes'", "'flowertune'"]),
    ({"threat": {"knows": ["labels"], "ladder": True}}, ["threat", "ladder = true", "keep one"]),
    ({"threat": {"knows": ["label"]}}, ["threat", "'label'", "did you mean 'labels'?"]),
    ({"attack": [{"kind": "dagger"}]}, ["attack[0].kind", "'dagger'", "did you mean 'dager'?"]),
    (
        {"attack": [{"steps": 1}]},
        [
            "attack[0].kind is missing",
            "dager, decepticons, dlg, imprint, keyspan, lamp, maximum_likelihood, membership, "
            "position_marginals, probes, query_gradients, state_pursuit, step_peeling, tag",
        ],
    ),
    ({"attack": "dager"}, ["attack = 'dager'", "list"]),
    ({"attack": [{"kind": "dlg", "step": 3}]}, ["attack", "'step'", "did you mean 'steps'?"]),
    ({"attack": [{"kind": "dlg", "steps": 0}]}, ["attack", "steps = 0", "greater than or equal"]),
    ({"attack": [{"kind": "dlg", "steps": "few"}]}, ["attack", "steps = 'few'", "integer"]),
    ({"attack": [{"kind": "dlg", "name": ""}]}, ["attack", "name = ''", "give it a word"]),
    ({"attack": [{"kind": "dlg", "name": "a[/]b"}]}, ["attack[0].name = 'a[/]b'", "letters"]),
    ({"attack": [{"kind": "dlg", "name": "a/b"}]}, ["attack[0].name = 'a/b'", "letters"]),
    ({"attack": [{"kind": "dlg", "name": "a\n"}]}, ["attack[0].name", "letters"]),
    ({"attack": [{"kind": "dlg", "name": "a" * 101}]}, ["attack[0].name", "at most 100"]),
    ({"name": "a" * 101}, ["name", "at most 100"]),
    ({"name": "a\n"}, ["name", "pattern"]),
    ({"model": {"name": "x" * 5000}}, ["model.name: 'xxx", "too long", "shorten it"]),
    ({"data": {"name": "x" * 5000}}, ["data.name: 'xxx", "too long", "shorten it"]),
    (
        {"defense": [{"kind": "dp_sgd", "epsilon": 1e308}]},
        ["defense[0].epsilon = 1e+308", "1000000"],
    ),
    (
        {"defense": [{"kind": "local_dp", "max_norm": 1.0, "noise_multiplier": 1e-300}]},
        ["defense[0].noise_multiplier = 1e-300", "than or equal to 0.000001"],
    ),
    ({"seed": 2**63}, [f"seed = {2**63}", f"less than or equal to {2**63 - 1}"]),
    (
        {"federation": {"rounds": 10**9}},
        ["federation", "rounds = 1,000,000,000 of 4 clients", "at most 1,000,000", "lower one"],
    ),
    (
        {"federation": {"clients": 10**9, "rounds": 1}},
        ["federation.clients = 1000000000", "less than or equal to 1000000"],
    ),
    ({"data": {"encoding": "latin-x"}}, ["data.encoding", "'latin-x'", "'latin-1'"]),
    ({"data": {"encoding": "base64"}}, ["data.encoding", "'base64'", "encoding of text"]),
    ({"data": {"delimiter": "||"}}, ["data.delimiter = '||'", "pattern"]),
    ({"data": {"delimiter": '"'}}, ["data.delimiter", "pattern"]),
    ({"data": {"drop_empty": "yes"}}, ["data.drop_empty = 'yes'", "boolean"]),
    ({"update": {"share": "q1"}}, ["update.share = 'q1'", "'all', or", "list"]),
    ({"update": {"share": [3]}}, ["update.share.0 = 3", "string"]),
    (
        {"seed": -1, "federation": {"rounds": 0, "clients": "two"}},
        ["seed = -1: ", "(wrong as well: federation.clients, federation.rounds)"],
    ),
    ({"attack": [{"kind": "dlg"}, {"kind": "dlg"}]}, ["attack", "two are called 'dlg'", "name ="]),
    (
        {"attack": [{"kind": "dlg", "name": "probes"}]},
        ["attack", "two are called 'probes'", "name ="],
    ),
    ({"defense": [{"kind": "noise"}]}, ["defense[0].kind", "'noise'", "gaussian_noise"]),
    (
        {"defense": [{"kind": "gaussian_noise", "sigma": -1.0}]},
        ["defense[0].sigma = -1.0", "greater than 0"],
    ),
    ({"defense": [{"kind": "gaussian_noise"}]}, ["defense[0]", "give either sigma or relative"]),
    (
        {"defense": [{"kind": "cast", "dtype": "int8"}]},
        ["defense[0].dtype = 'int8'", "'float16' or 'bfloat16'"],
    ),
    (
        {"defense": [{"kind": "mask", "fraction": 0.5}, {"kind": "mask", "fraction": 1.2}]},
        ["defense[1].fraction = 1.2", "less than 1"],
    ),
    (
        {"defense": [{"kind": "mask", "fraction": 0.5, "clients": [4]}]},
        ["defense[0].clients = [4]", "from 0 to 3"],
    ),
    (
        {"defense": [{"kind": "mask", "fraction": 0.5, "clients": 1}]},
        ["defense[0].clients = 1", "from 0 to 3"],
    ),
    ({"workers": {"devices": ["gpu"]}}, ["workers.devices", "'gpu'", "not a torch device"]),
    ({"workers": {"devices": ["cuda:99"]}}, ["workers.devices", "'cuda:99'", "leave the key out"]),
    ({"workers": {"devices": []}}, ["workers.devices = []", "at least 1"]),
    (
        {"model": {"task": "causal-lm"}, "federation": {"partition": "dirichlet"}},
        ["federation.partition = 'dirichlet'", "causal-lm", "'iid'"],
    ),
    ({"update": {"share": []}}, ["update.share", "[]"]),
    pytest.param(
        {"attack": [{"kind": "dlg", "steps": "50"}]},
        ["attack[0]", "steps = '50'"],
    ),
    pytest.param(
        {"attack": [{"kind": ["dlg"]}]},
        ["attack[0].kind", "['dlg']"],
    ),
    pytest.param(
        {"federation": {"learning_rate": float("inf")}},
        ["federation.learning_rate"],
    ),
    pytest.param(
        {"workers": {"devices": ["mps"]}},
        ["workers.devices", "'mps'"],
    ),
]


@pytest.mark.parametrize(("tables", "words"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_a_bad_experiment_is_refused_with_its_key(tables, words):
    with pytest.raises(ConfigError) as caught:
        parse(table_of(**tables))
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["name", "model", "data"])
def test_what_must_be_there_is_named(missing):
    with pytest.raises(ConfigError, match=f"^{missing} is missing: set it$"):
        parse({key: value for key, value in GOOD.items() if key != missing})


CANNOT_WORK = [
    (
        {"attack": [{"kind": "lamp", "prior": "./no-such-folder"}]},
        ["attack 'lamp'", "prior = './no-such-folder'", "no such folder"],
    ),
    (
        {"attack": [{"kind": "keyspan"}], "update": {"share": ["layer.0.*.value"]}},
        ["attack 'keyspan'", "layer.0.attention.self.query.weight", "update.share"],
    ),
    (
        {"attack": [{"kind": "dager"}], "update": {"share": ["layer.0", "layer.2"]}},
        ["attack 'dager'", "layer.1.attention.self.query.weight", "update.share"],
    ),
    (
        {"attack": [{"kind": "dlg", "name": "mine"}], "update": {"share": ["word_embeddings"]}},
        ["attack 'mine'", "beside the word embedding", "update.share"],
    ),
    (
        {"model": {"lora": {}}, "update": {"share": ["query", "key"]}},
        ["update.share", "'key' is in no parameter's name", "lora_A, lora_B, query"],
    ),
    (
        {"model": {"lora": {}}, "update": {"share": ["q1", "k1"]}},
        ["update.share", "'k1' is nothing that is trained", "lora_A, lora_B, query"],
    ),
    (
        {"model": {"name": "builtin/llama-tiny", "task": "causal-lm"}}
        | {"update": {"share": ["t", "classifier"]}},
        ["update.share", "'classifier' is nothing that is trained", "lm_head"],
    ),
    ({"update": {"share": ["q1", "q0"]}}, ["update.share: 'q0'", "has 4 layers", "from 1 to 4"]),
    ({"update": {"share": ["t5", "query"]}}, ["update.share: 't5'", "has 4 layers", "from 1 to 4"]),
    (
        {"model": {"name": "builtin/gpt2-tiny"}, "update": {"share": ["q1", "o1"]}},
        ["update.share: 'q1' cannot be had alone", "['q1', 'k1', 'v1']", "h.0.attn.c_attn'"],
    ),
    (
        {"attack": [{"kind": "dager"}], "update": {"share": ["q1", "k3"]}},
        ["attack 'dager'", "layer.1.attention.self.query.weight", "update.share"],
    ),
    (
        {"attack": [{"kind": "keyspan"}], "update": {"share": ["v1", "t2", "embeddings"]}},
        ["attack 'keyspan'", "layer.0.attention.self.query.weight", "update.share"],
    ),
    (
        {"attack": [{"kind": "dager"}], "update": {"share": ["q1", "q2"]}}
        | {"defense": [{"kind": "freeze", "parameters": ["q1"]}]},
        ["attack 'dager'", "layer.0.attention.self.query.weight"],
    ),
    (
        {"update": {"share": ["q1"]}}
        | {"defense": [{"kind": "freeze", "parameters": ["q"], "clients": [1]}]},
        ["update.share", "client 1", "frozen"],
    ),
    (
        {"model": {"lora": {"targets": ["values"]}}},
        ["model.lora.targets", "'values'", "did you mean 'value'?"],
    ),
    (
        {"update": {"share": ["query", "layer.9.attention"]}},
        ["update.share", "'layer.9.attention'", "position_embeddings"],
    ),
]


@pytest.mark.parametrize(("tables", "words"), CANNOT_WORK, ids=lambda value: json.dumps(value)[:60])
def test_an_attack_that_cannot_work_is_refused_with_what_would_mend_it(tables, words):
    experiment = parse(table_of(**tables))
    with pytest.raises(ConfigError) as caught:
        check_attacks(experiment, outline(experiment, 2))
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tables",
    [
        {"attack": [{"kind": "dager"}, {"kind": "dlg"}]},
        {"attack": [{"kind": "dager"}], "update": {"share": ["layer.0.*.query", "layer.1.*.key"]}},
        {"attack": [{"kind": "lamp"}, {"kind": "tag"}], "update": {"share": ["query"]}},
        {"attack": [{"kind": "lamp"}], "federation": {"algorithm": "fedavg"}},
        {
            "attack": [{"kind": "lamp"}],
            "model": {"name": "builtin/gpt2-tiny", "task": "causal-lm"},
        },
        {"attack": [{"kind": "keyspan"}], "update": {"share": ["layer.0.*.query"]}},
        {"attack": [{"kind": "keyspan"}], "update": {"share": ["q1"]}},
        {"attack": [{"kind": "dager"}], "update": {"share": ["q1", "layer.1.*.key"]}},
        {"attack": [{"kind": "dager"}], "update": {"share": ["t"]}, "model": {"lora": {}}},
        {"attack": [{"kind": "dlg"}], "update": {"share": ["embeddings"]}},
        {
            "attack": [{"kind": "dager"}, {"kind": "keyspan"}],
            "federation": {"algorithm": "fedavg"},
        },
    ],
)
def test_an_attack_that_can_work_is_let_through(tables):
    experiment = parse(table_of(**tables))
    model = outline(experiment, 2)
    check_attacks(experiment, model)
    settings = attack_settings(experiment, model)
    for named in experiment.attacks:
        assert None in [named.attack.obstacle(setting) for setting in settings]


# --- clients as people run them -----------------------------------------------------------


def test_a_preset_fills_in_what_the_file_leaves_out():
    experiment = parse(
        table_of(
            preset="flowertune",
            model={"name": "builtin/llama-tiny", "lora": {"rank": 4}},
            federation={"clients": 4},
            attack=[{"kind": "dager"}],
        )
    )
    lora = experiment.model.lora
    assert (lora.rank, lora.alpha, lora.dropout) == (4, 64.0, 0.075)
    assert (experiment.federation.clients, experiment.federation.batch_size) == (4, 16)
    assert experiment.client.max_steps == 10
    assert parse(experiment.model_dump(mode="json")) == experiment
    written_out = parse(experiment.model_dump(mode="json") | {"preset": None})
    assert written_out.fingerprint == experiment.fingerprint


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_sets_are_keys_of_an_experiment(preset):
    experiment = parse(table_of(preset=preset, model={"name": "builtin/llama-tiny"}, attack=[]))
    table = experiment.model_dump(mode="json")
    for key, value in flat(PRESETS[preset]):
        assert reduce(lambda part, name: part[name], key.split("."), table) == value


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_on_the_command_line_needs_no_file(preset):
    (file,) = PRESET
    experiment = load(file, [f"preset={preset}"])
    outlined = outline(experiment, 2)
    check_attacks(experiment, outlined)
    assert "membership" in {named.name for named in experiment.attacks}


@pytest.mark.parametrize(
    ("server", "suited"),
    [
        ({"mode": "imprint"}, ["imprint"]),
        ({"mode": "decepticons"}, ["decepticons"]),
        ({"mode": "inconsistent"}, []),
        ({}, []),
    ],
)
def test_what_a_server_plants_is_read_unless_the_file_names_attacks(server, suited):
    left_out = parse(GOOD | {"server": server})
    assert [table["kind"] for table in left_out.attack] == ["auto", *suited]
    named = parse(GOOD | {"server": server, "attack": [{"kind": "dlg"}]})
    assert [table["kind"] for table in named.attack] == ["dlg"]


def test_experiments_without_a_client_table_are_what_they_were():
    experiment = parse(table_of())
    assert experiment.local_training.recipe == Recipe()
    assert experiment.fingerprint == parse(table_of(client={})).fingerprint
    fedavg = {"algorithm": "fedavg"}
    plain, adam = (
        parse(table_of(federation=fedavg, client=client)).fingerprint
        for client in ({}, {"optimiser": "adam"})
    )
    assert plain != adam


NO_ROOM = [
    (
        {"client": {"precision": "bfloat16"}, "defense": [{"kind": "dp_sgd", "epsilon": 8.0}]},
        ["defense[0] (dp_sgd)", "client.precision = 'bfloat16': set client.precision = 'float32'"],
    ),
    (
        {"model": {"lora": {"dora": True}}, "defense": [{"kind": "dp_sgd", "epsilon": 8.0}]},
        ["defense[0] (dp_sgd)", "model.lora.dora = false"],
    ),
    ({"client": {"max_steps": 1}, "canary": {"count": 1}}, ["canary", "client.max_steps"]),
]


@pytest.mark.parametrize(("tables", "words"), NO_ROOM, ids=lambda value: json.dumps(value)[:60])
def test_what_is_not_accounted_for_is_refused(tables, words):
    experiment = parse(table_of(**{"federation": {"algorithm": "fedavg"}, **tables}))
    model = outline(experiment, 2)

    def check():
        check_defenses(experiment, model)
        check_canaries(experiment, model)

    with pytest.raises(ConfigError) as caught:
        check()
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_a_canary_that_is_a_whole_update_goes_with_any_optimiser():
    experiment = parse(
        table_of(
            federation={"algorithm": "fedavg"},
            client={"optimiser": "adamw"},
            canary={"count": 1},
            defense=[{"kind": "local_dp", "max_norm": 1.0, "epsilon": 8.0}],
        )
    )
    check_canaries(experiment, outline(experiment, 2))


# --- files and overrides --------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(tomli_w.dumps(table_of(attack=[{"kind": "dager"}])))
    return path


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.toml", None, ["none.toml", "No such file"]),
        ("bad.toml", b"name = ", ["bad.toml", "cannot be read"]),
        ("bad.json", b"{", ["bad.json", "cannot be read"]),
        ("other.json", b"{}", ["other.json", "not the run.json of a run", "give a TOML file"]),
        ("list.json", b"[]", ["list.json", "not the run.json of a run", "give a TOML file"]),
        ("inner.json", b'{"experiment": 3}', ["inner.json", "not the run.json", "give a TOML"]),
        ("utf16.toml", "name = 'a'".encode("utf-16"), ["is not UTF-8", "0xff", "save it as"]),
        ("json.toml", b'{"name": "a"}', ["json.toml", "is JSON", "write it as TOML"]),
        ("deep.toml", b"a = " + b"[" * 5000, ["deep.toml", "nested too deep"]),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / name)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("read", [load, lambda path: markdown.read_results([path])])
def test_a_device_that_never_ends_is_refused(read, monkeypatch):
    monkeypatch.setattr(plain_files, "MOST_SETTINGS", 1000)
    with pytest.raises(ConfigError, match=r"'/dev/zero'.*: it has more than 1,000 bytes: give a "):
        read(Path("/dev/zero"))


def test_settings_may_come_from_a_pipe(tmp_path):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_text, args=[tomli_w.dumps(GOOD)])
    writer.start()
    assert load(pipe).name == "good"
    writer.join()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8"])
def test_a_mark_at_the_start_of_a_file_is_no_key(tmp_path, encoding):
    (tmp_path / "a.toml").write_text(tomli_w.dumps(GOOD), encoding=encoding)
    assert load(tmp_path / "a.toml").name == "good"


@pytest.mark.parametrize("listed", [(None,), ([0],), ([2, 4], [4, 5]), ([0, 1, 2], None), ()])
def test_one_client_of_each_group_stands_for_all(listed):
    defenses = [
        {"kind": "sign"} if clients is None else {"kind": "sign", "clients": clients}
        for clients in listed
    ]
    experiment = parse(table_of(defense=defenses, federation={"clients": 6}))
    groups = {tuple(experiment.defenses_of(client)) for client in range(6)}
    chosen = experiment.unlike_clients
    assert {tuple(experiment.defenses_of(client)) for client in chosen} == groups
    assert len(chosen) == len(groups)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("federation.rounds", ["--set 'federation.rounds'", "dotted.key=value"]),
        ("=3", ["--set '=3'", "dotted.key=value"]),
        ("name.first=3", ["--set 'name.first=3'", "'name' is not a table"]),
        ("federation.rounds=many", ["federation.rounds = 'many'", "integer"]),
        ("federation.ronds=3", ["'ronds'", "'rounds'"]),
        ("seed=1\nname = 'b'", ["--set", "one key", "another --set"]),
    ],
)
def test_a_bad_override_is_refused(file, override, words):
    with pytest.raises(ConfigError) as caught:
        load(file, [override])
    assert [word for word in words if word not in str(caught.value)] == []


def test_overrides_are_toml_or_bare_words_and_make_tables(file):
    changes = [
        "federation.rounds=5",
        'defense=[{kind="gaussian_noise", sigma=0.1, clients=[1]}]',
        "model.name=org/model",
        'data.name="quoted"',
        "threat.knows=['labels']",
        " seed = 7",
        "model.lora.rank=2",
    ]
    experiment = load(file, changes)
    assert (experiment.federation.rounds, experiment.seed) == (5, 7)
    assert (experiment.model.name, experiment.data.name) == ("org/model", "quoted")
    (placed,) = experiment.defenses
    assert (placed.part, placed.clients) == (GaussianNoise(sigma=0.1), (1,))
    assert experiment.threat.knows == ["labels"]
    assert experiment == parse(
        table_of(
            attack=[{"kind": "dager"}],
            federation={"rounds": 5},
            defense=[{"kind": "gaussian_noise", "sigma": 0.1, "clients": [1]}],
            model={"name": "org/model", "lora": {"rank": 2}},
            data={"name": "quoted"},
            threat={"knows": ["labels"]},
            seed=7,
        )
    )


def test_variables_of_the_environment_are_filled_in_in_files_of_the_user_alone(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("FEDLEAK_HERE", "/some/where")
    table = table_of(data={"name": "${FEDLEAK_HERE}/a.csv"}, model={"name": "a$b"})
    (tmp_path / "e.toml").write_text(tomli_w.dumps(table))
    experiment = load(tmp_path / "e.toml")
    assert (experiment.data.name, experiment.model.name) == ("/some/where/a.csv", "a$b")
    run = Run(tmp_path)
    fingerprint = parse(table).fingerprint
    run.create(experiment=table, fingerprint=fingerprint, status="finished", num_labels=2)
    for of_anybody in (parse(table), load(tmp_path / "run.json"), stored(run)):
        assert of_anybody.data.name == "${FEDLEAK_HERE}/a.csv"
    monkeypatch.delenv("FEDLEAK_HERE")
    with pytest.raises(ConfigError, match=r"'\$\{FEDLEAK_HERE\}/a.csv' names .* not set: set it"):
        load(tmp_path / "e.toml")


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "experiments").glob("*.toml")), ids=lambda p: p.stem
)
def test_the_experiments_of_this_repository_are_right(path, monkeypatch):
    monkeypatch.setenv("FEDLEAK_ASSETS", "/assets")
    if "[sweep" in path.read_text():  # [[sweep.family]] as well
        assert all(cell.experiment.attacks for cell in sweep.load(path).cells)
    else:
        assert load(path).attacks


DESIGN = """
name = "cola-bert-noise"
seed = 101
[model]
name = "bert-base-uncased"
task = "sequence-classification"
[data]
name = "glue/cola"
split = "train"
text = "sentence"
label = "label"
samples = 400
[federation]
engine = "inline"
algorithm = "fedsgd"
clients = 4
clients_per_round = 4
rounds = 3
batch_size = 2
local_epochs = 1
learning_rate = 5e-5
dropout = false
partition = "iid"
alpha = 0.5
[update]
share = "all"
[[defense]]
kind = "gaussian_noise"
sigma = 0.001
clients = [0, 2]
[threat]
knows = ["labels", "lengths", "batch_size"]
[[attack]]
kind = "dlg"
steps = 100
[workers]
time_limit = 3600.0
[audit]
controls = true
"""


def test_the_designs_experiment_is_right():
    experiment = parse(tomllib.loads(DESIGN))
    assert [(named.name, named.attack) for named in experiment.attacks] == [
        ("probes", Probes()),
        ("dlg", Dlg(steps=100)),
    ]
    assert experiment.defenses[0].clients == (0, 2)
    assert experiment.threat.knows == ["labels", "lengths", "batch_size"]
    assert experiment.clients_per_round == 4
    assert experiment.local_training.kind == UpdateKind.GRADIENT


def test_defaults_are_those_of_the_design_and_probes_are_always_on():
    experiment = parse(GOOD)
    assert [named.attack for named in experiment.attacks] == [Probes(), Auto()]
    assert [named.attack for named in parse(table_of(attack=[])).attacks] == [Probes()]
    renamed = parse(table_of(attack=[{"kind": "dager"}, {"kind": "probes", "name": "p"}])).attacks
    assert [(named.name, named.attack) for named in renamed] == [
        ("dager", Dager()),
        ("p", Probes()),
    ]
    federation = tomllib.loads(DESIGN)["federation"] | {"clients_per_round": None, "at_once": None}
    federation |= {
        "server_optimiser": "sgd",
        "server_learning_rate": None,
        "participation": "random",
    }
    assert experiment.federation.model_dump() == federation
    assert (experiment.clients_per_round, experiment.update.share) == (4, "all")
    assert experiment.defenses == ()
    assert experiment.threat.knows == []
    assert experiment.audit.controls


def test_what_attacks_does_not_change_what_clients_send():
    assert parse(GOOD).fingerprint == parse(table_of(attack=[])).fingerprint


def test_two_of_a_kind_need_two_names():
    table = table_of(attack=[{"kind": "dlg"}, {"kind": "dlg", "name": "long", "steps": 9}])
    assert [attack.name for attack in parse(table).attacks] == ["probes", "dlg", "long"]


def test_what_run_json_holds_is_the_same_experiment(file, tmp_path):
    changes = ["defense=[{kind='mask', fraction=0.5}]", "update.share=['query']"]
    experiment = load(file, [*changes, "model.lora.targets=['query']", "model.loss=squared"])
    written = tmp_path / "run.json"
    written.write_text(
        json.dumps({"experiment": experiment.model_dump(mode="json"), "status": "new"})
    )
    assert load(written) == experiment
    assert load(written).attacks == experiment.attacks
    assert load(written).defenses == experiment.defenses
    assert load(written).model_spec(3) == experiment.model_spec(3)
    assert load(written, ["seed=9"]).seed == 9


def test_a_model_is_decided_by_its_table_the_seed_and_the_number_of_classes():
    name = "builtin/bert-tiny"
    assert parse(GOOD).model_spec(2) == ModelSpec(
        name=name, task=CLASSIFICATION, num_labels=2, seed=0, loss="cross-entropy"
    )
    table = table_of(seed=4, model={"loss": "squared", "lora": {}})
    assert parse(table).model_spec(3) == ModelSpec(
        name=name, task=CLASSIFICATION, num_labels=3, seed=4, loss="squared", lora=Lora(8, 16.0)
    )
    table = table_of(model={"lora": {"rank": 2, "alpha": 1, "targets": ["key", "c_attn"]}})
    spec = parse(table).model_spec(2)
    assert spec.lora == Lora(2, 1.0, ("key", "c_attn"))
    assert hash(spec) == hash(parse(table).model_spec(2))


def test_an_experiment_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        parse(GOOD).seed = 2


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a: 1 -> 2"]),
        ({"a": {"b": 1, "c": [1]}}, {"a": {"b": 1, "c": [2]}}, ["a.c: [1] -> [2]"]),
        ({"a": 1}, {"b": 2}, ["a: 1 -> None", "b: None -> 2"]),
        ({"a": {"b": 1}}, {"a": 3}, ["a: {'b': 1} -> 3"]),
        ({"a": 1}, {"a": 1.0}, []),
        (1, 2, [": 1 -> 2"]),
    ],
)
def test_differences_are_named_by_key(old, new, expected):
    assert difference(old, new) == expected


def test_the_nearest_name_is_offered_only_where_there_is_one():
    assert unknown("kind", "dagr", ["dlg", "dager"]) == (
        "unknown kind 'dagr': did you mean 'dager'? (known: dager, dlg)"
    )
    assert "did you mean" not in unknown("kind", "zzzz", ["dlg", "dager"])
    assert issubclass(ConfigError, FedleakError)


def test_an_attack_that_works_on_some_clients_is_not_refused():
    freeze = {"kind": "freeze", "parameters": ["q1", "q2"], "clients": [1]}
    experiment = parse(table_of(attack=[{"kind": "dager"}], defense=[freeze]))
    model = outline(experiment, 2)
    check_attacks(experiment, model)
    whole, less = captured_parameters(experiment, model)
    assert whole == set(model.trained())
    assert len(whole - less) == 2
    together = parse(table_of(defense=[freeze, {"kind": "secure_sum"}]))
    assert captured_parameters(together, model) == [whole]
    assert all(parameter.requires_grad for parameter in model.module.parameters())


def test_what_attacks_bring_along_is_checked_once_before_anything_runs(monkeypatch):
    experiment = parse(table_of(attack=[{"kind": "dlg", "name": "mine"}]))
    model, checked = outline(experiment, 2), []
    monkeypatch.setattr(Dlg, "check_equipment", lambda attack: checked.append(attack))
    check_attacks(experiment, model)
    assert checked == [Dlg()]

    def refuse(attack):
        raise ConfigError("its dictionary is gone: bring it back")

    monkeypatch.setattr(Dlg, "check_equipment", refuse)
    with pytest.raises(ConfigError, match=r"^attack 'mine': its dictionary is gone: bring"):
        check_attacks(experiment, model)


MARKS = [
    ({}, "7567c759aaf78585"),
    ({"samples": 400, "held_out": 100}, "7567c759aaf78585"),
    ({"name": "a.csv", "samples": 400}, "9192e4b82464a436"),
    ({"name": "a.csv", "samples": 400, "held_out": 100}, "9192e4b82464a436"),
    ({"name": "a.csv", "samples": 8}, "f3857231b8ca94f8"),
    ({"held_out": 4}, "b4d12aa7b07262c7"),
]


@pytest.mark.parametrize(("sizes", "mark"), MARKS)
def test_runs_of_the_time_when_sizes_had_defaults_keep_their_fingerprint(sizes, mark):
    table = {"name": "a", "model": GOOD["model"], "data": {"name": "builtin/notes"} | sizes}
    experiment = parse(table)
    assert experiment.fingerprint == mark
    assert parse(experiment.model_dump(mode="json")) == experiment


def test_all_rows_of_a_file_are_another_experiment_than_400():
    marks = {
        parse(table_of(data={"name": "a.csv"} | sizes)).fingerprint
        for sizes in ({}, {"samples": 400}, {"held_out": 100}, {"held_out": 0.25})
    }
    assert len(marks) == 4
