"""Prompts and paths are taken from the command line as they stand; the rest is left for the configuration."""

from pathlib import Path

import pytest

from pipeline.arguments import split_arguments
from pipeline.errors import ConfigError

VERBATIM = [
    "a, b and c",
    'it\'s "quoted" and `ticked`',
    "wow! really?!",
    "a=b==c",
    "${oc.env:HOME} $HOME ${",
    "line one\nline two\r\n\n",
    "12",
    "null",
    "true",
    "[1,2]",
    "{a: 1}",
    "(x)",
    "  leading and trailing  ",
    "\t",
    "\\ \\n",
    "東京 🦀 é",
    "prompt=prompt",
    "--help",
    "~",
    "# no comment",
]


@pytest.mark.parametrize("text", VERBATIM)
def test_prompt_and_paths_are_taken_as_they_stand(text):
    assert split_arguments([f"prompt={text}"]).prompt == text
    arguments = split_arguments([f"prompts_file={text}", f"output={text}", "seed=1"])
    assert (arguments.prompts_file, arguments.output) == (Path(text), Path(text))
    assert arguments.overrides == ("seed=1",)
    assert not arguments.wants_help


def test_an_address_to_serve_at_is_taken_as_it_stands():
    arguments = split_arguments(["listen=ipc:///tmp/a,b=c", "conf=ssd"])
    assert (arguments.listen, arguments.allow_remote) == ("ipc:///tmp/a,b=c", False)
    assert split_arguments(["listen=tcp://0.0.0.0:1", "allow_remote=true"]).allow_remote
    assert split_arguments(["prompt=x"]).listen is None


def test_everything_else_is_kept_in_order_for_the_configuration():
    arguments = split_arguments(["conf=ssd", "prompt=x", "seed=1", "prompts=y", "Prompt=z", "hello"])
    assert arguments.overrides == ("conf=ssd", "seed=1", "prompts=y", "Prompt=z", "hello")


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_can_be_asked_for_anywhere(flag):
    assert split_arguments(["conf=ssd", flag]).wants_help
    assert not split_arguments(["conf=ssd"]).wants_help


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["prompt=a", "prompt=b"], "prompt is given twice"),
        (["output=a", "output=a"], "output is given twice"),
        (["prompt="], "prompt= is empty, expected some text"),
        (["prompts_file="], "prompts_file= is empty"),
        (["output="], "output= is empty"),
        (["output=old.jsonl/"], "output=old.jsonl/ names a folder, expected a file"),
        (["output=old.jsonl/."], "output=old.jsonl/. names a folder, expected a file"),
        (["prompt=a", "prompts_file=b"], "prompt and prompts_file are both given"),
        (["listen="], "listen= is empty, expected the address to serve clients at"),
        (["listen=ipc://s", "prompt=a"], "prompt and listen are both given"),
        (["listen=ipc://s", "output=a"], "output and listen are both given"),
        (["listen=tcp://0.0.0.0:1", "allow_remote=yes"], "allow_remote=yes: expected true or false"),
        (["prompt=a", "allow_remote=true"], "allow_remote=true: expected true or false, beside listen"),
    ],
)
def test_what_is_empty_or_ambiguous_is_refused(argv, expected):
    with pytest.raises(ConfigError, match=expected):
        split_arguments(argv)
