"""The detokenizer stage: one text block per committed block, then the whole text."""

import random

import msgspec
import pytest

from pipeline.errors import ConfigError, ProtocolError
from pipeline.messages import (
    BeginText,
    Committed,
    FinishReason,
    ProposalSource,
    RequestFinished,
    StageName,
    TextBlock,
    TokenLogprobs,
)
from stages.detokenizer import DetokenizerStage
from tests.fake_frontend_events import NO_SPECULATION
from tests.tiny_tokenizers import byte_fallback, byte_level, metaspace, save_model_folder, word_piece

TEXT = "hello 한 🦀 the end"


class Sent(list):
    """An outbox that keeps what was sent."""

    def send(self, receiver, message):
        assert receiver is StageName.FRONTEND
        self.append(message)


@pytest.fixture
def tokenizer():
    return byte_level()


@pytest.fixture
def outbox():
    return Sent()


@pytest.fixture
def stage(tmp_path, tokenizer, outbox):
    stage = DetokenizerStage(outbox=outbox, folder=save_model_folder(tmp_path, tokenizer))
    stage.setup()
    yield stage
    stage.close()
    stage.close()


def committed(request_id, round_id, token_ids, finish_reason=None, source=None):
    return Committed(
        request_id=request_id,
        round_id=round_id,
        token_ids=token_ids,
        num_accepted=max(len(token_ids) - 1, 0),
        source=source,
        num_prompt_tokens=7,
        finish_reason=finish_reason,
        metrics=None if finish_reason is None else NO_SPECULATION,
    )


@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
def test_one_block_of_text_per_committed_block_then_the_whole_text(stage, tokenizer, outbox, block_size):
    ids = tokenizer.encode(TEXT).ids
    blocks = [ids[start : start + block_size] for start in range(0, len(ids), block_size)]
    for round_id, block in enumerate(blocks):
        reason = FinishReason.LENGTH if round_id == len(blocks) - 1 else None
        stage.handle(committed("0", round_id, block, reason, ProposalSource.HIT))
    *text_blocks, finished = outbox
    assert [block.token_ids for block in text_blocks] == blocks
    assert {block.source for block in text_blocks} == {ProposalSource.HIT}
    assert not any("\ufffd" in block.text for block in text_blocks)
    assert "".join(block.text for block in text_blocks) == finished.text == TEXT
    assert (finished.num_output_tokens, finished.num_prompt_tokens) == (len(ids), 7)
    assert finished.finish_reason is FinishReason.LENGTH


def test_requests_do_not_share_their_pending_bytes(stage, tokenizer, outbox):
    first, second = tokenizer.encode("한").ids, tokenizer.encode("🦀").ids
    for round_id in range(max(len(first), len(second))):
        for request_id, ids in (("a", first), ("b", second)):
            if round_id < len(ids):
                reason = FinishReason.LENGTH if round_id == len(ids) - 1 else None
                stage.handle(committed(request_id, round_id, [ids[round_id]], reason))
    texts = {message.request_id: message.text for message in outbox if isinstance(message, RequestFinished)}
    assert texts == {"a": "한", "b": "🦀"}


def test_end_of_sequence_is_in_the_ids_but_not_in_the_text(stage, tokenizer, outbox):
    hello, end = tokenizer.encode("hello").ids, tokenizer.token_to_id("<|im_end|>")
    stage.handle(committed("0", 0, [*hello, end], FinishReason.STOP))
    block, finished = outbox
    assert block.token_ids == [*hello, end]
    assert block.text == finished.text == "hello"
    assert finished.num_output_tokens == len(hello) + 1


def test_an_ordinary_token_that_ends_the_sequence_is_not_in_the_text_either(stage, tokenizer, outbox):
    hello, end = tokenizer.encode("hello").ids, tokenizer.token_to_id("<think>")
    stage.handle(committed("0", 0, [*hello, end], FinishReason.STOP))
    assert outbox[-1].text == "hello"


def test_held_back_bytes_come_with_the_last_block(stage, tokenizer, outbox):
    ids = tokenizer.encode("a🦀").ids
    stage.handle(committed("0", 0, ids[:-1]))
    stage.handle(committed("0", 1, [], FinishReason.CANCELLED))
    assert [message.text for message in outbox] == ["a", "\ufffd", "a\ufffd"]


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, metaspace, word_piece])
def test_streams_of_random_tokens_equal_the_one_shot_text_whatever_the_blocks_and_the_end(tmp_path, kind):
    """Any ids: half characters, special tokens, rows of padding; blocks of any size, the last one empty."""
    tokenizer, outbox, rng = kind(), Sent(), random.Random(8)
    stage = DetokenizerStage(outbox=outbox, folder=save_model_folder(tmp_path, tokenizer))
    stage.setup()
    for number in range(300):
        ids = [rng.randrange(tokenizer.get_vocab_size() + 3) for _ in range(rng.randint(1, 30))]
        reason = rng.choice([FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED])
        start = round_id = 0
        while start < len(ids):
            size = rng.randint(1, 6)
            is_last = start + size >= len(ids) and reason is not FinishReason.CANCELLED
            block = ids[start : start + size]
            stage.handle(committed(str(number), round_id, block, reason if is_last else None))
            start, round_id = start + size, round_id + 1
        if reason is FinishReason.CANCELLED:
            stage.handle(committed(str(number), round_id, [], reason))
        *blocks, finished = outbox
        kept = ids[:-1] if reason is FinishReason.STOP else ids
        assert finished.text == tokenizer.decode(kept, skip_special_tokens=True)
        assert "".join(block.text for block in blocks) == finished.text
        assert [token_id for block in blocks for token_id in block.token_ids] == ids
        outbox.clear()


