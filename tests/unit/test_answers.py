"""The output file: one JSON object a request, complete as soon as the request ends."""

import json
import math
import os

import pytest

from conf.schema import RunConfig
from pipeline.answers import AnswerWriter, check_output
from pipeline.errors import ConfigError
from pipeline.messages import TextBlock, TokenLogprobs
from pipeline.prompts import PromptRow
from pipeline.request_queue import RequestQueue
from tests.fake_frontend_events import METRICS, NO_SPECULATION, PLANNED, finished

METRIC_NAMES = {
    "num_rounds",
    "num_proposed_tokens",
    "num_accepted_tokens",
    "acceptance_length",
    "acceptance_rate",
    "cache_hits",
    "cache_misses",
    "hit_rate",
    "mean_ready_length",
    "ttft_ms",
    "decode_seconds",
    "tokens_per_second",
    "target_wait_ms",
    "overlap_ms",
}


def request_of(text):
    row = PromptRow(index=0, turns=(text,), is_conversation=False, origin="prompt")
    return RequestQueue([row], RunConfig(seed=9), use_chat=False).take()


def blocks_of(*token_ids):
    return [TextBlock(request_id="0", text="", token_ids=ids, source=None) for ids in token_ids]


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_an_answer_has_all_fields_and_is_on_disk_before_the_run_ends(tmp_path):
    path = tmp_path / "answers.jsonl"
    with AnswerWriter(path) as writer:
        writer.write_answer(request_of("say\u2028 ü\n"), finished(text="ok 🌵"), blocks_of([1, 2], [3]))
        (row,) = lines_of(path)
    metrics = row.pop("metrics")
    assert row == {
        "request_id": "0",
        "prompt": "say\u2028 ü\n",
        "prompt_token_ids": None,
        "text": "ok 🌵",
        "token_ids": [1, 2, 3],
        "finish_reason": "length",
        "stop_reason": None,
        "num_prompt_tokens": 5,
        "num_output_tokens": 31,
        "seed": 9,
        "logprobs": None,
    }
    assert set(metrics) >= METRIC_NAMES
    assert (metrics["hit_rate"], metrics["num_rounds"]) == (METRICS.hit_rate, METRICS.num_rounds)


def test_token_ids_are_written_in_the_place_of_a_prompt(tmp_path):
    row = PromptRow(index=0, turns=(), is_conversation=False, origin="a:1", token_ids=(4, 5))
    request = RequestQueue([row], RunConfig(seed=9), use_chat=True).take()
    with AnswerWriter(tmp_path / "answers.jsonl") as writer:
        writer.write_answer(request, finished(), blocks_of([1]))
        writer.write_failure(request, "too long")
    for written in lines_of(tmp_path / "answers.jsonl"):
        assert (written["prompt"], written["prompt_token_ids"]) == (None, [4, 5])


def test_the_planners_figures_are_written_with_the_others(tmp_path):
    path = tmp_path / "answers.jsonl"
    with AnswerWriter(path) as writer:
        writer.write_answer(request_of("a"), finished(metrics=PLANNED), blocks_of([1]))
    (row,) = lines_of(path)
    assert row["metrics"]["num_rest_rounds"] == 3
    assert row["metrics"]["plan"]["tokens_per_second"] == 80.0


def test_undefined_figures_are_null(tmp_path):
    path = tmp_path / "answers.jsonl"
    with AnswerWriter(path) as writer:
        writer.write_answer(request_of("a"), finished(metrics=NO_SPECULATION), blocks_of([1]))
    (row,) = lines_of(path)
    undefined = {"acceptance_rate", "cache_hits", "hit_rate", "decode_seconds", "tokens_per_second"}
    assert {name for name in undefined if row["metrics"][name] is None} == undefined


def test_nan_is_never_written(tmp_path):
    path = tmp_path / "answers.jsonl"
    bad = finished(metrics=NO_SPECULATION.__class__(**{**as_dict(NO_SPECULATION), "hit_rate": math.nan}))
    with AnswerWriter(path) as writer, pytest.raises(ValueError, match="not JSON compliant"):
        writer.write_answer(request_of("a"), bad, blocks_of([1]))


def as_dict(metrics):
    return {name: getattr(metrics, name) for name in metrics.__struct_fields__}


def test_a_failed_request_has_its_error(tmp_path):
    path = tmp_path / "answers.jsonl"
    with AnswerWriter(path) as writer:
        writer.write_failure(request_of("a"), "too long")
        writer.write_answer(request_of("b"), finished(), blocks_of([1]))
    first, second = lines_of(path)
    assert set(first) == {*second, "error"}
    assert (first["request_id"], first["prompt"], first["error"]) == ("0", "a", "too long")
    assert (first["finish_reason"], first["token_ids"], first["metrics"]) == ("error", None, None)
    assert second["prompt"] == "b"


def test_an_old_file_is_replaced(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("old\n", encoding="utf-8")
    with AnswerWriter(path) as writer:
        writer.write_failure(request_of("a"), "x")
    assert len(lines_of(path)) == 1


def test_a_path_that_cannot_be_written_is_refused_before_anything_is_touched(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n", encoding="utf-8")
    for path, expected in [
        (tmp_path, "is a folder"),
        (tmp_path / "nowhere" / "a.jsonl", "there is no folder"),
        (tmp_path / "." / "prompts.txt", "is the prompts_file"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            check_output(path, prompts_file=prompts)
    assert prompts.read_text(encoding="utf-8") == "hello\n"
    check_output(tmp_path / "new.jsonl", prompts_file=prompts)
    assert not (tmp_path / "new.jsonl").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_output(tmp_path / "a.jsonl", prompts_file=None)


def test_log_probabilities_are_written_where_they_were_asked_for(tmp_path):
    entry = TokenLogprobs(
        token_id=7,
        logprob=-0.5,
        rank=1,
        top_token_ids=[7, 2],
        top_logprobs=[-0.5, -2.0],
        token="a",
        top_tokens=["a", "b"],
    )
    row = PromptRow(index=0, turns=("a",), is_conversation=False, origin="prompt", options={"logprobs": 2})
    request = RequestQueue([row], RunConfig(seed=9), use_chat=False).take()
    block = TextBlock(request_id="0", text="", token_ids=[7], source=None, logprobs=[entry])
    with AnswerWriter(tmp_path / "answers.jsonl") as writer:
        writer.write_answer(request, finished(), [block])
    (written,) = lines_of(tmp_path / "answers.jsonl")
    assert written["logprobs"] == [
        {
            "token_id": 7,
            "logprob": -0.5,
            "rank": 1,
            "top_token_ids": [7, 2],
            "top_logprobs": [-0.5, -2.0],
            "token": "a",
            "top_tokens": ["a", "b"],
        }
    ]
