"""Outside programs: what they get, what they may answer, and that they end when they have to."""

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedleak import attacks
from fedleak.attacks import AttackSetting
from fedleak.attacks.outside import exchange, keeper
from fedleak.attacks.reconstruction import Status
from fedleak.config.components import build_attack
from fedleak.models import CLASSIFICATION, ModelSpec, loading
from fedleak.models.lora import Lora
from fedleak.running.workers.answers import InvalidAnswerError, checked
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

START = f'"format": "{exchange.ANSWER}", "version": 1'


@pytest.fixture(scope="module")
def seen(bert_tiny, observe):
    return observe(bert_tiny, 2, granted=("labels",))


@pytest.fixture
def program(tmp_path):
    """Makes an attack of a Python program, which gets the two paths as `folder` and `answer`."""

    def make(source, **settings):
        file = tmp_path / "program.py"
        head = "import os, sys, time, json, subprocess\nfrom pathlib import Path\n"
        head += "folder, answer = map(Path, sys.argv[1:])\n"
        file.write_text(head + source)
        command = f"{shlex.quote(sys.executable)} {file} {{observation}} {{answer}}"
        return build_attack(0, {"kind": "command", "command": command, **settings}).attack

    return make


def answered(attack, seen, model):
    return attack(seen, model, rng=stream(0, "attack"))


# --- what it gets ---------------------------------------------------------------------------------


def test_it_gets_the_update_the_knowledge_and_the_model(program, seen, bert_tiny, tmp_path):
    kept = tmp_path / "kept"
    attack = program(
        f"import shutil; shutil.copytree(folder, {str(kept)!r})\n"
        'answer.write_text(json.dumps({"format": "fedleak-answer", "version": 1, '
        '"status": "recovered", "sequences": ["she said so", [2, 5, 3]], "evidence": [0.5, 1]}))'
    )
    answer = answered(attack, seen.seen, bert_tiny)
    assert answer.status == Status.RECOVERED
    assert answer.sequences == (tuple(bert_tiny.encode(["she said so"])[0]), (2, 5, 3))
    assert answer.evidence == (0.5, 1)
    assert not answer.verified

    table = json.loads((kept / "observation.json").read_text())
    assert table["knowledge"] == {
        "learning_rate": 0.1,
        "local_steps": 1,
        "dropout": False,
        "batch_size": None,
        "labels": list(seen.labels),
        "lengths": None,
        "noise_scale": None,
        "local_epochs": None,
        "recipe": None,
        "server_mode": None,
        "own_head": None,
    }
    assert table["update"] == {"kind": "gradient", "num_examples": 2}
    update = load_file(kept / "update.safetensors")
    assert update.keys() == seen.seen.update.tensors.keys()
    assert all(torch.equal(update[name], t) for name, t in seen.seen.update.tensors.items())

    model = AutoModelForSequenceClassification.from_pretrained(kept / "model").eval()
    own = dict(bert_tiny.module.named_parameters())
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(kept / "model")
    assert tokenizer("she said so")["input_ids"] == bert_tiny.encode(["she said so"])[0]


