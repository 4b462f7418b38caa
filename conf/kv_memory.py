"""`placement.kv_memory`: how much memory the KV caches may take, as a user types it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from conf.errors import ConfigError, shown

AUTO = "auto"
AUTO_SHARE = Fraction(1, 2)
"""Of the machine's memory, at most, where nothing is configured: weights and all else need the rest."""
_UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]*|%)")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """A budget: a number of bytes, or a share of what the machine has."""

    num_bytes: int | None = None
    share: Fraction | None = None
    """0 < share <= 1. Exactly one of the two is given."""
    is_auto: bool = False
    """Whether this is only a limit, on what requests of full length need."""

    def bytes_of(self, machine_bytes: int) -> int:
        """The budget in bytes on a machine with so much memory."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.share is not None, "one of the two is given"
        return int(machine_bytes * self.share)


def parse_kv_memory(text: str) -> KVMemory:
    """Read `auto`, a share such as 0.25 or 25%, or a size such as 2GiB. Raises `ConfigError`."""
    if text == AUTO:
        return KVMemory(share=AUTO_SHARE, is_auto=True)
    match = _SIZE.fullmatch(text.strip())
    number, unit = (Fraction(match[1]), match[2]) if match else (Fraction(0), "?")
    factor = {name.lower(): size for name, size in _UNITS.items()}.get(unit.lower())
    if factor is not None and number * factor >= 1:
        return KVMemory(num_bytes=int(number * factor))
    share = number / 100 if unit == "%" else number
    if unit in ("", "%") and 0 < share <= 1:
        return KVMemory(share=share)
    raise ConfigError(
        f"placement.kv_memory={shown(text)}: expected auto, a share of the machine's memory such as 0.25, or "
        f"a size with its unit such as 2GiB; units are {', '.join(_UNITS)}"
    )
