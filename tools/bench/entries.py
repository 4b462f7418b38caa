"""What `systems=` names: our named runs and the peers, each with keys of its own.

    saguaro                                  the run of that name
    deep=saguaro+speculation.depth=8         the same with another key, shown as `deep`
    llama_cpp,q8=llama_cpp+llama_format=q8_0

Only reads the text; what a key's value may be is said by whoever takes it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from conf.compose import options_of
from pipeline.errors import ConfigError, shown

PLAIN_RUN = "autoregressive"
"""The named run that is plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKind:
    """What is known of a peer before it is loaded."""

    module: str
    """Has `open_system(spec)`."""
    keys: tuple[str, ...] = ()
    """Keys of the bench that an entry may give it otherwise."""
    takes_batches: bool = False


_TRANSFORMERS = "tools.bench.transformers_peer"
PEERS: Mapping[str, PeerKind] = {
    "transformers": PeerKind(module=_TRANSFORMERS),
    "transformers_lookup": PeerKind(module=_TRANSFORMERS, keys=("lookup_tokens",)),
    "transformers_assisted": PeerKind(module=_TRANSFORMERS, keys=("draft", "assistant_tokens")),
    "llama_cpp": PeerKind(module="tools.bench.llama_peer", keys=("llama_format",)),
    "vllm": PeerKind(module="tools.bench.vllm_peer", takes_batches=True),
    "sglang": PeerKind(module="tools.bench.sglang_peer", takes_batches=True),
}
_OWN_KEYS = ("speculation", "speculation.", "model.weights", "model.cpu_kernels", "placement.page_size")
"""Keys of a run that may differ between systems; the others are the bench's, the same for all."""
_OVERRIDE = re.compile(r"\+(?=[A-Za-z_][\w.]*=)")
_LABELLED = re.compile(r"([^=+]+)=([^=+]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One system as the command line names it."""

    label: str
    """What it is called in the results."""
    name: str
    """A named run or a peer."""
    overrides: tuple[str, ...] = ()
    """`key=value` each."""

    @property
    def is_ours(self) -> bool:
        """Whether this engine answers, and not a peer."""
        return self.name not in PEERS

    @property
    def takes_batches(self) -> bool:
        """Whether it can answer several questions at once."""
        return self.is_ours or PEERS[self.name].takes_batches


def parse_systems(text: str) -> list[Entry]:
    """The entries of `systems=`, in order. Raises `ConfigError`."""
    entries = [_parse_entry(part.strip()) for part in _split_at_commas(text)]
    labels = [entry.label for entry in entries]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(
                f"systems={shown(text)}: {shown(label)} comes twice; name one of them otherwise: other=NAME"
            )
    return entries


def choose_baseline(entries: list[Entry], label: str | None) -> Entry:
    """The entry of that label, or the first plain decoding. Raises `ConfigError` if there is none."""
    if label is not None:
        for entry in entries:
            if entry.label == label:
                return entry
        labels = ", ".join(shown(entry.label) for entry in entries)
        raise ConfigError(f"baseline={shown(label)}: expected one of the systems {labels}")
    for entry in entries:
        if entry.name == PLAIN_RUN:
            return entry
    raise ConfigError(f"systems= has no {PLAIN_RUN} to compare with; add it, or name baseline=LABEL")


def _split_at_commas(text: str) -> list[str]:
    """Parts between commas that stand outside of brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _parse_entry(text: str) -> Entry:
    head, *overrides = _OVERRIDE.split(text)
    labelled = _LABELLED.fullmatch(head)
    label, name = labelled.groups() if labelled else (text, head)
    label, name = label.strip(), name.strip()
    known = [*options_of("conf"), *PEERS]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"systems: {shown(text)}: there is no system {shown(repr(name))}; {advice}expected NAME or "
            f"LABEL=NAME, then +key=value, with one of {', '.join(known)}"
        )
    if "|" in label or not label.isprintable():
        raise ConfigError(f"systems: {shown(text)}: a label must be printable and without |")
    entry = Entry(label=label, name=name, overrides=tuple(overrides))
    _check_keys(entry)
    return entry


def _check_keys(entry: Entry) -> None:
    keys = [override.partition("=")[0] for override in entry.overrides]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"systems: {shown(entry.label)}: {key} is given twice; leave one out")
        if entry.is_ours:
            is_allowed = key.startswith(_OWN_KEYS[1]) or key in _OWN_KEYS
            allowed = "speculation.*, model.weights, model.cpu_kernels, placement.page_size"
        else:
            is_allowed = key in PEERS[entry.name].keys
            allowed = ", ".join(PEERS[entry.name].keys) or "none"
        if not is_allowed:
            raise ConfigError(
                f"systems: {shown(entry.label)}: {shown(key)} is no key of one system; {entry.name} has "
                f"{allowed}"
            )
