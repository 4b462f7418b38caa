"""What a run drafts with, in words, for reports: enough to tell any two configurations apart that matter."""

from __future__ import annotations

from pathlib import Path

from conf.schema import DraftKind, ModelConfig, SpeculationConfig, Verification
from tools.bench.identity import short_path


def model_in_words(model: ModelConfig) -> str:
    """Its name, if it has no files, else that of the folder. model: found, see `pipeline.model_source`."""
    return model.name if model.is_emulated else Path(model.path or "").name


def speculation_in_words(speculation: SpeculationConfig) -> list[str]:
    """A part for each of draft, shape, prepared outcomes, planner and rule."""
    draft = speculation.draft
    if draft.kind is DraftKind.none:
        return ["no draft"]
    detail = short_path(draft.path) if draft.path is not None else draft.layers
    parts = [
        f"draft {draft.kind.value}{'' if detail is None else f' {detail}, weights={draft.weights.value}'}",
        _shape(speculation),
    ]
    if draft.look_up:
        parts.append(f"{draft.look_up} tokens looked up beside")
    if speculation.prepare_outcomes:
        parts.append(
            f"budget {speculation.budget}, fan-out {speculation.fan_out.value}, "
            f"backup {speculation.backup.value}"
        )
    parts.append(f"plan {speculation.plan.value}")
    if speculation.verification is not Verification.coupled:
        c = "" if speculation.saguaro_c is None else f", C = {speculation.saguaro_c:g}"
        parts.append(f"verification {speculation.verification.value}{c}")
    return parts


def _shape(speculation: SpeculationConfig) -> str:
    tree = speculation.tree
    if tree.widths is not None:
        shape = f"trees of widths {list(tree.widths)}"
    elif tree.nodes is not None:
        shape = f"trees of {tree.nodes} nodes, depth {speculation.depth}"
    else:
        shape = f"chains, depth {speculation.depth}"
    if tree.rows is not None:
        shape += f", {tree.rows} rows a step"
    if speculation.min_path_prob > 0:
        shape += f", paths from {speculation.min_path_prob:g}"
    return shape
