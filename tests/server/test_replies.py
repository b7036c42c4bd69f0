"""A reply is filed under the node that sent it, and only if it is what that node was asked for."""

import itertools
import weakref

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedleak.config.loading import parse
from fedleak.flower.client.app import app as client_app
from fedleak.flower.inline import InlineGrid
from fedleak.flower.server.app import Patience, find_nodes
from fedleak.flower.server.capturing_grid import CapturingGrid
from fedleak.flower.server.strategy import CuriousServer
from fedleak.models import loading
from fedleak.running import preparation
from fedleak.store.captures import Captures
from fedleak.store.run import EVERYONE, Key
from fedleak.util.errors import FedleakError
from fedleak.util.versions import code

TABLE = {
    "name": "replies",
    "model": {"name": "smaller than builtin/bert-tiny: `bert`"},
    "data": {"name": "builtin/notes", "samples": 9, "held_out": 2},
    "federation": {"clients": 3, "rounds": 5, "batch_size": 2, "learning_rate": 0.1},
}
NODES = {0: 70, 1: 71, 2: 72}
NAME = "classifier.bias"


class Round:
    """A round that has been asked for, and replies to it."""

    def __init__(self, folder, model, number=4, **tables):
        experiment = parse(TABLE | tables)
        InlineGrid(client_app, 3, {})  # messages cannot be made before
        self.run = preparation.prepare(experiment, folder / "run")
        self.weights = model.parameters()
        self.run.models.write(number, self.weights)
        self.server = CuriousServer(experiment, self.run, model, number, NODES)
        messages = self.server.configure_train(1, ArrayRecord(self.weights), ConfigRecord(), None)
        self.asked = {message.metadata.dst_node_id: message for message in messages}
        self.replies = []

    def reply(self, client, /, *, tensors=(), without=(), node=None, arrays=(), **metrics):
        """Answers as a client does, except for what is given."""
        figures = {"num-examples": 2} | {n.replace("_", "-"): value for n, value in metrics.items()}
        own = {n: torch.full_like(v, float(client)) for n, v in self.weights.items()}
        update = ArrayRecord({n: v for n, v in (own | dict(tensors)).items() if n not in without})
        for name, array in dict(arrays).items():
            update[name] = array
        content = RecordDict({"update": update, "metrics": MetricRecord(figures)})
        return self.send(content, NODES[client] if node is None else node)

    def send(self, content, node):
        question = self.asked.get(node) or Message(RecordDict(), node, "train")
        reply = Message(content, reply_to=question)
        if reply.has_content():
            reply.content = self.server.on_reply(reply)
            assert not reply.content
            self.server.beside.finish()
        self.replies.append(reply)

    def end(self):
        return self.server.aggregate_train(1, self.replies)

    def refusal(self):
        """Returns what the round fails with, the other clients having answered."""
        with pytest.raises(FedleakError) as caught:
            self.end()
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture(scope="module", autouse=True)
def bert(saved):
    """A model that costs a tenth of the built-in one, and the experiment's."""
    TABLE["model"]["name"] = saved("bert")
    return loading.load(parse(TABLE).model_spec(2))


@pytest.fixture
def round(tmp_path, bert):
    return Round(tmp_path, bert)


def test_a_reply_is_filed_under_the_node_that_sent_it_whatever_it_does_not_say(round):
    for client in (2, 0, 1):
        round.reply(client)
    arrays, _ = round.end()
    assert round.run.captures.all_keys() == [Key(4, 0), Key(4, 1), Key(4, 2)]
    for client in (0, 1, 2):
        (value, *_) = round.run.captures.read_capture(Key(4, client)).update.tensors.values()
        assert set(value.unique().tolist()) == {float(client)}
    expected = round.weights[NAME] - 0.1 * 1.0  # the mean of 0, 1 and 2
    torch.testing.assert_close(arrays.to_torch_state_dict()[NAME], expected)


