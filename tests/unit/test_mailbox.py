"""Mailboxes within one process: round trip, refusals at the door, overflow."""

import msgspec
import pytest
import zmq

from pipeline.errors import EngineDead
from pipeline.mailbox import Header, Inbox, MailOutbox
from pipeline.messages import CancelRequest, Committed, Message, StageName, TokenizerMessage

FRONTEND, TOKENIZER, VERIFIER = StageName.FRONTEND, StageName.TOKENIZER, StageName.VERIFIER
ADDRESS = "inproc://tokenizer"
EPOCH = 7


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def inbox(context):
    return Inbox(context, ADDRESS, accepts=TokenizerMessage, senders=[FRONTEND], epoch=EPOCH)


def outbox(context, sender=FRONTEND, epoch=EPOCH, **options) -> MailOutbox:
    return MailOutbox(context, {TOKENIZER: ADDRESS}, sender=sender, epoch=epoch, **options)


def receive(inbox: Inbox, timeout_ms: int = 2000) -> tuple[StageName, Message] | None:
    """The next good message; the wait is for delivery, which ZeroMQ does in a thread of its own."""
    assert inbox.socket.poll(timeout_ms)
    return inbox.receive()


def test_a_message_arrives_with_its_sender(context, inbox):
    outbox(context).send(TOKENIZER, CancelRequest(request_id="a"))
    assert receive(inbox) == (FRONTEND, CancelRequest(request_id="a"))
    assert inbox.receive() is None
    assert (inbox.num_received, inbox.num_dropped) == (1, 0)
    assert inbox.transit_ns > 0


@pytest.mark.parametrize(
    ("sender", "epoch"), [(VERIFIER, EPOCH), (FRONTEND, EPOCH + 1)], ids=["unknown sender", "other run"]
)
def test_a_message_of_another_sender_or_run_is_dropped(context, inbox, sender, epoch):
    outbox(context, sender, epoch).send(TOKENIZER, CancelRequest(request_id="a"))
    assert receive(inbox) is None
    assert (inbox.num_received, inbox.num_dropped) == (0, 1)


@pytest.mark.parametrize(
    "payload",
    [
        {"type": "NoSuchMessage"},
        {"type": "CancelRequest"},
        {"type": "CancelRequest", "request_id": 7},
        {"type": "CancelRequest", "request_id": "a", "extra": 1},
        {"request_id": "a"},
        7,
    ],
)
def test_what_is_not_an_accepted_message_is_dropped_and_the_next_one_is_received(context, inbox, payload):
    with context.socket(zmq.PUSH) as socket:
        socket.connect(ADDRESS)
        header = msgspec.msgpack.encode(Header(FRONTEND, EPOCH, 0))
        socket.send_multipart([header, msgspec.msgpack.encode(payload)])
        good = CancelRequest(request_id="good")
        socket.send_multipart([header, msgspec.msgpack.encode(good)])
        assert receive(inbox) == (FRONTEND, good)
    assert (inbox.num_received, inbox.num_dropped) == (1, 1)


def test_a_message_for_another_receiver_is_dropped(context, inbox):
    message = Committed(
        request_id="a", round_id=0, token_ids=[1], num_accepted=0, source=None, num_prompt_tokens=1
    )
    outbox(context).send(TOKENIZER, message)
    assert receive(inbox) is None
    assert inbox.num_dropped == 1


def test_sending_past_the_high_water_mark_raises_and_names_the_receiver(context):
    sender = outbox(context, high_water_mark=3)
    message = CancelRequest(request_id="a")
    for _ in range(3):
        sender.send(TOKENIZER, message)
    with pytest.raises(EngineDead, match="tokenizer does not keep up: over 3 messages from frontend"):
        sender.send(TOKENIZER, message)
    assert sender.num_sent == 3


def test_messages_sent_before_the_receiver_is_there_wait_for_it(context):
    sender = outbox(context)
    sender.send(TOKENIZER, CancelRequest(request_id="early"))
    inbox = Inbox(context, ADDRESS, accepts=TokenizerMessage, senders=[FRONTEND], epoch=EPOCH)
    assert receive(inbox) == (FRONTEND, CancelRequest(request_id="early"))


def test_a_receiver_that_is_not_part_of_the_run_is_named(context):
    with pytest.raises(
        LookupError, match="frontend sent CancelRequest to target-verifier, which is not part"
    ):
        outbox(context).send(VERIFIER, CancelRequest(request_id="a"))


def test_ends_may_be_closed_twice(context, inbox):
    sender = outbox(context)
    for end in (sender, inbox, sender, inbox):
        end.close()
