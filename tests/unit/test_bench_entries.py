"""What `systems=` and the other keys of the benchmark may be."""

import errno
import os
import signal
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from tools.bench.command import main
from tools.bench.entries import Entry, choose_baseline, parse_systems
from tools.bench.settings import LlamaFormat, SetUp, compose_settings


def test_entries_have_names_labels_and_keys_of_their_own() -> None:
    text = "autoregressive, deep=saguaro+speculation.depth=8+speculation.budget=4,ssd+speculation.depth=2"
    assert parse_systems(text) == [
        Entry(label="autoregressive", name="autoregressive"),
        Entry(label="deep", name="saguaro", overrides=("speculation.depth=8", "speculation.budget=4")),
        Entry(label="ssd+speculation.depth=2", name="ssd", overrides=("speculation.depth=2",)),
    ]


def test_commas_in_brackets_belong_to_the_value() -> None:
    first, second = parse_systems("t=ssd+speculation.tree.widths=[4,2,[1,1]],transformers")
    assert first.overrides == ("speculation.tree.widths=[4,2,[1,1]]",)
    assert second == Entry(label="transformers", name="transformers")


def test_a_plus_in_a_value_and_an_equals_sign_in_a_path_are_kept() -> None:
    (entry,) = parse_systems("speculative+speculation.draft.path=/a+b/c=d+speculation.depth=2")
    assert entry.overrides == ("speculation.draft.path=/a+b/c=d", "speculation.depth=2")


def test_peers_are_not_ours_and_have_their_own_keys() -> None:
    ours, peer = parse_systems("autoregressive,q8=llama_cpp+llama_format=q8_0")
    assert (ours.is_ours, peer.is_ours) == (True, False)
    assert peer.overrides == ("llama_format=q8_0",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("saguro", "did you mean saguaro?"),
        ("", "there is no system"),
        ("autoregressive,,ssd", "there is no system"),
        ("x=y=ssd", "there is no system"),
        ("ssd,ssd", "ssd comes twice"),
        ("a=ssd,a=saguaro", "a comes twice"),
        ("a|b=ssd", "without |"),
        ("ssd+temperature=1", "temperature is no key of one system"),
        ("ssd+model.dtype=float32", "model.dtype is no key of one system"),
        ("ssd+speculation.depth=1+speculation.depth=2", "given twice"),
        ("llama_cpp+speculation.depth=1", "llama_cpp has llama_format"),
        ("transformers+draft=x", "transformers has none"),
    ],
)
def test_mistakes_in_systems_are_named(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"^systems") as caught:
        parse_systems(text)
    assert reason in str(caught.value)


def test_the_baseline_is_the_first_plain_decoding_or_the_one_that_is_named() -> None:
    entries = parse_systems("ssd,plain=autoregressive,autoregressive")
    assert choose_baseline(entries, None).label == "plain"
    assert choose_baseline(entries, "ssd").label == "ssd"
    with pytest.raises(ConfigError, match="expected one of the systems ssd, plain, autoregressive"):
        choose_baseline(entries, "saguaro")
    with pytest.raises(ConfigError, match="systems= has no autoregressive"):
        choose_baseline(parse_systems("ssd,transformers"), None)


def test_values_are_composed_with_their_types() -> None:
    settings = compose_settings(
        [
            "out=a b/[c]",
            "setups=same_total_cores",
            "llama_format=q8_0",
            "prompts=x y.jsonl,${z}",
            "draft=null",
            "temperatures=0, 0.7",
            "batch_sizes=1,4",
        ]
    )
    assert (settings.out, settings.prompts, settings.draft) == ("a b/[c]", "x y.jsonl,${z}", None)
    assert settings.setup_list == [SetUp.same_total_cores]
    assert (settings.temperature_list, settings.batch_size_list) == ([0.0, 0.7], [1, 4])
    assert settings.llama_format is LlamaFormat.q8_0
    assert (settings.repeats, settings.num_prompts) == (2, None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["repeats=2"], "out is missing"),
        (["out="], "out= is empty"),
        (["out=x", "repeats=0"], "repeats=0: expected at least 1"),
        (["out=x", "num_prompts=0"], "num_prompts=0: expected at least 1"),
        (["out=x", "max_tokens=many"], "max_tokens=many: expected a whole number"),
        (["out=x", "setups=fair"], "setups=fair: expected some of same_target_cores, same_total_cores"),
        (["out=x", "batch_sizes=1,0"], "batch_sizes=1,0: expected whole numbers from 1 to 256, got '0'"),
        (["out=x", "batch_sizes=4,4"], "batch_sizes=4,4: 4 comes twice"),
        (["out=x", "temperatures=nan"], "temperatures=nan: expected numbers from 0 to"),
        (["out=x", "repeat=2"], "did you mean repeats?"),
        (["out=x", "temperatures=0,-1"], "temperatures=0,-1: expected numbers from 0 to"),
        (["out=x", "answer_timeout_s=0"], "expected a positive number of seconds"),
        (["out=x", "load_timeout_s=1e300"], "expected a positive number of seconds, at most 1000000"),
        (["out=x", "systems=sagaro"], "there is no system"),
        (["out=x", "prompts=nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["out=x", "max_tokens=" + "[" * 3000], "expected a whole number"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_mistakes_end_with_status_2_and_leave_nothing(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_bench_in_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def run(*_: object, **__: object) -> int:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was not noticed")

    monkeypatch.setattr("tools.bench.command.run", run)
    assert main(["out=x"]) == status
    assert "stopped; the same command goes on from here" in capsys.readouterr().err


def test_a_full_disk_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tools.bench.command.run", run)
    assert main(["out=x"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the system refused what the bench needs: [Errno 28] No space left")


def test_help_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["out=x", "--help"]) == 0
    text = capsys.readouterr().out
    for key in ("systems=", "setups=same_target_cores", "llama_format=bf16", "transformers_assisted"):
        assert key in text
