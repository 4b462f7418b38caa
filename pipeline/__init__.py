"""The actor runtime: processes, messages, shared tensors; and what a Python program uses of it.

`LLM`, `SamplingParams`, `StructuredOutputsParams`, `Client` and `AsyncClient` are imported when they are
first asked for: each part starts without the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.client import AsyncClient, Client
    from pipeline.llm import LLM
    from pipeline.sampling_params import SamplingParams
    from pipeline.structured_outputs import StructuredOutputsParams

__all__ = ["LLM", "AsyncClient", "Client", "SamplingParams", "StructuredOutputsParams"]

_HOMES = {
    "AsyncClient": "pipeline.client",
    "Client": "pipeline.client",
    "LLM": "pipeline.llm",
    "SamplingParams": "pipeline.sampling_params",
    "StructuredOutputsParams": "pipeline.structured_outputs",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
