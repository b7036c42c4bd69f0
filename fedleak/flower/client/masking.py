"""The client's side of secure aggregation: Flower's SecAgg+ around what this client sends."""

from functools import partial

from flwr.app import Context, Message, MessageType
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import fitres_to_recorddict

from fedleak.config.federation.protection import protocol_of
from fedleak.flower.client.context import work_of
from fedleak.flower.client.mods import Next
from fedleak.flower.client.outgoing import Outgoing
from fedleak.util.errors import FedleakError


def mask(message: Message, context: Context, call_next: Next) -> Message:
    """Takes part in SecAgg+ if the experiment sets it; then the update leaves only masked.

    Four messages make a round: keys, shares of keys, the masked update, shares to unmask the sum.
    Only the third is about training, and contains the assignment.

    Raises:
        FedleakError: The server asks for an unmasked update.
    """
    if RECORD_KEY_CONFIGS in message.content.config_records:
        return secaggplus_mod(message, context, partial(_for_protocol, call_next=call_next))
    if message.metadata.message_type == MessageType.TRAIN:
        protocol = protocol_of(work_of(message, context).experiment)
        if protocol is not None:
            raise FedleakError(
                f"the experiment sums with {protocol.protocol!r}, and the server asks for the "
                "update itself: this client does not send it"
            )
    return call_next(message, context)


def _for_protocol(message: Message, context: Context, call_next: Next) -> Message:
    """Trains, and returns the update in the records that Flower's mod reads.

    The update is rounded already. So in float64 it is unchanged by Flower's rounding, whose random
    draws cannot be repeated, and a run gives the same sum again.
    """
    protocol = protocol_of(work_of(message, context).experiment)
    if protocol is None:
        raise FedleakError("the server asks for SecAgg+, and the experiment does not")
    reply = call_next(message, context)
    assert isinstance(reply, Outgoing)
    exact = protocol.on_grid(reply.update)
    arrays = [exact.tensors[name].numpy() for name in sorted(exact.tensors)]
    parameters = ndarrays_to_parameters(arrays)
    result = FitRes(Status(Code.OK, ""), parameters, reply.update.num_examples, {})
    return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)
