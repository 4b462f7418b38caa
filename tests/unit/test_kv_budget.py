"""`placement.kv_memory`: what may be typed, how it is shared out, and what is refused, with numbers."""

from __future__ import annotations

import pytest

from conf.errors import ConfigError
from conf.kv_memory import parse_kv_memory
from conf.schema import DraftKind, RunConfig
from stages.model.kv_budget import plan_kv
from tests.tiny import make_config, tiny_shape

SLOT_BYTES = 2 * 2 * 2 * 16 * 8  # layers, keys and values, heads, dimensions, float64


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.model.kv_budget.machine_memory", lambda: 64 << 20)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 << 30),
        ("1.5 MiB", 3 << 19),
        ("300kb", 300_000),
        ("0.25", 16 << 20),
        ("25%", 16 << 20),
        ("1", 64 << 20),
        ("auto", 32 << 20),
    ],
)
def test_sizes_and_shares(text: str, num_bytes: int) -> None:
    assert parse_kv_memory(text).bytes_of(64 << 20) == num_bytes


@pytest.mark.parametrize("text", ["", "2", "0", "-1GiB", "1e9", "2 bananas", "101%", "0.0", "GiB", "1" * 400])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"placement.kv_memory=.*expected auto, a share .* such as 2GiB"):
        parse_kv_memory(text)


def _config(kv_memory: str, **kwargs: int) -> RunConfig:
    config = make_config(prepare_outcomes=True, max_context=256, **kwargs)
    config.placement.kv_memory = kv_memory
    return config


def test_auto_holds_all_requests_at_full_length() -> None:
    plan = plan_kv(_config("auto", max_requests=3, depth=4, budget=6), tiny_shape(), tiny_shape())
    assert plan.target_pages == 3 * 17, "256 slots and 4 nodes in pages of 16"
    assert plan.draft_pages == 3 * 19, "256 slots and 2 * 4 + 6 * 5 + 1 nodes"
    assert plan.num_full_requests == 3


def test_auto_stops_at_half_of_the_memory() -> None:
    plan = plan_kv(_config("auto", max_requests=1000), tiny_shape(), tiny_shape())
    used = (plan.target_pages + plan.draft_pages) * 16 * SLOT_BYTES
    assert 31 << 20 < used <= 32 << 20
    assert 1 < plan.num_full_requests < 1000


def test_a_size_is_shared_so_that_both_hold_as_many_requests() -> None:
    plan = plan_kv(_config("2MiB", max_requests=1), tiny_shape(), tiny_shape())
    used = (plan.target_pages + plan.draft_pages) * 16 * SLOT_BYTES
    assert (2 << 20) - 2 * 16 * SLOT_BYTES < used <= 2 << 20
    assert plan.target_pages / 17 == pytest.approx(plan.draft_pages / 20, rel=0.05)


def test_a_run_without_a_draft_cache_gives_the_target_everything() -> None:
    config = _config("1MiB")
    config.speculation.draft.kind = DraftKind.ngram
    plan = plan_kv(config, tiny_shape(), None)
    assert (plan.target_pages, plan.draft_pages) == ((1 << 20) // (16 * SLOT_BYTES), 0)


def test_less_than_one_request_is_refused_with_numbers() -> None:
    with pytest.raises(
        ConfigError,
        match=r"placement.kv_memory=100KiB: expected at least 0\.6 MiB for the KV of one request of "
        r"model.max_context=256 \(target 260 slots of 1\.0 KiB, draft 305 slots of 1\.0 KiB, in pages of 16 "
        r"slots\), got 0\.1 MiB \(this machine has 0\.1 GiB\); raise "
        r"placement.kv_memory, or lower model.max_context",
    ):
        plan_kv(_config("100KiB"), tiny_shape(), tiny_shape())


def test_auto_that_does_not_fit_names_the_half_and_the_key() -> None:
    config = _config("auto")
    config.model.max_context = 1 << 20
    shape = tiny_shape(max_position=1 << 20)
    with pytest.raises(
        ConfigError, match=r"got half of this machine's 0\.1 GiB; set placement.kv_memory to more"
    ):
        plan_kv(config, shape, shape)


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_memory=1GiB: expected at most the 0\.1 GiB .* has; lower it"):
        plan_kv(_config("1GiB"), tiny_shape(), tiny_shape())
