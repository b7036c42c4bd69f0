"""Nodes with a file and a vault of their own, and a server that has neither."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from flwr.app import Context, RecordDict
from tiny import DLG, call, tables

from fedleak import data
from fedleak.config.loading import parse
from fedleak.data.notes import notes
from fedleak.flower.client.app import app as client_app
from fedleak.flower.inline import InlineGrid
from fedleak.flower.server.app import app as server_app
from fedleak.store.run import Key, Run
from fedleak.util.errors import ConfigError, FedleakError

CHANGES = {
    "data": {"name": "builtin/notes", "samples": 1, "held_out": 4, "on_nodes": True}
    | {"text": "text", "label": "label"},
    "federation.rounds": 2,
    "attack": [DLG],
}
WRITTEN = [note for note in notes(200) if len(note.text) < 60][-10:]


def write(path: Path, chosen: slice, **changes: Any) -> Path:
    names = ("other", "health")
    rows = [{"text": note.text, "label": names[note.label]} | changes for note in WRITTEN[chosen]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Federation:
    """Two nodes, each with a folder, and a server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own = [
            {
                "data": str(write(folder / f"{client}.jsonl", slice(3 * client, 3 * client + 3))),
                "vault": str(folder / f"node-{client}"),
            }
            for client in (0, 1)
        ]

    def train(self, changes: dict[str, Any] = CHANGES, *, attack: bool = False) -> Run:
        path = self.folder / "small.json"
        experiment = parse(tables(changes)).model_dump(mode="json")
        path.write_text(json.dumps({"experiment": experiment}))
        config: dict[str, bool | float | int | str] = {
            "experiment": str(path),
            "run-dir": str(self.folder / "runs" / "small"),
            "attack": attack,
            "nodes-within": 0,
            "answers-within": 60,
        }
        grid = InlineGrid(client_app, 2, config)
        for context, own in zip(grid._contexts.values(), self.own, strict=True):
            context.node_config.update(own)
        server_app(grid, Context(1, 1, {}, RecordDict(), config))
        return Run(self.folder / "runs" / "small")


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None) -> Federation:
    monkeypatch.delenv("FEDLEAK_VAULT", raising=False)
    monkeypatch.chdir(tmp_path)
    return Federation(tmp_path)


def test_each_node_trains_on_its_file_keeps_it_and_can_hand_it_over(federation: Federation) -> None:
    run = federation.train()
    assert run.captures.all_keys() == [Key(r, c) for r in (1, 2) for c in (0, 1)]
    assert not (run.path / "vault").exists()
    assert run.info()["node_examples"] == [3, 3]
    assert (run.info()["status"], run.info()["classes"]) == ("finished", ["other", "health"])
    status, _, errors = call("attack", str(run.path))
    assert status == 1
    assert "answers are unscored" in errors
    status, _, errors = call(
        "score", str(run.path), "--vault", "node-0", "--vault", "node-1", "--texts"
    )
    assert (status, errors) == (0, "")
    trained = {
        client: {
            tuple(ids)
            for round in (1, 2)
            for ids in run.vault.read_note(Key(round, client))["sequences"]
        }
        for client in (0, 1)
    }
    assert [len(texts) for texts in trained.values()] == [2, 2]
    assert not trained[0] & trained[1]


