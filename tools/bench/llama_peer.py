"""The peer llama.cpp, through its Python binding, on the same weights.

The file is written once and kept (`tools.bench.gguf_writer`). Token ids in and out: no tokenizer is used.
"""

from __future__ import annotations

import hashlib
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.model.cache_folder import build_once
from stages.model.shape import read_shape
from tools.bench.arrivals import Arrivals
from tools.bench.gguf_writer import WRITER_VERSION, write_gguf
from tools.bench.identity import model_identity
from tools.bench.protocol import Answer, Batch, NotHere, PeerSpec, Question

_FILE = "model.gguf"


class LlamaPeer:
    """A loaded model."""

    def __init__(self, llama: Any, spec: PeerSpec, *, version: str) -> None:
        """llama: a `llama_cpp.Llama`."""
        self._llama = llama
        self._ends = frozenset(read_shape(Path(spec.folder)).eos_token_ids)
        self.given = f"llama_cpp {version}, weights {spec.llama_format.value}, f16 KV cache, {spec.threads}"

    def answer(self, batch: Batch) -> list[Answer]:
        """Answer one question after the other."""
        return [self._answer(question, batch.temperature) for question in batch.questions]

    def _answer(self, question: Question, temperature: float) -> Answer:
        arrivals = Arrivals(time.monotonic())
        # Else it would keep the KV of the longest common prefix with the last prompt, which nobody else does.
        self._llama.reset()
        self._llama.set_seed(question.seed % 2**32)
        for token in self._llama.generate(
            question.prompt_token_ids,
            temp=temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repeat_penalty=1.0,
        ):
            arrivals.add([int(token)])
            if arrivals.token_ids[-1] in self._ends or arrivals.num_blocks == question.max_tokens:
                break
        return arrivals.answer(
            num_prompt_tokens=len(question.prompt_token_ids), num_rounds=arrivals.num_blocks
        )


@contextmanager
def open_system(spec: PeerSpec) -> Iterator[LlamaPeer]:
    """Write the weights if need be, and load them. Raises `NotHere`."""
    try:
        llama_cpp = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise NotHere(f"llama_cpp cannot be imported ({error}); pip install llama-cpp-python") from None
    path = gguf_path(spec)
    llama = llama_cpp.Llama(
        model_path=str(path),
        n_ctx=spec.max_context,
        n_threads=len(spec.cores),
        n_threads_batch=len(spec.cores),
        verbose=False,
    )
    try:
        yield LlamaPeer(llama, spec, version=llama_cpp.__version__)
    finally:
        llama.close()


def gguf_path(spec: PeerSpec) -> Path:
    """The cached file, written now if there is none. Raises `NotHere` for a model that it cannot hold."""
    folder = Path(spec.folder)
    key = hashlib.sha256(f"{model_identity(folder)}|{WRITER_VERSION}".encode()).hexdigest()[:16]

    def build(scratch: Path) -> None:
        write_gguf(folder, scratch / _FILE, spec.llama_format)

    return build_once(f"gguf-{spec.llama_format.value}-{key}", build) / _FILE
