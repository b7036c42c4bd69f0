"""What is the node's own to decide, and what it says when something goes wrong."""

import json
import logging
import stat

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedleak.config.federation.assignment import Assignment
from fedleak.config.loading import parse
from fedleak.flower.client.app import app as client_app
from fedleak.flower.client.context import client_of, vault
from fedleak.flower.client.mods import public
from fedleak.flower.inline import InlineGrid
from fedleak.running import preparation
from fedleak.store.run import Key, Run
from fedleak.util.errors import ConfigError, FedleakError

pytestmark = pytest.mark.core

SECRET = "my neighbour has hiv"
TABLE = {
    "name": "node",
    "model": {"name": "builtin/bert-tiny"},
    "data": {"name": "builtin/notes", "samples": 4, "held_out": 0},
    "federation": {"clients": 2, "batch_size": 1},
    "defense": [{"kind": "sign"}],
}


@pytest.fixture
def answer(tmp_path, bert_tiny):
    """Sends the model to the client 1 of a node and returns its reply."""

    def ask(node_folder=None, *, run_name="run", table=TABLE, **submitted):
        experiment = parse(table)
        run = preparation.prepare(experiment, tmp_path / "server" / "run")
        config = {
            "experiment": str(run.path / "run.json"),
            "run-dir": str(run.path),
            "attack": False,
        }
        grid = InlineGrid(client_app, 2, config | submitted, vault=node_folder)
        content = RecordDict(
            {
                "arrays": ArrayRecord(bert_tiny.parameters()),
                "config": ConfigRecord({"round": 1}),
                "assignment": ConfigRecord(
                    Assignment.of(experiment, Run(run.path.with_name(run_name))).to_values()
                ),
            }
        )
        (reply,) = grid.send_and_receive([Message(content, 3, "train")])
        return reply

    return ask


def private_files(folder):
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.parent.name in ("vault", "defended")
    }


# --- the vault ------------------------------------------------------------------------------

BOTH = {"vault/r0001-c01.json", "defended/r0001-c01.json"}


def test_a_server_cannot_have_an_earlier_run_written_over(answer, tmp_path):
    kept = Run(tmp_path / "node" / "run")
    assert not answer(tmp_path / "node").has_error()
    assert not answer(tmp_path / "node").has_error()  # the same run goes on
    earlier = kept.vault.read_note(Key(1, 1)) | {"fingerprint": "of another experiment"}
    kept.vault.write(Key(1, 1), earlier)
    reply = answer(tmp_path / "node")
    assert reply.error.reason == (
        "ConfigError: this node's vault has another run called 'run', and what it trained on: give "
        "this run another run-dir, or move that folder out of the vault"
    )
    assert kept.vault.read_note(Key(1, 1)) == earlier


@pytest.mark.parametrize("submitted", [{}, {"vault": True}, {"vault": "/tmp"}])
def test_a_node_without_a_vault_keeps_nothing_whatever_is_submitted(
    answer, tmp_path, monkeypatch, submitted
):
    monkeypatch.delenv("FEDLEAK_VAULT", raising=False)
    assert not answer(None, **submitted).has_error()
    assert private_files(tmp_path) == set()


