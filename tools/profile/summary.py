"""The figures of a profile: as JSON, round by round, and as a table in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.spans import SpanKind
from tools.profile.rounds import Cause, Round, busy_intervals, length_ns, outside
from tools.profile.timeline import Timeline

_CAUSE_NOTES = {
    Cause.TARGET: "its forward, the choice of tokens, KV moves",
    Cause.VERIFIER: "its work around the forward: commits, mail",
    Cause.DRAFT: "the target waits for a draft step",
    Cause.GLUE: "the target waits while the draft reads what it proposed",
    Cause.SPECULATOR: "the target waits for look-up, selection, mail",
    Cause.PREDICTOR: "the target waits while the predictor works",
    Cause.MESSAGES: "the target waits for a message under way",
    Cause.OTHER: "the target waits, nothing recorded says why",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of times, in ms."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of_ns(cls, values: Iterable[int]) -> Distribution:
        """values: at least one."""
        in_ms = np.fromiter(values, dtype=np.float64) / 1e6
        p50, p99 = np.percentile(in_ms, [50, 99])
        return cls(mean=float(in_ms.mean()), p50=float(p50), p99=float(p99))

    def as_json(self) -> dict[str, float]:
        """Rounded to the nanosecond."""
        return {"mean_ms": round(self.mean, 6), "p50_ms": round(self.p50, 6), "p99_ms": round(self.p99, 6)}


def summarise(timeline: Timeline, rounds: Sequence[Round], *, run: str) -> dict[str, Any]:
    """All figures. run: what was profiled, in a line."""
    bound = Counter(item.bound_by for item in rounds)
    cause_ns = {cause: sum(item.cause_ns[cause] for item in rounds) for cause in Cause}
    total_ns = sum(cause_ns.values())
    return {
        "run": run,
        "num_rounds": len(rounds),
        "rounds_with_several_requests": sum(item.num_requests > 1 for item in rounds),
        "per_round": _per_round(rounds),
        "causes": {
            cause.value: {
                **Distribution.of_ns(item.cause_ns[cause] for item in rounds).as_json(),
                "share": cause_ns[cause] / total_ns,
                "bounds_rounds": bound[cause],
            }
            for cause in Cause
            if rounds
        },
        "messages": _edges(timeline),
        "stages": _stages(timeline),
        "spans_overwritten": {name.value: n for name, n in timeline.num_overwritten.items() if n},
        "messages_without_other_end": timeline.num_unmatched,
        "rounds": [_round_as_json(item, timeline) for item in rounds],
    }


def _per_round(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    if not rounds:
        return {}
    figures = {
        "round": [item.length_ns for item in rounds],
        "target_compute": [item.cause_ns[Cause.TARGET] for item in rounds],
        "target_wait": [item.wait_ns for item in rounds],
        "target_idle": [item.cause_ns[Cause.OTHER] for item in rounds],
        "draft_compute": [item.draft_compute_ns for item in rounds],
        "draft_wait": [item.draft_wait_ns for item in rounds],
        "draft_idle": [item.draft_idle_ns for item in rounds],
        "target_and_draft_at_once": [item.at_once_ns for item in rounds],
        "overhead": [item.overhead_ns for item in rounds],
    }
    return {name: Distribution.of_ns(values).as_json() for name, values in figures.items()}


def _edges(timeline: Timeline) -> list[dict[str, Any]]:
    """How long messages take, by sender, receiver and type."""
    busy = {name: busy_intervals(spans) for name, spans in timeline.spans.items()}
    latencies: dict[tuple[str, str, str], list[int]] = {}
    busy_ns: Counter[tuple[str, str, str]] = Counter()
    for mail in timeline.mails:
        edge = (mail.sender.value, mail.receiver.value, mail.message)
        latencies.setdefault(edge, []).append(mail.received_ns - mail.sent_ns)
        free = outside([(mail.sent_ns, mail.taken_ns)], busy[mail.receiver])
        busy_ns[edge] += mail.taken_ns - mail.sent_ns - length_ns(free)
    return [
        {
            "sender": sender,
            "receiver": receiver,
            "message": message,
            "count": len(values),
            **Distribution.of_ns(values).as_json(),
            "mean_receiver_busy_ms": busy_ns[sender, receiver, message] / len(values) / 1e6,
        }
        for (sender, receiver, message), values in sorted(latencies.items())
    ]


def _stages(timeline: Timeline) -> dict[str, dict[str, Any]]:
    """Busy time of each stage, and the time in each kind of span, what lies in other kinds included."""
    found: dict[str, dict[str, Any]] = {}
    for name, spans in timeline.spans.items():
        by_kind: dict[SpanKind, list[int]] = {}
        for span in spans:
            by_kind.setdefault(span.kind, []).append(span.end_ns - span.start_ns)
        found[name.value] = {
            "busy_ms": length_ns(busy_intervals(spans)) / 1e6,
            "spans": {
                kind.name.lower(): {
                    "count": len(values),
                    "total_ms": sum(values) / 1e6,
                    **Distribution.of_ns(values).as_json(),
                }
                for kind, values in sorted(by_kind.items())
            },
        }
    return found


def _round_as_json(item: Round, timeline: Timeline) -> dict[str, Any]:
    return {
        "request": item.request_id,
        "round": item.round_id,
        "requests": item.num_requests,
        "start_ms": (item.start_ns - timeline.window[0]) / 1e6,
        "length_ms": item.length_ns / 1e6,
        "ready_length": item.ready_length,
        "bound_by": item.bound_by.value,
        "causes_ms": {cause.value: ns / 1e6 for cause, ns in item.cause_ns.items()},
        "draft_compute_ms": item.draft_compute_ns / 1e6,
        "draft_wait_ms": item.draft_wait_ns / 1e6,
        "draft_idle_ms": item.draft_idle_ns / 1e6,
        "at_once_ms": item.at_once_ns / 1e6,
    }


def markdown(summary: dict[str, Any]) -> str:
    """The summary as tables, without the single rounds."""
    parts = [f"# Profile\n\n{summary['run']}\n"]
    if not summary["num_rounds"]:
        parts.append("No decode round lies whole in the profile.\n")
    else:
        parts += [_round_table(summary), _cause_table(summary)]
    parts += [_message_table(summary), _stage_table(summary)]
    if summary["spans_overwritten"]:
        lost = ", ".join(f"{name} {count}" for name, count in summary["spans_overwritten"].items())
        parts.append(f"The ring was too small, the oldest spans are missing: {lost}. Raise num_spans.\n")
    return "\n".join(parts)


def _round_table(summary: dict[str, Any]) -> str:
    rows = [[name.replace("_", " "), *_three(figures)] for name, figures in summary["per_round"].items()]
    head = f"{summary['num_rounds']} decode rounds; ms a round"
    return _table([head, "mean", "p50", "p99"], rows)


def _cause_table(summary: dict[str, Any]) -> str:
    rows = [
        [
            f"{name}: {_CAUSE_NOTES[Cause(name)]}",
            *_three(figures),
            f"{100 * figures['share']:.1f} %",
            str(figures["bounds_rounds"]),
        ]
        for name, figures in summary["causes"].items()
    ]
    head = "What a round consists of; ms a round"
    return _table([head, "mean", "p50", "p99", "share", "rounds it bounds"], rows)


def _message_table(summary: dict[str, Any]) -> str:
    rows = [
        [
            f"{edge['sender']} → {edge['receiver']}: {edge['message']}",
            str(edge["count"]),
            *_three(edge),
            f"{edge['mean_receiver_busy_ms']:.3f}",
        ]
        for edge in summary["messages"]
    ]
    head = "Messages; ms from sending to having it"
    return _table([head, "count", "mean", "p50", "p99", "mean, receiver busy"], rows)


def _stage_table(summary: dict[str, Any]) -> str:
    rows = [
        [f"{stage}: {kind}", str(figures["count"]), f"{figures['total_ms']:.1f}", *_three(figures)]
        for stage, entry in summary["stages"].items()
        for kind, figures in entry["spans"].items()
    ]
    return _table(["Spans; ms", "count", "total", "mean", "p50", "p99"], rows)


def _three(figures: dict[str, float]) -> list[str]:
    return [f"{figures[key]:.3f}" for key in ("mean_ms", "p50_ms", "p99_ms")]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
