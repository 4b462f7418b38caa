"""The peer SGLang, through its offline `Engine`, streaming.

Written after its documentation (docs.sglang.io: "Offline Engine API", "Sampling Parameters"), and not yet run
with a real SGLang. Token ids in and out: no tokenizer is loaded, so it is told where answers end.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.model.shape import read_shape
from tools.bench.arrivals import Arrivals
from tools.bench.protocol import Answer, Batch, NotHere, PeerSpec, Question


class SglangPeer:
    """A loaded engine."""

    def __init__(self, engine: Any, spec: PeerSpec, *, version: str) -> None:
        """engine: a `sglang.Engine`."""
        self._engine = engine
        self._ends = list(read_shape(Path(spec.folder)).eos_token_ids)
        self._loop = asyncio.new_event_loop()
        self.given = f"sglang {version}, {spec.dtype.value}, no radix cache, {spec.threads}"

    def answer(self, batch: Batch) -> list[Answer]:
        """Answer all at once."""
        return self._loop.run_until_complete(self._answer_all(batch))

    def close(self) -> None:
        """End it."""
        self._engine.shutdown()
        self._loop.close()

    async def _answer_all(self, batch: Batch) -> list[Answer]:
        began = time.monotonic()
        return await asyncio.gather(
            *(self._answer(question, batch.temperature, began) for question in batch.questions)
        )

    async def _answer(self, question: Question, temperature: float, began: float) -> Answer:
        arrivals = Arrivals(began)
        chunks = await self._engine.async_generate(
            input_ids=question.prompt_token_ids,
            sampling_params={
                "temperature": temperature,
                "max_new_tokens": question.max_tokens,
                "stop_token_ids": self._ends,
                "no_stop_trim": True,
            },
            stream=True,
        )
        async for chunk in chunks:
            num_new = chunk["meta_info"]["completion_tokens"] - len(arrivals.token_ids)
            # All ids so far, or the new ones only: both end with the new ones.
            arrivals.add(chunk["output_ids"][-num_new:] if num_new else [])
        return arrivals.answer(num_prompt_tokens=len(question.prompt_token_ids), num_rounds=None)


@contextmanager
def open_system(spec: PeerSpec) -> Iterator[SglangPeer]:
    """Load it, and shut it down afterwards. Raises `NotHere`."""
    try:
        sglang = importlib.import_module("sglang")
    except ImportError as error:
        raise NotHere(
            f"sglang cannot be imported ({error}); see docs.sglang.io for how to install it"
        ) from None
    engine = sglang.Engine(
        model_path=spec.folder,
        dtype=spec.dtype.value,
        context_length=spec.max_context,
        max_running_requests=spec.batch_size,
        disable_radix_cache=True,  # nobody else keeps the last prompt either
        skip_tokenizer_init=True,
    )
    peer = SglangPeer(engine, spec, version=sglang.__version__)
    try:
        yield peer
    finally:
        peer.close()
