"""Request options: their ranges, their names, how they are typed, and the seeds of samples."""

import math

import msgspec
import pytest

from conf.check import check
from conf.compose import compose
from conf.schema import RunConfig
from pipeline.errors import ConfigError, RequestError
from pipeline.messages import Sampling
from pipeline.prompts import PromptRow, read_prompts_file
from pipeline.request_queue import RequestQueue
from pipeline.samples import sample_seed
from pipeline.sampling_options import check_sampling, sampling_of, with_options
from stages.target_verifier.checks import fault_of_options

BASE = Sampling(max_tokens=8, seed=1)

OUT_OF_RANGE = [
    ("presence_penalty", 2.01),
    ("presence_penalty", -2.01),
    ("presence_penalty", math.nan),
    ("frequency_penalty", 2.01),
    ("frequency_penalty", -2.01),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", 1e-300),
    ("max_tokens", 1 << 40),
    ("top_k", 1 << 70),
    ("logit_bias", {5: 100.5}),
    ("logit_bias", {5: -100.5}),
    ("logit_bias", {-1: 0.0}),
    ("logprobs", -1),
    ("logprobs", 21),
    ("min_tokens", -1),
    ("min_tokens", 9),
    ("stop", [""]),
    ("stop", ["x" * 5000]),
    ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1 << 40]),
]

AT_THE_EDGE = [
    ("presence_penalty", 2.0),
    ("frequency_penalty", -2.0),
    ("repetition_penalty", 1e-6),
    ("logit_bias", {0: 100.0, 1: -100.0}),
    ("logprobs", 0),
    ("logprobs", 20),
    ("min_tokens", 8),
    ("stop", ["x"]),
    ("stop_token_ids", [0]),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=f"^{name}"):
        check_sampling(msgspec.structs.replace(BASE, **{name: value}))
    with pytest.raises(RequestError, match=f"^{name}"):
        with_options(BASE, {name: value})
    with pytest.raises(ConfigError, match=f"^{name}"):
        check(RunConfig(**{"max_tokens": 8, name: value}), available_cores=2)


@pytest.mark.parametrize(("name", "value"), AT_THE_EDGE)
def test_a_value_at_the_edge_of_its_range_is_taken(name, value):
    changed = with_options(BASE, {name: value})
    check_sampling(changed)
    config = RunConfig(**{"max_tokens": 8, name: value})
    check(config, available_cores=2)
    assert sampling_of(config, seed=1) == changed


@pytest.mark.parametrize("n", [0, -1, 1025])
def test_a_number_of_samples_out_of_range_is_refused(n):
    with pytest.raises(ConfigError, match=f"^n={n}"):
        check(RunConfig(n=n), available_cores=2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"best_of": 2}, "option best_of is not supported"),
        ({"prompt_logprobs": 1}, "option prompt_logprobs is not supported"),
        ({"temprature": 1.0}, "did you mean temperature"),
        ({"n": 2}, "option n is not supported"),
        ({"stop": 3}, "stop: expected `array`"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature: expected `float`"),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(options, reason):
    with pytest.raises(RequestError, match=reason):
        with_options(BASE, options)


def test_options_take_the_place_of_those_of_the_run():
    changed = with_options(BASE, {"temperature": 1, "logit_bias": {"7": 2}, "stop": "END"})
    assert changed == with_options(BASE, {"temperature": 1.0, "logit_bias": {7: 2}, "stop": ["END"]})
    assert changed == msgspec.structs.replace(BASE, temperature=1.0, logit_bias={7: 2.0}, stop=["END"])


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("stop=END", "stop", ["END"]),
        ("stop={x}, y=$z", "stop", ["{x}, y=$z"]),
        ('stop=["\\n\\n", "a]"]', "stop", ["\n\n", "a]"]),
        ("stop_token_ids=[3,5]", "stop_token_ids", [3, 5]),
        ("logit_bias={198:-100,42:1.5}", "logit_bias", {198: -100.0, 42: 1.5}),
        ('logit_bias={"198": -100}', "logit_bias", {198: -100.0}),
        ("ignore_eos=true", "ignore_eos", True),
        ("repetition_penalty=1.3", "repetition_penalty", 1.3),
        ("logprobs=3", "logprobs", 3),
    ],
)
def test_options_on_the_command_line(argument, key, value):
    config = compose([argument])
    check(config, available_cores=2)
    assert getattr(config, key) == value
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=RunConfig) == config


