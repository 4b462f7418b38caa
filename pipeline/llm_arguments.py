"""The arguments of `pipeline.LLM`, in vLLM's names, as the `key=value` arguments of a command line.

An argument that cannot be meant here is refused by name, with what there is instead: none is ignored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from enum import Enum

from conf.compose import options_of
from conf.keys import GROUPS, all_keys
from pipeline.errors import ConfigError, shown

_RENAMED = {
    "max_model_len": "model.max_context",
    "dtype": "model.dtype",
    "max_num_seqs": "max_requests",
    "block_size": "placement.page_size",
    "enable_prefix_caching": "placement.prefix_cache",
    "seed": "seed",
}
"""vLLM's names of keys that there are here."""

_INSTEAD = {
    "tensor_parallel_size": "the target runs on one machine's cores: **{'placement.target_cores': N}",
    "pipeline_parallel_size": "the target runs on one machine's cores: **{'placement.target_cores': N}",
    "quantization": "**{'model.weights': 'int8'} rounds the matrices to int8",
    "gpu_memory_utilization": "**{'placement.kv_memory': '2GiB'} (or a share) sizes the KV caches",
    "swap_space": "a request that is pre-empted is read again: nothing is swapped",
    "tokenizer": "the model's own tokenizer is used",
    "trust_remote_code": "no code of a model is ever run",
    "enforce_eager": "there are no CUDA graphs to do without",
    "enable_chunked_prefill": "prompts are read in chunks, of **{'placement.prefill_chunk': N}",
    "download_dir": "models are cached where Hugging Face keeps them; HF_HOME moves that",
    "temperature": "give it in SamplingParams",
    "max_tokens": "give it in SamplingParams",
    "n": "give it in SamplingParams",
}

_SAYS_NOTHING: dict[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "trust_remote_code": (False,),
    "enforce_eager": (True, False),
    "enable_chunked_prefill": (True,),
}
"""Values of those that ask for what there is in any case; None always does."""

_METHODS = {"draft_model": "speculative", "ngram": "speculative"}
"""vLLM's names of methods; the others are our named runs."""
_JSON_KEYS = ("stop", "logit_bias", "structured_outputs.json", "structured_outputs.choice")
"""What is read as JSON: a list or an object of Python's is written so."""
_TREES = ("tree", "saguaro_tree")
_SPECULATION = "speculation."
_OWN = ("method", "model", "num_speculative_tokens")


def arguments_of(
    model: str | None, speculative_config: Mapping[str, object] | None, keys: Mapping[str, object]
) -> list[str]:
    """The arguments for `conf.compose.compose`. Raises `ConfigError`."""
    arguments = {} if model is None else {"model.path": model}
    if speculative_config is not None and "conf" in keys:
        raise ConfigError("conf and speculative_config are both given, expected one of them; leave one out")
    for name, value in {**_speculation_keys(speculative_config), **_run_keys(keys)}.items():
        if name in arguments:
            raise ConfigError(f"{name} is given twice, expected it once; leave one out")
        arguments[name] = _in_json(name, value) if name in _JSON_KEYS else _typed(value)
    return [f"{name}={value}" for name, value in arguments.items()]


def _run_keys(keys: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in keys.items():
        key = _RENAMED.get(name, name)
        if name in _INSTEAD and (value is None or value in _SAYS_NOTHING.get(name, ())):
            continue
        if name in _INSTEAD or (key not in all_keys() and key not in GROUPS):
            raise ConfigError(f"LLM({shown(name)}={shown(value)}): not supported; {_advice(name)}")
        if key in found:
            raise ConfigError(
                f"LLM({shown(name)}=...): {key} is given twice, expected it once; leave one out"
            )
        is_default = value is None or (name == "dtype" and value == "auto")  # vLLM's ways to say nothing
        if not (name in _RENAMED and is_default):
            found[key] = value
    return found


def _advice(name: str) -> str:
    if name in _INSTEAD:
        return _INSTEAD[name]
    supported = ["model", "speculative_config", *_RENAMED]
    near = difflib.get_close_matches(name, [*supported, *all_keys()], n=1)
    if near:
        return f"did you mean {near[0]}?"
    every_key = "and every key of python -m pipeline.run --help, as **{'KEY': VALUE}"
    return f"supported: {', '.join(supported)}, {every_key}"


def _speculation_keys(given: Mapping[str, object] | None) -> dict[str, object]:
    """The keys of a `speculative_config`. None leaves everything to the default run."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'speculative_config={shown(repr(given))}: expected a dict such as {{"method": "saguaro"}}'
        )
    method = given.get("method") or "saguaro"
    methods = [*options_of("conf"), *_METHODS]
    if method not in methods:
        raise ConfigError(
            f"speculative_config: method={shown(method)}: expected one of {', '.join(methods)}; correct it"
        )
    run = _METHODS.get(str(method), str(method))
    keys: dict[str, object] = {"conf": run}
    if method == "ngram":
        keys["speculation.draft.kind"] = "ngram"
    for name, value in ((str(name), value) for name, value in given.items()):
        if name not in _OWN and _SPECULATION + name not in all_keys():
            known = [
                *_OWN,
                *(key.removeprefix(_SPECULATION) for key in all_keys() if key.startswith(_SPECULATION)),
            ]
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"supported: {', '.join(known)}"
            raise ConfigError(
                f"speculative_config: {shown(name)}={shown(value)}: there is no such key; {advice}"
            )
        if name in _OWN and value is None:
            continue
        if name == "model":
            keys["speculation.draft.path"] = value
        elif name == "num_speculative_tokens":
            keys["speculation.tree.nodes" if run in _TREES else "speculation.depth"] = value
        elif name != "method":
            keys[_SPECULATION + name] = value
    if method == "draft_model" and "speculation.draft.path" not in keys:
        raise ConfigError("speculative_config: method=draft_model: expected model=DRAFT beside it; add it")
    return keys


def _in_json(key: str, value: object) -> str:
    """As it would stand on a command line, for one of `_JSON_KEYS`."""
    if key == "stop" and isinstance(value, str):
        value = [value]  # else a text that begins with a bracket would be read as a list
    if value is None or isinstance(value, str):
        return _typed(value)
    try:
        return json.dumps(list(value) if isinstance(value, tuple) else value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"LLM({key}={shown(repr(value))}): expected what JSON can hold: {error}") from None


def _typed(value: object) -> str:
    """As it would stand on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list | tuple):
        return f"[{','.join(_typed(part) for part in value)}]"
    return str(value)
