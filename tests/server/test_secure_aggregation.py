"""Flower's SecAgg+ through the engines: what the server sees, who may be lost, what is refused."""

import pickle
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, ndarray_to_bytes, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.compat.common.parameter import bytes_to_ndarray
from flwr.server.workflow.secure_aggregation import secaggplus_workflow
from scipy.stats import kstest

from fedleak.audit import scoring, vault
from fedleak.config.federation.lookup import dropped_out
from fedleak.config.loading import parse
from fedleak.defenses.secure_sum import MODULUS, SecureSum
from fedleak.flower.client import masking
from fedleak.flower.client.app import app as client_app
from fedleak.flower.engines import train
from fedleak.flower.inline import InlineGrid
from fedleak.flower.server.replies import RefusedError
from fedleak.flower.server.secure_aggregation import Stages, SummingServer, run_protocol
from fedleak.report.tables.defenses import defense_tables
from fedleak.running import preparation
from fedleak.running.reports import report_run
from fedleak.store.captures import Captures
from fedleak.store.lines import Lines
from fedleak.store.run import EVERYONE, Key
from fedleak.store.summaries import SUMMARY
from fedleak.training.local import local_update_
from fedleak.util.errors import FedleakError
from fedleak.util.rng import stream

UNMASK = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "experiments" / "unmask.py"))
)
SETTINGS = {"clipping": 0.5, "max_weight": 4.0}
SUM = {"kind": "secure_sum", **SETTINGS}
PROTOCOL = SUM | {"protocol": "secagg+"}
CLIENTS = 4
SMALL = {"name": "smaller than builtin/bert-tiny: `folder`"}
TABLE = {
    "name": "masked",
    "seed": 5,
    "model": SMALL,
    "data": {"name": "builtin/notes", "samples": 10, "held_out": 2},
    "federation": {"clients": CLIENTS, "rounds": 1, "batch_size": 2, "learning_rate": 0.1},
    "utility": {"rounds": []},
    "attack": [],
    "workers": {"devices": ["cpu"]},
}


@pytest.fixture(scope="module", autouse=True)
def folder(saved):
    """Makes a model of the built-in one's vocabulary that costs a tenth."""
    SMALL["name"] = saved("bert")


def experiment_of(*defense, **tables):
    federation = TABLE["federation"] | tables.pop("federation", {})
    return parse(TABLE | {"defense": list(defense), "federation": federation} | tables)


def trained(folder, experiment):
    run = preparation.prepare(experiment, folder)
    train(run, experiment)
    return run


