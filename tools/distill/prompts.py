"""All prompts of a run as token ids: from the given file, of the tool's own, and invented by the target.

A model with a chat template is asked through it, as the engine asks; one without gets the raw text.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.messages import ChatTurn
from pipeline.tokenizer_settings import read_tokenizer_settings
from stages.chat_template import ChatTemplate
from stages.model.shape import read_shape
from stages.vocabulary import load_tokenizer
from tools.distill.code_prompts import code_prompts
from tools.distill.code_tasks import code_tasks
from tools.distill.own_prompts import own_prompts
from tools.distill.settings import DistillSettings
from tools.distill.shards import prompt_key
from tools.progress import say

_MARK = "\u2402mark\u2403"
_OPENINGS = (
    "", "", "", "How", "What", "Why", "Write", "Can you", "Explain", "Translate", "Summarize", "I", "Give",
    "Create", "Please", "Is", "Which", "Describe", "The", "A", "If", "Make", "List", "Design", "Tell",
    "def ", "Find", "Calculate", "My", "In", "When", "Who", "Where", "Rewrite", "Compare", "Solve", "You",
)  # fmt: skip
_SIGNATURE_SHARE = 0.2
_CODE_TASK_SHARE = 0.3
_FEWEST_INVENTED_TOKENS = 3

Invent = Callable[[Sequence["Prompt"]], list[list[int]]]
"""From openings of user turns to whole user turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a request would send to the model."""

    source: str
    token_ids: tuple[int, ...]
    key: int


class PromptBook:
    """Turns texts into prompts for one target."""

    def __init__(self, target_folder: Path, *, max_tokens: int) -> None:
        """max_tokens: longer prompts are left out. Raises `ConfigError`."""
        self._tokenizer = load_tokenizer(target_folder)
        settings = read_tokenizer_settings(target_folder)
        self._template: ChatTemplate | None = None
        self._max_tokens = max_tokens
        self.end_of_turn_ids = frozenset(read_shape(target_folder).eos_token_ids)
        """Tokens that end an invented turn."""
        self._turn_prefix: list[int] = []
        if settings.chat_template is not None:
            self._template = ChatTemplate(settings.chat_template, settings.special_tokens)
            before, _, after = self._render(_MARK).partition(_MARK)
            self._turn_prefix = self._encode(before)
            self.end_of_turn_ids |= frozenset(self._encode(after)[:1])

    @property
    def num_turn_prefix(self) -> int:
        """Tokens of an opening that are not the user's."""
        return len(self._turn_prefix)

    def all_prompts(self, settings: DistillSettings, *, invent: Invent) -> list[Prompt]:
        """Everything there is to answer, without doubles. Invented turns are kept in the work folder."""
        texts = [*self._given(settings), *own_prompts(settings.own_prompts, seed=settings.seed)]
        signatures = code_prompts(round(settings.own_prompts * _SIGNATURE_SHARE), seed=settings.seed)
        tasks = code_tasks(round(settings.own_prompts * _CODE_TASK_SHARE), seed=settings.seed)
        texts += [("own/code", text) for text in (*signatures, *tasks)]
        texts += [("invented", text) for text in self._invented(settings, invent)]
        prompts: dict[int, Prompt] = {}
        num_long = 0
        for source, text in texts:
            prompt = self.prompt(source, text)
            if len(prompt.token_ids) > self._max_tokens:
                num_long += 1
            elif prompt.token_ids:
                prompts.setdefault(prompt.key, prompt)
        if num_long:
            say(f"{num_long:,} prompts with more than {self._max_tokens} tokens are left out")
        if not prompts:
            raise ConfigError("there are no prompts: expected prompts=FILE, own_prompts=N or invented=N")
        return list(prompts.values())

    def prompt(self, source: str, text: str) -> Prompt:
        """A user's text as the model sees it."""
        ids = self._encode(self._render(text)) if self._template else self._encode(text, is_raw=True)
        return Prompt(source=source, token_ids=tuple(ids), key=prompt_key(ids))

    def _render(self, text: str) -> str:
        assert self._template is not None
        return self._template.render([ChatTurn(role="user", content=text)])

    def _encode(self, text: str, *, is_raw: bool = False) -> list[int]:
        # The template writes the special tokens itself; raw text gets what tokenizer.json adds.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=is_raw).ids
        return ids

    def _given(self, settings: DistillSettings) -> Iterator[tuple[str, str]]:
        if settings.prompts is None:
            return
        path = Path(settings.prompts)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield str(row.get("source", "given")), str(row["prompt"])
            except (ValueError, KeyError, AttributeError) as error:
                raise ConfigError(
                    f"{path}:{number}: expected a JSON object with `prompt`, got {error!r}"
                ) from None

    def _invented(self, settings: DistillSettings, invent: Invent) -> list[str]:
        if settings.invented <= 0 or self._template is None:
            return []
        path = settings.work_folder / "invented.json"
        if path.is_file():
            return list(json.loads(path.read_text(encoding="utf-8")))
        draw = random.Random(f"openings {settings.seed}")
        openings = []
        for index in range(settings.invented):
            ids = [*self._turn_prefix, *self._encode(draw.choice(_OPENINGS))]
            # Equal openings are different jobs: the key only has to tell them apart.
            openings.append(Prompt(source="invented", token_ids=tuple(ids), key=prompt_key([*ids, index])))
        turns = invent(openings)
        texts = sorted(
            {self._tokenizer.decode(turn) for turn in turns if len(turn) >= _FEWEST_INVENTED_TOKENS}
        )
        scratch = path.with_suffix(".partial")
        scratch.write_text(json.dumps(texts), encoding="utf-8")
        os.replace(scratch, path)
        say(f"{len(texts):,} different user turns were invented")
        return texts
