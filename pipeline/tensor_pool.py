"""Fixed pools of equal tensors that one stage writes and others read, named in messages by `TensorRef`.

A pool has `num_slots` slots of one shape and dtype. Its owner writes a slot and gets a reference with
the slot's new generation; a reader that comes after the slot was written again gets `StaleTensor`, never
the wrong numbers. numpy only: stages that use torch wrap the arrays with `torch.from_numpy`.

A pool lies over any writable buffer and does not know who allocated it (`pipeline.shm_memory` between
processes, a bytearray within one). Layout: one int64 generation per slot, padded to 64 bytes, then the
slots. A generation is even when its slot is complete and odd while it is being written (a seqlock with
one writer): a reader compares it with the reference before and after it copies. That order is kept by
x86; on other processors the message that carries the reference is the barrier before the first check.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pipeline.errors import ProtocolError, StaleTensor
from pipeline.tensor_ref import TensorRef as TensorRef

_ALIGNMENT = 64


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a pool holds."""

    name: str
    num_slots: int
    shape: tuple[int, ...]
    """Shape of one slot."""
    dtype: str
    """A numpy dtype name."""


def pool_dtype(spec: PoolSpec) -> np.dtype[Any]:
    """The numpy dtype of a pool: numbers and booleans only, because an object is a pointer.

    Raises `ProtocolError` for anything else, and for a spec without slots or with an empty shape.
    """
    try:
        dtype = np.dtype(spec.dtype)
    except TypeError as error:
        raise ProtocolError(f"pool {spec.name!r}: expected a numpy dtype name, got {spec.dtype!r}") from error
    if dtype.kind not in "biuf":
        raise ProtocolError(f"pool {spec.name!r}: expected a dtype of plain numbers, got {spec.dtype!r}")
    if spec.num_slots < 1 or not spec.shape or min(spec.shape) < 1:
        raise ProtocolError(
            f"pool {spec.name!r}: expected at least one slot and positive dimensions, "
            f"got num_slots={spec.num_slots}, shape={spec.shape}"
        )
    return dtype


def pool_bytes(spec: PoolSpec) -> int:
    """Bytes of memory a pool needs, header included. Raises `ProtocolError` for an impossible spec."""
    return _header_bytes(spec) + spec.num_slots * math.prod(spec.shape) * pool_dtype(spec).itemsize


class TensorPool:
    """The slots of one pool, seen by its writer (`is_writable`) or by a reader."""

    def __init__(self, spec: PoolSpec, buffer: bytearray | memoryview, *, is_writable: bool) -> None:
        """Lay a pool over `buffer`, at least `pool_bytes(spec)` long and zero when fresh."""
        num_bytes = pool_bytes(spec)
        view = memoryview(buffer).cast("B")
        if len(view) < num_bytes:
            raise ProtocolError(f"pool {spec.name!r}: expected {num_bytes} bytes of memory, got {len(view)}")
        self.spec = spec
        self._is_writable = is_writable
        self._dtype = pool_dtype(spec)
        self._generations = np.ndarray((spec.num_slots,), np.int64, view)
        self._slots = np.ndarray((spec.num_slots, *spec.shape), self._dtype, view, _header_bytes(spec))
        self._next_slot = 0

    def write(self, array: npt.NDArray[Any]) -> TensorRef:
        """Copy `array` into the next slot of the ring and return its reference.

        array: dtype and shape of the pool, or fewer rows in its first dimension; the rows beyond are
            undefined, so tell the reader how many there are (`read(ref, rows=n)`).
        References to what the slot held before are stale from here on: num_slots is how many writes a
        reference lives. Raises `ProtocolError` for another shape or dtype, or in a reader.
        """
        if not self._is_writable:
            raise ProtocolError(f"pool {self.spec.name!r} is written by the stage that exports it, not here")
        self._check_fits(array)
        slot = self._next_slot
        self._next_slot = (slot + 1) % self.spec.num_slots
        generation = int(self._generations[slot])
        self._generations[slot] = generation + 1
        self._slots[slot, : array.shape[0]] = array
        self._generations[slot] = generation + 2
        return TensorRef(pool=self.spec.name, slot=slot, generation=generation + 2)

    def read(self, ref: TensorRef, rows: int | None = None) -> npt.NDArray[Any]:
        """Return a copy of what `ref` names: all rows, or the first `rows`.

        Raises `StaleTensor` when the slot was written again, even during the copy, and `ProtocolError`
        when the reference cannot be one of this pool's.
        """
        rows = self.spec.shape[0] if rows is None else rows
        self._check_reference(ref, rows)
        self._check_generation(ref)
        copy = self._slots[ref.slot, :rows].copy()
        self._check_generation(ref)
        return copy

    def release(self) -> None:
        """Let go of the memory, so that it can be unmapped. May be called twice; nothing works after it."""
        self._generations = np.zeros(0, np.int64)
        self._slots = np.zeros(0, self._dtype)
        self._is_writable = False

    def _check_fits(self, array: npt.NDArray[Any]) -> None:
        shape, dtype = self.spec.shape, self._dtype
        fits = array.ndim == len(shape) and array.shape[1:] == shape[1:] and array.shape[0] <= shape[0]
        if array.dtype != dtype or not fits:
            raise ProtocolError(
                f"pool {self.spec.name!r} takes {dtype} of shape {shape} or fewer rows, "
                f"got {array.dtype} of shape {array.shape}"
            )

    def _check_reference(self, ref: TensorRef, rows: int) -> None:
        name = self.spec.name
        if ref.pool != name:
            raise ProtocolError(f"expected a reference to pool {name!r}, got one to {ref.pool!r}")
        if not 0 <= ref.slot < len(self._generations):
            raise ProtocolError(
                f"pool {name!r}: expected 0 <= slot < {len(self._generations)}, got {ref.slot}"
            )
        if not 0 <= rows <= self.spec.shape[0]:
            raise ProtocolError(f"pool {name!r}: expected 0 <= rows <= {self.spec.shape[0]}, got {rows}")
        if ref.generation < 2 or ref.generation % 2:
            raise ProtocolError(f"pool {name!r}: generation {ref.generation} was never given out")

    def _check_generation(self, ref: TensorRef) -> None:
        current = int(self._generations[ref.slot])
        if current > ref.generation:
            raise StaleTensor(
                f"pool {ref.pool!r}, slot {ref.slot}: generation {ref.generation} was overwritten "
                f"(now {current}); read sooner, or give the pool more than {self.spec.num_slots} slots"
            )
        if current < ref.generation:
            raise ProtocolError(
                f"pool {ref.pool!r}, slot {ref.slot}: generation {ref.generation} is not written yet "
                f"(now {current})"
            )


def _header_bytes(spec: PoolSpec) -> int:
    return -(-8 * spec.num_slots // _ALIGNMENT) * _ALIGNMENT
