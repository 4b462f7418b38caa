"""Log lines: to stderr, with the stage's name, at the level asked for; warnings once, counted always."""

import logging

import pytest

from pipeline.log import LEVEL_VARIABLE, WarnOnce, configure_logging, get_logger


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger("ssd")
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers[:], root.level, root.propagate = before


def test_lines_go_to_stderr_with_the_name_of_the_stage(capsys, monkeypatch):
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    configure_logging("target-verifier")
    configure_logging("target-verifier")
    get_logger("a").warning("seen %d", 1)
    get_logger("a").info("not seen")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "[target-verifier] WARNING seen 1\n")


def test_the_level_comes_from_the_environment(capsys, monkeypatch):
    monkeypatch.setenv(LEVEL_VARIABLE, "info")
    configure_logging("run")
    get_logger("a").info("seen")
    assert capsys.readouterr().err == "[run] INFO seen\n"


def test_an_unknown_level_is_said_and_means_warning(capsys, monkeypatch):
    monkeypatch.setenv(LEVEL_VARIABLE, "loud")
    configure_logging("run")
    get_logger("a").info("not seen")
    expected = "[run] WARNING SSD_LOG: expected debug, info, warning or error, got 'loud'\n"
    assert capsys.readouterr().err == expected


def test_a_warning_is_said_once_and_counted_always(capsys):
    configure_logging("run")
    warn_once = WarnOnce(get_logger("a"))
    for number in range(3):
        warn_once("late", "number %d is late", number)
    warn_once("early", "and one is early")
    assert capsys.readouterr().err.count("WARNING") == 2
    assert warn_once.counts == {"late": 3, "early": 1}
