"""An update on its way out of a client, before it is encoded for the wire."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedleak.config.federation.canaries import ClientCanaries
from fedleak.flower.arrays import to_array
from fedleak.store.run import Key
from fedleak.training.observation import ClientUpdate
from fedleak.training.wire import to_wire


class Outgoing(Message):
    """A reply whose update is still tensors, so that mods change it without decoding it.

    Attributes:
        key: The round and the client.
        update: What is sent, after the mods that have run so far.
        noted: What the client notes of the training, which stays here: figures, and which records
            its private steps drew.
        canaries: The canaries of an audit; all but those in the update stay here, too.
    """

    def __init__(
        self,
        key: Key,
        update: ClientUpdate,
        noted: Mapping[str, Any],
        canaries: ClientCanaries | None,
        *,
        reply_to: Message,
    ) -> None:
        super().__init__(RecordDict(), reply_to=reply_to)
        self.key, self.update, self.noted, self.canaries = key, update, noted, canaries

    def encoded(self, reply_to: Message) -> Message:
        """Returns the reply that leaves: the update and three numbers.

        The update is dropped here, or it would be in memory twice.
        """
        numbers = {"num-examples": self.update.num_examples, **self.key._asdict()}
        tensors, arrays = to_wire(self.update.tensors), ArrayRecord()
        self.update = replace(self.update, tensors={})
        for name in list(tensors):
            arrays[name] = to_array(tensors.pop(name))
        content = RecordDict({"update": arrays, "metrics": MetricRecord(numbers)})
        return Message(content, reply_to=reply_to)
