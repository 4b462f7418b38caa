"""Processes of ours import the source that this one came from, whatever is installed."""

import os
import subprocess
from pathlib import Path

import pytest

import pipeline
from pipeline.import_path import environment_of_ours
from pipeline.model_source import _resolve

ROOT = str(Path(pipeline.__file__).resolve().parents[1])


def test_our_source_comes_before_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert environment_of_ours()["PYTHONPATH"] == ROOT
    monkeypatch.setenv("PYTHONPATH", "/a:/b")
    assert environment_of_ours()["PYTHONPATH"] == os.pathsep.join([ROOT, "/a:/b"])
    assert environment_of_ours()["PATH"] == os.environ["PATH"]


def test_models_are_found_by_our_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[bytes]:
        assert env["PYTHONPATH"].split(os.pathsep)[0] == ROOT
        return subprocess.CompletedProcess(command, 0, stdout=b'{"folder": "/a"}\n')

    monkeypatch.setattr("pipeline.model_source.subprocess.run", run)
    assert _resolve("a", "module:function") == "/a"
