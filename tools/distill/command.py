"""Runs the steps: write, vocabulary, train, judge, save. Each goes on where a killed run stopped.

Exit status: 0, 2 for a mistake in the arguments or files, 130 for Ctrl-C (nothing done is lost).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pipeline.errors import ConfigError
from stages.model.source import resolve
from tools.distill.allocator import keep_freed_memory
from tools.distill.head_vocabulary import choose_vocabulary
from tools.distill.judge import judge
from tools.distill.saver import save
from tools.distill.settings import DistillSettings, Step, compose_settings
from tools.distill.trainer import train
from tools.distill.writer import write
from tools.progress import say

_USAGE = "usage: python -m tools.distill target=demo|ID|FOLDER|FILE.gguf out=FOLDER [key=value...]"


def main(arguments: Sequence[str]) -> int:
    """The command."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{_USAGE}\nkeys and their meaning: tools/distill/settings.py")
        return 0 if arguments else 2
    try:
        run(compose_settings(arguments), arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        return 130
    return 0


def run(settings: DistillSettings, arguments: Sequence[str] = ()) -> None:
    """Do the steps. Raises `ConfigError`."""
    keep_freed_memory()
    torch.set_num_threads(settings.threads)
    target_folder = resolve(None if settings.target == "demo" else settings.target)
    work = settings.work_folder
    work.mkdir(parents=True, exist_ok=True)
    for step in Step:
        if step not in settings.steps:
            continue
        say(f"step {step.value}")
        match step:
            case Step.write:
                write(settings, target_folder, work)
            case Step.vocabulary:
                choose_vocabulary(settings, target_folder, work)
            case Step.train:
                train(settings, target_folder, work)
            case Step.judge:
                judge(settings, target_folder, work)
            case Step.save:
                save(settings, target_folder, work, Path(settings.out), arguments)
