"""The keys of the profiler, the picture, and finding an engine to attach to."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.errors import ConfigError, EngineDead
from pipeline.messages import StageName
from pipeline.profiling import ProfileClient
from pipeline.run_directory import RunDirectory, live_runs
from tests.tiny_profiles import two_rounds
from tools.profile.attach import find_run
from tools.profile.command import main, write_files
from tools.profile.cost import Cost
from tools.profile.gantt import choose_rounds, with_room
from tools.profile.settings import split_settings


def test_the_profilers_keys_are_taken_and_the_rest_is_the_runs():
    settings, rest = split_settings(
        ["conf=saguaro", "out=a=b, c", "prompt=rounds=3", "rounds=2", "torch_profiler=true", "output=x"]
    )
    assert (settings.out, settings.rounds, settings.torch_profiler) == ("a=b, c", 2, True)
    assert rest == ["conf=saguaro", "prompt=rounds=3", "output=x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rounds=0"], "rounds=0: expected at least 1"),
        (["rounds=many"], "rounds=many: expected a whole number"),
        (["first_round=-1"], "first_round=-1: expected at least 0"),
        (["num_spans=0"], "num_spans=0: expected 1 to"),
        (["num_spans=99999999"], "num_spans=99999999: expected 1 to"),
        (["cost_pairs=0"], "cost_pairs=0: expected at least 1"),
        (["cost_pairs=2", "prompt=hello"], "with cost_pairs the tool asks its own prompts"),
        (["seconds=0"], "seconds=0.0: expected a positive"),
        (["seconds=nan"], "seconds=nan: expected a positive"),
        (["seconds=1e300"], "seconds=1e+300: expected a positive number of seconds, at most 1000000"),
        (["out="], "out= is empty"),
        (["out=a", "out=b"], "out is given twice"),
        (["picture=a.jpg"], "expected a name that ends with .png"),
        (["picture=/dev/null/a.png", "attach=any"], "picture=/dev/null cannot be written"),
        (["out=/dev/null/a", "attach=any"], "out=/dev/null/a cannot be written"),
        (["attach=any", "conf=saguaro"], "attach and conf=saguaro are both given"),
    ],
)
def test_bad_keys_are_refused_in_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_mistake_in_the_runs_own_keys_is_told_as_ever(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["conf=saguro"]) == 2
    assert "did you mean saguaro" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_key(capsys):
    assert main(["--help"]) == 0
    assert "torch_profiler=false" in capsys.readouterr().out


def test_the_cost_is_the_median_over_pairs_and_the_busiest_stages_spans():
    cost = Cost(
        off_ms=[10.0, 20.0, 10.0],
        on_ms=[10.1, 20.0, 10.2],
        spans_per_round={StageName.VERIFIER: 12.0, StageName.SPECULATOR: 30.0},
        span_us=2.0,
    )
    first, second, third = cost.report().splitlines()
    assert first == "round, recording off: 10.000 ms; on: 10.200 ms (medians)"
    assert second.startswith("on over off: +1.00%, 95 % +0.00% to +2.00% (3 pairs")
    assert third.endswith("draft-speculator, records 30.0 a round: 60.0 us, 0.600% of a round")


@pytest.mark.parametrize(
    ("count", "first", "chosen"),
    [(3, None, [3, 4, 5]), (20, None, list(range(10))), (3, 8, [8, 9]), (3, 10, []), (1, 0, [0])],
)
def test_the_rounds_of_the_picture_are_the_middle_or_those_asked_for(count, first, chosen):
    assert list(choose_rounds(range(10), count=count, first=first)) == chosen


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (6, 6), (14, 14), (300, 15)])
def test_rounds_are_told_what_they_are_where_there_is_room(count, expected):
    rounds = [SimpleNamespace(start_ns=10 * number, end_ns=10 * number + 10) for number in range(count)]
    shown = with_room(rounds)
    assert len(shown) == expected
    assert shown[0] is rounds[0]
    uneven = [SimpleNamespace(start_ns=start, end_ns=end) for start, end in ((0, 1), (1, 2), (2, 100))]
    assert with_room(uneven) == [uneven[0], uneven[2]]


def test_the_picture_goes_where_it_is_wanted_and_is_a_small_png(tmp_path):
    settings, _ = split_settings([f"out={tmp_path}/out", f"picture={tmp_path}/pictures/a.png"])
    write_files(settings, two_rounds().profile(end_us=1000))
    picture = (tmp_path / "pictures" / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 150_000
    assert not (tmp_path / "out" / "rounds.png").exists()


def test_a_picture_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "a.png").mkdir()
    with pytest.raises(ConfigError, match="is a folder, expected a file"):
        split_settings([f"picture={tmp_path / 'a.png'}"])


def test_without_matplotlib_there_is_a_profile_and_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tools.profile.command.can_draw", lambda: False)
    settings, _ = split_settings([f"out={tmp_path}"])
    write_files(settings, two_rounds().profile(end_us=1000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["summary.json", "summary.md", "trace.json"]
    assert "rounds.png" not in capsys.readouterr().err


def test_the_command_does_without_matplotlib():
    """Until it draws: a plain installation has none."""
    code = "import sys; sys.modules['matplotlib'] = None; import tools.profile.command"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_folder_that_cannot_be_written_is_told_before_the_engine_starts(capsys, monkeypatch):
    def start(engine):
        raise AssertionError("an engine was started")

    monkeypatch.setattr("tools.profile.profiled_engine.ProfiledEngine.start", start)
    assert main(["conf=autoregressive", "model=emulated", "prompt=hi", "out=/dev/null/a"]) == 2
    assert "error: out=/dev/null/a cannot be written: Not a directory; choose" in capsys.readouterr().err


def test_ctrl_c_ends_without_a_traceback(tmp_path, monkeypatch, capsys):
    def interrupted(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.profile.command.profile_running", interrupted)
    assert main(["attach=any", f"out={tmp_path}"]) == 130
    assert capsys.readouterr().err.strip() == "stopped"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_attached_profile_early_and_keeps_it(tmp_path, monkeypatch, number):
    class FakeClient:
        def __init__(self, run):
            self.is_on = False

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            assert not self.is_on

        def start(self, **options):
            self.is_on = True

        def end(self):
            self.is_on = False
            return two_rounds().profile(end_us=1000)

    monkeypatch.setattr("tools.profile.attach.find_run", lambda attach: tmp_path)
    monkeypatch.setattr("tools.profile.attach.ProfileClient", FakeClient)
    monkeypatch.setattr("time.sleep", lambda seconds: os.kill(os.getpid(), number))
    assert main(["attach=any", "seconds=600", f"out={tmp_path}"]) == 0
    assert (tmp_path / "trace.json").exists()


def test_an_engine_that_has_ended_is_not_waited_for(tmp_path):
    run = RunDirectory(tmp_path)
    with ProfileClient(run.path) as client:
        run.remove()
        began = time.monotonic()
        with pytest.raises(EngineDead, match="has ended, and its profile with it"):
            client.start(num_spans=100, traces_kernels=False)
        assert time.monotonic() - began < 30


def test_a_running_engine_is_found_by_pid_by_folder_and_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.profile.attach.runtime_root", lambda: tmp_path)
    run = RunDirectory(tmp_path)
    abandoned = tmp_path / "ssd-1-00000000"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    assert live_runs(tmp_path) == [run.path]
    assert find_run(str(os.getpid())) == find_run(str(run.path)) == find_run("any") == run.path
    for wrong in (str(Path(abandoned)), "1", "nonsense"):
        with pytest.raises(ConfigError, match=f"names no running engines, expected one; running: {run.path}"):
            find_run(wrong)
    another = RunDirectory(tmp_path)
    with pytest.raises(ConfigError, match="names 2 running engines, expected one"):
        find_run("any")
    another.remove()
    run.remove()
