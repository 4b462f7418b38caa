"""`structured_outputs` and `response_format` as programs and command lines give them."""

from __future__ import annotations

import msgspec
import pytest

from conf.check import check
from conf.compose import compose
from conf.schema import RunConfig, StructuredOutputsConfig
from pipeline import SamplingParams, StructuredOutputsParams
from pipeline.client_options import resolve_options
from pipeline.errors import ConfigError, RequestError
from pipeline.messages import Sampling, StructuredOutputs
from pipeline.sampling_options import check_sampling, with_options
from stages.detokenizer import DetokenizerStage

BASE = Sampling(max_tokens=8, seed=1)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}}'


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=AS_TEXT)),
        ({"structured_outputs": {"json": AS_TEXT}}, StructuredOutputs(json=AS_TEXT)),
        ({"structured_outputs": StructuredOutputsParams(json=SCHEMA)}, StructuredOutputs(json=AS_TEXT)),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, StructuredOutputs(regex="a+")),
        (
            {"structured_outputs": StructuredOutputsParams(choice=("a", "b"))},
            StructuredOutputs(choice=["a", "b"]),
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "regex": None}},
            StructuredOutputs(json_object=True, disable_any_whitespace=True),
        ),
        ({"structured_outputs": {"grammar": "start: A"}}, StructuredOutputs(grammar="start: A")),
        ({"structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            StructuredOutputs(json=AS_TEXT),
        ),
    ],
)
def test_every_way_to_ask_comes_to_the_same(options, expected):
    sampling = with_options(BASE, options)
    assert sampling.structured_outputs == expected
    check_sampling(sampling)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=Sampling) == sampling
    # As a client sends them.
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(options))
    assert with_options(BASE, sent).structured_outputs == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"structured_outputs": {}}, "structured_outputs: expected one of json, json_object, .*got none"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "expected one of json, regex; leave"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.*structural_tag"),
        ({"structured_outputs": {"regex": 3}}, r"structured_outputs\.regex: expected"),
        ({"structured_outputs": {"regex": ""}}, r"structured_outputs\.regex: expected"),
        ({"structured_outputs": {"choice": ["a", ""]}}, r"structured_outputs\.choice"),
        ({"structured_outputs": {"choice": []}}, "got none"),
        ({"structured_outputs": {"json": "{"}}, "json: expected a JSON schema"),
        ({"structured_outputs": {"json": "3"}}, "json: expected a JSON schema, which is an object"),
        ({"structured_outputs": {"json": {"a": {1}}}}, "json: expected a JSON schema, got"),
        ({"structured_outputs": "json"}, "expected StructuredOutputsParams, or an object"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "is about JSON"),
        ({"structured_outputs": {"regex": "a" * (1 << 18)}}, r"structured_outputs\.regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format=.*expected"),
        ({"response_format": "json"}, "response_format=.*expected"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "expected one of them",
        ),
    ],
)
def test_what_is_no_structured_output_is_refused_by_name(options, reason):
    with pytest.raises(RequestError, match=reason):
        with_options(BASE, options)


def test_a_message_made_by_hand_is_checked_too():
    sampling = msgspec.structs.replace(BASE, structured_outputs=StructuredOutputs())
    with pytest.raises(RequestError, match="got none"):
        check_sampling(sampling)


def test_sampling_params_take_both_names():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"), max_tokens=4)
    assert resolve_options(params.options, RunConfig()).structured_outputs == StructuredOutputs(regex="a+")
    params = SamplingParams(response_format={"type": "json_object"})
    sampling = resolve_options(params.options, RunConfig())
    assert sampling.structured_outputs == StructuredOutputs(json_object=True)
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regexp": "a"})
    with pytest.raises(RequestError, match=r"guided_json.*structured_outputs"):
        SamplingParams(guided_json="{}")
    with pytest.raises(RequestError, match="expected one of json, regex"):
        StructuredOutputsParams(json="{}", regex="a")


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        (f"structured_outputs.json={AS_TEXT}", "json", AS_TEXT),
        (r"structured_outputs.regex=[a-z]{2,3}=\$(x|y), 'z'", "regex", r"[a-z]{2,3}=\$(x|y), 'z'"),
        ('structured_outputs.choice=["yes", "no"]', "choice", ["yes", "no"]),
        ('structured_outputs.grammar=start: "a"\n', "grammar", 'start: "a"\n'),
        ("structured_outputs.json_object=true", "json_object", True),
    ],
)
def test_structured_outputs_on_the_command_line(argument, name, value):
    config = compose([argument])
    check(config, available_cores=2)
    assert config.structured_outputs == StructuredOutputsConfig(**{name: value})
    sampling = resolve_options({}, config)
    assert sampling.structured_outputs == StructuredOutputs(**{name: value})
    assert resolve_options({"structured_outputs": {"regex": "b"}}, config).structured_outputs == (
        StructuredOutputs(regex="b")
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["structured_outputs.json={"],
        ["structured_outputs.choice=yes"],
        ["structured_outputs.regex="],
        ["structured_outputs.regex=a", "structured_outputs.json_object=true"],
    ],
)
def test_a_broken_one_on_the_command_line_is_refused_by_name(arguments):
    with pytest.raises(ConfigError, match=r"^structured_outputs"):
        check(compose(arguments), available_cores=2)


def test_the_detokenizer_fails_a_request_and_forgets_it(tmp_path):
    from pipeline.messages import Committed, RequestFailed
    from tests.tiny_tokenizers import byte_level, save_model_folder

    class Outbox:
        def __init__(self):
            self.sent = []

        def send(self, receiver, message):
            self.sent.append(message)

    outbox = Outbox()
    stage = DetokenizerStage(outbox=outbox, folder=save_model_folder(tmp_path, byte_level()))
    stage.setup()
    block = {"request_id": "r", "num_accepted": 0, "source": None, "num_prompt_tokens": 3}
    stage.handle(Committed(round_id=0, token_ids=[70], **block))
    stage.handle(Committed(round_id=1, token_ids=[], failure="because", **block))
    assert outbox.sent[1:] == [RequestFailed(request_id="r", reason="because")]
    stage.handle(Committed(round_id=0, token_ids=[70], **block))
    assert outbox.sent[2].text == outbox.sent[0].text