def like(value=0.0, dtype=torch.float32, shape=(2,)):
    return {NAME: torch.full(shape, value, dtype=dtype)}


WRONG = [
    ({"client": 0}, "it says client 0, but is of client 1"),
    ({"client": EVERYONE}, "it says client -1, but is of client 1"),
    ({"client": [1, 1]}, "it says client [1, 1], but is of client 1"),
    ({"round": 3}, "it says round 3, but is of round 4"),
    ({"num_examples": 0}, "its num-examples is 0 and not a whole number, 1 to 2"),
    ({"num_examples": -2}, "its num-examples is -2 and not a whole number, 1 to 2"),
    ({"num_examples": 3}, "its num-examples is 3 and not a whole number, 1 to 2"),
    ({"num_examples": 2**60}, f"its num-examples is {2**60} and not a whole number, 1 to 2"),
    ({"num_examples": 2.0}, "its num-examples is 2.0 and not a whole number, 1 to 2"),
    ({"num_examples": float("nan")}, "its num-examples is nan and not a whole number, 1 to 2"),
    ({"num_examples": [1]}, "its num-examples is [1] and not a whole number, 1 to 2"),
    ({"without": [NAME]}, f"it lacks '{NAME}'"),
    ({"tensors": {"a\x1b[2Jb": torch.ones(2)}}, r"it holds a parameter 'a\x1b[2Jb'"),
    ({"tensors": like(shape=(3,))}, f"'{NAME}' has the shape [3], but the parameter [2]"),
    ({"tensors": like(shape=(1, 2))}, f"'{NAME}' has the shape [1, 2], but the parameter [2]"),
    ({"tensors": like(dtype=torch.float64)}, f"'{NAME}' is of torch.float64"),
    ({"tensors": like(dtype=torch.int64)}, f"'{NAME}' is of torch.int64"),
    ({"tensors": like(float("nan"))}, f"not every number of '{NAME}' is finite"),
    ({"tensors": like(-float("inf"), torch.float16)}, f"not every number of '{NAME}' is finite"),
    (
        {"arrays": {NAME: Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY is not this")}},
        "its update cannot be read (",
    ),
    (
        {"arrays": {NAME: Array("float32", (2,), "pickle", b"cos\nsystem")}},
        "its update cannot be read (TypeError)",
    ),
    ({"arrays": {NAME: Array(np.array(["a", "b"]))}}, "its update cannot be read (TypeError)"),
]


@pytest.mark.parametrize(("changes", "line"), WRONG)
def test_a_reply_that_is_wrong_is_refused_with_a_line_and_captures_nothing(round, changes, line):
    for client in (0, 2):
        round.reply(client)
    before = {p.name: p.read_bytes() for p in (round.run.path / "captures").iterdir()}
    round.reply(1, **changes)
    assert round.refusal().startswith(f"round 4: client 1 (node 71): its answer is refused: {line}")
    assert {p.name: p.read_bytes() for p in (round.run.path / "captures").iterdir()} == before
    assert round.run.models.rounds() == [4]


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict(
            {"update": ConfigRecord({"a": 1}), "metrics": MetricRecord({"num-examples": 1})}
        ),
        RecordDict({"update": ArrayRecord(), "metrics": ConfigRecord({"num-examples": 1})}),
    ],
)
def test_a_reply_without_an_update_is_refused(round, content):
    for client in (0, 2):
        round.reply(client)
    round.send(content, NODES[1])
    assert "client 1 (node 71): its answer is refused: it holds no update" in round.refusal()


def test_a_second_answer_is_refused_and_the_first_stays(round):
    for client in (0, 1, 2):
        round.reply(client)
    before = round.run.captures.read_capture(Key(4, 1)).update.tensors[NAME].clone()
    round.reply(1, tensors=like(9.0))
    assert round.refusal() == (
        "round 4: client 1 (node 71): its answer is refused: it was not asked, or has answered "
        "already"
    )
    assert torch.equal(round.run.captures.read_capture(Key(4, 1)).update.tensors[NAME], before)


