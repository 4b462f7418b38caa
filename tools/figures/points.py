"""The configurations that figures measure, and their prompts."""

from __future__ import annotations

from pathlib import Path

from conf.check import check
from conf.compose import compose
from conf.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.messages import ChatTurn, Sampling
from pipeline.model_source import resolve_models
from stages.tokenizer import PromptEncoder
from tools.bench.prompts import read_sets
from tools.figures.in_process import Rounds, run_in_process
from tools.figures.settings import FigureSettings


def config_of(settings: FigureSettings, *arguments: str) -> RunConfig:
    """A checked configuration with found models. Raises `ConfigError`."""
    scale: tuple[str, ...] = ()
    if settings.model.startswith("emulated"):
        scale = (f"model.emulated.time_scale={settings.time_scale}",)
    config = compose(
        [
            f"model={settings.model}",
            *scale,
            "model.max_context=4096",
            "placement.prefix_cache=false",
            *arguments,
        ]
    )
    check(config)
    return resolve_models(config)


def ssd_arguments(depth: int, budget: int, *more: str) -> list[str]:
    """SSD as published: chains of `depth`, all branches read in every step, drafting again after a miss."""
    return [
        "conf=ssd",
        f"speculation.depth={depth}",
        f"speculation.budget={budget}",
        "speculation.min_path_prob=0",
        "speculation.backup=sequential",
        *more,
    ]


def predict(settings: FigureSettings, *arguments: str) -> Rounds:
    """Answer the prompts in one thread, without waits."""
    config = config_of(settings, *arguments)
    config.model.emulated.time_scale = 0.0
    assert config.model.path is not None, "the models are found"
    encoder = PromptEncoder(Path(config.model.path))
    prompts = read_sets(None, num_prompts=settings.num_prompts)
    if config.model.is_emulated:
        encoded = [encoder.encode_request(prompt=prompt.text, chat=None) for prompt in prompts]
    else:
        encoded = [
            encoder.encode_request(prompt=None, chat=[ChatTurn(role="user", content=prompt.text)])
            for prompt in prompts
        ]
    if len(encoded) < settings.num_prompts:
        raise ConfigError(f"num_prompts={settings.num_prompts}: expected at most {len(encoded)}; lower it")
    return run_in_process(
        config,
        encoded,
        lambda index: Sampling(
            max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed + index
        ),
    )
