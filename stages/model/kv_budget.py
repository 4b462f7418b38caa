"""How many pages the KV caches of target and draft get out of one memory budget.

Target and draft are loaded in processes of their own, and each makes this plan for both, from the same
configuration: they need not ask one another. Both caches hold the same number of requests of full length;
what is too small for one of them is refused before any weights are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch

from conf.kv_memory import parse_kv_memory
from conf.proposal_size import draft_nodes, submitted_nodes
from conf.schema import DraftKind, RunConfig
from pipeline.errors import ConfigError
from stages.model.emulated_runner import KV_DTYPE, emulated_shape
from stages.model.kv_storage import machine_memory
from stages.model.shape import ModelShape, read_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNeed:
    """What one request of full length takes in one cache."""

    num_slots: int
    """Its longest context, and the uncommitted nodes behind it."""
    slot_bytes: int
    page_size: int

    @property
    def num_pages(self) -> int:
        """Whole pages."""
        return -(-self.num_slots // self.page_size)

    @property
    def num_bytes(self) -> int:
        """Memory of these pages."""
        return self.num_pages * self.page_size * self.slot_bytes

    def __str__(self) -> str:
        return f"{self.num_slots} slots of {self.slot_bytes / 1024:.1f} KiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """Pages of both caches."""

    target_pages: int
    draft_pages: int
    """0 where the draft has no KV cache."""
    num_full_requests: float
    """Requests of the longest context that fit at once; shorter ones take less."""


def plan_kv(config: RunConfig, target: ModelShape, draft: ModelShape | None) -> KVPlan:
    """Share the budget out. Raises `ConfigError` if not even one request of the longest context fits.

    draft: None where it has no KV cache.
    """
    longest = min(config.model.max_context, target.max_position)
    has_draft = config.speculation.draft.kind is not DraftKind.none
    needs = [_need(config, target, longest + (submitted_nodes(config.speculation) if has_draft else 0))]
    if draft is not None:
        longest_draft = min(longest, draft.max_position)
        needs.append(_need(config, draft, longest_draft + draft_nodes(config.speculation)))
    each = sum(need.num_bytes for need in needs)
    memory = parse_kv_memory(config.placement.kv_memory)
    budget = memory.bytes_of(machine_memory())
    num_requests = Fraction(budget, each)
    if budget > machine_memory():
        raise ConfigError(
            f"placement.kv_memory={config.placement.kv_memory}: expected at most the "
            f"{machine_memory() / 2**30:.1f} GiB that this machine has; lower it"
        )
    if num_requests < 1:
        raise ConfigError(_too_small(config, needs, each, budget))
    if memory.is_auto:
        num_requests = min(num_requests, Fraction(config.max_requests))
    pages = [int(need.num_pages * num_requests) for need in needs]
    return KVPlan(
        target_pages=pages[0],
        draft_pages=pages[1] if draft is not None else 0,
        num_full_requests=float(num_requests),
    )


def draft_shape(config: RunConfig, target: ModelShape) -> ModelShape | None:
    """The shape of the configured draft; None where it has no KV cache, or is handed in by a test."""
    draft = config.speculation.draft
    if draft.kind in (DraftKind.none, DraftKind.ngram):
        return None
    if config.model.is_emulated:
        return emulated_shape(config.model.emulated.vocab_size)
    if draft.kind is DraftKind.layers:
        assert draft.layers is not None, "the configuration was checked"
        return replace(target, num_layers=min(draft.layers, target.num_layers))
    if draft.path is None or config.model.path is None:
        return None
    try:
        return read_shape(Path(draft.path))
    except ConfigError as error:
        raise ConfigError(f"speculation.draft.path: {error}") from error


def _need(config: RunConfig, shape: ModelShape, num_slots: int) -> CacheNeed:
    dtype = KV_DTYPE if config.model.is_emulated else getattr(torch, config.model.dtype.value)
    slot_bytes = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    return CacheNeed(num_slots=num_slots, slot_bytes=slot_bytes, page_size=config.placement.page_size)


def _too_small(config: RunConfig, needs: list[CacheNeed], each: int, budget: int) -> str:
    given = config.placement.kv_memory
    parts = [f"target {needs[0]}", *(f"draft {need}" for need in needs[1:])]
    machine = f"{machine_memory() / 2**30:.1f} GiB"
    if parse_kv_memory(given).is_auto:
        budget_is, advice = f"half of this machine's {machine}", "set placement.kv_memory to more"
    else:
        budget_is = f"{budget / 2**20:.1f} MiB (this machine has {machine})"
        advice = "raise placement.kv_memory"
    page = f" in pages of {config.placement.page_size} slots"
    return (
        f"placement.kv_memory={given}: expected at least {each / 2**20:.1f} MiB for the KV of one request of "
        f"model.max_context={config.model.max_context} ({', '.join(parts)},{page}), got {budget_is}; "
        f"{advice}, or lower model.max_context, placement.page_size or what is speculated"
    )
