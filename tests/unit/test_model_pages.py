"""The paged KV cache: who holds which page, and moving slots."""

from __future__ import annotations

import random
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
    assert torch.equal(cache.storage, before), "nothing yet"
    cache.finish_moves()
    expected = list(range(20))
    expected[10:13] = [12, 10, 11]
    assert numbers(cache, handle, 20) == expected
    untouched = [slot for slot in range(before.shape[3]) if slot not in handle.physical_list]
    assert torch.equal(cache.storage[:, :, :, untouched], before[:, :, :, untouched])


def test_moves_of_several_handles_wait_for_one_another_only_where_they_must() -> None:
    cache = make_cache(num_slots=64)
    first, second = cache.allocate(10), cache.allocate(10)
    fill(cache, first, 10)
    fill(cache, second, 10)
    cache.move(first, src=[7], dst=[3])
    cache.move(second, src=[8, 9], dst=[3, 4])
    cache.move(first, src=[3], dst=[1])  # what was just moved there
    cache.finish_moves()
    assert numbers(cache, first, 10) == [0, 7, 2, 7, 4, 5, 6, 7, 8, 9]
    assert numbers(cache, second, 10) == [0, 1, 2, 8, 9, 5, 6, 7, 8, 9]


def test_what_is_left_of_a_freed_handle_is_as_it_was_to_be() -> None:
    cache = make_cache(num_slots=64)
    handle = cache.allocate(10)
    fill(cache, handle, 10)
    slot = handle.physical_list[3]
    expected = cache.storage[:, :, :, handle.physical_list[7]].clone()
    cache.move(handle, src=[7], dst=[3])
    cache.free(handle)
    assert torch.equal(cache.storage[:, :, :, slot], expected), "a later request may begin with it"


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


def test_a_handle_grows_in_place_and_is_still_read_as_a_view() -> None:
    cache = make_cache(num_slots=64)
    handle = cache.allocate(4, max_slots=32)
    other = cache.allocate(8)
    assert other.first_slot == 32, "the pages that the first may need are left to it"
    for num_slots in (5, 9, 32):
        assert cache.grow(handle, num_slots)
        assert handle.first_slot == 0
        assert handle.physical_list == list(range(handle.num_slots))
        assert handle.physical[: handle.num_slots].tolist() == handle.physical_list
    assert cache.grow(handle, 31), "it is there already"
    assert cache.free_pages == 6
    assert not cache.grow(handle, 57)
    assert (handle.num_slots, cache.free_pages) == (32, 6)
    cache.free(handle)
    cache.free(other)
    cache.check_integrity()


def test_a_handle_that_cannot_grow_in_place_is_gathered() -> None:
    cache = make_cache(num_slots=64)
    handle, other = cache.allocate(4), cache.allocate(4)
    assert cache.grow(handle, 70) is False
    assert cache.grow(handle, 60)
    assert (handle.first_slot, handle.pages) == (None, [0, *range(2, 16)])
    assert handle.physical[:60].tolist() == handle.physical_list
    fill(cache, handle, 60)
    keys, _ = cache.read(0, handle, 59)
    assert torch.equal(keys, cache.storage[0, 0][:, handle.physical_list[:59]])
    for each in (handle, other):
        cache.free(each)
    cache.check_integrity()


