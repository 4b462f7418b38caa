"""The paged KV cache: who holds which page, and moving slots."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.errors import ConfigError, RequestError
from stages.model.pages import KVCache, KVHandle
from stages.model.shape import tiny_shape


def make_cache(*, num_slots: int = 32, page_size: int = 4, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(shape=tiny_shape(), num_slots=num_slots, page_size=page_size, dtype=dtype)


def fill(cache: KVCache, handle: KVHandle, count: int) -> None:
    """Give each logical slot its own number, different in every layer, head and dimension."""
    noise = torch.randn(cache.storage[:, :, :, 0].shape, generator=torch.Generator().manual_seed(1))
    for slot in range(count):
        cache.storage[:, :, :, handle.physical_list[slot]] = noise + 100.0 * slot


def numbers(cache: KVCache, handle: KVHandle, count: int) -> list[int]:
    """Which number each logical slot holds now, checked to be the same in every layer."""
    found = []
    noise = torch.randn(cache.storage[:, :, :, 0].shape, generator=torch.Generator().manual_seed(1))
    for slot in range(count):
        values = (cache.storage[:, :, :, handle.physical_list[slot]] - noise) / 100.0
        assert torch.allclose(values, values.flatten()[0], atol=1e-4)
        found.append(round(values.flatten()[0].item()))
    return found


def fragmented(cache: KVCache, num_slots: int) -> KVHandle:
    """A handle whose pages are not contiguous: every other page was taken when it was made."""
    singles = [cache.allocate(1) for _ in range(cache.num_pages)]
    for handle in singles[::2]:
        cache.free(handle)
    handle = cache.allocate(num_slots)
    for other in singles[1::2]:
        cache.free(other)
    return handle


def test_allocation_rounds_up_to_pages_and_freeing_gives_all_back() -> None:
    cache = make_cache()
    first, second = cache.allocate(5), cache.allocate(4)
    assert (first.num_slots, second.num_slots) == (8, 4)
    assert not set(first.physical_list) & set(second.physical_list)
    assert cache.free_pages == 5
    cache.free(first)
    cache.free(second)
    assert cache.free_pages == 8
    cache.check_integrity()


def test_too_large_a_request_is_refused_with_numbers_and_takes_nothing() -> None:
    cache = make_cache()
    cache.allocate(20)
    with pytest.raises(RequestError, match=r"13 KV slots .*4 pages of 4.* 3 of 8 pages are free"):
        cache.allocate(13)
    assert cache.free_pages == 3
    cache.allocate(12)


def test_contiguous_pages_are_preferred_over_lower_ones() -> None:
    cache = make_cache()
    handles = [cache.allocate(4) for _ in range(8)]
    for index in (0, 2, 5, 6, 7):
        cache.free(handles[index])
    run = cache.allocate(12)
    assert (run.pages, run.first_slot) == ([5, 6, 7], 20)
    scattered = cache.allocate(8)
    assert (scattered.pages, scattered.first_slot) == ([0, 2], None)


def test_integrity_check_notices_a_handle_that_is_still_out() -> None:
    cache = make_cache()
    handle = cache.allocate(5)
    with pytest.raises(AssertionError, match="1 handles hold 2 pages"):
        cache.check_integrity()
    cache.free(handle)
    with pytest.raises(AssertionError, match="freed twice"):
        cache.free(handle)
    cache.check_integrity()


@pytest.mark.parametrize("is_fragmented", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_move_reads_everything_before_it_writes(page_size: int, is_fragmented: bool) -> None:
    cache = make_cache(num_slots=4 * 32, page_size=page_size)
    handle = fragmented(cache, 20) if is_fragmented else cache.allocate(20)
    assert (handle.first_slot is None) == is_fragmented
    fill(cache, handle, 20)
    before = cache.storage.clone()
    cache.move(handle, src=[12, 10, 11, 3], dst=[10, 11, 12, 3])
    expected = list(range(20))
    expected[10:13] = [12, 10, 11]
    assert numbers(cache, handle, 20) == expected
    untouched = [slot for slot in range(before.shape[3]) if slot not in handle.physical_list]
    assert torch.equal(cache.storage[:, :, :, untouched], before[:, :, :, untouched])


def test_contiguous_slots_are_read_as_a_view_and_fragmented_ones_in_logical_order() -> None:
    cache = make_cache(num_slots=64)
    handle = cache.allocate(10)
    keys, _ = cache.read(1, handle, 10)
    assert keys.untyped_storage().data_ptr() == cache.storage.untyped_storage().data_ptr()
    cache.free(handle)
    handle = fragmented(cache, 10)
    fill(cache, handle, 10)
    keys, values = cache.read(1, handle, 9)
    assert torch.equal(keys, cache.storage[1, 0][:, handle.physical_list[:9]])
    assert torch.equal(values, cache.storage[1, 1][:, handle.physical_list[:9]])


def test_a_large_cache_commits_memory_only_as_it_is_written() -> None:
    def resident_mib() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20

    before = resident_mib()
    # 2 layers x 2 x 2 heads x 2^20 slots x 16 x 8 bytes: 1 GiB.
    cache = make_cache(num_slots=1 << 20, page_size=1 << 10, dtype=torch.float64)
    assert cache.storage[-1, -1, -1, -1, -1].item() == 0.0
    assert resident_mib() - before < 100


def test_a_cache_beyond_the_machines_memory_is_refused_with_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"the KV cache needs .* GiB .*the machine has .*lower max_requests"
    ):
        KVCache(shape=tiny_shape(), num_slots=1 << 40, page_size=16, dtype=torch.float32)


def test_long_pages_are_named_where_rounding_up_to_them_is_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"pages of 1000000000 slots.*lower placement\.page_size"):
        make_cache(num_slots=1_000_000_000_000, page_size=1_000_000_000)
    with pytest.raises(ConfigError, match=r"machine has [0-9.]+ GiB; lower max_requests"):
        make_cache(num_slots=1_000_000_000_000, page_size=16)


def test_a_cache_beyond_this_processs_own_limit_is_refused_with_numbers() -> None:
    # In a process of its own: what other tests freed, or told the allocator to keep, could make room.
    code = """
import resource, torch
from pathlib import Path
from stages.model.pages import KVCache
from stages.model.shape import tiny_shape
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20),) * 2)
KVCache(shape=tiny_shape(), num_slots=1 << 20, page_size=16, dtype=torch.float64)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    # 1 GiB, which the machine has and the process may not take.
    last = done.stderr.splitlines()[-1]
    assert last.startswith("conf.errors.ConfigError: the KV cache needs 1.0 GiB ")
    assert last.endswith("lower max_requests or model.max_context")
