"""Stop strings end a request at the same token in every system, and the text stops before them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pipeline.messages import FinishReason, RequestFinished, Sampling, TextBlock
from stages.detokenizer import DetokenizerStage
from stages.incremental_text import TextDecoder
from stages.vocabulary import load_tokenizer
from tests.plain_options import PlainAnswer, plain_answer
from tests.tiny import (
    EOS,
    SYSTEMS,
    VOCAB_SIZE,
    PlainDecoder,
    TinyPipeline,
    draft_by_name,
    system_config,
    tiny_target,
)
from tests.tiny_tokenizers import byte_level, save_model_folder

PROMPT = [17, 3, 99, 42, 8, 17, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose first ids, all that the tiny target has, are special tokens and single bytes."""
    torch.set_num_threads(1)
    return save_model_folder(tmp_path_factory.mktemp("model"), byte_level())


class Sent(list[object]):
    """An outbox that keeps what was sent."""

    def send(self, receiver: object, message: object) -> None:
        self.append(message)


def _run(
    system: str, samplings: Sequence[Sampling], folder: Path, *, draft: str, order_seed: int | None = None
) -> tuple[list[PlainAnswer], list[str]]:
    """Answers and texts of requests that share rounds, through the real detokenizer."""
    target = tiny_target()
    source = None if system == "autoregressive" else draft_by_name(draft, target, page_size=4)
    pipeline = TinyPipeline(
        system_config(system, max_requests=4),
        target,
        source,
        order_seed=order_seed,
        text_decoder=TextDecoder(load_tokenizer(folder)),
    )
    ids = [f"r{index}" for index in range(len(samplings))]
    for request_id, sampling in zip(ids, samplings, strict=True):
        pipeline.submit(request_id, PROMPT, sampling)
    pipeline.finish(*ids)
    outbox = Sent()
    detokenizer = DetokenizerStage(outbox=outbox, folder=folder)
    detokenizer.setup()
    for message in pipeline.recorder.messages:
        detokenizer.handle(message)
    finished = {event.request_id: event for event in outbox if isinstance(event, RequestFinished)}
    answers, texts = [], []
    for request_id in ids:
        blocks = [e for e in outbox if isinstance(e, TextBlock) and e.request_id == request_id]
        end = finished[request_id]
        tokens = [token for block in blocks for token in block.token_ids]
        assert "".join(block.text for block in blocks) == end.text
        assert end.num_output_tokens == len(tokens)
        answers.append(
            PlainAnswer(token_ids=tokens, finish_reason=end.finish_reason.value, stop_reason=end.stop_reason)
        )
        texts.append(end.text)
    return answers, texts


def _text(decoder: TextDecoder, answer: PlainAnswer, sampling: Sampling) -> str:
    """What a reader sees of a plain answer."""
    ends_by_token = answer.finish_reason == "stop" and not isinstance(answer.stop_reason, str)
    text = decoder.decode(answer.token_ids[:-1] if ends_by_token else answer.token_ids)
    if not isinstance(answer.stop_reason, str):
        return text
    num_free = len(decoder.decode(answer.token_ids[: sampling.min_tokens]))
    starts = [text.find(stop, max(num_free - len(stop) + 1, 0)) for stop in sampling.stop]
    return text[: min(start for start in starts if start >= 0)]


def _samplings(decoder: TextDecoder, plain: PlainDecoder, temperature: float) -> list[Sampling]:
    """Stop strings cut out of what the target says without them, so that they come: at every length, across
    tokens, overlapping, none at all; and some that `min_tokens` passes over."""
    generator = random.Random(1)
    found = []
    for seed in range(8):
        free = Sampling(
            max_tokens=28,
            temperature=temperature,
            seed=seed,
            ignore_eos=True,
            # Different answers at temperature 0, too.
            logit_bias={generator.randrange(VOCAB_SIZE): 6.0} | dict.fromkeys((0, 1, 2), -20.0),
            presence_penalty=1.0,
        )
        answer = _plain(plain, free, None)
        text = decoder.decode(answer.token_ids)
        start = generator.randrange(len(text) // 2)
        size = 1 + seed % 5
        stops = [text[start : start + size], text[start + 1 : start + 4], "never said"]
        fields = {name: getattr(free, name) for name in free.__struct_fields__}
        min_tokens = (0, 0, 0, 9)[seed % 4]
        found.append(Sampling(**{**fields, "stop": stops, "min_tokens": min_tokens}))
    return found


def _plain(plain: PlainDecoder, sampling: Sampling, decoder: TextDecoder | None) -> PlainAnswer:
    raw = Sampling(max_tokens=1, seed=0)
    return plain_answer(
        lambda tokens: plain.law(tokens, raw)[0],
        PROMPT,
        sampling,
        eos=EOS,
        decode=None if decoder is None else decoder.decode,
    )


@pytest.fixture(scope="module", params=[0.0, 1.0])
def requests(
    request: pytest.FixtureRequest, folder: Path
) -> tuple[list[Sampling], list[PlainAnswer], list[str]]:
    """Requests, plain decoding's answers, and what a reader sees of them."""
    decoder, plain = TextDecoder(load_tokenizer(folder)), PlainDecoder(tiny_target())
    samplings = _samplings(decoder, plain, request.param)
    answers = [_plain(plain, sampling, decoder) for sampling in samplings]
    assert sum(answer.finish_reason == FinishReason.STOP.value for answer in answers) >= 5
    return samplings, answers, [_text(decoder, a, s) for a, s in zip(answers, samplings, strict=True)]


@pytest.mark.parametrize(("draft", "order_seed"), [("noisy", None), ("oracle", 3)])
@pytest.mark.parametrize("system", SYSTEMS)
def test_stop_strings_end_every_system_where_plain_decoding_ends(
    system: str,
    draft: str,
    order_seed: int | None,
    requests: tuple[list[Sampling], list[PlainAnswer], list[str]],
    folder: Path,
) -> None:
    samplings, answers, texts = requests
    assert _run(system, samplings, folder, draft=draft, order_seed=order_seed) == (answers, texts)