def test_a_text_that_was_read_before_is_shared_by_whole_pages_and_never_written() -> None:
    cache = make_cache(num_slots=64)
    cache.keeps_prefixes = True
    text = list(range(100, 114))
    first = cache.allocate(14, token_ids=text)
    assert first.num_cached == 0
    cache.keep(first, text)
    second = cache.allocate(20, token_ids=[*text[:9], 7, 7, 7, 7])
    assert (second.num_cached, second.pages[:2]) == (8, first.pages[:2])
    assert not set(second.pages[2:]) & set(first.pages)
    with pytest.raises(AssertionError, match="slot 7 is written, 8 are shared"):
        cache.move(second, [9], [7])
    with pytest.raises(AssertionError, match="slot 11 is written, 12 are shared"):
        cache.move(first, [13], [11])
    cache.free(first, text)
    cache.free(second)
    cache.check_integrity()
    third = cache.allocate(20, token_ids=text)
    assert third.num_cached == 12
    assert third.first_slot is not None, "the pages behind are free again"
    fourth = cache.allocate(12, token_ids=text[:12])
    assert fourth.num_cached == 8, "the last token is computed, for its logits"
    assert fourth.first_slot is None
    for handle in (third, fourth):
        cache.free(handle)
    cache.check_integrity()


def test_kept_pages_make_room_and_are_counted_as_free() -> None:
    cache = make_cache(num_slots=32)
    cache.keeps_prefixes = True
    texts = [[number] * 8 for number in range(4)]
    for text in texts:
        cache.free(cache.allocate(8, token_ids=text), text)
    assert cache.free_pages == 8
    found = cache.allocate(9, token_ids=[*texts[0], 5])
    assert found.num_cached == 8
    # Two kept pages of the eight are held now: three more than the others have cannot be had.
    with pytest.raises(RequestError, match="5 of 8 pages are free"):
        cache.allocate(21, token_ids=[*texts[1], 5])
    with pytest.raises(RequestError):
        cache.allocate(17, num_spare=1)
    other = cache.allocate(20)
    assert cache.free_pages == 0
    for handle in (found, other):
        cache.free(handle)
    cache.check_integrity()
    cache.free(cache.allocate(32), list(range(32)))
    assert cache.allocate(9, token_ids=[*texts[0], 5]).num_cached == 0


def test_without_the_switch_nothing_is_kept() -> None:
    cache = make_cache()
    text = list(range(8))
    cache.free(cache.allocate(8, token_ids=text), text)
    assert cache.allocate(9, token_ids=[*text, 1]).num_cached == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_texts_read_back_what_was_written_for_the_same_tokens(seed: int) -> None:
    """Every slot is written with the hash of the tokens up to it; what is shared must hold that already."""
    draw = random.Random(seed)
    page_size = draw.choice([1, 2, 4])
    cache = make_cache(num_slots=24 * page_size, page_size=page_size, dtype=torch.float64)
    cache.keeps_prefixes = True
    live: list[tuple[KVHandle, list[int]]] = []

    def mark(text: list[int], slot: int) -> float:
        return float(hash(tuple(text[: slot + 1])) % 1_000_003)

    for _ in range(300):
        if draw.random() < 0.5 or not live:
            text = [draw.randrange(2) for _ in range(draw.randint(1, 6 * page_size))]
            try:
                handle = cache.allocate(len(text) + draw.randint(0, 3), token_ids=text)
            except RequestError:
                continue
            for slot in range(handle.num_cached, len(text)):
                cache.storage[:, :, :, handle.physical_list[slot]] = mark(text, slot)
            live.append((handle, text))
        elif draw.random() < 0.5:
            handle, text = draw.choice(live)
            new = [*text, *(draw.randrange(2) for _ in range(draw.randint(1, 2 * page_size)))]
            if cache.grow(handle, len(new)):
                for slot in range(len(text), len(new)):
                    cache.storage[:, :, :, handle.physical_list[slot]] = mark(new, slot)
                text[:] = new
        else:
            handle, text = live.pop(draw.randrange(len(live)))
            cache.free(handle, text if draw.random() < 0.7 else ())
        for handle, text in live:
            found = cache.storage[0, 0, 0, handle.physical_list[: len(text)], 0].tolist()
            assert found == [mark(text, slot) for slot in range(len(text))]
            assert cache.read(0, handle, len(text))[0][0, :, 0].tolist() == found
    for handle, text in live:
        cache.free(handle, text)
    cache.check_integrity()
