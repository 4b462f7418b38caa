"""Renders a conversation with a model's own chat template, a Jinja program that came with its files.

The environment offers what transformers offers to templates, so that the same template gives the same
text. It is sandboxed: a template is a stranger's code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.errors import ConfigError, RequestError
from pipeline.messages import ChatTurn


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`, which sees `special_tokens` by name. Raises `ConfigError` if it is no Jinja."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the model's chat template cannot be compiled: {error}; chat=false does without it"
            ) from None

    def render(self, turns: Sequence[ChatTurn]) -> str:
        """Write the conversation down, up to where the assistant's answer starts.

        Raises `RequestError` with the template's own words when it refuses the turns.
        """
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # a template can raise whatever the expressions in it raise
            raise RequestError(
                f"the model's chat template refused the conversation: {error}; chat=false does without it"
            ) from None


class _GenerationBlocks(Extension):
    """Accepts `{% generation %}`, which marks what the assistant wrote, for training; it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
