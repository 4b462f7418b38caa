"""The command line: `python -m pipeline.run conf=NAME [prompt=TEXT] [key=value ...]`.

With `listen=ADDRESS` it serves clients until a signal comes (`pipeline.serve`).

A run from top to bottom:

1. `split_arguments` takes `prompt=`, `prompts_file=` and `output=` out, as they stand;
2. `compose` and `check` make the configuration of the rest;
3. the prompts are read, and the models found (`resolve_models`): up to here nothing was started;
4. `Engine` starts the stages;
5. `Run` submits requests and shows the answers, until the queue is done;
6. the closing table goes to stderr.

Exit status: 0; 2 for what the user can mend, with one line that says how, and for failed requests;
1 when a stage was lost; 128 + the signal's number for Ctrl-C (130) and the like.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from pipeline.interrupts import Interrupts, exit_on_ctrl_c

if __name__ == "__main__":
    exit_on_ctrl_c()  # the imports below take a moment

from conf.check import check
from conf.compose import compose
from conf.schema import RunConfig
from pipeline.answer_printer import AnswerPrinter, write_text
from pipeline.answers import AnswerWriter, check_output, check_output_is_no_model
from pipeline.arguments import Arguments, split_arguments
from pipeline.engine import Engine
from pipeline.errors import ConfigError, EngineError, OutputError, RequestError
from pipeline.listen_address import parse_listen
from pipeline.log import configure_logging, get_logger
from pipeline.messages import FrontendMessage, RequestFailed, RequestFinished, TextBlock
from pipeline.model_source import resolve_models
from pipeline.prompts import PromptRow, built_in_rows, read_prompts_file, rows_of_prompt
from pipeline.report import closing_table
from pipeline.request_queue import RequestQueue
from pipeline.running_engine import OpenEngine, RunningEngine
from pipeline.serve import Server, listening
from pipeline.standard_streams import open_missing_streams
from pipeline.tokenizer_settings import read_tokenizer_settings
from pipeline.usage import usage

_WAIT_S = 0.2
"""How long to wait for news before looking for a signal."""
_DRAIN_S = 1.0
"""How long after Ctrl-C the engine may take to end the requests in flight."""
_EXIT_BAD_INPUT = 2
_EXIT_ENGINE_DEAD = 1
_EXIT_BROKEN_PIPE = 141
"""What a shell shows for a process that wrote into a closed pipe."""

_log = get_logger(__name__)


def main(argv: Sequence[str], *, open_engine: OpenEngine = Engine) -> int:
    """Run the command line with the arguments after the program's name. Returns the exit status."""
    open_missing_streams()
    configure_logging("run")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a character shows a question mark, and the run goes on.
        sys.stdout.reconfigure(errors="replace")
    with Interrupts() as interrupts:
        try:
            return _run_and_explain(argv, interrupts, open_engine)
        except KeyboardInterrupt:
            _say("aborted")
            return interrupts.exit_status


def _run_and_explain(argv: Sequence[str], interrupts: Interrupts, open_engine: OpenEngine) -> int:
    """Run, and say of every error that is not a bug what it means; the exit status."""
    try:
        arguments = split_arguments(argv)
        if arguments.wants_help:
            write_text(sys.stdout, usage() + "\n")
            return 0
        _check_current_folder()
        if arguments.listen is not None:
            return _serve(arguments, interrupts, open_engine)
        return _run(arguments, interrupts, open_engine)
    except ConfigError as error:
        _say(f"error: {' '.join(str(error).split())}")
        return _EXIT_BAD_INPUT
    except BrokenPipeError:
        _discard_stdout()
        return _EXIT_BROKEN_PIPE
    except EngineError as error:
        if isinstance(error, OutputError):
            _discard_stdout()
        if interrupts.received is not None:
            # Who shuts down a machine or a container ends our stages too, maybe before us; and a terminal
            # that is closed takes no more answers.
            _say(f"stopped: {error}")
            return interrupts.exit_status
        _say(f"error: {error}")
        return _EXIT_ENGINE_DEAD
    except OSError as error:
        _log.debug("where it happened", exc_info=True)
        _say(f"error: the system refused what the run needs: {error} (SSD_LOG=debug shows where)")
        return _EXIT_ENGINE_DEAD


def _run(arguments: Arguments, interrupts: Interrupts, open_engine: OpenEngine) -> int:
    config = compose(arguments.overrides)
    check(config)
    rows = _rows(arguments)
    if arguments.output is not None:
        check_output(arguments.output, prompts_file=arguments.prompts_file)
    named, config = config, resolve_models(config)
    if arguments.output is not None:
        check_output_is_no_model(arguments.output, named, config)
    queue = RequestQueue(rows, config, use_chat=_uses_chat(config))
    with ExitStack() as stack:
        num_answers = len(rows) * config.n
        printer = AnswerPrinter(
            sys.stdout,
            is_live=config.max_requests == 1 or num_answers == 1,
            has_headers=num_answers > 1 or rows[0].is_conversation,
        )
        began = time.monotonic()
        _say(f"loading {config.model.path}")
        engine = stack.enter_context(open_engine(config))
        _say(f"ready after {time.monotonic() - began:.1f} s")
        # Not before: a run that never got ready must leave the answers of the last one alone.
        writer = stack.enter_context(AnswerWriter(arguments.output)) if arguments.output else None
        run = Run(engine, queue, printer, writer, interrupts)
        with interrupts.deferred():
            run.answer_everything()
        run.report()
        return run.exit_status