def test_it_gets_nothing_that_names_the_run(program, seen, bert_tiny, monkeypatch, tmp_path):
    for name in ("FEDLEAK_VAULT", "OLDPWD", "PYTHONPATH"):
        monkeypatch.setenv(name, "/secret/runs/one")
    monkeypatch.setenv("MINE", "passed on")
    monkeypatch.chdir(tmp_path)
    attack = program(
        "said = {'environment': dict(os.environ), 'cwd': os.getcwd(), "
        "'files': sorted(str(p.relative_to('.')) for p in Path('.').rglob('*'))}\n"
        "answer.write_text(json.dumps({'format': 'fedleak-answer', 'version': 1, "
        "'status': 'abstained', 'diagnostics': said}))",
        environment=["MINE"],
    )
    diagnostics = answered(attack, seen.seen, bert_tiny).diagnostics
    assert "/secret" not in json.dumps(diagnostics)
    assert diagnostics["environment"]["MINE"] == "passed on"
    assert diagnostics["environment"]["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert Path(diagnostics["cwd"]) != tmp_path
    assert not Path(diagnostics["cwd"]).exists(), "the folder is left behind"
    assert diagnostics["files"] == [
        "observation",
        "observation/model",
        *(
            f"observation/model/{name}"
            for name in (
                "config.json",
                "model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json",
            )
        ),
        "observation/observation.json",
        "observation/update.safetensors",
    ]


def test_a_delta_and_a_causal_model_are_handed_over_too(program, observe, gpt2_tiny):
    truth = observe(gpt2_tiny, 1, kind="delta")
    attack = program(
        "seen = json.loads((folder / 'observation.json').read_text())\n"
        "assert seen['update']['kind'] == 'delta' and seen['model']['task'] == 'causal-lm'\n"
        "answer.write_text(json.dumps({'format': 'fedleak-answer', 'version': 1, "
        "'status': 'recovered', 'tokens': [5, 3, 5]}))"
    )
    assert answered(attack, truth.seen, gpt2_tiny).tokens == (3, 5)


def test_a_model_with_adapters_is_not_handed_over():
    lora = Lora(2, 4.0)
    spec = ModelSpec(name="builtin/bert-tiny", task=CLASSIFICATION, num_labels=2, lora=lora)
    model = loading.outline(spec)
    setting = AttackSetting(
        update="gradient",
        shared=frozenset(model.trained()),
        knows=frozenset(),
        family=model.family,
        num_layers=4,
        task=CLASSIFICATION,
    )
    attack = build_attack(0, {"kind": "command", "command": "true {observation} {answer}"}).attack
    assert "model.lora" in attack.obstacle(setting)
    assert attack.obstacle(replace(setting, shared=frozenset({"a.weight"}))) is None


# --- what it may answer ---------------------------------------------------------------------------

WRONG = {
    "none": ("pass", "it wrote no answer"),
    "empty": ("answer.write_text('')", "Invalid JSON"),
    "no JSON": ("answer.write_text('hello')", "Invalid JSON"),
    "list": ("answer.write_text('[]')", "object"),
    "binary": (r"answer.write_bytes(b'\xff\xfe')", "Invalid JSON"),
    "surrogate": (
        rf"""answer.write_text('{{{START}, "status": "failed", "reason": "\\ud800"}}')""",
        "Invalid JSON",
    ),
    "version": (
        f"""answer.write_text('{{{START[:-1]}2, "status": "abstained"}}')""",
        "version: Input should be 1",
    ),
    "status": (f"""answer.write_text('{{{START}, "status": "proved"}}')""", "status: "),
    "further key": (
        f"""answer.write_text('{{{START}, "status": "abstained", "verified": true}}')""",
        "verified: Extra inputs",
    ),
    "id": (
        f"""answer.write_text('{{{START}, "status": "recovered", "tokens": [-1]}}')""",
        "tokens.0: ",
    ),
    "no id": (
        f"""answer.write_text('{{{START}, "status": "recovered", "tokens": [1.5]}}')""",
        "tokens.0: ",
    ),
    "nothing recovered": (
        f"""answer.write_text('{{{START}, "status": "recovered"}}')""",
        "status is 'recovered' and it holds nothing",
    ),
    "abstained with texts": (
        f"""answer.write_text('{{{START}, "status": "abstained", "sequences": ["a"]}}')""",
        "status is 'abstained' and it holds sequences",
    ),
    "evidence alone": (
        f"""answer.write_text('{{{START}, "status": "abstained", "evidence": [1.0]}}')""",
        "evidence is given and sequences are not",
    ),
    "deep": (
        f"""answer.write_text('{{{START}, "status": "failed", "facts": {{"a": ' + '[' * 10**5)""",
        "Invalid JSON",
    ),
    "large": (
        f"answer.write_bytes(b' ' * {exchange.MOST_BYTES + 1})",
        "more than 10,000,000 bytes",
    ),
    "link": ("answer.symlink_to('/dev/zero')", "it is a link"),
    "pipe": ("os.mkfifo(answer)", "it is a pipe"),
    "folder": ("answer.mkdir()", "it is a folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_answer_that_is_none_is_a_failure_with_its_reason(case, program, seen, bert_tiny):
    source, reason = WRONG[case]
    answer = answered(program(source), seen.seen, bert_tiny)
    assert answer.status == Status.FAILED
    assert reason in answer.reason
    assert "\n" not in answer.reason
    assert answer.sequences is None
    assert answer.tokens is None


REFUSED = {
    "token": ('"tokens": [2147483647]', "no token id"),
    "long": ('"sequences": [[%s5]]' % ("5, " * 600), "at most 128"),
    "many": ('"sequences": [%s[5]]' % ("[5], " * 500), "501 sequences"),
    "empty": ('"sequences": [[]]', "sequences.0: .* at least 1 item"),
    "evidence": ('"sequences": [[5]], "evidence": [1, 2]', "2 numbers of evidence"),
    "facts": ('"facts": {"": 1}', "facts.*: .* at least 1 character"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_attack_may_answer_a_program_may_not(case, program, seen, bert_tiny):
    claim, reason = REFUSED[case]
    source = f"""answer.write_text('{{{START}, "status": "recovered", {claim}}}')"""
    answer = answered(program(source), seen.seen, bert_tiny)
    with pytest.raises(InvalidAnswerError, match=reason):
        checked(answer, vocabulary=2000, longest=bert_tiny.max_length, examples=2)


# --- when it ends ---------------------------------------------------------------------------------


def test_a_failure_says_the_last_line(program, seen, bert_tiny):
    noise = "print('x' * 10**7); print('y' * 10**7, file=sys.stderr)"
    attack = program(f"{noise}; print('no such GPU', file=sys.stderr); sys.exit(3)")
    answer = answered(attack, seen.seen, bert_tiny)
    assert (answer.status, answer.reason) == (
        Status.FAILED,
        "outside program: exit status 3: no such GPU",
    )


def test_an_answer_of_a_program_that_failed_does_not_count(program, seen, bert_tiny):
    source = f"""answer.write_text('{{{START}, "status": "recovered", "tokens": [5]}}')"""
    answer = answered(program(f"{source}\nos.abort()"), seen.seen, bert_tiny)
    assert answer.status == Status.FAILED
    assert "exit status 134" in answer.reason


def test_after_its_time_it_ends_with_all_that_it_started(program, seen, bert_tiny, tmp_path):
    note = tmp_path / "pid"
    attack = program(
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"Path({str(note)!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)",
        seconds=1.5,
    )
    start = time.monotonic()
    answer = answered(attack, seen.seen, bert_tiny)
    assert answer.reason == "outside program: took longer than seconds = 1.5"
    assert time.monotonic() - start < 15
    assert all(gone(int(pid)) for pid in note.read_text().split())


def test_what_it_leaves_behind_ends_with_it(program, seen, bert_tiny, tmp_path):
    note = tmp_path / "pid"
    attack = program(
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"Path({str(note)!r}).write_text(str(child.pid))\n"
        f"""answer.write_text('{{{START}, "status": "recovered", "tokens": [5]}}')"""
    )
    assert answered(attack, seen.seen, bert_tiny).status == Status.RECOVERED
    assert gone(int(note.read_text()))


def test_it_ends_with_whoever_started_it(tmp_path):
    """As if the worker was killed, which closes the keeper's standard input."""
    folder, note = tmp_path / "folder", tmp_path / "pid"
    folder.mkdir()
    (folder / "update").touch()
    source = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", keeper.__file__, str(folder), sys.executable, "-c", source],
        stdin=subprocess.PIPE,
    ) as process:
        deadline = time.monotonic() + 30
        while not (note.is_file() and note.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.stdin.close()
        assert process.wait(30) == 1
    assert gone(int(note.read_text()))
    assert not folder.exists()


def gone(pid):
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- before it starts -----------------------------------------------------------------------------

BAD_COMMANDS = {
    "python 'attack.py {observation} {answer}": "No closing quotation",
    "python attack.py {observation}": "has no {answer}",
    "": "has no {observation}",
}


@pytest.mark.parametrize("command", BAD_COMMANDS)
def test_a_command_that_could_not_answer_is_refused(command):
    with pytest.raises(ConfigError) as caught:
        build_attack(0, {"kind": "command", "command": command})
    assert BAD_COMMANDS[command] in str(caught.value)


def test_what_is_not_there_is_refused_before_training(monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    for settings, reason in (
        ({"command": "no-such-program {observation} {answer}"}, "there is no program"),
        (
            {"command": "true {observation} {answer}", "environment": ["NOT_SET"]},
            "NOT_SET is not set",
        ),
    ):
        attack = build_attack(0, {"kind": "command", **settings}).attack
        with pytest.raises(ConfigError, match=reason):
            attack.check_equipment()


def test_a_program_of_the_current_folder_is_found(seen, bert_tiny, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import sys, json\nopen(sys.argv[2], 'w').write(json.dumps({'format': 'fedleak-answer', "
        "'version': 1, 'status': 'recovered', 'tokens': [7]}))"
    )
    monkeypatch.chdir(tmp_path)
    command = f"{shlex.quote(sys.executable)} mine.py {{observation}} {{answer}}"
    attack = build_attack(0, {"kind": "command", "command": command}).attack
    assert answered(attack, seen.seen, bert_tiny).tokens == (7,)


def test_a_report_says_that_nothing_holds_the_program():
    (note,) = attacks.unchecked(["dager", "command"])
    assert note.startswith("command runs an outside program: fedleak's import contract does not")
    assert note.endswith("nothing here rules out that it read the truth from the disk")