def test_a_server_that_waits_for_vaults_ends_well_and_says_so(
    federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flwr")
    run = federation.train(CHANGES | {"federation.rounds": 1, "attack": []}, attack=True)
    assert "its scores wait for the nodes' vaults: 2 of 2 captures have no truth" in caplog.text
    status, _, errors = call("score", str(run.path))  # which is asked for scores
    assert status == 1
    assert "answers are unscored" in errors


def test_a_server_that_waits_for_vaults_still_says_what_failed(federation: Federation) -> None:
    failing = {"kind": "command", "command": "false {observation} {answer}"}
    with pytest.raises(FedleakError, match="2 of 4 answers failed"):
        federation.train(CHANGES | {"federation.rounds": 1, "attack": [failing]}, attack=True)


def test_a_run_goes_on_with_the_same_files_only(federation: Federation) -> None:
    run = federation.train()
    (run.path / "captures" / "r0002-c01.safetensors").unlink()
    (run.path / "models" / "r0003.safetensors").unlink()
    write(Path(federation.own[1]["data"]), slice(3, 8))
    with pytest.raises(FedleakError, match="client 1 has 5 examples, and had 3 when the run began"):
        federation.train()
    write(Path(federation.own[1]["data"]), slice(3, 6))
    federation.train()
    assert len(run.captures.all_keys()) == 4


def test_a_node_reads_no_other_file_than_its_own(federation: Federation) -> None:
    elsewhere = CHANGES | {"data": {"name": "builtin/notes", "samples": 8}}
    with pytest.raises(
        FedleakError, match=r"this node reads its own file only: set data\.on_nodes"
    ):
        federation.train(elsewhere)


def test_a_node_without_a_file_is_told_to_have_one(federation: Federation) -> None:
    del federation.own[0]["data"]
    with pytest.raises(FedleakError, match=r"this node's configuration names no file: add"):
        federation.train()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"label": "secret class"}, "ConfigError: data is refused: "),
        ({"text": ""}, "ConfigError: data is refused: "),
        ({"text": "word " * 600}, "ConfigError: data is refused: "),
    ],
)
def test_what_is_wrong_with_a_file_stays_on_its_node(
    change: dict[str, str], reason: str, federation: Federation
) -> None:
    write(Path(federation.own[1]["data"]), slice(3, 6), **change)
    with pytest.raises(FedleakError) as caught:
        federation.train()
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value)
    assert str(federation.folder) not in str(caught.value)


@pytest.mark.parametrize("path", ["own.jsonl", 7, "/no/such/file.jsonl", "/etc/passwd"])
def test_a_file_that_cannot_be_is_refused(path: Any, federation: Federation) -> None:
    federation.own[1]["data"] = path
    with pytest.raises(FedleakError, match="ConfigError"):
        federation.train()


def test_settings_that_need_all_data_in_one_place_are_refused() -> None:
    for change, says in (
        ({"federation.partition": "dirichlet"}, "federation.partition divides one data set"),
        ({"utility.reference": True}, "utility.reference trains on all data in one place"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse(tables(CHANGES | change))


@pytest.mark.parametrize("numbered", [True, False])
def test_classes_have_the_numbers_that_the_server_gives_them(
    numbered: bool, tmp_path: Path
) -> None:
    names = ["b", "a"]
    label = ClassLabel(names=names) if numbered else Value("string")
    rows = {"text": ["one", "two", "three"], "label": ["a", "a", "b"]}
    features = Features({"text": Value("string"), "label": label})
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "own.parquet"))
    own = data.read_own(
        tmp_path / "own.parquet", text="text", label="label", classes=("a", "b", "c")
    )
    assert (own.labels, own.label_names) == ((0, 0, 1), ("a", "b", "c"))
    alone = data.read_own(tmp_path / "own.parquet", text="text", label=None, classes=None)
    assert set(alone.labels) == {0}


def test_fedleak_run_has_no_nodes(federation: Federation) -> None:
    Path("small.json").write_text(json.dumps({"experiment": tables(CHANGES)}))
    status, _, errors = call("run", "small.json")
    assert status == 2
    assert "data.on_nodes" in errors
    assert "flwr run" in errors
    assert not Path("runs").exists()


def test_the_defenses_of_nodes_are_checked_without_their_data(federation: Federation) -> None:
    noise = {"kind": "local_dp", "epsilon": 6.0, "max_norm": 1.0}
    run = federation.train(CHANGES | {"defense": [noise]})
    assert len(run.captures.all_keys()) == 4
    assert {path.name for path in Path("node-1/small/defended").iterdir()} == {
        "r0001-c01.json",
        "r0002-c01.json",
    }
    assert call("attack", str(run.path))[0] == 1
    assert call("score", str(run.path), "--vault", "node-0", "--vault", "node-1")[0] == 0
    Path("small.json").write_text(
        json.dumps({"experiment": tables(CHANGES | {"defense": [noise]})})
    )
    assert call("check-defense", "small.json")[0] == 0
