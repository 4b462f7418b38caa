"""The peer vLLM, through `LLMEngine`, the object under its offline interface: requests in, a step at a time.

Written after its documentation (docs.vllm.ai: LLMEngine, EngineArgs, SamplingParams, "CPU"), and not yet run
with a real vLLM. Token ids in and out: no tokenizer is used.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tools.bench.arrivals import Arrivals
from tools.bench.protocol import Answer, Batch, NotHere, PeerSpec, Question


class VllmPeer:
    """A loaded engine."""

    def __init__(self, vllm: Any, spec: PeerSpec) -> None:
        """vllm: the module."""
        self._vllm = vllm
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=spec.folder,
                dtype=spec.dtype.value,
                max_model_len=spec.max_context,
                max_num_seqs=spec.batch_size,
                enable_prefix_caching=False,  # nobody else keeps the last prompt either
                generation_config="vllm",  # a checkpoint's own would filter and penalise tokens
            )
        )
        self._num_asked = 0
        self.given = f"vllm {vllm.__version__}, {spec.dtype.value}, no prefix cache, {spec.threads}"

    def answer(self, batch: Batch) -> list[Answer]:
        """Answer all at once."""
        began = time.monotonic()
        arrivals: dict[str, Arrivals] = {}
        for question in batch.questions:
            request_id = str(self._num_asked)
            self._num_asked += 1
            arrivals[request_id] = Arrivals(began)
            prompt = {"prompt_token_ids": question.prompt_token_ids}
            self._engine.add_request(request_id, prompt, self._sampling(question, batch.temperature))
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                seen = arrivals[output.request_id]
                seen.add(list(output.outputs[0].token_ids)[len(seen.token_ids) :])
        return [
            seen.answer(num_prompt_tokens=len(question.prompt_token_ids), num_rounds=None)
            for question, seen in zip(batch.questions, arrivals.values(), strict=True)
        ]

    def _sampling(self, question: Question, temperature: float) -> Any:
        return self._vllm.SamplingParams(
            temperature=temperature,
            max_tokens=question.max_tokens,
            seed=question.seed,
            detokenize=False,
        )


@contextmanager
def open_system(spec: PeerSpec) -> Iterator[VllmPeer]:
    """Load it, bound to the cores that it may use. Raises `NotHere`."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, spec.cores))
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise NotHere(f"vllm cannot be imported ({error}); see docs.vllm.ai for how to install it") from None
    yield VllmPeer(vllm, spec)
