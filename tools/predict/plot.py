"""The curves as a picture: miss rate against fan-out on log axes, a panel for each system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tools.predict.curves import Curve

FILE_NAME = "miss_rates.png"


def draw(curves: Sequence[Curve], path: Path) -> bool:
    """Write the picture; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    systems = list(dict.fromkeys(curve.system for curve in curves))
    figure = Figure(figsize=(4.6 * len(systems), 4.0), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(systems), squeeze=False, sharey=True)[0]
    for panel, system in zip(panels, systems, strict=True):
        for number, curve in enumerate(curve for curve in curves if curve.system == system):
            fan_outs = np.arange(1, len(curve.miss_rates) + 1)
            law = curve.law
            label = f"temperature {curve.temperature:g}: {law.scale:.2f} F^-{law.power:.2f}"
            panel.plot(fan_outs, curve.miss_rates, "o", color=f"C{number}", markersize=4, label=label)
            panel.plot(
                fan_outs, [law.miss_rate(float(f)) for f in fan_outs], "--", color=f"C{number}", linewidth=1
            )
        panel.set(xscale="log", yscale="log", title=system, xlabel="fan-out F")
        panel.grid(visible=True, which="both", alpha=0.25)
        panel.legend(fontsize=8)
    panels[0].set_ylabel("miss rate: bonus token beyond the F likeliest")
    figure.savefig(path)
    return True
