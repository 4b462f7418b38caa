"""A picture of some rounds: a row per stage, time to the right, so that the overlap shows at a glance."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.messages import StageName
from pipeline.spans import Span, SpanKind
from tools.profile.rounds import Round
from tools.profile.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = (StageName.VERIFIER, StageName.SPECULATOR, StageName.PREDICTOR, StageName.DETOKENIZER)
_OTHER_WORK = "#b8b8b8"
_COLOURS = {
    SpanKind.WORK: _OTHER_WORK,
    SpanKind.HANDLE: _OTHER_WORK,
    SpanKind.RECEIVE: _OTHER_WORK,
    SpanKind.SEND: _OTHER_WORK,
    SpanKind.PREFILL: "#08306b",
    SpanKind.VERIFY: "#2f6fb5",
    SpanKind.COMMIT: "#c03a2b",
    SpanKind.READ: "#7f5539",
    SpanKind.DRAFT: "#e8850c",
    SpanKind.GLUE: "#7b4fa3",
    SpanKind.BRANCH: "#4f9d4f",
    SpanKind.LOOKUP: "#111111",
    SpanKind.PLAN: "#c2a10f",
}
"""Later kinds are painted over earlier ones, in which they lie."""
_LABELS = {
    SpanKind.VERIFY: "verify",
    SpanKind.COMMIT: "commit",
    SpanKind.DRAFT: "draft step (the target waits)",
    SpanKind.GLUE: "read the proposal (glue)",
    SpanKind.BRANCH: "branch step (ahead)",
    SpanKind.LOOKUP: "look-up",
    SpanKind.PLAN: "plan",
    SpanKind.WORK: "other work",
}
_ARROWS = ("Proposal", "Outcome")
_ARROWS_BETWEEN = {StageName.VERIFIER, StageName.SPECULATOR}
_BAR_HEIGHT = 0.62
_LABEL_WIDTH = 1 / 15
"""Of what stands over a round, as a share of the picture."""
_TITLE_LETTERS = 170
"""In a line of the title."""
_DPI = 100
_LEAST_WIDTH = 1 / 700
"""Of a bar, as a share of the picture: a look-up takes a hundredth of a millimetre otherwise."""


def choose_rounds(rounds: Sequence[Round], *, count: int, first: int | None) -> Sequence[Round]:
    """`count` rounds, or as many as there are; from the middle, unless it is said which comes first."""
    if first is None:
        first = max(0, (len(rounds) - count) // 2)
    return rounds[first : first + count]


def with_room(rounds: Sequence[Round]) -> list[Round]:
    """Those over which a text can stand without running into the one before; the first is among them."""
    least = 2 * _LABEL_WIDTH * (rounds[-1].end_ns - rounds[0].start_ns)
    found: list[Round] = []
    for item in rounds:
        # Twice the middles.
        if not found or item.start_ns + item.end_ns - found[-1].start_ns - found[-1].end_ns >= least:
            found.append(item)
    return found


def draw_rounds(path: Path, timeline: Timeline, rounds: Sequence[Round], *, title: str) -> None:
    """Write a PNG. rounds: at least one, following one another. Needs matplotlib."""
    import matplotlib  # optional: the extra `tools`
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    start_ns, end_ns = rounds[0].start_ns, rounds[-1].end_ns
    stages = [stage for stage in _ROWS if timeline.spans.get(stage)]
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 0.95 + 0.62 * len(stages)), dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        for row, stage in enumerate(stages):
            _draw_row(axes, row, timeline.spans[stage], start_ns, end_ns)
        _mark_rounds(axes, rounds, start_ns)
        _draw_arrows(axes, timeline, stages, start_ns, end_ns)
        axes.set_xlim(0, (end_ns - start_ns) / 1e6)
        axes.set_ylim(len(stages) - 0.5, -0.75)
        axes.set_yticks(range(len(stages)), [stage.value for stage in stages])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("ms")
        figure.suptitle(textwrap.fill(title, _TITLE_LETTERS), fontsize=9, x=0.01, ha="left")
        shown = {s.kind for stage in stages for s in timeline.spans[stage] if s.start_ns < end_ns}
        handles = [Patch(color=_COLOURS[kind], label=_LABELS[kind]) for kind in _LABELS if kind in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        figure.savefig(path, metadata={"Software": None})


def _draw_row(axes: Axes, row: int, spans: Sequence[Span], start_ns: int, end_ns: int) -> None:
    visible = [span for span in spans if span.end_ns > start_ns and span.start_ns < end_ns]
    least = _LEAST_WIDTH * (end_ns - start_ns)
    for kind, colour in _COLOURS.items():
        bars = []
        for span in visible:
            if span.kind is kind:
                begin, end = max(span.start_ns, start_ns), min(span.end_ns, end_ns)
                bars.append(((begin - start_ns) / 1e6, max(end - begin, least) / 1e6))
        # A thin light edge keeps steps apart that follow one another at once.
        axes.broken_barh(
            bars,
            (row - _BAR_HEIGHT / 2, _BAR_HEIGHT),
            facecolors=colour,
            edgecolors="white",
            linewidth=0.4 if kind in (SpanKind.BRANCH, SpanKind.DRAFT) else 0,
        )


def _mark_rounds(axes: Axes, rounds: Sequence[Round], start_ns: int) -> None:
    """A line at the end of each round, and above it what became of its look-up, where there is room."""
    for item in rounds:
        axes.axvline((item.end_ns - start_ns) / 1e6, color="#888888", linewidth=0.6, linestyle=":", zorder=0)
    for item in with_room(rounds):
        begin, end = ((ns - start_ns) / 1e6 for ns in (item.start_ns, item.end_ns))
        text = f"round {item.round_id}"
        if item.ready_length is not None:
            text += ": hit" if item.ready_length else ": miss"
        axes.text((begin + end) / 2, -0.55, text, ha="center", va="center", fontsize=8, color="#444444")


def _draw_arrows(
    axes: Axes, timeline: Timeline, stages: Sequence[StageName], start_ns: int, end_ns: int
) -> None:
    """Proposals and outcomes, from stage to stage."""
    from matplotlib.patches import ConnectionPatch  # optional: the extra `tools`

    for mail in timeline.mails:
        if mail.message not in _ARROWS or {mail.sender, mail.receiver} != {
            StageName.VERIFIER,
            StageName.SPECULATOR,
        }:
            continue
        if not start_ns <= mail.sent_ns < mail.received_ns <= end_ns:
            continue
        sender, receiver = stages.index(mail.sender), stages.index(mail.receiver)
        edge = _BAR_HEIGHT / 2 if receiver > sender else -_BAR_HEIGHT / 2
        axes.add_patch(
            ConnectionPatch(
                ((mail.sent_ns - start_ns) / 1e6, sender + edge),
                ((mail.received_ns - start_ns) / 1e6, receiver - edge),
                "data",
                arrowstyle="-|>",
                mutation_scale=7,
                linewidth=0.8,
                color="#222222",
            )
        )