@pytest.mark.parametrize(
    "argument",
    ["stop=", "stop=[END]", 'stop=["a", 3]', "logit_bias=5", "logit_bias={a:1}", "logit_bias={3:x}"],
)
def test_a_broken_value_on_the_command_line_is_refused_by_name(argument):
    with pytest.raises(ConfigError, match="^" + argument.partition("=")[0]):
        check(compose([argument]), available_cores=2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_tokens": 9}, "min_tokens=9: expected at most max_tokens=8"),
        ({"stop_token_ids": [3, 10]}, "stop_token_ids: expected token ids below 10, got 10"),
        ({"logit_bias": {11: 1.0}}, "logit_bias: expected token ids below 10, got 11"),
        ({"min_tokens": 1, "stop_token_ids": list(range(1, 10))}, "min_tokens .* bans the whole vocabulary"),
        ({"min_tokens": 1, "stop_token_ids": list(range(2, 10))}, None),
        ({"stop_token_ids": [9], "logit_bias": {9: 1.0}}, None),
    ],
)
def test_what_only_the_vocabulary_tells_is_refused_by_the_verifier(options, reason):
    fault = fault_of_options(msgspec.structs.replace(BASE, **options), eos_token_ids={0}, vocab_size=10)
    if reason is None:
        assert fault is None
    else:
        with pytest.raises(RequestError, match=reason):
            raise RequestError(fault)


def test_seeds_of_samples_are_the_seed_itself_and_hashes_of_it():
    seeds = [sample_seed(seed, index) for seed in (7, 8, 2**63 - 1) for index in range(100)]
    assert (seeds[0], seeds[100], seeds[200]) == (7, 8, 2**63 - 1)
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**53 for index, seed in enumerate(seeds) if index % 100)
    assert sample_seed(7, 3) == sample_seed(7, 3)


def _rows(*rows):
    return [
        PromptRow(index=i, turns=turns, is_conversation=len(turns) > 1, origin=f"f:{i}", options=options)
        for i, (turns, options) in enumerate(rows)
    ]


def test_every_sample_of_a_prompt_is_a_request_with_a_seed_of_its_own():
    rows = _rows((("a",), {}), (("b",), {"seed": 5}))
    queue = RequestQueue(rows, RunConfig(n=3, seed=7, max_requests=9), use_chat=False)
    requests = [queue.take() for _ in range(6)]
    assert [r.request_id for r in requests] == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]
    assert [r.sampling.seed for r in requests] == [sample_seed(s, i) for s in (7, 5) for i in range(3)]


def test_samples_of_one_prompt_without_a_seed_share_a_drawn_one():
    queue = RequestQueue(_rows((("a",), {})), RunConfig(n=2, max_requests=2), use_chat=False)
    first, second = queue.take(), queue.take()
    assert second.sampling.seed == sample_seed(first.sampling.seed, 1)


def test_each_sample_of_a_conversation_goes_on_with_its_own_answers():
    queue = RequestQueue(_rows((("a", "b"), {})), RunConfig(n=2, seed=1, max_requests=4), use_chat=True)
    assert [queue.take().request_id, queue.take().request_id] == ["0.0/0", "0.0/1"]
    queue.finish("0.0/1", "second answer")
    following = queue.take()
    assert following.request_id == "0.1/1"
    assert [turn.content for turn in following.chat] == ["a", "second answer", "b"]
    assert following.sampling.seed == sample_seed(1, 1)


def test_a_row_of_a_file_may_have_options_of_its_own(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "sampling": {"temperature": 0.5}}\n{"prompt": "b"}\n')
    queue = RequestQueue(read_prompts_file(path), RunConfig(temperature=1.0, max_requests=2), use_chat=False)
    assert [queue.take().sampling.temperature for _ in range(2)] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ('{"best_of": 2}', "prompts.jsonl:1: option best_of is not supported"),
        ("3", "prompts.jsonl:1: expected"),
    ],
)
def test_bad_options_of_a_row_are_refused_with_its_line(tmp_path, sampling, reason):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a", "sampling": {sampling}}}\n')
    with pytest.raises(ConfigError, match=reason):
        RequestQueue(read_prompts_file(path), RunConfig(), use_chat=False)
