"""The one-thread runtime: order, decoding, pools, seeded interleavings, and no silent hang."""

import msgspec
import numpy as np
import pytest

from pipeline.errors import EngineDead, ProtocolError, StaleTensor
from pipeline.inprocess import InProcess
from pipeline.messages import Message, StageName
from pipeline.stage import Stage
from pipeline.tensor_pool import PoolSpec, TensorRef

A, B, C = StageName.TOKENIZER, StageName.SPECULATOR, StageName.VERIFIER


class Item(Message, kw_only=True):
    number: int


class Tensor(Message, kw_only=True):
    ref: TensorRef


class Relay(Stage):
    """Passes items on to one receiver."""

    accepts = Item

    def __init__(self, context, receiver):
        self.outbox, self.receiver = context.outbox, receiver
        self.life = []

    def setup(self):
        self.life.append("setup")

    def connect(self, pools):
        self.life.append("connect")

    def handle(self, message):
        if message.number < 0:
            raise ProtocolError("negative")
        self.outbox.send(self.receiver, message)

    def close(self):
        self.life.append("close")


class Worker(Relay):
    """Sends one item for each slice of work it was given."""

    def __init__(self, context, receiver):
        super().__init__(context, receiver)
        self.num_left = 0

    def handle(self, message):
        self.num_left += message.number

    def work(self):
        if self.num_left == 0:
            return False
        self.num_left -= 1
        self.outbox.send(self.receiver, Item(number=self.num_left))
        return True


def relay(receiver, kind=Relay):
    return lambda context: kind(context, receiver)


def fan_in(**options):
    """Two relays into one, that answers the frontend."""
    stages = {A: relay(C), B: relay(C), C: relay(StageName.FRONTEND)}
    return InProcess(stages, frontend_accepts=Item, **options)


def numbers(runtime):
    return [message.number for message in runtime.outputs]


def test_messages_arrive_in_the_order_they_were_sent():
    with fan_in() as runtime:
        for number in range(10):
            runtime.send(A if number % 2 else B, Item(number=number))
        runtime.run_until(lambda: len(runtime.outputs) == 10)
        assert numbers(runtime) == list(range(10))


def test_a_seed_interleaves_senders_but_keeps_each_one_in_order():
    def order(seed):
        with fan_in(order_seed=seed) as runtime:
            for number in range(20):
                runtime.send(A if number % 2 else B, Item(number=number))
            runtime.run_until_idle()
            return numbers(runtime)

    orders = [order(seed) for seed in range(5)]
    assert order(3) == orders[3]
    assert len({tuple(one) for one in orders}) == 5
    for one in orders:
        assert [n for n in one if n % 2] == list(range(1, 20, 2))
        assert [n for n in one if not n % 2] == list(range(0, 20, 2))


def test_work_runs_when_no_message_waits():
    with InProcess({A: relay(StageName.FRONTEND, Worker)}, frontend_accepts=Item) as runtime:
        runtime.send(A, Item(number=2))
        runtime.send(A, Item(number=1))
        runtime.run_until_idle()
        assert numbers(runtime) == [2, 1, 0]


def test_a_message_of_the_wrong_type_fails_where_it_is_sent():
    with fan_in() as runtime, pytest.raises(TypeError, match=r"frontend sent tokenizer .* does not accept"):
        runtime.send(A, Tensor(ref=TensorRef(pool="p", slot=0, generation=2)))


def test_a_field_of_the_wrong_type_is_named():
    with fan_in() as runtime, pytest.raises(TypeError, match=r"number.*got Item"):
        runtime.send(A, Item(number="seven"))


def test_a_receiver_outside_the_run_is_named():
    with InProcess({A: relay(C)}) as runtime:
        runtime.send(A, Item(number=1))
        with pytest.raises(LookupError, match="tokenizer sent Item to target-verifier, which is not part"):
            runtime.run_until_idle()


def test_a_protocol_error_is_counted_and_the_stage_goes_on():
    with fan_in() as runtime:
        runtime.send(A, Item(number=-1))
        runtime.send(A, Item(number=1))
        runtime.run_until_idle()
        assert numbers(runtime) == [1]
        assert [(name, str(error)) for name, error in runtime.protocol_errors] == [(A, "negative")]


def test_a_held_message_and_those_behind_it_wait_until_it_is_let_go():
    with fan_in(hold=lambda sender, receiver, message: sender is A and message.number == 1) as runtime:
        for number in (1, 3):
            runtime.send(A, Item(number=number))
        runtime.send(B, Item(number=2))
        runtime.run_until_idle()
        assert numbers(runtime) == [2]
        runtime.hold = None
        runtime.run_until_idle()
        assert numbers(runtime) == [2, 1, 3]


def test_idleness_before_the_condition_tells_what_each_stage_waits_for():
    with fan_in(hold=lambda sender, receiver, message: receiver is C) as runtime:
        runtime.send(A, Item(number=5))
        with pytest.raises(EngineDead) as error:
            runtime.run_until(lambda: bool(runtime.outputs))
    assert "tokenizer: received 1, last Item(number=5)" in str(error.value)
    assert "target-verifier: received 0, last None; 1 waiting from tokenizer" in str(error.value)


def test_stages_are_set_up_connected_and_closed():
    with fan_in() as runtime:
        stage = runtime.stages[A]
    runtime.close()
    assert stage.life == ["setup", "connect", "close", "close"]


class Writer(Relay):
    def __init__(self, context):
        super().__init__(context, B)
        self.pools = context.pools

    def setup(self):
        self.pool = self.pools.export(PoolSpec(name="p", num_slots=2, shape=(2,), dtype="int32"))

    def connect(self, pools):
        assert not pools

    def handle(self, message):
        self.outbox.send(B, Tensor(ref=self.pool.write(np.full(2, message.number, np.int32))))


class Reader(Relay):
    accepts = Tensor

    def connect(self, pools):
        self.pool = pools["p"]

    def handle(self, message):
        self.outbox.send(StageName.FRONTEND, Item(number=int(self.pool.read(message.ref).sum())))


def test_tensors_travel_by_reference_and_go_stale():
    stages = {B: relay(StageName.FRONTEND, Reader), A: Writer}
    with InProcess(stages, frontend_accepts=Item) as runtime:
        for number in (1, 2):
            runtime.send(A, Item(number=number))
        runtime.run_until_idle()
        assert numbers(runtime) == [2, 4]
        runtime.hold = lambda sender, receiver, message: receiver is B
        for number in (3, 4, 5):
            runtime.send(A, Item(number=number))
        runtime.run_until_idle()
        runtime.hold = None
        runtime.run_until_idle()
        assert numbers(runtime) == [2, 4, 8, 10]
        assert [type(error) for _, error in runtime.protocol_errors] == [StaleTensor]


def test_settings_reach_the_factory():
    seen = []

    def factory(context):
        seen.append(msgspec.msgpack.decode(context.settings))
        return Relay(context, StageName.FRONTEND)

    with InProcess({A: factory}, msgspec.msgpack.encode({"depth": 4})):
        assert seen == [{"depth": 4}]
