"""The tap stands in an app of others, whose environment may have none of what an audit needs."""

import subprocess
import sys
import tomllib
from pathlib import Path

from safetensors.torch import load_file

from fedleak.tap.folder import Tapped

ROOT = Path(__file__).parents[2]

APP = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from fedleak.tap import tap

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
WEIGHTS = np.arange(6, dtype=">f4").reshape(2, 3).T  # neither the order nor the bytes of a file

class Answers(Grid):
    set_run = run = create_message = get_node_ids = get_nodes = send_and_receive = None

    def push_messages(self, messages):
        self.sent = list(messages)
        for message in self.sent:
            message.metadata.__dict__["_message_id"] = "first"  # as Flower's own grid does
        return ["first"]

    def pull_messages(self, names):
        content = RecordDict({{"arrays": ArrayRecord({{"w": Array(WEIGHTS)}})}})
        return [Message(content, reply_to=message) for message in self.sent]

content = RecordDict({{"arrays": ArrayRecord({{"w": Array(np.zeros((3, 2), np.float32))}})}})
question = Message(content, dst_node_id=7, message_type="train", group_id="1")
assert len(list(tap(Answers(), "kept").send_and_receive([question]))) == 1
"""


def third_party(requirements: list[str]) -> set[str]:
    """Returns the names of packages without versions and extras."""
    return {
        requirement.split(">")[0].split("[")[0].replace("-", "_") for requirement in requirements
    }


def test_the_tap_needs_no_more_than_the_core(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = third_party(project["dependencies"])
    absent = third_party(project["optional-dependencies"]["audit"]) - core
    absent -= {"rich", "tomli_w", "typer", "typing_extensions"}  # Flower itself needs them
    assert {"torch", "transformers"} <= absent
    done = subprocess.run(
        [sys.executable, "-c", APP.format(absent=absent)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    messages, damaged = Tapped(tmp_path / "kept").messages()
    assert [message.way for message in messages] == ["sent", "received"]
    assert damaged == []
    received = load_file(tmp_path / "kept" / messages[1].arrays[0].file)["w"]
    assert received.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_command_in_the_core_says_what_to_install(tmp_path):
    absent = "import sys; sys.modules['torch'] = None; sys.argv = ['fedleak', 'list']; "
    done = subprocess.run(
        [sys.executable, "-c", f"{absent}from fedleak.__main__ import main; main()"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "fedleak: torch is not installed; without it this installation can only tap: "
        "install 'fedleak[audit]'\n"
    )
