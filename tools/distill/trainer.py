"""The step `train`: bfloat16 forward and backward, float32 master weights, AdamW, a budget in minutes.

The learning rate follows the share of the budget that is used: warm-up, then a cosine down to a twentieth.
A checkpoint every few minutes holds everything, so a killed run loses those minutes at most.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from stages.model.shape import ModelShape, read_shape
from tools.distill.batches import Batch, collate, epoch, row_map
from tools.distill.draft_network import HEAD_NAME, DraftNetwork, default_layers, initial_tensors
from tools.distill.head_vocabulary import read_vocabulary
from tools.distill.law_loss import law_loss
from tools.distill.settings import DistillSettings
from tools.distill.shards import Answer, read_answers
from tools.progress import say

CHECKPOINT = "checkpoint.pt"
_REPORT_S = 60.0
_AVERAGE_EVERY = 8
_LAST_RATE_SHARE = 0.05


@dataclass(slots=True, kw_only=True)
class TrainState:
    """What a checkpoint holds."""

    layers: list[int]
    masters: dict[str, Tensor]
    """float32."""
    averages: dict[str, Tensor]
    optimizer: torch.optim.AdamW
    step: int = 0
    elapsed_s: float = 0.0
    num_positions: int = 0
    """Answer positions trained on."""
    history: list[str] = field(default_factory=list)
    """A line a minute."""


@dataclass(slots=True)
class _Tally:
    loss: float = 0.0
    num_steps: int = 0
    num_right: int = 0
    num_answer: int = 0
    num_all: int = 0


class Trainer:
    """Owns the bfloat16 copies; the state is the caller's to save."""

    def __init__(
        self,
        settings: DistillSettings,
        shape: ModelShape,
        embed: Tensor,
        state: TrainState,
        row_of_id: Tensor,
    ) -> None:
        self._settings, self._state, self._row_of_id = settings, state, row_of_id
        self._device = settings.device
        dtype = torch.bfloat16 if shape.hidden_size >= 128 else torch.float32  # tiny ones are for tests
        positions = settings.max_prompt_tokens + settings.max_answer_tokens + 16
        self._network = DraftNetwork(
            shape, embed, num_positions=positions, dtype=dtype, device=settings.device
        )
        self._compute = {
            name: master.detach().to(dtype, copy=True).requires_grad_(True)
            for name, master in state.masters.items()
        }

    def step(self, answers: list[Answer], rate: float) -> tuple[Batch, float, int]:
        """One update. Returns the batch, its loss and the number of positions that agree."""
        settings, state = self._settings, self._state
        batch = self._collate(answers)
        hidden = self._network.hidden(self._compute, batch.token_ids, batch.rows)
        loss, agreement = law_loss(hidden, self._compute[HEAD_NAME], batch.law)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, compute in self._compute.items():
            assert compute.grad is not None, f"{name} got no gradient"
            state.masters[name].grad = compute.grad.float()
            compute.grad = None
        torch.nn.utils.clip_grad_norm_(state.masters.values(), settings.max_gradient_norm)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        state.optimizer.step()
        state.step += 1
        with torch.no_grad():
            for name, compute in self._compute.items():
                compute.copy_(state.masters[name])
                state.masters[name].grad = None
            if state.step % _AVERAGE_EVERY == 0:
                self._average()
        return batch, agreement.loss, agreement.num_right

    def evaluate(self, answers: list[Answer], *, averaged: bool) -> tuple[float, float]:
        """Mean loss and agreement over held-out answers."""
        weights = self._state.averages if averaged else self._state.masters
        some = next(iter(self._compute.values()))
        tensors = {name: tensor.to(some.dtype) for name, tensor in weights.items()}
        total = right = count = 0.0
        with torch.no_grad():
            for group in epoch(answers, batch_tokens=self._settings.batch_tokens, seed="held out"):
                batch = self._collate(group)
                hidden = self._network.hidden(tensors, batch.token_ids, batch.rows)
                _, agreement = law_loss(hidden, tensors[HEAD_NAME], batch.law)
                total += agreement.loss * agreement.num_positions
                right += agreement.num_right
                count += agreement.num_positions
        return total / max(count, 1), right / max(count, 1)

    def _collate(self, answers: list[Answer]) -> Batch:
        batch = collate(answers, row_of_id=self._row_of_id, token_weight=self._settings.token_weight)
        if self._device == "cpu":
            return batch
        law = batch.law
        moved = type(law)(**{k: getattr(law, k).to(self._device) for k in ("rows", "weights", "best")})
        return Batch(token_ids=batch.token_ids.to(self._device), rows=batch.rows.to(self._device), law=moved)

    def _average(self) -> None:
        # Early on the average must follow quickly, or it keeps the start in it.
        decay = min(self._settings.average_decay**_AVERAGE_EVERY, self._state.step / (self._state.step + 80))
        averages, masters = list(self._state.averages.values()), list(self._state.masters.values())
        torch._foreach_lerp_(averages, masters, 1 - decay)


