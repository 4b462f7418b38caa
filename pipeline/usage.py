"""The help text of the command line, made from the configuration schema and the group files."""

from __future__ import annotations

import textwrap

from conf.compose import description_of, options_of
from conf.keys import GROUPS, all_keys

_WIDTH = 100

_INTRODUCTION = """\
usage: python -m pipeline.run [conf=NAME] [prompt=TEXT | prompts_file=FILE] [output=FILE] [key=value ...]
       python -m pipeline.run [conf=NAME] listen=ADDRESS [key=value ...]

Answers prompts with a language model, through one of the inference systems below. Answers go to stdout,
everything else to stderr. Without a prompt it answers a few built-in ones.
"""

_OWN_KEYS = {
    "prompt": "One prompt, taken as it stands.",
    "prompts_file": 'JSON Lines with "prompt", "turns" or "prompt_token_ids", or plain text with one prompt '
    "a line.",
    "output": "JSON Lines file for the answers, with token ids and figures; replaced if it exists.",
    "listen": "Keep running and serve clients (pipeline.client) at ipc:///PATH or tcp://127.0.0.1:PORT.",
    "allow_remote": "true: listen may be an address that other machines reach, without authentication.",
}


def usage() -> str:
    """The whole text, without a final newline."""
    sections = [_INTRODUCTION.rstrip()]
    sections.append("Prompts and answers:\n" + "\n".join(_entry(k, text) for k, text in _OWN_KEYS.items()))
    sections.extend(_group_section(group) for group in GROUPS)
    sections.append("Keys:\n" + "\n".join(_key_entries()))
    return "\n\n".join(sections)


def _group_section(group: str) -> str:
    title = "Named runs (conf=NAME)" if group == "conf" else f"{group}=NAME"
    entries = [_entry(name, description_of(group, name)) for name in options_of(group)]
    return f"{title}:\n" + "\n".join(entries)


def _key_entries() -> list[str]:
    entries = ["  A named run may set another default than the one shown here.\n"]
    for key in all_keys().values():
        entries.append(_entry(key.name, f"{key.description} ({key.expects}; default {key.default})"))
    return entries


def _entry(name: str, text: str) -> str:
    """A name and its wrapped description, indented below it."""
    body = textwrap.fill(" ".join(text.split()), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {name}\n{body}"
