"""The targets: what takes conversations, the share of each in the duration, and the meaning of an input."""

from verification.fuzz.bodies import message_parts
from verification.fuzz.decoding import Decoding
from verification.fuzz.feeding import Feeding
from verification.fuzz.grammar import ROLES, any_content, conversation
from verification.fuzz.live_broadcasts import LivePublisher, LiveSubscriber
from verification.fuzz.live_requests import LiveClient, LiveServer
from verification.fuzz.live_tensors import LiveReceiver, LiveSender
from verification.fuzz.living import Live
from verification.fuzz.steps import Conversation, Step
from verification.fuzz.wire import Chooser

# Real peers by their roles, which talk to rogues in another process, and code without peers.
LIVE: dict[str, type[Live]] = {
    "receiver": LiveReceiver,
    "sender": LiveSender,
    "publisher": LivePublisher,
    "subscriber": LiveSubscriber,
    "server": LiveServer,
    "client": LiveClient,
}
PURE: dict[str, type[Decoding | Feeding]] = {"decoder": Decoding, "connections": Feeding}

# The relative duration of each target: the name of pure code, or a role and a link.
_LINKED = [f"{role}, {link}" for role in ROLES for link in ("unix", "tcp")]
TARGETS = dict.fromkeys(PURE, 15) | dict.fromkeys(_LINKED, 10)


def conversation_of(target: str, data: bytes) -> Conversation:
    """Return the conversation that an input of a pure target represents."""
    chooser = Chooser(data)
    if target != "decoder":
        return conversation(chooser, chooser.one_of(list(ROLES)))
    body, *buffers = message_parts(chooser, chooser.one_in())
    message = Step(body.hex(), parts=tuple(buffer.hex() for buffer in buffers))
    said = conversation(chooser, chooser.one_of(list(LIVE))).steps
    return Conversation(target, (Step(data.hex()), message, Step(any_content(chooser).hex()), *said))