def train(settings: DistillSettings, target_folder: Path, work: Path) -> None:
    """Train until the budget is used up; goes on from `work/checkpoint.pt`. Raises `ConfigError`."""
    head_token_ids = read_vocabulary(work)
    settings = replace(
        settings, layers=settings.layers or default_layers(read_shape(target_folder).num_layers)
    )
    shape, initial, embed = initial_tensors(target_folder, settings.layers, head_token_ids)
    state = load_state(settings, initial, work)
    budget_s = settings.train_minutes * 60
    if state.elapsed_s >= budget_s:
        say(f"train_minutes={settings.train_minutes:g} are used up; raise it to go on")
        return
    answers = [answer for answer in read_answers(work / "answers") if len(answer.answer_ids) > 0]
    limit = settings.max_prompt_tokens + settings.max_answer_tokens
    answers = [a for a in answers if len(a.prompt_ids) + len(a.answer_ids) <= limit]
    training = [answer for answer in answers if not answer.is_held_out]
    held_out = [answer for answer in answers if answer.is_held_out][:200]
    if not training:
        raise ConfigError(f"{work} holds no answers to train on; run steps=[write] first")
    num_tokens = sum(len(answer.answer_ids) for answer in training)
    num_parameters = sum(tensor.numel() for tensor in state.masters.values())
    say(
        f"{num_parameters / 1e6:.1f} M parameters, layers {state.layers}, {len(training):,} answers, "
        f"{num_tokens:,} answer tokens, step {state.step}, {state.elapsed_s / 60:.1f} min used"
    )
    row_of_id = row_map(head_token_ids, shape.vocab_size)
    trainer = Trainer(settings, shape, embed, state, row_of_id)
    start_s, start = state.elapsed_s, time.monotonic()
    last_report = last_save = start
    tally = _Tally()
    try:
        for group in _endless(training, settings, state):
            state.elapsed_s = start_s + time.monotonic() - start
            share = state.elapsed_s / budget_s
            if share >= 1:
                break
            batch, loss, num_right = trainer.step(group, learning_rate(settings, share))
            state.num_positions += len(batch.rows)
            tally.loss += loss
            tally.num_steps += 1
            tally.num_right += num_right
            tally.num_answer += len(batch.rows)
            tally.num_all += batch.token_ids.numel()
            now = time.monotonic()
            if now - last_report >= _REPORT_S:
                state.history.append(_line(tally, state, now - last_report, budget_s))
                say(state.history[-1])
                last_report, tally = now, _Tally()
            if now - last_save >= settings.checkpoint_minutes * 60:
                _checkpoint(trainer, state, held_out, work)
                last_save = time.monotonic()
    finally:
        if tally.num_steps:
            state.history.append(_line(tally, state, time.monotonic() - last_report, budget_s))
            say(state.history[-1])
        _checkpoint(trainer, state, held_out, work)