@pytest.mark.parametrize("claim", [{}, {"client": 0, "round": 4}])
def test_an_answer_of_a_node_that_was_not_asked_is_refused(round, claim):
    round.reply(0, node=99, **claim)
    assert round.run.captures.all_keys() == []
    for client in (0, 1, 2):
        round.reply(client)
    assert round.refusal().startswith("round 4: node 99: its answer is refused: it was not asked")


def test_a_client_of_another_round_was_not_asked_either(tmp_path, bert):
    federation = TABLE["federation"] | {"clients_per_round": 2}
    round = Round(tmp_path, bert, federation=federation)
    (idle,) = set(NODES.values()) - round.asked.keys()
    for client in (0, 1, 2):
        round.reply(client)
    assert f"(node {idle}): its answer is refused: it was not asked" in round.refusal()
    assert len(round.run.captures.all_keys()) == 2


def test_a_client_of_fedavg_has_its_part_of_the_data_and_no_more(tmp_path, bert):
    round = Round(tmp_path, bert, federation=TABLE["federation"] | {"algorithm": "fedavg"})
    round.reply(0, num_examples=3)
    round.reply(1, num_examples=4)
    round.reply(2, num_examples=9)
    refused = round.refusal()
    assert "(node 71): its answer is refused: its num-examples is 4 and not a whole" in refused
    assert "(node 72): its answer is refused: its num-examples is 9 and not a whole" in refused
    assert round.run.captures.all_keys() == [Key(4, 0)]


def test_a_failed_round_names_who_failed_and_who_was_silent(round):
    round.reply(0)
    round.send(Error(2, "boom\x1b]0;owned\x07\nand more"), NODES[1])
    assert round.refusal() == (
        r"round 4: client 1 (node 71): boom\x1b]0;owned\x07 and more; client 2: did not answer"
    )


def test_a_part_of_the_model_and_half_precision_are_right_where_they_were_asked_for(tmp_path, bert):
    round = Round(tmp_path, bert, update={"share": ["classifier"]})
    rest = [name for name in round.weights if not name.startswith("classifier.")]
    bits = torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.int16)
    round.reply(0, without=rest)
    round.reply(1, without=rest, tensors={NAME: bits})
    round.reply(2)
    assert "client 2 (node 72): its answer is refused: it holds a parameter" in round.refusal()
    update = round.run.captures.read_capture(Key(4, 1)).update
    assert update.tensors[NAME].tolist() == [1.5, -2.0]
    assert update.tensors.keys() == {"classifier.weight", NAME}


def test_what_a_client_freezes_it_must_not_send_and_others_must(tmp_path, bert):
    freeze = {"kind": "freeze", "parameters": ["classifier"], "clients": [0]}
    round = Round(tmp_path, bert, defense=[freeze])
    frozen = [name for name in round.weights if name.startswith("classifier.")]
    round.reply(0, without=frozen)
    round.reply(1, without=frozen)
    round.reply(2)
    assert round.refusal().startswith(
        "round 4: client 1 (node 71): its answer is refused: it lacks"
    )
    assert round.run.captures.all_keys() == [Key(4, 0), Key(4, 2)]


def test_nothing_is_held_for_a_sum_of_a_reply_that_is_refused(tmp_path, bert):
    round = Round(tmp_path, bert, defense=[{"kind": "secure_sum"}])
    for client in (0, 1, 2):
        round.reply(client, **({"client": 0} if client == 1 else {}))
    round.refusal()
    held = round.run.path / "held"
    assert {p.name for p in held.iterdir()} == {"r0004-c00.safetensors", "r0004-c02.safetensors"}
    assert round.run.captures.all_keys() == []


# --- who is who -----------------------------------------------------------------------------


