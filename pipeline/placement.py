"""Which cores the target gets, and which everything else shares. Pure arithmetic on core numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import PlacementConfig
from pipeline.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CorePlan:
    """Cores of the two sides.

    is_crowded: they overlap although the placement asked for a split: there was one core only.
    """

    target: tuple[int, ...]
    draft: tuple[int, ...]
    """Also of the small stages and the frontend."""
    is_crowded: bool = False


def plan_cores(placement: PlacementConfig, usable: Sequence[int]) -> CorePlan:
    """Share out the `usable` cores (ascending system numbers).

    Raises `ConfigError` for an unknown placement, and for more cores than there are.
    """
    cores = tuple(usable)
    for key, number in (("target_cores", placement.target_cores), ("draft_cores", placement.draft_cores)):
        if number is not None and not 1 <= number <= len(cores):
            raise ConfigError(f"placement.{key}={number}: expected 1 to {len(cores)} usable cores")
    if placement.name == "cpu_shared":
        return CorePlan(target=cores[: placement.target_cores], draft=cores[: placement.draft_cores])
    if placement.name != "cpu_split":
        raise ConfigError(f"placement={placement.name}: expected cpu_split or cpu_shared")
    if len(cores) == 1:
        return CorePlan(target=cores, draft=cores, is_crowded=True)
    num_target = placement.target_cores or max(
        1, min(len(cores) // 2, len(cores) - (placement.draft_cores or 1))
    )
    num_draft = placement.draft_cores or len(cores) - num_target
    if num_draft < 1 or num_target + num_draft > len(cores):
        raise ConfigError(
            f"placement.target_cores={num_target} and placement.draft_cores={placement.draft_cores} need "
            f"more than the {len(cores)} usable cores; lower one, or choose placement=cpu_shared"
        )
    return CorePlan(target=cores[:num_target], draft=cores[num_target : num_target + num_draft])