@pytest.fixture(scope="module")
def modelled(folder, tmp_path_factory):
    """A round without cryptography, and the updates that it summed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Captures, "drop", lambda captures: None)
        return trained(tmp_path_factory.mktemp("modelled") / "run", experiment_of(SUM))


def sum_of(modelled, *clients):
    held = (modelled.held.read_capture(Key(1, client)).update for client in clients)
    return SecureSum(**SETTINGS).combined(held, rng=stream(0))


def check_sum(run, expected):
    """The protocol's sum is the model's: all but float rounding is whole numbers."""
    update = run.captures.read_capture(Key(1, EVERYONE)).update
    assert update.num_examples == expected.num_examples
    assert update.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        assert update.tensors[name].dtype == value.dtype
        torch.testing.assert_close(update.tensors[name], value, rtol=1e-5, atol=1e-8)


def lose(monkeypatch, *clients, stage=None, answer=None):
    """Lets clients crash in a stage, or answer it with what `answer` makes of theirs."""

    def mod(message, context, call_next):
        of_stage = message.content.config_records["secaggplus_configs"]["stage"]
        reply = secaggplus_mod(message, context, call_next)
        if context.node_config["partition-id"] not in clients or of_stage != stage:
            return reply
        if answer is None:
            raise RuntimeError("it is gone")
        content = reply.content
        answer(content, content.config_records["secaggplus_configs"])
        return Message(content, reply_to=message)

    monkeypatch.setattr(masking, "secaggplus_mod", mod)


# --- what it gives --------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_the_sum_is_that_of_the_model(tmp_path, algorithm):
    federation = {"algorithm": algorithm, "rounds": 2}
    defenses = [{"kind": "gaussian_noise", "sigma": 1e-4}, {"kind": "freeze", "parameters": ["t2"]}]
    pair = [
        trained(tmp_path / name, experiment_of(*defenses, aggregator, federation=federation))
        for name, aggregator in (("model", SUM), ("protocol", PROTOCOL))
    ]
    for round in (1, 2):
        model_capture, protocol_capture = (
            run.captures.read_capture(Key(round, EVERYONE)) for run in pair
        )
        assert model_capture.knowledge == protocol_capture.knowledge
        assert model_capture.update.num_examples == protocol_capture.update.num_examples
        for name, value in model_capture.update.tensors.items():
            torch.testing.assert_close(
                value, protocol_capture.update.tensors[name], rtol=1e-5, atol=1e-8
            )
    assert pair[0].models.rounds() == pair[1].models.rounds() == [1, 2, 3]
    assert pair[1].captures.all_keys() == [Key(1, EVERYONE), Key(2, EVERYONE)]
    assert not (pair[1].path / "held").exists()
    assert "dropped_out" not in pair[1].info()


@pytest.mark.slow
def test_the_simulation_gives_the_same_sum(modelled, tmp_path):
    run = trained(tmp_path / "run", experiment_of(PROTOCOL, federation={"engine": "simulation"}))
    check_sum(run, sum_of(modelled, *range(CLIENTS)))


def test_the_server_sees_keys_shares_and_masked_numbers_only(modelled, tmp_path, monkeypatch):
    seen = {}

    def keep(server, reply):
        configs = reply.content.config_records["secaggplus_configs"]
        assert not any(reply.content.array_records.values())
        for name in configs:
            seen.setdefault(name, []).append(configs[name])
        return reply.content

    monkeypatch.setattr(SummingServer, "on_reply", keep)
    trained(tmp_path / "run", experiment_of(PROTOCOL))
    shares = {"dsts", "ctxts", "nids", "shares"}
    assert seen.keys() == {"pk1", "pk2", "masked_params", *shares}
    for masked in seen["masked_params"]:
        numbers = np.concatenate([bytes_to_ndarray(encoded).flatten() for encoded in masked])
        assert kstest(numbers / 2**32, "uniform").pvalue > 1e-6
    assert len(seen["masked_params"]) == CLIENTS


def test_two_clients_are_unmasked_by_trying_seeds(modelled, tmp_path, monkeypatch):
    """Seeds of 11 bits in place of 32; else it is Flower's protocol, and what its server holds."""
    masked, private = [], []

    def keep(server, reply):
        configs = reply.content.config_records["secaggplus_configs"]
        if "masked_params" in configs:
            masked.append([bytes_to_ndarray(array) for array in configs["masked_params"]])
        return reply.content

    def short(seed, *rest):
        return pseudo_rand_gen(
            (int.from_bytes(seed[:4], "little") % 2**11).to_bytes(4, "little"), *rest
        )

    def taken_off(seed, *rest):
        private.append(short(seed, *rest))
        return private[-1]

    monkeypatch.setattr(SummingServer, "on_reply", keep)
    monkeypatch.setattr(sys.modules[secaggplus_mod.__module__], "pseudo_rand_gen", short)
    monkeypatch.setattr(secaggplus_workflow, "pseudo_rand_gen", taken_off)
    run = trained(tmp_path / "run", experiment_of(PROTOCOL, federation={"clients": 2}))
    flat = lambda arrays: np.concatenate([array.reshape(-1) for array in arrays])  # noqa: E731
    read = []
    # Two seeds of so few bits may be the same, and then so are their masks.
    own_masks = {own.tobytes(): own for own in map(flat, private)}
    # The server does not say whose private mask is whose: a wrong one leaves no small numbers.
    for numbers in map(flat, masked):
        for own in own_masks.values():
            left = (numbers - own) % MODULUS
            seed = UNMASK.pair_seed(left, range(2**11))
            if seed is not None:
                drawn = UNMASK.mask(seed, len(left))
                read += [(left + sign * drawn) % MODULUS for sign in (1, -1)]
    small = [numbers for numbers in read if (numbers <= UNMASK.SMALL).all()]
    assert len(small) == 2
    total = run.captures.read_capture(Key(1, EVERYONE)).update.tensors
    sum_of_both = np.concatenate([value.flatten().numpy() for value in total.values()])
    # The first number is the client's weight.
    assert np.corrcoef(small[0][1:] + small[1][1:], sum_of_both)[0, 1] > 0.999
    assert np.corrcoef(small[0][1:], small[1][1:])[0, 1] < 0.99


# --- who is lost ----------------------------------------------------------------------------


