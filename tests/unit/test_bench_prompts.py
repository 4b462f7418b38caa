"""Reading prompt sets for the benchmark, and its own set."""

import gzip
import json
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from tools.bench.prompts import OWN_SET, read_sets


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_turns_prompts_and_questions_are_read_set_by_set(tmp_path: Path) -> None:
    chat = write(
        tmp_path / "chat.jsonl",
        {"question_id": 81, "turns": ["one", "two"]},
        {"turns": ["three"], "reference": []},
    )
    code = write(
        tmp_path / "code.jsonl", {"task_id": "x/0", "prompt": "def f():\n", "canonical_solution": ""}
    )
    sums = write(tmp_path / "sums.jsonl", {"question": "1 + 1?", "answer": "2"})
    prompts = read_sets(f"{chat}, {code},{sums}", num_prompts=None)
    assert [(p.set_name, p.index, p.text) for p in prompts] == [
        ("chat", 0, "one"),
        ("chat", 1, "three"),
        ("code", 0, "def f():\n"),
        ("sums", 0, "1 + 1?"),
    ]
    assert prompts[1].origin == f"{chat}:2"


def test_num_prompts_counts_in_each_set_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *({"prompt": f"a{n}"} for n in range(5)))
    b = tmp_path / "b.jsonl"
    b.write_text('\n{"prompt": "b0"}\n\n', encoding="utf-8")
    assert [p.text for p in read_sets(f"{a},{b}", num_prompts=2)] == ["a0", "a1", "b0"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("plain text", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "expected an object with one of"),
        ("{}", "expected an object with one of"),
        ('{"prompt": "a", "question": "b"}', "expected an object with one of"),
        ('{"prompt": 3}', "got prompt=3"),
        ('{"prompt": " "}', "got prompt="),
        ('{"turns": []}', "got turns=[]"),
        ('{"turns": "text"}', "got turns='text'"),
        ('{"turns": [3]}', "got turns=[3]"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_sets(str(path), num_prompts=None)
    assert f"{path}:2" in str(caught.value)
    assert reason in str(caught.value)


def test_a_compressed_set_is_read_and_called_like_the_plain_one(tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "def f():"}\n'))
    assert [(p.set_name, p.text) for p in read_sets(str(path), num_prompts=None)] == [
        ("HumanEval", "def f():")
    ]
    whole = path.read_bytes()
    for broken in (b"plain", whole[:-12], whole[:12] + b"\xff" * 20):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"cannot be read: .*; expected a \.jsonl or \.jsonl\.gz"):
            read_sets(str(path), num_prompts=None)


def test_files_that_cannot_be_sets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "b").mkdir()
    same = (
        write(tmp_path / "b" / "set.jsonl", {"prompt": "x"}),
        write(tmp_path / "set.jsonl", {"prompt": "x"}),
    )
    with pytest.raises(ConfigError, match="has no prompts"):
        read_sets(str(tmp_path / "empty.jsonl"), num_prompts=None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sets(str(tmp_path / "none.jsonl"), num_prompts=None)
    with pytest.raises(ConfigError, match="two sets are called set"):
        read_sets(",".join(same), num_prompts=None)


def test_the_own_set_has_four_prompts_of_each_kind() -> None:
    prompts = read_sets(None, num_prompts=None)
    kinds = [json.loads(line)["category"] for line in OWN_SET.read_text(encoding="utf-8").splitlines()]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        ("code", "mathematics", "chat", "summary", "extraction"), 4
    )
    assert len({p.text for p in prompts}) == 20
    assert len(set(kinds[:5])) == 5  # so num_prompts=5 has one of each
    assert {p.set_name for p in prompts} == {"built-in"}


def test_the_own_set_can_stand_beside_others(tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", {"prompt": "x"})
    prompts = read_sets(f"built-in,{other}", num_prompts=1)
    assert [p.set_name for p in prompts] == ["built-in", "other"]
