"""Prompt rows come out of every kind of file as they went in; a bad line is named with its number."""

import json

import pytest

from pipeline.errors import ConfigError
from pipeline.prompts import BUILT_IN_PROMPTS, built_in_rows, read_prompts_file, rows_of_prompt


def rows_of(tmp_path, content, name="prompts.jsonl"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts_file(path)


def turns_of(rows):
    return [row.turns for row in rows]


def test_json_lines_give_prompts_and_conversations_in_order(tmp_path):
    lines = [
        {"prompt": "a\nb"},
        {"turns": ["one", "two"], "question_id": 81},
        {"turns": ["alone"]},
        {"prompt": " x "},
        {"prompt_token_ids": [3, 0, 3], "sampling": {"seed": 4}},
    ]
    rows = rows_of(tmp_path, "\n".join(json.dumps(line) for line in lines))
    assert turns_of(rows) == [("a\nb",), ("one", "two"), ("alone",), (" x ",), ()]
    assert [row.index for row in rows] == [0, 1, 2, 3, 4]
    assert [row.is_conversation for row in rows] == [False, True, True, False, False]
    assert [row.token_ids for row in rows] == [None] * 4 + [(3, 0, 3)]
    assert rows[4].options == {"seed": 4}


def test_plain_text_gives_one_prompt_a_line(tmp_path):
    rows = rows_of(tmp_path, "first\n  second, with = and ${x}\n[third]\n", "prompts.txt")
    assert turns_of(rows) == [("first",), ("  second, with = and ${x}",), ("[third]",)]


def test_a_byte_order_mark_crlf_and_blank_lines_do_not_count(tmp_path):
    rows = rows_of(tmp_path, b'\xef\xbb\xbf\r\n{"prompt": "a"}\r\n\r\n  \r\n{"prompt": "b"}\r\n\r\n')
    assert turns_of(rows) == [("a",), ("b",)]
    assert [row.index for row in rows] == [0, 1]
    assert rows[1].origin.endswith("prompts.jsonl:5")
    plain = rows_of(tmp_path, b"\xef\xbb\xbfa\r\n\r\nb", "prompts.txt")
    assert turns_of(plain) == [("a",), ("b",)]


def test_only_a_newline_ends_a_line(tmp_path):
    separators = "a\u2028b\u0085c\x0bd"
    line = json.dumps({"prompt": separators}, ensure_ascii=False)
    assert turns_of(rows_of(tmp_path, line + "\n")) == [(separators,)]


def test_json_lines_are_recognised_without_their_suffix(tmp_path):
    assert turns_of(rows_of(tmp_path, '\n {"prompt": "a"}\n', "prompts")) == [("a",)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": "a"', "is not JSON"),
        ("plain", "is not JSON"),
        ('{"text": "a"}', "one of the three keys"),
        ('{"prompt": "a", "turns": ["b"]}', "one of the three keys"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "one of the three keys"),
        ('["a"]', "one of the three keys"),
        ('{"prompt_token_ids": "12"}', "with a list of whole numbers"),
        ('{"prompt_token_ids": null}', "with a list of whole numbers"),
        ('{"prompt_token_ids": [1, true]}', "with a list of whole numbers"),
        ('{"prompt_token_ids": [1.0]}', "with a list of whole numbers"),
        ('{"prompt": 3}', "a prompt that is no text"),
        ('{"prompt": null}', "a prompt that is no text"),
        ('{"turns": []}', "with a list of texts"),
        ('{"turns": "a"}', "with a list of texts"),
        ('{"turns": [{"role": "user", "content": "a"}]}', "with a list of texts"),
        ('{"prompt": "\\ud800"}', "is not valid Unicode"),
        ('{"prompt": tru}', "is not JSON (Expecting value at column 12)"),
        ('{"prompt": "a", "extra": ' + "[" * 100_000, "nested too deeply"),
        ('{"prompt": "a", "extra": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"turns": ["a", "", "b"]}', "turn 2 is empty"),
        ('{"text": "\x7f\u202e"}', "\\x7f\\u202e"),
    ],
)
def test_a_bad_line_is_an_error_with_file_and_number(tmp_path, line, expected):
    with pytest.raises(ConfigError) as caught:
        rows_of(tmp_path, f'{{"prompt": "good"}}\n\n{line}\n')
    assert f"{tmp_path / 'prompts.jsonl'}:3" in str(caught.value)
    assert expected in str(caught.value)
    assert str(caught.value).isprintable()
    assert "line 1" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "content",
    ["", "\n\n  \n", '{"prompt": ""}\n', '{"turns": ["", ""]}\n', '{"prompt_token_ids": []}\n'],
)
def test_a_file_without_any_text_is_refused(tmp_path, content):
    with pytest.raises(ConfigError, match="prompts"):
        rows_of(tmp_path, content)


def test_an_empty_prompt_among_others_is_left_to_fail_alone(tmp_path):
    assert turns_of(rows_of(tmp_path, '{"prompt": ""}\n{"prompt": "a"}\n')) == [("",), ("a",)]
    rows = rows_of(tmp_path, '{"prompt_token_ids": []}\n{"prompt_token_ids": [-1]}\n')
    assert [row.token_ids for row in rows] == [(), (-1,)]


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.jsonl cannot be read: No such file"):
        read_prompts_file(tmp_path / "nothing.jsonl")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_prompts_file(tmp_path)
    with pytest.raises(ConfigError, match="is not UTF-8"):
        rows_of(tmp_path, b"caf\xe9\n", "latin.txt")


def test_a_prompt_of_the_command_line_must_be_unicode():
    assert rows_of_prompt(" x\n")[0].turns == (" x\n",)
    with pytest.raises(ConfigError, match="is not valid Unicode"):
        rows_of_prompt("caf\udce9")


def test_the_built_in_prompts_are_single_questions():
    rows = built_in_rows()
    assert turns_of(rows) == [(prompt,) for prompt in BUILT_IN_PROMPTS]
    assert not any(row.is_conversation for row in rows)
