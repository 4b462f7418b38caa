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

MAX_ADDITIVE_PENALTY = 2.0
"""Of presence and frequency penalties, either way; as in the OpenAI API and vLLM."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
"""Far beyond what leaves text readable, and logits times or divided by it are still numbers in float32."""
MAX_LOGIT_BIAS = 100.0
"""Either way; as in the OpenAI API."""
MAX_LOGPROBS = 20
"""Likeliest tokens reported for each output token; vLLM's default limit."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING = 4096
"""Characters of one stop string: what may be the beginning of one is held back."""
MAX_STOP_IDS = 4096
MAX_SAMPLES = 1024
"""Of one prompt."""
MAX_GRAMMAR = 1 << 17
"""Characters of a schema, regular expression or grammar, and of each choice."""
MAX_CHOICES = 4096
