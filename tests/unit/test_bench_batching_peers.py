"""The wrappers of vLLM and SGLang against stand-ins with the documented interface: neither is here."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from conf.schema import DType
from tests.bench_plans import make_batch, make_peer, make_question
from tests.parity.test_bench_peers import save_model
from tools.bench import sglang_peer, vllm_peer
from tools.bench.protocol import NotHere, PeerSpec

ANSWERS = {0: [5, 6, 7, 8], 1: [9, 2]}
"""Token ids by the first id of the prompt."""


def make_spec(name: str, folder: Path) -> PeerSpec:
    return msgspec.structs.replace(
        make_peer(name), folder=str(folder), dtype=DType.float32, batch_size=2, cores=[0, 1]
    )


class StandInEngine:
    """vLLM's: every step gives each open request two more tokens; outputs hold all of them so far."""

    def __init__(self, arguments: SimpleNamespace) -> None:
        self.arguments = arguments
        self.open: dict[str, list[int]] = {}
        self.given: dict[str, int] = {}
        self.sampling: list[SimpleNamespace] = []

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: SimpleNamespace) -> None:
        self.open[request_id] = ANSWERS[prompt["prompt_token_ids"][0]]
        self.given[request_id] = 0
        self.sampling.append(params)

    def has_unfinished_requests(self) -> bool:
        return bool(self.open)

    def step(self) -> list[SimpleNamespace]:
        outputs = []
        for request_id, token_ids in list(self.open.items()):
            self.given[request_id] += 2
            so_far = tuple(token_ids[: self.given[request_id]])
            outputs.append(
                SimpleNamespace(request_id=request_id, outputs=[SimpleNamespace(token_ids=so_far)])
            )
            if len(so_far) == len(token_ids):
                del self.open[request_id]
        return outputs


def stand_in_vllm() -> ModuleType:
    module: Any = ModuleType("vllm")
    module.__version__ = "1"
    module.EngineArgs = module.SamplingParams = lambda **keys: SimpleNamespace(**keys)
    module.LLMEngine = SimpleNamespace(from_engine_args=StandInEngine)
    stand_in: ModuleType = module
    return stand_in


def test_vllm_answers_a_batch_and_is_told_its_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", stand_in_vllm())
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    with vllm_peer.open_system(make_spec("vllm", tmp_path)) as peer:
        batch = make_batch(make_question(1), make_question(0), temperature=0.5)
        for _ in range(2):  # request ids are not used twice
            first, second = peer.answer(batch)
            assert (first.token_ids, first.block_tokens) == ([9, 2], [2])
            assert (second.token_ids, second.block_tokens) == ([5, 6, 7, 8], [2, 2])
            assert (second.num_prompt_tokens, second.num_rounds) == (3, None)
    engine = peer._engine
    assert (engine.arguments.max_num_seqs, engine.arguments.dtype) == (2, "float32")
    assert (engine.sampling[1].temperature, engine.sampling[1].max_tokens) == (0.5, 8)
    assert vllm_peer.os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


class StandInSglang:
    """Streams two tokens at a time, with all of them so far or the new ones only."""

    def __init__(self, *, is_incremental: bool) -> None:
        self.is_incremental = is_incremental
        self.is_shut_down = False
        self.sampling: dict[str, Any] = {}

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], stream: bool
    ) -> AsyncIterator[dict[str, Any]]:
        assert stream
        self.sampling = sampling_params
        return self._chunks(ANSWERS[input_ids[0]])

    async def _chunks(self, token_ids: list[int]) -> AsyncIterator[dict[str, Any]]:
        for end in range(2, len(token_ids) + 1, 2):
            output_ids = token_ids[end - 2 : end] if self.is_incremental else token_ids[:end]
            yield {"output_ids": output_ids, "meta_info": {"completion_tokens": end}}
        # The last one may bring nothing new.
        yield {
            "output_ids": [] if self.is_incremental else token_ids,
            "meta_info": {"completion_tokens": len(token_ids)},
        }

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.mark.parametrize("is_incremental", [True, False])
def test_sglang_answers_a_batch_however_it_streams(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_incremental: bool
) -> None:
    engine = StandInSglang(is_incremental=is_incremental)
    module: Any = ModuleType("sglang")
    module.__version__ = "1"
    module.Engine = lambda **keys: engine
    monkeypatch.setitem(sys.modules, "sglang", module)
    folder = save_model(tmp_path / "target")
    with sglang_peer.open_system(make_spec("sglang", folder)) as peer:
        first, second = peer.answer(make_batch(make_question(0), make_question(1)))
    assert (first.token_ids, first.block_tokens) == ([5, 6, 7, 8], [2, 2])
    assert (second.token_ids, second.block_tokens) == ([9, 2], [2])
    assert engine.sampling["max_new_tokens"] == 8
    assert engine.is_shut_down


@pytest.mark.parametrize(("module", "name"), [(vllm_peer, "vllm"), (sglang_peer, "sglang")])
def test_one_that_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: Any, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what Python takes for: cannot be imported
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    with (
        pytest.raises(NotHere, match=f"{name} cannot be imported"),
        module.open_system(make_spec(name, tmp_path)),
    ):
        pass
