"""`LLM`: a pipeline of one's own inside a Python program, with the habits of vLLM's class of that name.

    with LLM(speculative_config={"method": "saguaro", "num_speculative_tokens": 6}) as llm:
        for output in llm.generate(["Once upon a time", "def add("], SamplingParams(max_tokens=32)):
            print(output.prompt, output.outputs[0].text)

The stages are processes of their own, started by command and not by forking, so a script needs no `__main__`
guard (and may have one). One call at a time: threads wait for one another.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from types import TracebackType
from typing import Self, TypeVar, cast

from conf.check import check
from conf.compose import compose
from pipeline.client_options import resolve_options
from pipeline.engine import Engine
from pipeline.errors import EngineDead, RequestError, shown
from pipeline.given_prompt import EXPECTED_DICT, GivenPrompt, PromptDict, prompt_of, turns_of
from pipeline.jobs import jobs_of, outputs_of, run_jobs
from pipeline.llm_arguments import arguments_of
from pipeline.llm_outputs import RequestOutput
from pipeline.messages import ChatTurn
from pipeline.model_source import resolve_models
from pipeline.sampling_params import SamplingParams

_T = TypeVar("_T")
Turns = Sequence[ChatTurn | Mapping[str, str]]


class LLM:
    """A running pipeline. A context manager; `close` stops it, as does the end of the program."""

    def __init__(
        self,
        model: str | None = None,
        *,
        speculative_config: Mapping[str, object] | None = None,
        **keys: object,
    ) -> None:
        """Load the models and start the stages.

        model: Hugging Face id, local folder, or .gguf file; None: the built-in demo model.
        speculative_config: `method` (a named run such as saguaro, or vLLM's draft_model and ngram), `model`
            (the draft), `num_speculative_tokens` (the depth of a chain, the nodes of a tree), and any key of
            ours below `speculation.`, such as `budget` or `tree.rows`. None: as `conf=saguaro`.
        keys: `max_model_len`, `max_num_seqs` (prompts that share rounds), `dtype`, `seed` (of every prompt
            that is given none), and any key of `python -m pipeline.run --help`.

        Raises `ConfigError` for what cannot work, by name, and `EngineDead` if a stage is lost.
        """
        config = compose(arguments_of(model, speculative_config, keys))
        check(config)
        self._config = resolve_models(config)
        self._lock = threading.Lock()
        self._num_requests = 0
        self._engine = Engine(self._config)
        self._engine.start()
        self._engine.leave_draft_cores()
        self._stop = weakref.finalize(self, self._engine.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: str | PromptDict | Sequence[str | PromptDict],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue raw prompts; the outputs are in the order of the prompts.

        prompts: texts, `{"prompt": TEXT}`, or `{"prompt_token_ids": IDS}` for what is encoded already; one
            or several, of any of these kinds.
        sampling_params: one for all, or one for each; None: greedy, 128 tokens, or what the keys of this
            `LLM` say.
        use_tqdm: show on stderr how many prompts are answered.

        Raises `RequestError` for what is no prompt; `PartialResults`, after all others are answered, when
        some could not be; and `EngineDead` when a stage is lost.
        """
        several = [prompts] if isinstance(prompts, str | Mapping) else _in_order(prompts, "prompts")
        given = [_raw_prompt(prompt, index) for index, prompt in enumerate(several)]
        return self._answer(given, sampling_params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Turns | Sequence[Turns],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template; see `generate`."""
        several = _in_order(messages, "conversations")
        is_single = bool(several) and isinstance(several[0], Mapping | ChatTurn)
        chats = cast(Sequence[Turns], [several] if is_single else several)
        given = [GivenPrompt(chat=turns_of(chat)) for chat in chats]
        return self._answer(given, sampling_params, use_tqdm=use_tqdm)

    def close(self) -> None:
        """Stop the pipeline within 5 seconds, after the call of another thread. May be called twice."""
        with self._lock:
            self._stop()

    def _answer(
        self,
        prompts: Sequence[GivenPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        with self._lock:
            if not self._stop.alive:
                raise EngineDead("this LLM is closed; make another")
            jobs = []
            each = self._params_of_each(params, len(prompts))
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
                self._num_requests += 1
                sampling = resolve_options({} if one is None else one.options, self._config)
                num_samples = 1 if one is None else one.n
                jobs += jobs_of(
                    prompt, sampling, num_samples, index=index, request_id=str(self._num_requests)
                )
            self._engine.keep_to_draft_cores()
            try:
                run_jobs(self._engine, jobs, max_requests=self._config.max_requests, use_tqdm=use_tqdm)
            finally:
                self._engine.leave_draft_cores()
        return outputs_of(jobs)

    @staticmethod
    def _params_of_each(
        params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams | None]:
        if params is None or isinstance(params, SamplingParams):
            return [params] * num_prompts
        each = _in_order(params, "SamplingParams")
        for one in each:
            if not isinstance(one, SamplingParams):
                raise RequestError(
                    f"expected SamplingParams, got {shown(repr(one))}; make one, as SamplingParams(n=2)"
                )
        if len(each) != num_prompts:
            raise RequestError(
                f"expected 1 SamplingParams for all or {num_prompts}, one for each prompt; got {len(each)}"
            )
        return each


def _in_order(given: Iterable[_T], what: str) -> list[_T]:
    """A list of it. Raises `RequestError` for what has no order, to which no answers could be assigned."""
    if isinstance(given, str | bytes | Mapping | Set) or not isinstance(given, Iterable):
        raise RequestError(f"expected one or a list of {what}, got {shown(repr(given))}; give a list")
    return list(given)


def _raw_prompt(prompt: str | PromptDict, index: int) -> GivenPrompt:
    """index: its place among the prompts of the call, for the error."""
    if not isinstance(prompt, str | Mapping) or prompt == "":
        raise RequestError(
            f"prompt {index}: expected some text, {EXPECTED_DICT}, got {shown(repr(prompt))}; correct it"
        )
    try:
        given = prompt_of(prompt)
    except RequestError as error:
        raise RequestError(f"prompt {index}: {error}") from None
    if given.prompt == "":
        raise RequestError(f"prompt {index}: expected some text, got none; fill it or leave it out")
    return given