def learning_rate(settings: DistillSettings, share: float) -> float:
    """At a share of the budget: linear warm-up, then a cosine."""
    if share < settings.warmup_share:
        return settings.learning_rate * max(share / settings.warmup_share, 0.01)
    progress = (share - settings.warmup_share) / max(1 - settings.warmup_share, 1e-9)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return settings.learning_rate * (_LAST_RATE_SHARE + (1 - _LAST_RATE_SHARE) * cosine)


def load_state(settings: DistillSettings, initial: dict[str, Tensor], work: Path) -> TrainState:
    """The checkpoint, or a start from the given weights. Raises `ConfigError` if they do not fit."""
    path = work / CHECKPOINT
    saved = None
    if path.is_file():
        saved = torch.load(path, map_location=settings.device, weights_only=True)
        _check_fit(path, saved["masters"], initial)
        masters, averages = saved["masters"], saved["averages"]
    elif settings.start_from:
        start = Path(settings.start_from)
        start = start / CHECKPOINT if start.is_dir() else start
        if not start.is_file():
            raise ConfigError(
                f"start_from={settings.start_from}: there is no checkpoint; expected a .pt file"
            )
        other = torch.load(start, map_location=settings.device, weights_only=True)
        _check_fit(start, other["averages"], initial)
        masters = {name: tensor.clone() for name, tensor in other["averages"].items()}
        averages = {name: tensor.clone() for name, tensor in masters.items()}
    else:
        masters = {name: tensor.to(settings.device) for name, tensor in initial.items()}
        averages = {name: tensor.clone() for name, tensor in masters.items()}
    optimizer = torch.optim.AdamW(
        masters.values(),
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    state = TrainState(layers=list(settings.layers), masters=masters, averages=averages, optimizer=optimizer)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
        state.step, state.elapsed_s = saved["step"], saved["elapsed_s"]
        state.num_positions, state.history = saved["num_positions"], saved["history"]
        state.layers = saved["layers"]
    return state


def _check_fit(path: Path, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    sizes = {name: tensor.shape for name, tensor in found.items()}
    if sizes != {name: tensor.shape for name, tensor in expected.items()}:
        raise ConfigError(
            f"{path} holds a draft of another shape than layers and vocabulary ask for; "
            "give the same layers, or another work folder"
        )


def _checkpoint(trainer: Trainer, state: TrainState, held_out: list[Answer], work: Path) -> None:
    if held_out:
        loss, share = trainer.evaluate(held_out, averaged=True)
        line = f"held out at step {state.step}: loss {loss:.4f}, agreement {share:.4f} (averaged weights)"
        state.history.append(line)
        say(line)
    scratch = work / f"{CHECKPOINT}.partial"
    content = {
        "layers": state.layers,
        "masters": state.masters,
        "averages": state.averages,
        "optimizer": state.optimizer.state_dict(),
        "step": state.step,
        "elapsed_s": state.elapsed_s,
        "num_positions": state.num_positions,
        "history": state.history,
    }
    torch.save(content, scratch)
    os.replace(scratch, work / CHECKPOINT)


def _endless(answers: list[Answer], settings: DistillSettings, state: TrainState) -> Iterator[list[Answer]]:
    while True:
        # A resumed run draws a new order rather than finding its place in the old one.
        seed = f"{settings.seed} {state.step}"
        yield from epoch(answers, batch_tokens=settings.batch_tokens, seed=seed)


def _line(tally: _Tally, state: TrainState, seconds: float, budget_s: float) -> str:
    left = max(budget_s - state.elapsed_s, 0) / 60
    return (
        f"step {state.step}: loss {tally.loss / max(tally.num_steps, 1):.4f}, "
        f"agreement {tally.num_right / max(tally.num_answer, 1):.4f}, "
        f"{tally.num_all / seconds:,.0f} positions/s, {tally.num_answer / seconds:,.0f} answer tokens/s, "
        f"{left:.1f} min left"
    )
