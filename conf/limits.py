"""The ends of the ranges that a configuration and the messages share, so that what passes one passes both."""

from __future__ import annotations

MAX_DEPTH = 128
MAX_BUDGET = 1024
"""Far beyond what can pay, and what the draft's KV cache is sized for."""
MAX_NODES = 1024
"""Of one proposal."""
MAX_SEED = 2**63 - 1
"""Largest seed; seeds travel as signed 64-bit numbers."""
MAX_TEMPERATURE = 1e30
"""Far hotter than an even choice, and logits divided by it are still numbers in float32."""
MAX_WHOLE_NUMBER = 2**31 - 1
"""Largest value of every other whole number: products of two still fit the 64 bits in which they travel."""
