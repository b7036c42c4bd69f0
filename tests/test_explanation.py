import dataclasses
import io
from typing import ClassVar

import pytest
from rich.console import Console
from tiny import call, tables, toml

from fedleak import attacks
from fedleak.audit.explanation import explain
from fedleak.config.loading import parse
from fedleak.report.terminal import explanation
from fedleak.training.observation import GRANTABLE
from fedleak.util.errors import ConfigError


def explained(**changes):
    return explain(parse(tables({key.replace("__", "."): value for key, value in changes.items()})))


def shown(**changes):
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    experiment, file = parse(tables(changes)), io.StringIO()
    explanation.show(experiment, explain(experiment), Console(file=file, width=200, emoji=False))
    return file.getvalue()


def by_name(explained_run):
    return {attack.name: attack for attack in explained_run.attacks}


def test_every_attack_is_in_it_and_those_of_the_file_are_marked():
    explained_run = explained(attack=[{"kind": "dlg", "name": "mine"}])
    assert {attack.name for attack in explained_run.attacks} == (
        attacks.kinds().keys() - {"dlg"}
    ) | {"mine"}
    assert {attack.name for attack in explained_run.attacks if attack.listed} == {"probes", "mine"}
    # What runs somebody's program does not know which, an honest server imprints nothing, and
    # a classifier's text has no next token.
    assert {attack.name for attack in explained_run.attacks if attack.reason} == {
        "adapter_imprint",
        "command",
        "decepticons",
        "imprint",
        "state_pursuit",
        "step_peeling",
    }