def test_a_client_that_is_lost_in_training_is_not_in_the_sum(modelled, tmp_path, monkeypatch):
    calls = []

    def crash(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return local_update_(*args, **kwargs)

    monkeypatch.setattr("fedleak.flower.client.app.local_update_", crash)
    run = trained(tmp_path / "run", experiment_of(PROTOCOL))
    (absent,) = dropped_out(run, 1)
    others = [client for client in range(CLIENTS) if client != absent]
    check_sum(run, sum_of(modelled, *others))
    truth = vault.read_truth(run, Key(1, EVERYONE))
    alone = [vault.read_truth(run, Key(1, client)) for client in others]
    assert truth.sequences == tuple(
        text for client_truth in alone for text in client_truth.sequences
    )
    scoring.score_run(run)
    (note,) = [note for note in run.read_document(SUMMARY).notes if "dropped out" in note]
    assert f"secure sum ({absent} in round 1)" in note
    # What rounding did to a client's update is said apart from the sum.
    summary = run.read_document(SUMMARY)
    (table,) = defense_tables(summary.defenses.defense, summary.defended)
    ((defense, _, rounded),) = table.rows
    assert defense.text == "0: secure_sum"
    assert rounded.text.startswith("change norm")
    assert "zeroed" in rounded.text
    assert "what the sum itself hides is not" in report_run(run, None).read_text()
    assert {row["client"] for row in run.rows(Lines("privacy.jsonl", dict))} == set(others)


@pytest.mark.parametrize("stage", ["setup", "share_keys", "collect_masked_vectors"])
def test_a_client_that_is_lost_in_a_stage_is_not_in_the_sum(modelled, tmp_path, monkeypatch, stage):
    lose(monkeypatch, 1, stage=stage)
    run = trained(tmp_path / "run", experiment_of(PROTOCOL))
    assert dropped_out(run, 1) == {1}
    check_sum(run, sum_of(modelled, 0, 2, 3))


def test_who_is_lost_after_it_has_sent_is_in_the_sum(modelled, tmp_path, monkeypatch):
    lose(monkeypatch, 1, stage="unmask")
    run = trained(tmp_path / "run", experiment_of(PROTOCOL))
    assert not dropped_out(run, 1)
    check_sum(run, sum_of(modelled, *range(CLIENTS)))


@pytest.mark.parametrize("stage", ["setup", "unmask"])
def test_too_few_clients_give_an_error_and_no_sum(tmp_path, monkeypatch, stage):
    lose(monkeypatch, 0, 2, 3, stage=stage)
    experiment = experiment_of(PROTOCOL)
    run = preparation.prepare(experiment, tmp_path / "run")
    message = (
        r"round 1: SecAgg\+ gave no sum: 3 of 4 clients were lost, and at least 2 must answer: "
        r"client \d \(node \d\): RuntimeError in fedleak.flower.client.masking:\d+: "
        r"the client's log says more; "
    )
    with pytest.raises(FedleakError, match=message):
        train(run, experiment)
    assert run.captures.all_keys() == []
    assert run.models.rounds() == [1]
    # The same command again goes on.
    monkeypatch.undo()
    train(run, experiment)
    assert run.captures.all_keys() == [Key(1, EVERYONE)]


def test_one_client_alone_is_never_summed_whatever_the_threshold(tmp_path, monkeypatch):
    lose(monkeypatch, 0, 2, 3, stage="setup")
    experiment = experiment_of(PROTOCOL | {"threshold": 0.3})
    run = preparation.prepare(experiment, tmp_path / "run")
    with pytest.raises(FedleakError, match="3 of 4 clients were lost, and at least 2 must answer"):
        train(run, experiment)
    assert run.captures.all_keys() == []


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(1.0, -1.0), (1.0, 1.05), (-1.05, 0.0)])
def test_a_mean_is_as_large_as_clipping_and_weights_allow(numbers, monkeypatch):
    """Two examples of four at most weigh a half: a number clipped to 0.5 is 1 in the mean."""

    class Workflow:
        def __init__(self, **settings):
            self.timeout = settings["timeout"]

        def __call__(self, grid, context):
            result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([np.array(numbers)]), 2, {})
            context.strategy.aggregate_fit(1, [(SimpleNamespace(node_id=7), result)], [])

    monkeypatch.setattr("fedleak.flower.server.secure_aggregation.SecAggPlusWorkflow", Workflow)
    if max(map(abs, numbers)) == 1.0:
        assert run_protocol(None, [7], SecureSum(**SETTINGS), 1.0).examples == {7: 2}
    else:
        with pytest.raises(FedleakError, match="a sum that no updates have"):
            run_protocol(None, [7], SecureSum(**SETTINGS), 1.0)


