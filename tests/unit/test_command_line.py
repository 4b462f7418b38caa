"""What a report shows of the command that made it, and folders for what comes out."""

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from tools.command_line import shown_command
from tools.out_folder import make_out_folder


def test_a_command_is_shown_without_folders_also_those_that_are_yet_to_be_made(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").touch()
    arguments = [
        f"out={tmp_path}/new",
        f"prompts={tmp_path}/set.jsonl,built-in",
        "model=owner/name",
        "baseline=a b",
    ]
    shown = shown_command("bench", arguments, path_keys=("out", "prompts", "model"))
    expected = "out=new prompts=set.jsonl,built-in model=owner/name 'baseline=a b'"
    assert shown == f"python -m tools.bench {expected}"


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    make_out_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/a"])
def test_where_nothing_can_be_written_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=f"picture={folder} cannot be written: .*; choose another"):
        make_out_folder(Path(folder), key="picture")