class Nodes(InlineGrid):
    """Nodes that say what they like of who they are."""

    def __init__(self, answers, says=None):
        self.code = code() if says is None else says
        super().__init__(lambda message, context: self.answer(message), len(answers), {})
        self.answers = dict(zip(self.get_node_ids(), answers, strict=True))

    def answer(self, message):
        says = self.answers[message.metadata.dst_node_id]
        identity = {"fedleak": self.code, **({} if says is None else {"client": says})}
        content = RecordDict({"identity": ConfigRecord(identity)})
        return Message(content, reply_to=message)


@pytest.fixture
def prepared(tmp_path):
    """A run directory, as the server has it when it looks for nodes."""
    return preparation.prepare(parse(TABLE), tmp_path / "run")


NOW = Patience(nodes=0, answers=9)


def test_nodes_are_those_of_the_clients_they_say_and_others_stay_idle(prepared):
    assert find_nodes(Nodes([2, 3, 0, 1]), parse(TABLE), prepared, NOW) == {
        2: 2,
        3: 3,
        0: 4,
        1: 5,
    }


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ([0, 1, 1], "node 4 says that it holds the data of client 1, but so says node 3: give"),
        ([0, 1, "2"], "node 4 cannot take part: its client is '2' and not a whole"),
        ([0, 1, True], "node 4 cannot take part: its client is True and not a"),
        ([0, 1, -1], "node 4 cannot take part: its client is -1 and not a whole"),
        ([0, 1, None], "node 4 cannot take part: its client is None and not a"),
        ([0, 1, 7], "no node holds the data of the clients [2]"),
    ],
)
def test_nodes_that_do_not_fit_the_clients_are_refused(answers, line, prepared):
    with pytest.raises(FedleakError) as caught:
        find_nodes(Nodes(answers), parse(TABLE), prepared, NOW)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize("theirs", ["0.0.1 (abc)", "\x1b[2J", 7, b"x"])
def test_a_node_with_another_fedleak_is_refused_in_one_line(theirs, prepared):
    with pytest.raises(FedleakError) as caught:
        find_nodes(Nodes([0, 1, 2], theirs), parse(TABLE), prepared, NOW)
    line = str(caught.value)
    assert line.startswith("node 2 cannot take part: it runs fedleak ")
    assert f"and the server {code()}: install the same on both" in line
    assert line.isprintable()


def test_nodes_that_are_not_there_in_time_are_counted(prepared):
    with pytest.raises(FedleakError, match=r"clients = 3, but Flower has 2 nodes after 0 s: start"):
        find_nodes(Nodes([0, 1]), parse(TABLE), prepared, NOW)


# --- one at a time --------------------------------------------------------------------------


class Ready(InlineGrid):
    """A grid on which all replies are ready at once, and which hands over all that is asked for."""

    def __init__(self, clients):
        super().__init__(lambda message, context: Message(update(), reply_to=message), clients, {})
        self.pulls, self.handed_over, self.alive = [], [], []

    def pull_messages(self, message_ids):
        message_ids = list(message_ids)
        self.pulls.append(len(message_ids))
        self.alive.append(sum(content() is not None for content in self.handed_over))
        replies = super().pull_messages(message_ids)
        self.handed_over += [weakref.ref(reply.content["update"]) for reply in replies]
        return replies


def update():
    return RecordDict({"update": ArrayRecord({"a": Array(np.zeros(3))})})


def test_replies_are_pulled_one_at_a_time_and_freed_before_the_next():
    grid = Ready(4)
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    replies = CapturingGrid(grid, lambda reply: RecordDict()).send_and_receive(messages, timeout=9)
    assert grid.pulls == [1, 1, 1, 1]
    assert grid.alive == [0, 0, 0, 0]
    assert [reply.metadata.src_node_id for reply in replies] == grid.get_node_ids()


