"""The rules of the request options beyond temperature and filters: ranges, and options that need one another.

Whether a token id exists, only the model's vocabulary tells: the verifier says so, for each request.
"""

from __future__ import annotations

from dataclasses import asdict

from conf.errors import ConfigError, shown
from conf.limits import (
    MAX_ADDITIVE_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_SAMPLES,
    MAX_STOP_IDS,
    MAX_STOP_STRING,
    MAX_STOP_STRINGS,
    MAX_WHOLE_NUMBER,
    MIN_REPETITION_PENALTY,
)
from conf.schema import RunConfig
from conf.structured import fault_of_structured


def check_options(config: RunConfig) -> None:
    """Raise `ConfigError` for the first rule that the options of `config` break."""
    if not 0 <= config.min_tokens <= config.max_tokens:
        raise ConfigError(
            f"min_tokens={config.min_tokens}: expected 0 to max_tokens={config.max_tokens}; lower it"
        )
    _check_stops(config)
    _check_penalties(config)
    _check_token_ids("logit_bias", list(config.logit_bias))
    for token, bias in config.logit_bias.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:  # which NaN is not either
            raise ConfigError(
                f"logit_bias of token {token} is {bias}: expected {-MAX_LOGIT_BIAS:g} to "
                f"{MAX_LOGIT_BIAS:g}; -100 all but bans a token"
            )
    if config.logprobs is not None and not 0 <= config.logprobs <= MAX_LOGPROBS:
        raise ConfigError(
            f"logprobs={config.logprobs}: expected 0 to {MAX_LOGPROBS}; 0 reports the chosen token alone, "
            "null nothing"
        )
    fault = fault_of_structured(**asdict(config.structured_outputs))
    if fault is not None:
        raise ConfigError(f"structured_outputs.{fault}" if ":" in fault else f"structured_outputs: {fault}")
    if not 1 <= config.n <= MAX_SAMPLES:
        raise ConfigError(f"n={config.n}: expected 1 to {MAX_SAMPLES} samples of each prompt")


def _check_stops(config: RunConfig) -> None:
    if len(config.stop) > MAX_STOP_STRINGS:
        raise ConfigError(f"stop: expected at most {MAX_STOP_STRINGS} texts, got {len(config.stop)}")
    for text in config.stop:
        if not 1 <= len(text) <= MAX_STOP_STRING:
            raise ConfigError(
                f"stop={shown(text)}: expected 1 to {MAX_STOP_STRING} characters, got {len(text)}; "
                "an empty text would end every answer before it starts"
            )
    if len(config.stop_token_ids) > MAX_STOP_IDS:
        raise ConfigError(
            f"stop_token_ids: expected at most {MAX_STOP_IDS} ids, got {len(config.stop_token_ids)}"
        )
    _check_token_ids("stop_token_ids", config.stop_token_ids)


def _check_token_ids(key: str, token_ids: list[int]) -> None:
    for token in token_ids:
        if not 0 <= token <= MAX_WHOLE_NUMBER:
            raise ConfigError(
                f"{key}: expected token ids of 0 to {MAX_WHOLE_NUMBER}, got {shown(token)}; leave it out"
            )


def _check_penalties(config: RunConfig) -> None:
    for key, penalty in (
        ("presence_penalty", config.presence_penalty),
        ("frequency_penalty", config.frequency_penalty),
    ):
        if not -MAX_ADDITIVE_PENALTY <= penalty <= MAX_ADDITIVE_PENALTY:
            raise ConfigError(
                f"{key}={penalty}: expected {-MAX_ADDITIVE_PENALTY:g} to {MAX_ADDITIVE_PENALTY:g}; "
                "0 changes nothing"
            )
    if not MIN_REPETITION_PENALTY <= config.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise ConfigError(
            f"repetition_penalty={config.repetition_penalty}: expected {MIN_REPETITION_PENALTY:g} to "
            f"{MAX_REPETITION_PENALTY:g}; 1 changes nothing"
        )
