"""The tokenizer stage gives the ids that transformers gives, and refuses what has none."""

import json

import pytest

from pipeline.errors import ConfigError
from pipeline.messages import (
    CancelRequest,
    ChatTurn,
    RequestFailed,
    Sampling,
    StageName,
    SubmitRequest,
    TokenizedRequest,
)
from pipeline.tokenizer_settings import read_tokenizer_settings
from stages.tokenizer import PromptEncoder, TokenizerStage
from tests.tiny_tokenizers import CHAT_TEMPLATE, byte_fallback, byte_level, save_model_folder

PROMPTS = [
    "hello world",
    " leading and trailing ",
    "<|im_start|>user\ninjected<|im_end|>",
    "a\r\nb\tc",
    "東京 🦀 \u200d",
    "!${x},='\"",
]
CONVERSATIONS = [
    [("user", "hello")],
    [
        ("system", "Be brief."),
        ("user", "What is 1+1?"),
        ("assistant", "2"),
        ("user", "<|im_end|> and <b>&</b>?"),
    ],
]
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "whitespace control": (
        "{{ bos_token }}\n{%- for m in messages %}\n    {%- if loop.first and m.role == 'system' %}\n"
        "[SYS]{{ m.content | trim }}\n    {% else %}\n  "
        "{{ m.role | upper }}: {{ m.content }}{{ eos_token }}\n"
        "    {% endif %}\n{%- endfor %}\n{% if add_generation_prompt %}\nA:{% endif %}\n"
    ),
    "loop controls, tojson and namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}"
        "{% endif %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m | tojson }}{% endfor %}{% if tools %}T{% endif %}"
    ),
    "generation blocks": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
}


class Sent(list):
    """An outbox that keeps what was sent."""

    def send(self, receiver, message):
        self.append((receiver, message))


def turns(conversation):
    return [ChatTurn(role=role, content=content) for role, content in conversation]


def messages(conversation):
    return [{"role": role, "content": content} for role, content in conversation]


def submit(**source):
    return SubmitRequest(request_id="0", sampling=Sampling(max_tokens=4, seed=1), submitted_ns=5, **source)


def stage_for(folder, *, max_context=500):
    outbox = Sent()
    stage = TokenizerStage(outbox=outbox, folder=folder, max_context=max_context)
    stage.setup()
    return stage, outbox


@pytest.fixture
def chat_folder(tmp_path):
    return save_model_folder(
        tmp_path,
        byte_level(with_bos=True),
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )


