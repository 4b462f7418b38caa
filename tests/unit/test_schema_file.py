"""Composition over any schema: what every command shares."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from conf.errors import ConfigError
from conf.keys import keys_of
from conf.schema_file import check_known, compose_schema, parse_arguments


class Colour(str, Enum):
    red = "red"
    green = "green"


@dataclass
class Settings:
    size: int = 3
    """How large."""
    colours: list[Colour] = field(default_factory=lambda: [Colour.red])
    name: str | None = None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.yaml").write_text("defaults:\n  - schema\n  - _self_\nname: from the file\n")
    return tmp_path


def test_arguments_win_over_the_file_and_the_file_over_the_schema(folder: Path) -> None:
    composed = compose_schema(Settings, folder=folder, file="own", given={"colours": "[green,red]"})
    assert composed == Settings(size=3, colours=[Colour.green, Colour.red], name="from the file")
    assert compose_schema(Settings, folder=folder, file="own", given={"name": "x"}).name == "x"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("size", "many", "a whole number"),
        ("colours", "[blue]", "a list, each one of red, green"),
        ("colours", "red", "a list, each one of red, green"),
        ("size", "[" * 3000, "a whole number"),
        ("size", "9" * 5000, "a whole number"),
    ],
    ids=["type", "element", "no list", "too deep", "too long"],
)
def test_a_wrong_value_is_one_short_error_with_key_and_expectation(
    folder: Path, key: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_schema(Settings, folder=folder, file="own", given={"name": "x", key: value})
    assert str(caught.value).startswith(f"{key}={value[:20]}")
    assert str(caught.value).endswith(f"expected {expected}")
    assert len(str(caught.value)) < 200


def test_threads_compose_at_once(folder: Path) -> None:
    def composed(number: int) -> Settings:
        return compose_schema(Settings, folder=folder, file="own", given={"size": str(number)})

    with ThreadPoolExecutor(8) as pool:
        assert [settings.size for settings in pool.map(composed, range(40))] == list(range(40))


def test_unknown_keys_and_doubles_are_refused() -> None:
    check_known(["size", "name"], Settings)
    with pytest.raises(ConfigError, match="did you mean colours"):
        check_known(["size", "colors"], Settings)
    with pytest.raises(ConfigError, match="size is given twice"):
        parse_arguments(["size=1", "size=2"], example="size=1")
    with pytest.raises(ConfigError, match="expected key=value, for example size=1"):
        parse_arguments(["size"], example="size=1")


def test_keys_tell_defaults_as_typed_and_their_docstrings() -> None:
    keys = keys_of(Settings)
    assert [(key.name, key.default) for key in keys.values()] == [
        ("size", "3"),
        ("colours", "[red]"),
        ("name", "null"),
    ]
    assert keys["size"].description == "How large."
