"""Canary clients in another app: what they send, who keeps coins, and what Flower's mods leave."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from fedleak.flower.inline import InlineGrid
from fedleak.tap import canary_clients
from fedleak.tap.canaries import coins
from fedleak.training import privacy
from fedleak.util.errors import FedleakError

pytestmark = pytest.mark.core

CLIENTS, NORM, STEP = 48, 5.0, np.float32(0.01)


def app_of(*mods):
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        sent = message.content.array_records["arrays"]
        after = ArrayRecord(dict(sent) | {"w": Array(sent["w"].numpy() + STEP)})
        metrics = MetricRecord({"num-examples": 3})
        return Message(RecordDict({"arrays": after, "metrics": metrics}), reply_to=message)

    return app


def replies(app, round=1, clients=CLIENTS, **others):
    """Returns the update of each client."""
    grid = InlineGrid(app, clients, {})
    weights = np.random.default_rng(0).normal(0, 0.1, 256 * CLIENTS).astype(np.float32)
    arrays = ArrayRecord({"w": Array(weights), **others})
    messages = [
        Message(
            RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": round})}),
            dst_node_id=node,
            message_type="train",
        )
        for node in grid.get_node_ids()
    ]
    records = [m.content.array_records["arrays"] for m in grid.send_and_receive(messages)]
    assert all(
        record[name].numpy() == value.numpy()
        for record in records
        for name, value in others.items()
    )
    return [{"w": record["w"].numpy() - weights} for record in records]


def test_the_first_clients_are_canaries_and_the_others_train(tmp_path):
    app = app_of(canary_clients(tmp_path, 2, norm=NORM, seed=3))
    updates = replies(app, round=4, clients=3, count=Array(np.array([7])))
    inside = coins(tmp_path, 2)
    canaries = privacy.directions(updates[0], 2, seed=3, step=4)
    for client, update in enumerate(updates[:2]):
        values = canaries.taken(update)[:, client]
        size = NORM * (1 if inside[client] else 1e-4)
        assert values == pytest.approx(size * canaries.directions()[:, client], abs=1e-6)
        assert np.linalg.norm(update["w"]) == pytest.approx(size, rel=1e-3)
    assert updates[2]["w"] == pytest.approx(np.full(256 * CLIENTS, STEP), abs=1e-7)


def test_a_coin_is_flipped_once_for_all_rounds_and_stays_with_the_client(tmp_path):
    for _ in range(2):
        replies(app_of(canary_clients(tmp_path / "a", CLIENTS, norm=NORM)))
        first = coins(tmp_path / "a", CLIENTS)
    replies(app_of(canary_clients(tmp_path / "a", CLIENTS, norm=NORM)), round=2)
    assert np.array_equal(coins(tmp_path / "a", CLIENTS), first)
    replies(app_of(canary_clients(tmp_path / "b", CLIENTS, norm=NORM)))
    assert not np.array_equal(coins(tmp_path / "b", CLIENTS), first)
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0
    with pytest.raises(FedleakError, match=r"c00048\.coin"):
        coins(tmp_path / "a", CLIENTS + 1)


@pytest.mark.parametrize(("noise", "contradicted"), [(1.0, False), (0.25, True)])
def test_what_flower_s_local_dp_leaves_of_canaries(tmp_path, noise, contradicted):
    """Its noise is that of epsilon 6 by its formula; a quarter of it is found."""
    np.random.seed(5)  # Flower's noise comes from here
    delta, announced = 1e-5, 6.0
    mod = LocalDpMod(0.5, noise * 2 * 0.5, announced, delta)
    canary = canary_clients(tmp_path, CLIENTS, norm=NORM, seed=1, signed=True)
    updates = replies(app_of(mod, canary))
    canaries = privacy.directions(updates[0], CLIENTS, seed=1, step=1)
    scores = [canaries.score(update)[client] for client, update in enumerate(updates)]
    shown = privacy.bounds(
        scores, coins(tmp_path, CLIENTS), delta=delta, signed=True, confidence=0.999
    )
    assert (shown.largest > announced) == contradicted