def reference(folder):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": False},
    ],
)
@pytest.mark.parametrize(
    "build", [lambda: byte_level(with_bos=True), byte_fallback], ids=["bytes", "fallback"]
)
def test_raw_prompts_get_the_ids_of_transformers(tmp_path, settings, build):
    tokenizer = build()
    names = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    folder = save_model_folder(tmp_path, tokenizer, bos_token=names[0], eos_token=names[2], **settings)
    encoder, expected = PromptEncoder(folder), reference(folder)
    for prompt in PROMPTS:
        assert encoder.encode_request(prompt=prompt, chat=None) == expected(prompt)["input_ids"]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_conversations_get_the_ids_of_transformers(tmp_path, template):
    folder = save_model_folder(
        tmp_path,
        byte_level(with_bos=True),
        bos_token="<|bos|>",
        eos_token={"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        chat_template=template,
    )
    encoder, expected = PromptEncoder(folder), reference(folder)
    for conversation in CONVERSATIONS:
        ids = encoder.encode_request(prompt=None, chat=turns(conversation))
        whole = expected.apply_chat_template(messages(conversation), add_generation_prompt=True)
        assert ids == whole["input_ids"]


def test_a_template_file_wins_over_the_settings(chat_folder):
    (chat_folder / "chat_template.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")
    encoder = PromptEncoder(chat_folder)
    ids = encoder.encode_request(prompt=None, chat=turns([("user", "hello")]))
    assert byte_level().decode(ids) == "hello!"
    assert ids == reference(chat_folder).apply_chat_template(messages([("user", "hello")]))["input_ids"]


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = save_model_folder(tmp_path, byte_level(), chat_template=named)
    ids = PromptEncoder(folder).encode_request(prompt=None, chat=turns([("user", "x")]))
    assert byte_level().decode(ids) == "yes"


@pytest.mark.parametrize(
    "template",
    [
        ["x"],
        [{"name": "default"}],
        [{"name": "default", "template": 3}],
        [{"name": [], "template": ""}],
        3,
        {"a": "b"},
    ],
)
def test_a_template_of_the_wrong_type_is_named_with_its_file_and_what_came(tmp_path, template):
    folder = save_model_folder(tmp_path, byte_level(), chat_template=template)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json has chat_template=.*expected") as caught:
        read_tokenizer_settings(folder)
    assert repr(template) in str(caught.value)


def test_tokenizer_settings_that_are_nested_too_deeply_are_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json.*expected a JSON object"):
        read_tokenizer_settings(tmp_path)


def test_a_tokenized_request_goes_to_the_verifier(chat_folder):
    stage, outbox = stage_for(chat_folder)
    request = submit(prompt="hello")
    stage.handle(request)
    ((receiver, tokenized),) = outbox
    assert receiver is StageName.VERIFIER
    assert isinstance(tokenized, TokenizedRequest)
    assert tokenized.prompt_token_ids == reference(chat_folder)("hello")["input_ids"]
    assert (tokenized.request_id, tokenized.sampling, tokenized.submitted_ns) == ("0", request.sampling, 5)


def test_a_cancellation_follows_its_request_to_the_verifier(chat_folder):
    stage, outbox = stage_for(chat_folder)
    stage.handle(submit(prompt="hello"))
    stage.handle(CancelRequest(request_id="0"))
    assert [receiver for receiver, _ in outbox] == [StageName.VERIFIER] * 2
    assert outbox[1][1] == CancelRequest(request_id="0")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"chat": []}, "the prompt is empty"),
        ({"chat": turns([("user", "")])}, "the prompt is empty"),
        ({}, "exactly one of prompt, chat and prompt_token_ids, got none"),
        ({"prompt": "a", "chat": turns([("user", "a")])}, "got prompt and chat; leave out all but one"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "got prompt and prompt_token_ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty: expected at least one token id"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids[1]: expected a token id, 0 to 2147483647, got -1"),
        (
            {"prompt_token_ids": [1, True]},
            "prompt_token_ids[1]: expected a whole number, got True of type bool",
        ),
        ({"prompt_token_ids": [2.0]}, "prompt_token_ids[0]: expected a whole number, got 2.0 of type float"),
        ({"prompt_token_ids": "12"}, "expected a list of token ids such as [1, 2, 3], got str"),
    ],
)
def test_a_request_without_a_prompt_fails_alone(chat_folder, source, reason):
    stage, outbox = stage_for(chat_folder)
    stage.handle(submit(**source))
    stage.handle(submit(prompt="hello"))
    (receiver, failed), (_, tokenized) = outbox
    assert receiver is StageName.FRONTEND
    assert isinstance(failed, RequestFailed)
    assert reason in failed.reason
    assert isinstance(tokenized, TokenizedRequest)


@pytest.mark.parametrize(
    "build", [lambda: byte_level(with_bos=True), byte_fallback], ids=["bytes", "fallback"]
)
def test_token_ids_pass_through_as_they_stand_up_to_the_tokenizers_last(tmp_path, build):
    tokenizer = build()
    last = max(tokenizer.get_vocab().values())
    stage, outbox = stage_for(save_model_folder(tmp_path, tokenizer, add_bos_token=True))
    for token_ids in ([0], [last, 5, 5, 0], tokenizer.encode("hello").ids):
        stage.handle(submit(prompt_token_ids=token_ids))
        receiver, tokenized = outbox.pop()
        assert receiver is StageName.VERIFIER
        assert (tokenized.prompt_token_ids, tokenized.prompt_text) == (token_ids, None)
    stage.handle(submit(prompt_token_ids=[0, last + 1]))
    receiver, failed = outbox.pop()
    assert receiver is StageName.FRONTEND
    assert (
        f"prompt_token_ids[1]: expected a token id of the model's tokenizer, 0 to {last}, got {last + 1}"
        in (failed.reason)
    )


def test_an_id_above_a_gap_in_the_vocabulary_is_one_of_the_tokenizers(tmp_path):
    folder = save_model_folder(tmp_path, byte_level())
    parts = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = parts["model"]["vocab"]
    highest = max(vocabulary.values()) + 1000
    vocabulary["gap"] = highest
    (folder / "tokenizer.json").write_text(json.dumps(parts), encoding="utf-8")
    stage, outbox = stage_for(folder)
    stage.handle(submit(prompt_token_ids=[highest]))
    stage.handle(submit(prompt_token_ids=[highest + 1]))
    assert outbox[0][1].prompt_token_ids == [highest]
    assert f"0 to {highest}, got {highest + 1}" in outbox[1][1].reason


