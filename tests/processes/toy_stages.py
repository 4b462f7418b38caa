"""Toy stages and messages: what the runtime does, without models. Imported by the stage processes too."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import time
from pathlib import Path

import msgspec
import numpy as np

from pipeline.errors import ConfigError, ProtocolError, StaleTensor
from pipeline.messages import Message, StageName
from pipeline.stage import Stage, StageContext
from pipeline.tensor_pool import PoolSpec, TensorRef


class Item(Message, frozen=True, kw_only=True):
    number: int
    text: str = ""


class TensorItem(Message, frozen=True, kw_only=True):
    number: int
    ref: TensorRef


class Settings(msgspec.Struct, kw_only=True):
    receiver: StageName = StageName.FRONTEND
    """Where relays send to."""
    copies: int = 1
    num_slots: int = 4


class Relay(Stage):
    """Passes every item on, `copies` times; refuses negative numbers."""

    accepts = Item

    def __init__(self, context: StageContext) -> None:
        self.outbox = context.outbox
        self.pools = context.pools
        self.settings = msgspec.msgpack.decode(context.settings, type=Settings)

    def setup(self) -> None:
        pass

    def handle(self, message: Item) -> None:
        if message.number < 0:
            raise ProtocolError(f"expected a number of at least 0, got {message.number}")
        for _ in range(self.settings.copies):
            self.outbox.send(self.settings.receiver, message)

    def close(self) -> None:
        pass


class Echo(Relay):
    """Answers the frontend."""

    def handle(self, message: Item) -> None:
        self.outbox.send(StageName.FRONTEND, message)


class Describe(Relay):
    """Answers with facts about its process."""

    def handle(self, message: Item) -> None:
        comm = Path("/proc/self/comm").read_text().strip()
        cores = sorted(os.sched_getaffinity(0))
        text = f"{comm} cores={cores} omp={os.environ['OMP_NUM_THREADS']}"
        self.outbox.send(StageName.FRONTEND, Item(number=os.getpid(), text=text))


class Worker(Relay):
    """Does `number` slices of background work for an item, and tells the frontend about each."""

    def setup(self) -> None:
        self.num_left = 0

    def handle(self, message: Item) -> None:
        self.num_left += message.number

    def work(self) -> bool:
        if self.num_left == 0:
            return False
        self.num_left -= 1
        self.outbox.send(StageName.FRONTEND, Item(number=self.num_left))
        return True


class TensorWriter(Relay):
    """Writes a tensor per item and passes its reference to the predictor; text `overrun` makes it stale."""

    def setup(self) -> None:
        spec = PoolSpec(name="toy", num_slots=self.settings.num_slots, shape=(8, 1000), dtype="float32")
        self.pool = self.pools.export(spec)

    def handle(self, message: Item) -> None:
        array = np.full((8, 1000), message.number, np.float32)
        ref = self.pool.write(array)
        for _ in range(self.settings.num_slots if message.text == "overrun" else 0):
            self.pool.write(array + 1)
        self.outbox.send(StageName.PREDICTOR, TensorItem(number=message.number, ref=ref))


class TensorReader(Relay):
    """Tells the frontend what is in each tensor."""

    accepts = TensorItem

    def connect(self, pools):
        self.pool = pools["toy"]

    def handle(self, message: TensorItem) -> None:
        try:
            array = self.pool.read(message.ref)
        except StaleTensor:
            self.outbox.send(StageName.FRONTEND, Item(number=message.number, text="stale"))
            raise
        text = f"{array.shape} {array.min():g}..{array.max():g}"
        self.outbox.send(StageName.FRONTEND, Item(number=message.number, text=text))


class Deaf(Relay):
    """Never returns from handling its first item."""

    def handle(self, message: Item) -> None:
        self.outbox.send(StageName.FRONTEND, message)
        while True:
            time.sleep(1000)


class Crashing(Relay):
    def handle(self, message: Item) -> None:
        raise ZeroDivisionError(f"toy crash at {message.number}")


class CrashesInSetup(Relay):
    def setup(self) -> None:
        raise ZeroDivisionError("toy crash in setup")


class RefusesSettings(Relay):
    def setup(self) -> None:
        raise ConfigError("toy.size=3: expected an even number; change it to 2 or 4")


class CrashesAtExit(Echo):
    """Holds a library that does not survive the end of the interpreter."""

    def setup(self) -> None:
        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)


class RefusesSettingsAndCrashesAtExit(CrashesAtExit):
    def setup(self) -> None:
        super().setup()
        raise ConfigError("toy.size=3: expected an even number; change it to 2 or 4")


class NeverReady(Relay):
    """Exports a pool and then loads forever."""

    def setup(self) -> None:
        self.pools.export(PoolSpec(name="never", num_slots=1, shape=(1,), dtype="int8"))
        while True:
            time.sleep(1000)


class LoadsInCallback(NeverReady):
    """Exports a pool and loads forever inside a callback of foreign code, which drops exceptions."""

    def setup(self) -> None:
        call = ctypes.CFUNCTYPE(None)(super().setup)
        while True:
            call()


class DiesInSetup(TensorWriter):
    """Is killed after exporting a pool."""

    def setup(self) -> None:
        super().setup()
        os.kill(os.getpid(), 9)
