"""Makes the draft that the configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from conf.saguaro import active_saguaro_c
from conf.schema import DraftKind, RunConfig
from pipeline.errors import ConfigError
from stages.draft_speculator.draft_source import DraftSource, Drawing
from stages.draft_speculator.emulated_draft import EmulatedDraft
from stages.draft_speculator.model_draft import ModelDraft
from stages.draft_speculator.ngram_draft import NgramDraft
from stages.grammar import GrammarCompiler
from stages.model.draft_card import is_draft_folder
from stages.model.draft_folder import load_draft_folder
from stages.model.runner import ModelRunner
from stages.model.shape import ModelShape, read_shape
from stages.model.weights import LoadedModel, load_model
from stages.vocabulary import check_same_vocabulary


def load_source(config: RunConfig, *, max_nodes: int, num_ranked: int = 1) -> DraftSource:
    """Load weights and size the KV cache. Raises `ConfigError` where target and draft do not fit.

    max_nodes: uncommitted nodes of one request's tree. num_ranked: see `ModelDraft`.
    """
    draft = config.speculation.draft
    grammars = GrammarCompiler.of_model(config.model.path)
    grammars.prepare()
    if draft.kind is DraftKind.ngram:
        return NgramDraft(is_coupled=Drawing.of(config.speculation) is Drawing.COUPLED, grammars=grammars)
    if config.model.is_emulated:
        return EmulatedDraft(config, max_nodes=max_nodes, num_ranked=num_ranked)
    if config.model.path is None:
        raise ConfigError("model.path is not resolved: expected a local folder, got none")
    path = target_path = Path(config.model.path)
    if draft.kind is DraftKind.model:
        if draft.path is None:
            raise ConfigError("speculation.draft.path is missing: draft.kind=model needs it")
        path = Path(draft.path)
        if is_draft_folder(path):
            return _distilled_source(
                config, target_path, path, max_nodes=max_nodes, num_ranked=num_ranked, grammars=grammars
            )
        with _naming_the_draft():
            check_same_vocabulary(target_path, path)
    target_shape = read_shape(target_path)
    if draft.layers is not None and draft.layers > target_shape.num_layers:
        raise ConfigError(
            f"speculation.draft.layers={draft.layers}: the target has {target_shape.num_layers} layers; "
            "choose fewer"
        )
    dtype = getattr(torch, config.model.dtype.value)
    if draft.kind is DraftKind.model:
        with _naming_the_draft():
            model = load_model(path, dtype=dtype)
    else:
        model = load_model(path, dtype=dtype, num_layers=draft.layers)
    runner = _make_runner(config, model, target_shape, max_nodes=max_nodes)
    return ModelDraft(
        runner,
        vocab_size=min(target_shape.vocab_size, model.shape.vocab_size),
        num_ranked=num_ranked,
        drawing=Drawing.of(config.speculation),
        saguaro_c=active_saguaro_c(config.speculation),
        grammars=grammars,
    )


def _distilled_source(
    config: RunConfig,
    target_path: Path,
    path: Path,
    *,
    max_nodes: int,
    num_ranked: int,
    grammars: GrammarCompiler,
) -> DraftSource:
    """A draft made by `tools.distill`: the target's embedding, and a head over a part of its ids."""
    with _naming_the_draft():
        loaded = load_draft_folder(path, target_path, dtype=getattr(torch, config.model.dtype.value))
    runner = _make_runner(config, loaded.model, read_shape(target_path), max_nodes=max_nodes)
    return ModelDraft(
        runner,
        vocab_size=loaded.model.shape.vocab_size,
        head_token_ids=loaded.head_token_ids,
        num_ranked=num_ranked,
        drawing=Drawing.of(config.speculation),
        saguaro_c=active_saguaro_c(config.speculation),
        grammars=grammars,
    )


@contextmanager
def _naming_the_draft() -> Iterator[None]:
    """Put the draft's key before an error of the loaders, which know folders and no keys."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"speculation.draft.path: {error}") from error


def _make_runner(
    config: RunConfig, model: LoadedModel, target_shape: ModelShape, *, max_nodes: int
) -> ModelRunner:
    """A runner with KV for `max_requests` requests of the longest context, and their trees."""
    longest = min(config.model.max_context, target_shape.max_position, model.shape.max_position)
    runner = ModelRunner.for_requests(
        model,
        num_requests=config.max_requests,
        slots_per_request=longest + max_nodes,
        page_size=config.placement.page_size,
        cpu_kernels=config.model.cpu_kernels,
        weight_format=config.speculation.draft.weights,
    )
    runner.warm_up()
    return runner
