"""What one outcome teaches: how likely accepted nodes were held to be, and how fast the engine is."""

from __future__ import annotations

from pipeline.messages import Outcome
from stages.draft_speculator.draft_request import DraftRequest
from stages.draft_speculator.measures import Measures


def learn(measures: Measures, request: DraftRequest, outcome: Outcome, *, num_active: int) -> None:
    """Count an outcome of the submitted proposal, before the tree is rerooted.

    num_active: requests that share the rounds.
    """
    if outcome.compute_ns > 0:
        measures.target.add(outcome.num_rows, outcome.compute_ns)
        if not request.is_resting:
            measures.add_turnaround(outcome.decided_ns - outcome.compute_ns - request.submitted_ns)
            measures.delays.add(outcome.decided_ns - request.due_ns)
    if request.last_decided_ns:
        measures.add_round(
            tokens=outcome.num_accepted + 1,
            ns=outcome.decided_ns - request.last_decided_ns,
            is_plain=request.is_resting,
            num_active=num_active,
        )
    request.last_decided_ns = outcome.decided_ns
    tree = request.tree
    parents = tree.proposal_parents()
    path = {-1, outcome.accepted_node}
    node = outcome.accepted_node
    while node >= 0:
        path.add(node)
        node = parents[node]
    has_children = {parent for parent in parents if parent in path}
    for parent in has_children:
        measures.add_continuation(was_accepted=parent != outcome.accepted_node)
    for index, (parent, submitted) in enumerate(zip(parents, request.submitted, strict=True)):
        if parent not in path:
            continue
        is_accepted = index in path
        if submitted.log_prob is not None:
            measures.calibration.add(submitted.log_prob, is_accepted=is_accepted)
        elif submitted.matched:
            measures.look_up[submitted.matched].add(is_accepted)
