"""Pages: who holds them, what is kept, what is taken first, against a model that is written differently."""

from __future__ import annotations

import random

import pytest

from stages.model.page_pool import PagePool
from stages.model.prefix_cache import PrefixIndex


def make_pool(num_pages: int) -> tuple[PagePool, list[int]]:
    forgotten: list[int] = []
    return PagePool(num_pages, forget=forgotten.append), forgotten


def test_pages_behind_the_last_one_are_taken_where_they_are_idle() -> None:
    pool, _ = make_pool(8)
    first = pool.take(2, span=5)
    assert first == [0, 1]
    assert pool.take(2, after=1) == [2, 3]
    other = pool.take(1)
    assert other == [4]
    assert pool.take(2, after=3) == [5, 6], "a run elsewhere, as 4 is held"


def test_a_claim_keeps_others_away_while_there_is_room_elsewhere() -> None:
    pool, _ = make_pool(8)
    assert pool.take(1) == [0]
    pool.claim(range(1, 4))
    assert pool.take(3) == [4, 5, 6]
    assert pool.take(2) == [1, 2], "one page is not claimed, two are wanted in a run"
    pool.unclaim(range(1, 4))
    assert pool.take(2) == [3, 7]


def test_kept_pages_go_last_and_those_used_longest_ago_before_the_others() -> None:
    pool, forgotten = make_pool(6)
    runs = [pool.take(2) for _ in range(3)]
    for run in (runs[1], runs[0]):
        for page in run:
            pool.keep(page)
    pool.release(runs[1])
    pool.release(runs[2])
    pool.release(runs[0])
    assert pool.take(2) == [4, 5]
    assert forgotten == []
    # Of one text the last page goes first: without its beginning the rest is of no use.
    assert pool.take(1) == [3]
    assert pool.take(1) == [2]
    assert pool.take(1) == [1]
    assert forgotten == [3, 2, 1]


def test_a_page_with_two_holders_is_idle_after_both_released_it() -> None:
    pool, _ = make_pool(2)
    pages = pool.take(1)
    pool.hold(pages)
    pool.release(pages)
    assert pool.num_idle == 1
    pool.release(pages)
    assert pool.num_idle == 2
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(pages)


@pytest.mark.parametrize("seed", range(8))
def test_random_use_agrees_with_a_plain_model(seed: int) -> None:
    """The model: lists of holders. No page is ever given to two takers, lost, or forgotten while held."""
    draw = random.Random(seed)
    num_pages = draw.choice([1, 2, 7, 40])
    kept: set[int] = set()
    holders: dict[int, int] = dict.fromkeys(range(num_pages), 0)

    def forget(page: int) -> None:
        assert holders[page] == 0
        kept.remove(page)

    pool = PagePool(num_pages, forget=forget)
    out: list[list[int]] = []
    claims: list[range] = []
    for _ in range(600):
        idle = [page for page, count in holders.items() if count == 0]
        assert pool.num_idle == len(idle)
        action = draw.choice(["take", "take", "share", "release", "release", "keep", "claim"])
        if action == "take" and idle:
            after = draw.choice([None, draw.randrange(num_pages)])
            taken = pool.take(draw.randint(1, len(idle)), after=after, span=draw.randint(0, num_pages))
            assert len(set(taken)) == len(taken)
            assert set(taken) <= set(idle)
            assert not set(taken) & kept
            out.append(taken)
            for page in taken:
                holders[page] = 1
        elif action == "share" and (kept or out):
            pages = draw.choice(out) if out else sorted(kept)
            pool.hold(pages)
            out.append(pages)
            for page in pages:
                holders[page] += 1
        elif action == "release" and out:
            pages = out.pop(draw.randrange(len(out)))
            pool.release(pages)
            for page in pages:
                holders[page] -= 1
        elif action == "keep" and out:
            page = draw.choice(draw.choice(out))
            pool.keep(page)
            kept.add(page)
        elif action == "claim":
            if claims and draw.random() < 0.5:
                pool.unclaim(claims.pop())
            else:
                start = draw.randrange(num_pages)
                claims.append(range(start, min(start + 3, num_pages)))
                pool.claim(claims[-1])
    for pages in out:
        pool.release(pages)
    for claim in claims:
        pool.unclaim(claim)
    pool.check_integrity(sorted(kept))


def test_a_page_is_found_only_behind_the_same_tokens() -> None:
    index = PrefixIndex(4)
    text = list(range(12))
    for page, digest in enumerate(index.digests(text)):
        assert index.add(digest, page + 20)
    assert index.match(text)[0] == [20, 21, 22]
    assert index.match(text[:11])[0] == [20, 21], "the last page is not full"
    assert index.match([*text[:4], 99, *text[5:]])[0] == [20]
    assert index.match([99, *text[1:]])[0] == []
    assert index.match(text[4:])[0] == [], "the same tokens after others are something else"
    assert not index.add(next(index.digests(text)), 7), "known already"
    index.forget(21)
    assert index.match(text)[0] == [20]
    (again,) = list(index.digests(text[:8], list(index.digests(text[:4]))))
    assert index.add(again, 9)
    assert index.match(text)[0] == [20, 9, 22], "what follows is of use again"