def test_a_message_that_could_not_be_sent_is_not_waited_for():
    class Full(Ready):
        def push_messages(self, messages):
            names = super().push_messages(messages)
            return [None] if names == ["m0"] else names

    grid = Full(3)
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    replies = CapturingGrid(grid, lambda reply: RecordDict()).send_and_receive(messages, timeout=9)
    assert [reply.metadata.src_node_id for reply in replies] == grid.get_node_ids()[1:]
    assert grid.pulls == [1, 1]


class Slow(Ready):
    """A grid whose nodes answer at the second pull, and counts who is asked at a time."""

    def __init__(self, count):
        super().__init__(count)
        self.asked, self.most, self.sent = {}, 0, []

    def push_messages(self, messages):
        names = list(super().push_messages(messages))
        self.asked |= dict.fromkeys(names, 0)
        self.most = max(self.most, len(self.asked))
        self.sent += [message.metadata.dst_node_id for message in messages]
        return names

    def pull_messages(self, message_ids):
        (name,) = message_ids
        self.asked[name] += 1
        if self.asked[name] < 2:
            return []
        del self.asked[name]
        return super().pull_messages(message_ids)


@pytest.mark.parametrize("at_once", [1, 3, 9])
def test_no_more_are_asked_at_a_time_than_may_be_and_all_in_their_order(at_once):
    grid = Slow(7)
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    tap = CapturingGrid(grid, lambda reply: RecordDict(), at_once=at_once)
    assert len(tap.send_and_receive(messages, timeout=9)) == 7
    assert grid.sent == grid.get_node_ids()
    assert grid.most == min(at_once, 7)


def test_who_never_answers_is_not_waited_for_and_keeps_nobody_from_being_asked():
    class Silent(Ready):
        def pull_messages(self, message_ids):
            return [] if message_ids == ["m1"] else super().pull_messages(message_ids)

    grid = Silent(4)
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    tap = CapturingGrid(grid, lambda reply: RecordDict(), at_once=1)
    answered = [r.metadata.src_node_id for r in tap.send_and_receive(messages, timeout=0.05)]
    assert answered == [node for node in grid.get_node_ids() if node != grid.get_node_ids()[1]]


def test_who_answers_early_is_held_until_it_is_its_turn_and_the_sum_is_that_of_the_order(
    tmp_path, bert
):
    following = []
    torch.manual_seed(0)
    values = {client: torch.randn(2) for client in range(3)}
    for number, order in enumerate(itertools.permutations(range(3))):
        ordered_round = Round(
            tmp_path / str(number), bert, threat={"rounds": [1 + 3 * (number % 2)]}
        )
        waiting = []
        for client in order:
            ordered_round.reply(client, tensors={NAME: values[client]})
            waiting.append(sorted(p.name for p in (ordered_round.run.path / "held").glob("*")))
        arrays, _ = ordered_round.end()
        following.append(arrays.to_torch_state_dict()[NAME])
        assert waiting[-1] == []
        assert ordered_round.run.captures.all_keys() == [
            Key(4, client) for client in range(3) if number % 2
        ]
        if order == (2, 1, 0):
            assert waiting[1] == ["r0004-c01.safetensors", "r0004-c02.safetensors"]
    assert all(torch.equal(tensor, following[0]) for tensor in following)


def test_a_capture_that_cannot_be_written_ends_the_round(round, monkeypatch):
    def full(self, capture):
        raise FedleakError("r0004-c00 cannot be written: No space left on device")

    monkeypatch.setattr(Captures, "write", full)
    with pytest.raises(FedleakError, match="No space left"):
        round.reply(0)


def test_an_encoded_update_is_freed_while_it_is_decoded(round):
    on_reply, left = round.server.on_reply, []

    def watch(reply):
        record = reply.content["update"]
        kept = on_reply(reply)
        left.append(len(record))
        return kept

    round.server.on_reply = watch
    round.reply(1)
    assert left == [0]
