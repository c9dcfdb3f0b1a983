"""The rules that end objects, links and processes, at any time."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from verification.internals import cut, keep_socket_file, listener_of, senders_of, worker_of
from verification.model.receivers import ReceiverRules
from verification.model.records import Call, Outcome, Receiver, Sender
from verification.model.senders import SenderRules, senders


class EndRules(SenderRules, ReceiverRules):
    """Rules that end objects, links and processes."""

    @initialize(has_receiver=st.booleans())
    def begin(self, has_receiver: bool) -> None:
        self.open_sender(2, 128 << 10)
        if has_receiver:
            self._open_receiver(None)

    @precondition(lambda self: self.living)
    @rule(sender=senders, is_killed=st.booleans())
    def end_a_sender(self, sender: Sender, is_killed: bool) -> None:
        if is_killed:
            self._kill_sender(sender)
        else:
            self._close_sender(sender)

    def _close_sender(self, sender: Sender, end: str = "closed") -> None:
        sender.end = end
        for loss in sender.losses:
            if loss.noticed is None:
                loss.is_certain = False  # its closing frame may be read first
        self.let_go(sender)

        def finish(call: Call, outcome: Outcome) -> None:
            for message in sender.messages:
                if message.state == "open":
                    message.state = "dropped"

        self.call("close", sender, sender.sender.aclose(), finish)

    def let_go(self, sender: Sender) -> None:
        """Stop holding the worker of a sender."""
        worker = worker_of(sender.sender)
        if self.steps.is_held(worker):
            self.steps.let_go(worker)

    def _kill_sender(self, sender: Sender) -> None:
        """End a sender like a killed process: its sockets are closed, without a closing frame."""
        with self.steps.inside():
            sender.sender._disconnect()
            sender.sender.discard_all()  # posted messages, which closing would wait for
        for call in self.of(sender):
            self.cancel(call)
        self._close_sender(sender, "killed")  # for the resources of this process, which the kernel would free

    @precondition(lambda self: self.receiver)
    @rule(is_killed=st.booleans(), is_quiet=st.booleans())
    def end_the_receiver(self, is_killed: bool, is_quiet: bool) -> None:
        """Close or kill the receiver, perhaps while nothing else happens."""
        assert self.receiver is not None
        if is_quiet:
            self.settle()
            # A receiver that closes releases the memory of tensors that were not taken.
            self.note_who_waits([one for one in self.living if one.met], frees_memory=not is_killed)
        if is_killed:
            self._kill_receiver(self.receiver)
        else:
            self._close_receiver(self.receiver)
        if is_quiet:
            self.settle()

    def _close_receiver(self, receiver: Receiver) -> None:
        self.lose_receiver(receiver)
        self.call("close", receiver, receiver.receiver.aclose())

    def _kill_receiver(self, receiver: Receiver) -> None:
        """End a receiver like a killed process: its sockets are closed, and its socket file stays."""
        keep_socket_file(receiver.receiver)
        with self.steps.inside():
            listener_of(receiver.receiver).close()
            for peer in senders_of(receiver.receiver).values():
                peer.transport.close()
        for call in self.of(receiver):
            self.cancel(call)
        self._close_receiver(receiver)

    @precondition(lambda self: any(sender.met for sender in self.living))
    @rule(data=st.data(), is_quiet=st.booleans())
    def break_a_link(self, data: st.DataObject, is_quiet: bool) -> None:
        """Cut a connection of two living sides, perhaps while nothing else happens."""
        if is_quiet:
            self.settle()
        connected = [one for one in self.living if one.met]
        if not connected:
            return  # a limit of the receiver has refused it since
        sender = data.draw(st.sampled_from(connected))
        session = sender.sender._session
        if session is not None and not session.transport.is_closed:
            if is_quiet:
                self.note_who_waits([sender])
            cut(session.transport)
            sender.lose(self.tick(), is_certain=True)
            if is_quiet:
                self.settle()