@pytest.fixture(scope="module")
def answers(folder, tmp_path_factory):
    """A right answer to each stage, and who checks it."""
    by_stage, check = {}, Stages._check

    def keep(stages, stage, content):
        by_stage[stage] = stages, pickle.dumps(content)
        check(stages, stage, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stages, "_check", keep)
        trained(tmp_path_factory.mktemp("answers") / "run", experiment_of(PROTOCOL))
    return by_stage


def in_clear(content, configs):
    content["update"] = ArrayRecord([np.ones(3)])


def too_many(content, configs):
    content.metric_records["fitres.num_examples"]["num_examples"] = 3


def one_array(content, configs):
    configs["masked_params"] = configs["masked_params"][:1]


def other_shape(content, configs):
    configs["masked_params"] = [ndarray_to_bytes(np.zeros(3, int))] * len(configs["masked_params"])


def too_large(content, configs):
    arrays = [bytes_to_ndarray(encoded) for encoded in configs["masked_params"]]
    configs["masked_params"] = [ndarray_to_bytes(array + 2**40) for array in arrays]


def no_array(content, configs):
    configs["masked_params"] = [b"pickle"] * len(configs["masked_params"])


def nothing(content, configs):
    configs.clear()


@pytest.mark.parametrize(
    ("stage", "answer", "words"),
    [
        ("setup", nothing, r"it is no answer to the stage 'setup' of SecAgg\+"),
        (
            "share_keys",
            lambda content, configs: configs.update(dsts=configs["dsts"][:1]),
            "'share_keys'",
        ),
        ("collect_masked_vectors", nothing, "the stage 'collect_masked_vectors'"),
        ("collect_masked_vectors", in_clear, "it holds numbers that nothing masks"),
        ("collect_masked_vectors", too_many, "num-examples is 3"),
        ("collect_masked_vectors", one_array, "it holds 1 arrays, and not"),
        ("collect_masked_vectors", other_shape, "not of the shape and type"),
        ("collect_masked_vectors", too_large, "beyond the modulus"),
        ("collect_masked_vectors", no_array, "cannot be read"),
        (
            "unmask",
            lambda content, configs: configs.update(shares=[1] * CLIENTS),
            "the stage 'unmask'",
        ),
    ],
)
def test_a_hostile_answer_is_refused(answers, stage, answer, words):
    kept, content = answers[stage]
    content = pickle.loads(content)
    kept._check(stage, content)
    answer(content, content.config_records["secaggplus_configs"])
    with pytest.raises(RefusedError, match=words):
        kept._check(stage, content)


def test_who_gave_a_hostile_answer_is_lost(tmp_path, monkeypatch):
    lose(monkeypatch, 0, 1, 2, stage="collect_masked_vectors", answer=in_clear)
    refused = (
        r"3 of 4 clients were lost.*its answer is refused: it holds numbers that nothing masks"
    )
    with pytest.raises(FedleakError, match=refused):
        trained(tmp_path / "run", experiment_of(PROTOCOL))


def test_a_wrong_share_gives_an_error_and_no_sum(tmp_path, monkeypatch):
    def wrong(content, configs):
        configs["shares"] = [share[:4] + bytes(len(share) - 4) for share in configs["shares"]]

    lose(monkeypatch, 1, stage="unmask", answer=wrong)
    with pytest.raises(FedleakError, match="a client's share is wrong"):
        trained(tmp_path / "run", experiment_of(PROTOCOL))


def test_wrong_masks_give_an_error_and_no_sum(tmp_path, monkeypatch):
    def shifted(content, configs):
        arrays = [bytes_to_ndarray(encoded) for encoded in configs["masked_params"]]
        arrays[1:] = [(array + 2**31) % 2**32 for array in arrays[1:]]
        configs["masked_params"] = [ndarray_to_bytes(array) for array in arrays]

    lose(monkeypatch, 1, stage="collect_masked_vectors", answer=shifted)
    with pytest.raises(FedleakError, match="a sum that no updates have"):
        trained(tmp_path / "run", experiment_of(PROTOCOL))


def test_a_client_sends_nothing_that_is_not_masked(answers):
    stages, _ = answers["setup"]
    grid = InlineGrid(client_app, CLIENTS, {})

    def refusal(content):
        (reply,) = grid.send_and_receive([Message(content, 2, "train")])
        return reply.error.reason

    assert "this client does not send it" in refusal(stages.tasks[2])
    assert "did not say which experiment" in refusal(RecordDict({"config": ConfigRecord()}))
