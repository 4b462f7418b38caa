"""Tensor pools: what is read is what was written, or an error; never something else."""

import threading

import numpy as np
import pytest

from pipeline.errors import ProtocolError, StaleTensor
from pipeline.tensor_pool import PoolSpec, TensorPool, TensorRef, pool_bytes


def spec(**changes: object) -> PoolSpec:
    fields = {"name": "scores", "num_slots": 3, "shape": (4, 5), "dtype": "float32"}
    return PoolSpec(**(fields | changes))


def pair(pool_spec: PoolSpec) -> tuple[TensorPool, TensorPool]:
    memory = bytearray(pool_bytes(pool_spec))
    reader = TensorPool(pool_spec, memoryview(memory).toreadonly(), is_writable=False)
    return TensorPool(pool_spec, memory, is_writable=True), reader


def filled(value: float, rows: int = 4) -> np.ndarray:
    return np.full((rows, 5), value, np.float32)


def test_reader_gets_what_was_written_until_the_ring_comes_round():
    writer, reader = pair(spec())
    refs = [writer.write(filled(value)) for value in (1.0, 2.0, 3.0)]
    assert [ref.slot for ref in refs] == [0, 1, 2]
    for value, ref in zip((1.0, 2.0, 3.0), refs, strict=True):
        np.testing.assert_array_equal(reader.read(ref), filled(value))


def test_a_slot_written_again_makes_old_references_stale():
    writer, reader = pair(spec())
    old = writer.write(filled(1.0))
    for value in (2.0, 3.0, 4.0):
        new = writer.write(filled(value))
    assert new.slot == old.slot
    with pytest.raises(StaleTensor, match=r"scores.*slot 0.*overwritten.*more than 3 slots"):
        reader.read(old)
    np.testing.assert_array_equal(reader.read(new), filled(4.0))


def test_read_returns_a_copy_that_later_writes_do_not_touch():
    writer, reader = pair(spec(num_slots=1))
    copy = reader.read(writer.write(filled(1.0)))
    writer.write(filled(2.0))
    np.testing.assert_array_equal(copy, filled(1.0))


def test_fewer_rows_may_be_written_and_read():
    writer, reader = pair(spec())
    ref = writer.write(filled(7.0, rows=2))
    np.testing.assert_array_equal(reader.read(ref, rows=2), filled(7.0, rows=2))
    assert reader.read(writer.write(filled(0.0, rows=0)), rows=0).shape == (0, 5)


@pytest.mark.parametrize(
    "array",
    [
        filled(1.0).astype(np.float64),
        filled(1.0, rows=5),
        np.zeros((4, 4), np.float32),
        np.zeros(5, np.float32),
    ],
    ids=["dtype", "too many rows", "width", "dimensions"],
)
def test_arrays_of_another_kind_are_refused_and_nothing_is_written(array):
    writer, reader = pair(spec(num_slots=1))
    ref = writer.write(filled(1.0))
    with pytest.raises(ProtocolError, match=r"takes float32 of shape \(4, 5\) or fewer rows, got"):
        writer.write(array)
    np.testing.assert_array_equal(reader.read(ref), filled(1.0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pool": "other"}, "expected a reference to pool 'scores'"),
        ({"slot": 3}, "0 <= slot < 3"),
        ({"slot": -1}, "0 <= slot < 3"),
        ({"generation": 0}, "never given out"),
        ({"generation": 3}, "never given out"),
        ({"generation": 4}, "not written yet"),
        ({"slot": 1}, "not written yet"),
    ],
)
def test_references_that_were_never_given_out_are_refused(change, reason):
    writer, reader = pair(spec())
    ref = writer.write(filled(1.0))
    fields = {"pool": ref.pool, "slot": ref.slot, "generation": ref.generation} | change
    with pytest.raises(ProtocolError, match=reason) as error:
        reader.read(TensorRef(**fields))
    assert not isinstance(error.value, StaleTensor)


def test_more_rows_than_the_pool_has_are_refused():
    writer, reader = pair(spec())
    with pytest.raises(ProtocolError, match="0 <= rows <= 4, got 5"):
        reader.read(writer.write(filled(1.0)), rows=5)


def test_a_reader_cannot_write():
    _, reader = pair(spec())
    with pytest.raises(ProtocolError, match="written by the stage that exports it"):
        reader.write(filled(1.0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "object"}, "plain numbers"),
        ({"dtype": "no such thing"}, "numpy dtype name"),
        ({"num_slots": 0}, "at least one slot"),
        ({"shape": ()}, "positive dimensions"),
        ({"shape": (4, 0)}, "positive dimensions"),
    ],
)
def test_impossible_specs_are_refused(change, reason):
    with pytest.raises(ProtocolError, match=reason):
        pool_bytes(spec(**change))


def test_a_buffer_that_is_too_small_is_refused():
    with pytest.raises(ProtocolError, match=r"expected 304 bytes of memory, got 303"):
        TensorPool(spec(), bytearray(303), is_writable=True)


def test_a_slot_that_is_being_written_is_stale_already():
    writer, reader = pair(spec(num_slots=1))
    ref = writer.write(filled(1.0))
    seen_halfway = []

    class Halfway(np.ndarray):
        """Lets the reader in while the writer is in the middle of a slot."""

        def __setitem__(self, key, value):
            super().__setitem__((key[0], slice(0, 2)), value[:2])
            with pytest.raises(StaleTensor):
                reader.read(ref)
            seen_halfway.append(True)
            super().__setitem__(key, value)

    writer._slots = writer._slots.view(Halfway)
    new = writer.write(filled(2.0))
    assert seen_halfway
    np.testing.assert_array_equal(reader.read(new), filled(2.0))


def test_a_reader_that_races_the_writer_sees_whole_versions_or_stale_ones():
    """A thread rewrites one large slot; every read is one value throughout, or StaleTensor."""
    pool_spec = spec(num_slots=1, shape=(256, 1024))
    writer, reader = pair(pool_spec)
    refs = [writer.write(np.zeros(pool_spec.shape, np.float32))]
    is_done = threading.Event()

    def rewrite() -> None:
        for value in range(1, 200):
            refs[0] = writer.write(np.full(pool_spec.shape, value, np.float32))
        is_done.set()

    thread = threading.Thread(target=rewrite)
    thread.start()
    num_torn = 0
    while not is_done.is_set():
        try:
            copy = reader.read(refs[0])
        except StaleTensor:
            continue
        num_torn += int(copy.min() != copy.max())
    thread.join()
    assert num_torn == 0
    assert reader.read(refs[0])[0, 0] == 199.0
