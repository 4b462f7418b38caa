"""What a model folder says about its text format, besides the vocabulary: chat template and special tokens.

Read by the frontend, which has to know whether a model chats before it starts anything, and by the
tokenizer stage, which renders the template. Plain JSON reading: no tokenizer library, no model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, shown

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that chat templates may refer to by name."""
_OLD_NAME = "chat_template.json"
"""Where multimodal models kept their template for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """The settings that are not in `tokenizer.json`."""

    chat_template: str | None
    """Jinja source; None for a model that does not chat."""
    special_tokens: dict[str, str]
    """Text of the named special tokens, such as `bos_token`."""


def read_tokenizer_settings(folder: Path) -> TokenizerSettings:
    """Read the settings of a local model folder; a folder without any has no chat template.

    A `chat_template.jinja` file wins over `tokenizer_config.json`, as it does in transformers. Which
    special tokens a raw prompt gets is in `tokenizer.json`: the flags `add_bos_token` and `add_eos_token`
    have no effect beside that file, here as there.
    Raises `ConfigError` for a file that cannot be read.
    """
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = {
        name: text for name in _NAMED_TOKENS if (text := _text_of_token(config.get(name))) is not None
    }
    return TokenizerSettings(
        chat_template=_find_chat_template(folder, config),
        special_tokens=special_tokens,
    )


def _find_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return _read_text(jinja)
    for name, settings in (("tokenizer_config.json", config), (_OLD_NAME, _read_json(folder / _OLD_NAME))):
        template = settings.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = _named_templates(folder / name, template).get("default")
        if isinstance(template, str):
            return template
        if template is not None:
            raise _no_template(folder / name, template)
    return None


def _named_templates(path: Path, entries: list[Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise _no_template(path, entries)
    return templates


def _no_template(path: Path, came: Any) -> ConfigError:
    return ConfigError(
        f"{path} has chat_template={shown(repr(came))}, expected text or a list of objects with name and "
        "template; correct the file"
    )


def _text_of_token(token: Any) -> str | None:
    """A token is written as its text, or as an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected a JSON object, got {error}; fetch the model again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object; fetch the model again")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected readable UTF-8 text, got {error}") from None