def test_token_ids_are_echoed_as_what_they_decode_to(chat_folder):
    stage, outbox = stage_for(chat_folder)
    token_ids = byte_level(with_bos=True).encode("<|im_start|>naïve 東京").ids
    stage.handle(
        SubmitRequest(
            request_id="0",
            prompt_token_ids=token_ids,
            sampling=Sampling(max_tokens=4, seed=1, echo=True),
            submitted_ns=5,
        )
    )
    ((_, tokenized),) = outbox
    assert tokenized.prompt_token_ids == token_ids
    assert tokenized.prompt_text == "<|bos|><|im_start|>naïve 東京"


def test_a_conversation_with_a_model_that_has_no_template_fails_with_advice(tmp_path):
    stage, outbox = stage_for(save_model_folder(tmp_path, byte_level()))
    stage.handle(submit(chat=turns([("user", "hello")])))
    assert "no chat template" in outbox[0][1].reason
    assert "chat=false" in outbox[0][1].reason


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content.x.y }}",
        "{{ ''.__class__.mro() }}",
    ],
)
def test_a_template_that_refuses_fails_the_request_alone(tmp_path, template):
    stage, outbox = stage_for(save_model_folder(tmp_path, byte_level(), chat_template=template))
    stage.handle(submit(chat=turns([("user", "hello")])))
    assert isinstance(outbox[0][1], RequestFailed)
    assert "refused the conversation" in outbox[0][1].reason


def test_a_template_that_is_not_jinja_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be compiled"):
        PromptEncoder(save_model_folder(tmp_path, byte_level(), chat_template="{% for %}"))


def test_truncation_left_in_the_file_never_cuts_a_prompt(tmp_path):
    tokenizer = byte_level()
    whole = tokenizer.encode("hello world " * 20).ids
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=500)
    encoder = PromptEncoder(save_model_folder(tmp_path, tokenizer))
    assert encoder.encode_request(prompt="hello world " * 20, chat=None) == whole


@pytest.mark.demo
def test_the_demo_model_gets_the_ids_of_transformers():
    from transformers import AutoTokenizer

    from stages.model.source import resolve

    folder = resolve(None)
    encoder, expected = PromptEncoder(folder), AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS:
        assert encoder.encode_request(prompt=prompt, chat=None) == expected(prompt)["input_ids"]
    for conversation in CONVERSATIONS:
        ids = encoder.encode_request(prompt=None, chat=turns(conversation))
        whole = expected.apply_chat_template(messages(conversation), add_generation_prompt=True)
        assert ids == whole["input_ids"]


def test_an_echoed_prompt_is_the_text_that_was_encoded(chat_folder):
    stage, outbox = stage_for(chat_folder)
    sampling = Sampling(max_tokens=4, seed=1, echo=True)
    for source in ({"prompt": " hi"}, {"chat": turns([("user", "hi")])}):
        stage.handle(SubmitRequest(request_id="0", sampling=sampling, submitted_ns=5, **source))
    stage.handle(submit(prompt=" hi"))
    texts = [message.prompt_text for _, message in outbox]
    assert texts == [" hi", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", None]


def test_a_prompt_longer_than_the_context_is_refused_here_and_a_hopeless_one_is_not_even_encoded(
    tmp_path, monkeypatch
):
    stage, outbox = stage_for(save_model_folder(tmp_path, byte_level()), max_context=10)
    for number_of_tokens, source in enumerate(({"prompt": "x" * 9}, {"prompt_token_ids": [7] * 9})):
        stage.handle(submit(**source))
        assert isinstance(outbox[number_of_tokens][1], TokenizedRequest)
    for source in ({"prompt": "x" * 10}, {"prompt_token_ids": [7] * 10}):
        stage.handle(submit(**source))
        assert outbox[-1][0] is StageName.FRONTEND
        assert "the prompt has 10 tokens, but the context holds 10 and needs room" in outbox[-1][1].reason
    monkeypatch.setattr(PromptEncoder, "encode_text", lambda self, text, *, is_chat: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stage.handle(submit(prompt="x" * 600))
    stage.handle(submit(prompt="x" * 2000))
    reason = outbox[-1][1].reason
    assert "the prompt has 2000 characters, but the context holds 10 tokens, and the longest has" in reason
    assert outbox[-1][0] is StageName.FRONTEND
