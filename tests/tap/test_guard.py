"""A client of another app, guarded by one line: what it notices, keeps, and how it refuses."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fedleak.detectors import REFUSED, Movement, named
from fedleak.tap import guard

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
STEP = 0.01


def model(seed=0):
    rng = np.random.default_rng(seed)
    return {"dense.weight": rng.standard_normal((32, 16)).astype(np.float32)}


def moved(weights, step):
    return {name: (value + np.float32(step)).astype(np.float32) for name, value in weights.items()}


def sent(weights, round, node=1, **settings):
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    arrays = ArrayRecord({name: Array(value) for name, value in weights.items()})
    config = ConfigRecord({"server-round": round, "epochs": 1, **settings})
    content = RecordDict({"arrays": arrays, "config": config})
    message = Message(content, dst_node_id=node, message_type="train", group_id=str(round))
    message.metadata.__dict__["_message_id"] = f"m{round}-{node}"
    return message


def app_of(*mods):
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        weights = message.content.array_records["arrays"].to_numpy_ndarrays()
        after = {"dense.weight": Array(weights[0] + np.float32(STEP))}
        numbers = MetricRecord({"num-examples": 3})
        content = RecordDict({"arrays": ArrayRecord(after), "metrics": numbers})
        return Message(content, reply_to=message)

    return app


def answer(app, message):
    context = Context(1, message.metadata.dst_node_id, {}, RecordDict(), {})
    return app(message, context)


def findings(folder, node=1):
    lines = (folder / f"n{node}" / "findings.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_an_honest_app_trains_as_without_a_guard(tmp_path, capsys):
    weights, guarded, bare = model(), app_of(guard(tmp_path)), app_of()
    for round in range(1, 5):
        replies = [answer(app, sent(weights, round)) for app in (guarded, bare)]
        values = [reply.content.array_records["arrays"].to_numpy_ndarrays()[0] for reply in replies]
        assert np.array_equal(*values)
        weights = moved(weights, STEP)
    noted = findings(tmp_path)
    assert len(noted) == 4 * 8
    assert not any(finding["alarm"] for finding in noted)
    (jump,) = [f for f in noted if f["detector"] == "jump" and f["round"] == 4]
    assert jump["limit"] == pytest.approx(10 * jump["statistic"], rel=1e-3)
    assert capsys.readouterr().err == ""


def test_who_refuses_answers_with_an_error_and_does_not_train(tmp_path, capsys):
    app = app_of(guard(tmp_path, named("jump", action="refuse"), named("zeros")))
    assert not answer(app, sent(model(), 1)).has_error()
    reply = answer(app, sent(moved(model(), 5.0), 2))
    assert reply.error.code == REFUSED
    assert "jump" not in reply.error.reason
    assert "round 2: refused: jump: the model is" in capsys.readouterr().err
    # What was refused is no model to compare with.
    assert not answer(app, sent(moved(model(), STEP), 3)).has_error()
    assert not answer(app_of(guard(tmp_path / "w", named("jump"))), sent(model(), 1)).has_error()


def test_a_public_checkpoint_is_what_the_first_model_must_equal(tmp_path):
    def refusing(folder):
        return app_of(guard(folder, named("jump", action="refuse"), checkpoint=model))

    assert not answer(refusing(tmp_path / "a"), sent(model(), 1)).has_error()
    assert answer(refusing(tmp_path / "b"), sent(model(1), 1)).has_error()


def test_the_bound_of_adam_comes_from_what_the_app_agreed_on(tmp_path):
    movement = Movement(optimiser="adam", rate=STEP, steps=2, anew=True)
    app = app_of(guard(tmp_path, named("adam_bound", action="refuse"), movement=movement))
    weights = model()
    assert not answer(app, sent(weights, 1)).has_error()
    assert not answer(app, sent(moved(weights, 2 * STEP), 2)).has_error()
    assert answer(app, sent(moved(weights, 4.1 * STEP), 3)).has_error()


def test_clients_show_each_other_what_they_were_sent(tmp_path):
    app = app_of(
        guard(tmp_path / "kept", named("same_model", action="refuse"), board=tmp_path / "b")
    )
    assert not answer(app, sent(model(), 1, node=1)).has_error()
    assert not answer(app, sent(model(), 1, node=2)).has_error()
    assert answer(app, sent(model(1), 1, node=3)).has_error()
    assert answer(app, sent(model(), 2, node=1)).has_error(), "it learns of it a round later"


def test_a_changed_setting_is_noticed_and_the_round_is_none(tmp_path):
    app = app_of(guard(tmp_path, named("settings", action="refuse")))
    assert not answer(app, sent(model(), 1)).has_error()
    assert not answer(app, sent(model(), 2)).has_error()
    assert answer(app, sent(model(), 3, epochs=5)).has_error()


@pytest.mark.parametrize("action", ["warn", "refuse"])
def test_what_cannot_be_looked_at_is_said_and_refused_where_anything_is(action, tmp_path, capsys):
    message = sent(model(), 1)
    message.content.array_records["arrays"]["dense.weight"] = Array(
        dtype="float32", shape=(32, 16), stype="numpy.ndarray", data=b"no array"
    )
    app = ClientApp(mods=[guard(tmp_path, named("zeros", action=action))])

    @app.train()
    def train(message, context):
        return Message(RecordDict(), reply_to=message)

    assert answer(app, message).has_error() == (action == "refuse")
    assert "fedleak guard: NOT CHECKED" in capsys.readouterr().err


def test_a_reply_is_not_lost_for_what_cannot_be_remembered(tmp_path, capsys):
    app = ClientApp(mods=[guard(tmp_path)])

    @app.train()
    def train(message, context):
        after = {"dense.weight": Array(np.full((32, 16), np.nan, np.float32))}
        return Message(RecordDict({"arrays": ArrayRecord(after)}), reply_to=message)

    reply = answer(app, sent(model(), 1))
    assert np.isnan(reply.content.array_records["arrays"].to_numpy_ndarrays()[0]).all()
    assert "fedleak guard: NOT REMEMBERED: ValueError" in capsys.readouterr().err


def test_a_guard_needs_no_more_than_the_core(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {need.split(">")[0].split("[")[0] for need in project["dependencies"]}
    assert {"flwr", "numpy", "safetensors"} <= core
    places = [str(Path(__file__).parent), str(ROOT)]
    code = (
        "import sys\n"
        "for absent in ('torch', 'transformers', 'peft', 'opacus', 'scipy', 'vl_convert'):\n"
        "    sys.modules[absent] = None\n"
        f"sys.path[:0] = {places!r}\n"
        "from test_guard import answer, app_of, findings, guard, model, sent\n"
        "from pathlib import Path\n"
        "app = app_of(guard('kept'))\n"
        "for round in (1, 2):\n"
        "    assert not answer(app, sent(model(), round)).has_error()\n"
        "print(len(findings(Path('kept'))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "16"