def test_a_request_cancelled_before_its_first_token_finishes_without_a_block(stage, outbox):
    stage.handle(committed("0", 0, [], FinishReason.CANCELLED))
    (finished,) = outbox
    assert isinstance(finished, RequestFinished)
    assert (finished.text, finished.num_output_tokens) == ("", 0)


def test_a_repeated_round_is_refused_and_shows_nothing(stage, tokenizer, outbox):
    ids = tokenizer.encode("hello").ids
    stage.handle(committed("0", 0, ids))
    with pytest.raises(ProtocolError, match="expected a round after 0, got round 0"):
        stage.handle(committed("0", 0, ids))
    assert [type(message) for message in outbox] == [TextBlock]


def test_an_id_can_be_used_again_once_its_request_is_finished(stage, tokenizer, outbox):
    ids = tokenizer.encode("hello").ids
    for _ in range(2):
        stage.handle(committed("0", 0, ids, FinishReason.LENGTH))
    assert [message.text for message in outbox] == ["hello"] * 4


def test_a_folder_without_a_tokenizer_is_a_configuration_error(tmp_path, outbox):
    with pytest.raises(ConfigError, match=r"expected a tokenizer\.json"):
        DetokenizerStage(outbox=outbox, folder=tmp_path).setup()


def end_of_stop(request_id, round_id, token_ids, stop, num_cut_characters):
    last = committed(request_id, round_id, token_ids, FinishReason.STOP)
    return msgspec.structs.replace(last, stop_reason=stop, num_cut_characters=num_cut_characters)


@pytest.mark.parametrize("block_size", [1, 2, 3, 7])
@pytest.mark.parametrize("stop", ["t", "the", "the end", "한 🦀", "🦀", " "])
def test_no_part_of_a_stop_string_is_shown(stage, tokenizer, outbox, stop, block_size):
    ids = tokenizer.encode(TEXT).ids
    start = TEXT.index(stop)
    num_tokens = next(n for n in range(len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
    num_cut = len(tokenizer.decode(ids[:num_tokens])) - start
    stage.handle(BeginText(request_id="0", stop=["zzz", stop], prompt_text=None))
    blocks = [ids[i : min(i + block_size, num_tokens)] for i in range(0, num_tokens, block_size)]
    for round_id, block in enumerate(blocks[:-1]):
        stage.handle(committed("0", round_id, block))
    stage.handle(end_of_stop("0", len(blocks), blocks[-1], stop, num_cut))
    *texts, finished = outbox
    assert "".join(block.text for block in texts) == finished.text == TEXT[:start]
    assert (finished.num_output_tokens, finished.stop_reason) == (num_tokens, stop)
    assert [token for block in texts for token in block.token_ids] == ids[:num_tokens]


def test_what_only_looked_like_a_stop_string_is_shown(stage, tokenizer, outbox):
    stage.handle(BeginText(request_id="0", stop=["the endless"], prompt_text=None))
    ids = tokenizer.encode(TEXT).ids
    stage.handle(committed("0", 0, ids))
    assert outbox[0].text == TEXT.removesuffix("the end")
    stage.handle(committed("0", 1, tokenizer.encode("ing").ids))
    assert outbox[1].text == "the ending"
    stage.handle(committed("0", 2, tokenizer.encode(" the").ids))
    stage.handle(committed("0", 3, [], FinishReason.CANCELLED))
    assert outbox[-1].text == TEXT + "ing the"


def test_an_echoed_prompt_comes_first_and_counts_no_tokens(stage, tokenizer, outbox):
    stage.handle(BeginText(request_id="0", stop=[], prompt_text="Say: "))
    ids = tokenizer.encode("hello").ids
    stage.handle(committed("0", 0, ids, FinishReason.LENGTH))
    echo, answer, finished = outbox
    assert (echo.text, echo.token_ids) == ("Say: ", [])
    assert (answer.text, finished.text) == ("hello", "Say: hello")
    assert (finished.num_echo_characters, finished.num_output_tokens) == (5, len(ids))


def test_a_text_that_begins_twice_is_refused(stage, outbox):
    stage.handle(BeginText(request_id="0", stop=["x"], prompt_text=None))
    with pytest.raises(ProtocolError, match="begun"):
        stage.handle(BeginText(request_id="0", stop=["x"], prompt_text=None))


def test_log_probabilities_get_the_texts_of_their_tokens(stage, tokenizer, outbox):
    (hello,), (first, *_) = tokenizer.encode(" hello").ids, tokenizer.encode("Ж").ids
    entry = TokenLogprobs(
        token_id=hello, logprob=-0.5, rank=1, top_token_ids=[hello, 0], top_logprobs=[-0.5, -2]
    )
    part = TokenLogprobs(token_id=first, logprob=-0.5, rank=1, top_token_ids=[], top_logprobs=[])
    stage.handle(msgspec.structs.replace(committed("0", 0, [hello, first]), logprobs=[entry, part]))
    given = outbox[0].logprobs
    assert [(e.token, e.top_tokens) for e in given] == [(" hello", [" hello", "<|bos|>"]), ("\ufffd", [])]
    assert [msgspec.structs.replace(e, token="", top_tokens=[]) for e in given] == [entry, part]