def _serve(arguments: Arguments, interrupts: Interrupts, open_engine: OpenEngine) -> int:
    """Keep an engine running for clients, until a signal ends it."""
    config = compose(arguments.overrides)
    check(config)
    if config.n != 1:
        raise ConfigError(
            f"n={config.n}: expected 1 with listen, where each request has one answer; leave it out"
        )
    assert arguments.listen is not None
    address = parse_listen(arguments.listen, allow_remote=arguments.allow_remote)
    with listening(config, address) as (socket, bound_address):
        config = resolve_models(config)
        began = time.monotonic()
        _say(f"loading {config.model.path}")
        with open_engine(config) as engine:
            _say(f"ready after {time.monotonic() - began:.1f} s")
            with interrupts.deferred():
                server = Server(engine, socket, config)
                _say(f"listening at {bound_address}")
                server.run(interrupts)
    return interrupts.exit_status


class Run:
    """The requests of one command line, from the first submission to the closing table."""

    def __init__(
        self,
        engine: RunningEngine,
        queue: RequestQueue,
        printer: AnswerPrinter,
        writer: AnswerWriter | None,
        interrupts: Interrupts,
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._printer = printer
        self._writer = writer
        self._interrupts = interrupts
        self._blocks: dict[str, list[TextBlock]] = {}
        self._finished: list[RequestFinished] = []
        self._num_failed = 0
        self._began = time.monotonic()

    @property
    def exit_status(self) -> int:
        """The status of the command line after `answer_everything`."""
        if self._interrupts.received is not None:
            return self._interrupts.exit_status
        return _EXIT_BAD_INPUT if self._num_failed else 0

    def answer_everything(self) -> None:
        """Submit the requests as there is room, and show what comes back, until all have ended.

        After a signal the requests in flight are cancelled and awaited, for a bounded time.
        Raises `EngineDead` when a stage was lost, `BrokenPipeError` when nobody reads the answers.
        """
        deadline: float | None = None
        while not self._queue.is_done and (deadline is None or time.monotonic() < deadline):
            if self._interrupts.received is None:
                self._submit_waiting()
            elif deadline is None:
                deadline = time.monotonic() + _DRAIN_S
                self._cancel_everything()
            for event in self._engine.events(_WAIT_S):
                self._handle(event)

    def report(self) -> None:
        """Write the closing table to stderr, if anything was answered."""
        if self._finished:
            wall_seconds = time.monotonic() - self._began
            # After a signal a stage may be deep in a forward, and nobody wants to wait for its figures.
            stats = self._engine.stats() if self._interrupts.received is None else {}
            _say("\n" + closing_table(self._finished, stats, wall_seconds=wall_seconds))

    def _submit_waiting(self) -> None:
        while (request := self._queue.take()) is not None:
            self._printer.begin(request)
            self._blocks[request.request_id] = []
            try:
                self._engine.submit(
                    request_id=request.request_id,
                    prompt=request.prompt,
                    chat=None if request.chat is None else list(request.chat),
                    prompt_token_ids=None
                    if request.prompt_token_ids is None
                    else list(request.prompt_token_ids),
                    sampling=request.sampling,
                )
            except RequestError as error:
                self._fail(request.request_id, str(error))

    def _cancel_everything(self) -> None:
        _say("stopping; once more aborts")
        self._queue.drop_waiting()
        for request_id in self._queue.in_flight:
            self._engine.cancel(request_id)

    def _handle(self, event: FrontendMessage) -> None:
        if event.request_id not in self._queue.in_flight:
            return  # the last words of a request that ended otherwise
        match event:
            case TextBlock():
                self._blocks[event.request_id].append(event)
                self._printer.block(event)
            case RequestFinished():
                self._finish(event)
            case RequestFailed():
                self._fail(event.request_id, event.reason)

    def _finish(self, finished: RequestFinished) -> None:
        answer = finished.text[finished.num_echo_characters :]
        request = self._queue.finish(finished.request_id, answer)
        if self._interrupts.received is not None:
            self._queue.drop_waiting()  # no next turn
        self._finished.append(finished)
        blocks = self._blocks.pop(finished.request_id)
        if self._writer is not None:
            self._writer.write_answer(request, finished, blocks)
        self._printer.end(request, finished)

    def _fail(self, request_id: str, reason: str) -> None:
        failed, *later = self._queue.fail(request_id)
        del self._blocks[request_id]
        self._num_failed += 1 + len(later)
        self._printer.fail(failed)
        _say(f"error: {failed.origin}: {' '.join(reason.split())}")
        if self._writer is not None:
            self._writer.write_failure(failed, reason)
            for request in later:
                self._writer.write_failure(request, f"{failed.turn_name} failed: {reason}")


def _check_current_folder() -> None:
    """Raise `ConfigError` if it was deleted: Hydra and relative paths need one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder does not exist any more; cd somewhere else") from None


def _rows(arguments: Arguments) -> list[PromptRow]:
    if arguments.prompt is not None:
        return rows_of_prompt(arguments.prompt)
    if arguments.prompts_file is not None:
        return read_prompts_file(arguments.prompts_file)
    return built_in_rows()


def _uses_chat(config: RunConfig) -> bool:
    """Whether prompts go through the model's chat template. `ConfigError` for chat=true without one."""
    assert config.model.path is not None, "the models are found by now"
    has_template = read_tokenizer_settings(Path(config.model.path)).chat_template is not None
    if config.chat and not has_template:
        raise ConfigError(f"chat=true, but {config.model.path} has no chat template; set chat=false")
    return has_template if config.chat is None else config.chat


def _say(line: str) -> None:
    """Write to stderr; if nobody listens there is nobody to tell."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _discard_stdout() -> None:
    """Keep the interpreter from failing once more when it flushes stdout at exit."""
    with contextlib.suppress(io.UnsupportedOperation):  # no file, so nothing that could fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
