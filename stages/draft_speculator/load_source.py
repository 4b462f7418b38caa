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
from stages.model.emulated_runner import emulated_shape
from stages.model.kv_budget import draft_shape, plan_kv
from stages.model.runner import ModelRunner
from stages.model.shape import ModelShape, read_shape
from stages.model.weights import LoadedModel, load_model
from stages.vocabulary import check_same_vocabulary


def load_source(config: RunConfig, *, num_ranked: int = 1) -> DraftSource:
    """Load weights and size the KV cache. Raises `ConfigError` where target and draft do not fit.

    num_ranked: see `ModelDraft`.
    """
    draft = config.speculation.draft
    grammars = GrammarCompiler.of_model(config.model.path)
    grammars.prepare()
    if draft.kind is DraftKind.ngram:
        return NgramDraft(is_coupled=Drawing.of(config.speculation) is Drawing.COUPLED, grammars=grammars)
    if config.model.is_emulated:
        shape = emulated_shape(config.model.emulated.vocab_size)
        num_pages = plan_kv(config, shape, shape).draft_pages
        return EmulatedDraft(config, num_pages=num_pages, num_ranked=num_ranked)
    if config.model.path is None:
        raise ConfigError("model.path is not resolved: expected a local folder, got none")
    path = target_path = Path(config.model.path)
    if draft.kind is DraftKind.model:
        if draft.path is None:
            raise ConfigError("speculation.draft.path is missing: draft.kind=model needs it")
        path = Path(draft.path)
        if is_draft_folder(path):
            return _distilled_source(config, target_path, path, num_ranked=num_ranked, grammars=grammars)
        with _naming_the_draft():
            check_same_vocabulary(target_path, path)
    target_shape = read_shape(target_path)
    if draft.layers is not None and draft.layers > target_shape.num_layers:
        raise ConfigError(
            f"speculation.draft.layers={draft.layers}: the target has {target_shape.num_layers} layers; "
            "choose fewer"
        )
    num_pages = _num_pages(config, target_shape)
    dtype = getattr(torch, config.model.dtype.value)
    if draft.kind is DraftKind.model:
        with _naming_the_draft():
            model = load_model(path, dtype=dtype)
    else:
        model = load_model(path, dtype=dtype, num_layers=draft.layers)
    runner = _make_runner(config, model, num_pages=num_pages)
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
    num_ranked: int,
    grammars: GrammarCompiler,
) -> DraftSource:
    """A draft made by `tools.distill`: the target's embedding, and a head over a part of its ids."""
    with _naming_the_draft():
        loaded = load_draft_folder(path, target_path, dtype=getattr(torch, config.model.dtype.value))
    runner = _make_runner(config, loaded.model, num_pages=_num_pages(config, read_shape(target_path)))
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


def _num_pages(config: RunConfig, target_shape: ModelShape) -> int:
    return plan_kv(config, target_shape, draft_shape(config, target_shape)).draft_pages


def _make_runner(config: RunConfig, model: LoadedModel, *, num_pages: int) -> ModelRunner:
    runner = ModelRunner.with_pages(
        model,
        num_pages=num_pages,
        page_size=config.placement.page_size,
        cpu_kernels=config.model.cpu_kernels,
        weight_format=config.speculation.draft.weights,
    )
    runner.kv.keeps_prefixes = config.placement.prefix_cache
    runner.warm_up()
    return runner
