"""What the verifier refuses: prompts it cannot serve, and trees it cannot verify. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kernels.tree import check_tree, node_depths
from pipeline.messages import Sampling


def fault_of_prompt(token_ids: Sequence[int], *, max_context: int, vocab_size: int) -> str | None:
    """Why a prompt cannot be served, or None.

    max_context: most tokens of prompt and output. vocab_size: rows of the embedding.
    """
    if not token_ids:
        return "the prompt has no tokens; expected at least one"
    if len(token_ids) >= max_context:
        return (
            f"the prompt has {len(token_ids)} tokens, but the context holds {max_context} and needs "
            "room for at least one more; shorten the prompt or raise model.max_context"
        )
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return (
            f"the prompt holds token id {max(token_ids)}, but the model has {vocab_size} embedding rows: "
            "its tokenizer knows tokens that it was not trained on; leave them out of the prompt"
        )
    return None


def fault_of_options(sampling: Sampling, *, eos_token_ids: Collection[int], vocab_size: int) -> str | None:
    """Why a request's options cannot be served, or None: what their ranges alone do not tell."""
    if sampling.min_tokens > sampling.max_tokens:
        return (
            f"min_tokens={sampling.min_tokens}: expected at most max_tokens={sampling.max_tokens}; "
            "lower it or raise max_tokens"
        )
    for name, token_ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
        if (largest := max(token_ids, default=0)) >= vocab_size:
            return f"{name}: expected token ids below {vocab_size}, got {largest}; leave it out"
    if sampling.min_tokens and len({*eos_token_ids, *sampling.stop_token_ids}) >= vocab_size:
        return "min_tokens with every token in stop_token_ids bans the whole vocabulary; leave some out"
    if sampling.structured_outputs is not None:
        if not eos_token_ids:
            return (
                "structured_outputs: expected a model with an end-of-sequence token, which tells that an "
                "answer is complete; this one has none: leave the option out"
            )
        if sampling.ignore_eos:
            return (
                "ignore_eos=true with structured_outputs: expected one of them, because nothing can follow a "
                "complete answer; leave one out"
            )
    return None


def fault_of_tree(
    token_ids: Sequence[int], parents: Sequence[int], *, max_nodes: int, room: int, vocab_size: int
) -> str | None:
    """Why a proposed tree cannot be verified, or None.

    max_nodes: nodes that the KV cache has slots for. room: tokens that the request may still get.
    """
    if len(token_ids) > max_nodes:
        return f"{len(token_ids)} nodes, at most {max_nodes} fit"
    fault = check_tree(token_ids, parents, vocab_size=vocab_size)
    if fault is None and max(node_depths(parents), default=0) >= room:
        return f"it is as deep as the {room} tokens that the request may still get, or deeper"
    return fault