@pytest.mark.parametrize("how", ["node config", "environment"])
def test_what_a_node_keeps_is_in_its_own_folder_under_the_name_of_the_run(
    answer, tmp_path, monkeypatch, how
):
    own = tmp_path / "own"
    if how == "environment":
        monkeypatch.setenv("FEDLEAK_VAULT", str(own))
    else:
        monkeypatch.setenv("FEDLEAK_VAULT", str(tmp_path / "another"))
    reply = answer(own if how == "node config" else None, run_name="its name")
    assert not reply.has_error()
    assert private_files(tmp_path) == {f"own/its name/{name}" for name in BOTH}
    for name in BOTH:
        assert stat.S_IMODE((own / "its name" / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("submitted", ["/", "/..", "..", "a/..", "/a/b/../.."])
def test_no_name_of_a_run_leads_out_of_the_node_s_folder(tmp_path, submitted):
    context = Context(1, 1, {"vault": str(tmp_path)}, RecordDict(), {})
    run = vault(context, submitted)
    assert run.path in (tmp_path, tmp_path / tmp_path.name, tmp_path / tmp_path.parent.name)


@pytest.mark.parametrize("folder", [True, 1, "runs", "./runs", "~/runs"])
def test_a_vault_that_is_no_absolute_path_is_refused(tmp_path, folder):
    context = Context(1, 1, {"vault": folder}, RecordDict(), {})
    with pytest.raises(ConfigError, match=r"vault = .*: give the absolute path of a folder"):
        vault(context, "run")


@pytest.mark.parametrize("folder", [False, ""])
def test_a_vault_can_be_switched_off_against_the_environment(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("FEDLEAK_VAULT", str(tmp_path))
    context = Context(1, 1, {"vault": folder}, RecordDict(), {})
    assert vault(context, "run") is None


@pytest.mark.parametrize("config", [{}, {"partition-id": "one"}])
def test_a_node_without_a_number_is_told_to_have_one(config):
    with pytest.raises(ConfigError, match=r"partition-id = .*: give the number of its client"):
        client_of(Context(1, 1, config, RecordDict(), {}))


# --- errors ---------------------------------------------------------------------------------


def refusal_of(table):
    """Returns what a node answers to a message with these tables."""
    grid = InlineGrid(client_app, 2, {})
    request = ConfigRecord({"experiment": json.dumps(table), "run": "run", "classes": ["a", "b"]})
    message = Message(RecordDict({"assignment": request}), 3, "train")
    message.content["config"] = ConfigRecord({"round": 1})
    (reply,) = grid.send_and_receive([message])
    return reply.error.reason


def raiser(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_an_error_goes_to_the_server_without_its_words_and_to_the_client_s_log_whole(
    answer, monkeypatch, caplog
):
    monkeypatch.setattr(
        "fedleak.flower.client.app.local_update_", raiser(ValueError(f"no token for {SECRET}"))
    )
    with caplog.at_level(logging.ERROR):
        reason = answer().error.reason
    assert reason.startswith("ValueError in fedleak.flower.client.app:")
    assert reason.endswith(": the client's log says more")
    (record,) = [r for r in caplog.records if r.name == "fedleak.flower.client.mods"]
    assert record.getMessage() == "client 1 failed"
    assert isinstance(record.exc_info[1], ValueError)
    assert SECRET in caplog.text
    assert "local_update_" in caplog.text


SENT = [
    ({"federation": {"algorithm": "${NODE_SECRET}"}}, "ConfigError: federation.algorithm is"),
    ({"name": "${NODE_SECRET}"}, "ConfigError: name is"),
    ({"defense": [{"kind": "${NODE_SECRET}"}]}, "UnknownKindError: defense[0].kind is"),
    ({"model": {"name": "${NODE_SECRET}"}}, "ConfigError: model is"),
    ({"model": {"name": "FOLDER"}}, "ConfigError: model is"),
    ({"data": {"name": "${NODE_SECRET}"}}, "ConfigError: data is"),
    ({"data": {"name": "FOLDER", "text": "text"}}, "ConfigError: data is"),
    ({"data": {"name": "builtin/notes", "samples": 10**9}}, "ConfigError: data.samples is"),
    ({"federation": {"clients": 10**9, "rounds": 1}}, "ConfigError: federation.clients is"),
]


@pytest.mark.parametrize(("change", "key"), SENT)
def test_a_node_expands_nothing_and_tells_the_key_alone(change, key, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NODE_SECRET", SECRET)
    change = json.loads(json.dumps(change).replace("FOLDER", str(tmp_path)))
    reason = refusal_of(TABLE | change)
    assert reason == f"{key} refused: the client's log says more"
    assert SECRET not in caplog.text


def test_a_node_takes_no_tables_about_what_the_server_does():
    table = TABLE | {"attack": [{"kind": "command", "command": "true"}], "workers": {}}
    assert refusal_of(table) == (
        "ConfigError: the server sent what is not for clients: attack, workers"
    )
    assert refusal_of([]) == "ConfigError: the experiment that the server sent is no table"


def test_an_error_in_what_it_came_from_is_not_told_either(answer, monkeypatch):
    error = RuntimeError("outside")
    error.__cause__ = ValueError(SECRET)
    monkeypatch.setattr("fedleak.flower.client.app.local_update_", raiser(error))
    assert SECRET not in answer().error.reason


def test_an_error_in_a_defense_is_an_answer_too(answer, monkeypatch):
    monkeypatch.setattr("fedleak.config.federation.protection.measured", raiser(KeyError(SECRET)))
    assert answer().error.reason.startswith("KeyError in fedleak.config.federation.protection:")


def test_our_own_words_travel_but_not_those_about_data(answer, monkeypatch):
    monkeypatch.setattr(
        "fedleak.flower.client.app.local_update_", raiser(FedleakError("give more rounds"))
    )
    assert answer().error.reason == "FedleakError: give more rounds"
    # As `tokenise` does with a text that is too long.
    monkeypatch.undo()
    monkeypatch.setattr(preparation, "prepare", lambda experiment, path: Run(path))
    reason = answer(table=TABLE | {"data": TABLE["data"] | {"max_length": 10**6}}).error.reason
    assert reason.startswith("ConfigError: data is refused: ")
    assert "max_length" not in reason


def test_the_system_s_words_for_an_error_travel_and_its_file_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr("fedleak.store.files.os.open", raiser(OSError(28, "x", f"/{SECRET}")))
    with pytest.raises(FedleakError) as caught:
        Run(tmp_path).write_json("a.json", {})
    text = public(caught.value)
    assert text.startswith("FedleakError (No space left on device) in fedleak.store.files:")
    assert SECRET not in text
    assert str(tmp_path) not in text
