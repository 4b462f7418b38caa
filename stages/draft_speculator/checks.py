"""Whether what other stages send fits what this stage knows of the request."""

from __future__ import annotations

from pipeline.errors import EngineDead, ProtocolError
from pipeline.messages import Outcome, Plan
from stages.draft_speculator.draft_request import DraftRequest


def check_outcome(outcome: Outcome, request: DraftRequest) -> None:
    """Refuse an outcome that does not follow from what this request proposed.

    Such a one ends the run: the two sides disagree about what is committed, and the target would wait for
    a proposal that never comes.
    """
    tree = request.tree
    if not -1 <= outcome.accepted_node < len(tree.proposal):
        raise EngineDead(
            f"outcome for request {outcome.request_id}: node {outcome.accepted_node} was accepted, but "
            f"{len(tree.proposal)} were proposed"
        )
    num_new = tree.depth(tree.proposal_node(outcome.accepted_node)) + 1
    expected = (request.round_id, tree.committed_len + num_new)
    if (outcome.round_id, outcome.committed_len) != expected:
        raise EngineDead(
            f"outcome for request {outcome.request_id}: expected (round, committed tokens) {expected}, got "
            f"{(outcome.round_id, outcome.committed_len)}"
        )


def check_plan(plan: Plan, request: DraftRequest) -> None:
    """Refuse a plan that names nodes which were not proposed."""
    num_nodes = len(request.tree.proposal)
    if not len(plan.nodes) == len(plan.token_ids) == len(plan.log_probs):
        raise ProtocolError(
            f"plan for request {plan.request_id}: {len(plan.nodes)} nodes but {len(plan.token_ids)} tokens "
            f"and {len(plan.log_probs)} log-probabilities"
        )
    if any(not -1 <= node < num_nodes for node in plan.nodes):
        raise ProtocolError(
            f"plan for request {plan.request_id}: expected nodes from -1 to {num_nodes - 1}, got {plan.nodes}"
        )
