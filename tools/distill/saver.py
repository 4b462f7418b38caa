"""The step `save`: the draft folder that `speculation.draft.path=` loads, with a card that says how it came.

The folder is built beside its place and then takes it, so that an engine never sees half of it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from stages.model.draft_folder import save_draft_folder
from tools.command_line import shown_command
from tools.distill.head_vocabulary import read_vocabulary
from tools.distill.judge import trained_weights
from tools.distill.settings import PATH_KEYS, DistillSettings
from tools.distill.shards import read_answers
from tools.distill.trainer import CHECKPOINT
from tools.progress import say
from tools.tables import Table


def save(
    settings: DistillSettings, target_folder: Path, work: Path, out: Path, arguments: Sequence[str]
) -> None:
    """Write `out` from the checkpoint's averaged weights. Raises `ConfigError`."""
    layers, weights = trained_weights(work)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{out.name}.", suffix=".partial", dir=out.parent))
    try:
        save_draft_folder(
            scratch,
            target_folder=target_folder,
            tensors=weights,
            head_token_ids=read_vocabulary(work),
            dtype=getattr(torch, settings.dtype.value),
        )
        card = _card(settings, work, layers, arguments)
        (scratch / "README.md").write_text(card, encoding="utf-8")
        if (work / "judge.json").is_file():
            shutil.copyfile(work / "judge.json", scratch / "judge.json")
        scratch.chmod(0o755)
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f"{out.name}.", suffix=".old", dir=out.parent))
            out.rename(old / out.name)
            scratch.rename(out)
            shutil.rmtree(old)
        else:
            scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    say(f"saved {out}: {size:.1f} MB; use it with speculation.draft.path={out}")


def _card(settings: DistillSettings, work: Path, layers: list[int], arguments: Sequence[str]) -> str:
    answers: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for answer in read_answers(work / "answers"):
        kind = "greedy" if answer.temperature == 0 else "sampled"
        source = answer.source.split("/")[0] if not answer.source.startswith("own/") else answer.source
        for key in (f"from {source}", kind):
            answers[key] += 1
            tokens[key] += len(answer.answer_ids)
    saved = torch.load(work / CHECKPOINT, map_location="cpu", weights_only=True)
    lines = [
        "# A draft distilled from its target",
        "",
        f"Target: `{settings.target}`. Layers started from the target's {layers}. Head: "
        f"{len(read_vocabulary(work)):,} ids. Matrices stored as {settings.dtype.value}; the input embedding "
        "is the target's and is not stored.",
        "",
        "## How it was made",
        "",
        f"    {shown_command('distill', arguments, path_keys=PATH_KEYS)}",
        "",
        f"{saved['step']:,} steps, {saved['num_positions']:,} answer positions, "
        f"{saved['elapsed_s'] / 60:.1f} minutes of training. All text was written by the target:",
        "",
        *Table(
            head=["answers", "count", "tokens"],
            rows=[[key, f"{answers[key]:,}", f"{tokens[key]:,}"] for key in sorted(answers)],
        ).markdown_lines(),
        "",
        "One prompt in forty is held out, and only judged on.",
    ]
    if (work / "judge.json").is_file():
        figures = json.loads((work / "judge.json").read_text(encoding="utf-8"))
        lines += [
            "",
            "## Held-out figures",
            "",
            "Greedy chains; the acceptance length includes the bonus token.",
            "",
        ]
        by_depth = zip(figures["rates"], figures["conditional"], figures["lengths"], strict=True)
        lines += Table(
            head=["K", "right up to K", "right if all before were", "acceptance length"],
            rows=[[str(k), *(f"{rate:.3f}" for rate in rates)] for k, rates in enumerate(by_depth, start=1)],
        ).markdown_lines()
        if figures["coupled"] is not None:
            lines += ["", f"Coupled at temperature 1, one token ahead: {figures['coupled']:.3f}."]
    return "\n".join(lines) + "\n"