def test_a_server_that_cannot_do_what_it_is_to_do_is_refused():
    lora = {"name": "builtin/gpt2-tiny", "lora": {"rank": 2}}
    with pytest.raises(ConfigError, match="which is not trained: remove model"):
        explained(model=lora, server={"mode": "imprint"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"federation__algorithm": "fedavg", "client__optimiser": "adamw", "canary__count": 4},
            "canary: canaries are scored in sums of gradients, and client.optimiser changes",
        ),
        (
            {"model__name": "builtin/gpt2-tiny", "model__task": "causal-lm"}
            | {"model__response_template": "### Response:"},
            "8 of 8 texts have nothing behind model.response_template",
        ),
        (
            {"federation__clients_per_round": 1, "threat__clients": [0], "threat__rounds": [1]}
            | {"seed": 1},
            "none of them trains in a round that is attacked",
        ),
        ({"gate__may_abstain": ["dlg"]}, "gate.may_abstain"),
        (
            {"model__lora": {"dropout": 0.1}},
            r"model.lora.dropout = 0.1 is off, .*: set federation.dropout = true, or",
        ),
    ],
    ids=["canaries", "responses", "clients", "gate", "dropout"],
)
def test_what_run_refuses_is_not_explained(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        explained(**changes)


def test_a_sum_is_said_to_be_one_clients_in_the_rounds_that_have_a_target():
    changes = {"defense": [{"kind": "secure_sum"}], "federation__rounds": 3}
    together = "the gradient of all clients of a round together"
    alone = "rounds the gradient of one client, taken out of the sum"
    assert f"sees: {together}, " in shown(**changes)
    server = {"mode": "inconsistent", "rounds": [1, 3]}
    assert f"sees: in 2 {alone}, and in the other 1 {together}" in shown(**changes, server=server)
    assert f"sees: in 3 {alone}, " in shown(**changes, server={"mode": "inconsistent"})


def test_an_attack_that_cannot_work_says_why_whether_it_is_listed_or_not():
    model = {"name": "builtin/llama-tiny"}
    explained_attacks = by_name(explained(model=model, attack=[{"kind": "position_marginals"}]))
    assert "rows of positions" in explained_attacks["position_marginals"].reason
    assert explained_attacks["position_marginals"].listed
    assert explained_attacks["dager"].reason is None
    embedding = {"share": ["classifier"]}
    assert "needs" in by_name(explained(update=embedding))["dager"].reason


def test_a_loss_on_responses_is_said_and_ends_what_needs_all_tokens():
    learned = {
        "model": {
            "name": "builtin/gpt2-tiny",
            "task": "causal-lm",
            "response_template": "### Response:",
        },
        "data__text": "{instruction}\n### Response: {response}",
    }
    assert "clients learn what stands behind the last '### Response:' of a text" in shown(**learned)
    explained_attacks = by_name(explained(**learned))
    assert "model.response_template" in explained_attacks["lamp"].reason
    assert explained_attacks["dager"].reason is None


def test_adapters_are_no_matter_of_what_is_shared_and_are_silent_in_round_1():
    lora = {"model": {"name": "builtin/bert-tiny", "lora": {"rank": 2}}}
    reason = by_name(explained(**lora))["keyspan"].reason
    assert "with model.lora they train adapters in their place" in reason
    assert "add it" not in reason
    silent = "in round 1 one factor of each LoRA adapter is zero"
    assert silent in shown(**lora)
    assert silent not in shown(**lora, federation__rounds=2, threat__rounds=[2])
    assert silent not in shown(**lora, federation__algorithm="fedavg")
    assert silent not in shown()


def test_a_prior_that_is_not_there_is_a_reason():
    explained_attacks = by_name(explained(attack=[{"kind": "lamp", "prior": "/no/such/folder"}]))
    assert "/no/such/folder" in explained_attacks["lamp"].reason


def test_what_the_attacker_knows_is_what_was_granted_and_what_the_server_set():
    explained_run = explained(threat__knows=["labels"])
    assert set(explained_run.knows) == {"labels", "learning_rate", "local_steps", "dropout"}
    assert set(explained_run.unknown) == GRANTABLE - {"labels"}


def test_captures_of_clients_with_other_defenses_are_told_apart():
    freeze = {"kind": "freeze", "parameters": ["q1", "k1", "v1"], "clients": [0]}
    explained_run = explained(defense=[freeze], federation__clients=3)
    assert len(explained_run.captured) == 2
    assert max(explained_run.captured) == explained_run.parameters
    text = shown(defense=[freeze], federation__clients=3)
    (line,) = [line for line in text.splitlines() if line.startswith("  keyspan")]
    assert "can work" in line
    assert "on 1 of 2 kinds of captures; on the others it needs" in line


def test_the_sum_of_clients_is_said():
    summed = shown(defense=[{"kind": "secure_sum"}])
    assert "all clients of a round together" in summed
    assert "a sum hides an update among 2 clients: if one colludes, the server reads the other" in (
        shown(defense=[{"kind": "secure_sum"}], federation={"clients_per_round": 2})
    )
    assert "each client" in shown()


@dataclasses.dataclass(frozen=True)
class Demanding:
    """Has a setting without a default."""

    must: int
    kind: ClassVar[str] = "demanding"
    uses: ClassVar[frozenset[str]] = frozenset()


def test_an_attack_without_defaults_is_said_to_have_none(monkeypatch):
    kinds = {**attacks.kinds(), "demanding": Demanding}
    monkeypatch.setattr(attacks, "kinds", lambda: kinds)
    assert "must is missing" in by_name(explained())["demanding"].reason


def test_the_command_trains_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(toml())
    status, output, _ = call("explain", "small.toml")
    assert status == 0
    assert "the server sees: the gradient of each client" in output
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]
    assert call("explain", "none.toml")[0] == 2


def test_without_a_file_it_explains_what_run_would_run():
    status, output, _ = call("explain", "--set", "preset=flowertune", "--set", "data.samples=320")
    assert status == 0
    assert output.startswith("preset flowertune")
    status, output, _ = call("explain")
    assert status == 0
    assert output.startswith("quickstart-llama")
    assert "\nquickstart-gpt2\n" in output
