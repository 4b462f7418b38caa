"""Structured outputs of the demo model, in real processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.demo

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 16}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "Describe Ada Lovelace, who was 36 years old, as JSON."
OPTIONS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA}},
    {
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "temperature": 1,
        "seed": 3,
    },
    {"structured_outputs": {"regex": "[A-Z][a-z]{2,8} [0-9]{2,3}"}, "temperature": 1, "seed": 4},
    {"structured_outputs": {"choice": ["thirty-six", "thirty-seven"]}},
    {"structured_outputs": {"regex": "(unclosed"}},
]


def _answers(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    rows = [json.dumps({"prompt": PROMPT, "sampling": sampling}) + "\n" for sampling in OPTIONS]
    (folder / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    output = folder / "out.jsonl"
    command = [sys.executable, "-m", "pipeline.run", *arguments, f"prompts_file={folder / 'rows.jsonl'}"]
    done = subprocess.run(
        [*command, f"output={output}", "max_tokens=64"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    answers = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    return sorted(answers, key=lambda answer: int(answer["request_id"]))


def test_answers_are_what_was_asked_and_the_same_in_two_systems(tmp_path: Path) -> None:
    answers = _answers(tmp_path, "conf=saguaro_tree", "max_requests=3")
    for answer in answers[:4]:
        assert answer["finish_reason"] == "stop", answer
    for answer in answers[:2]:
        value = json.loads(answer["text"])
        assert value.keys() == {"name", "age"}
        assert isinstance(value["name"], str)
        assert value["age"] <= 150
    assert re.fullmatch("[A-Z][a-z]{2,8} [0-9]{2,3}", answers[2]["text"])
    assert answers[3]["text"] in ("thirty-six", "thirty-seven")
    assert answers[4]["finish_reason"] == "error"
    assert "structured_outputs.regex cannot be compiled" in answers[4]["error"]
    plain = _answers(tmp_path, "conf=autoregressive")
    assert [answer["token_ids"] for answer in plain] == [answer["token_ids"] for answer in answers]
