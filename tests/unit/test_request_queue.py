"""Which request comes when: at most so many in flight, and a turn only after the answer before it."""

import pytest

from conf.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.prompts import PromptRow
from pipeline.request_queue import RequestQueue


def prompt(index, text="hello"):
    return PromptRow(index=index, turns=(text,), is_conversation=False, origin=f"file:{index + 1}")


def conversation(index, *turns):
    return PromptRow(index=index, turns=turns, is_conversation=True, origin=f"file:{index + 1}")


def queue_of(*rows, use_chat=True, **settings):
    return RequestQueue(rows, RunConfig(**settings), use_chat=use_chat)


def spoken(request):
    return [(turn.role, turn.content) for turn in request.chat]


@pytest.mark.parametrize("max_requests", [1, 2, 5])
def test_no_more_than_max_requests_are_in_flight(max_requests):
    queue = queue_of(*(prompt(index) for index in range(4)), max_requests=max_requests)
    order = []
    while not queue.is_done:
        while (request := queue.take()) is not None:
            order.append(request.request_id)
        assert 0 < len(queue.in_flight) <= max_requests
        queue.finish(next(iter(queue.in_flight)), "answer")
    assert order == ["0", "1", "2", "3"]


def test_a_turn_is_asked_after_the_answer_before_it_with_all_that_was_said():
    queue = queue_of(conversation(0, "one", "two", "three"), prompt(1), max_requests=2)
    first, other = queue.take(), queue.take()
    assert (first.request_id, other.request_id) == ("0.0", "1")
    assert spoken(first) == [("user", "one")]
    assert queue.take() is None
    queue.finish("0.0", "A")
    second = queue.take()
    assert second.request_id == "0.1"
    assert spoken(second) == [("user", "one"), ("assistant", "A"), ("user", "two")]
    queue.finish("0.1", "B")
    third = queue.take()
    assert (third.request_id, third.text, len(third.chat)) == ("0.2", "three", 5)
    queue.finish("0.2", "C")
    queue.finish("1", "D")
    assert queue.is_done


def test_the_next_turn_comes_before_new_rows():
    queue = queue_of(conversation(0, "one", "two"), conversation(1, "uno", "dos"))
    order = []
    while (request := queue.take()) is not None:
        order.append(request.request_id)
        queue.finish(request.request_id, "answer")
    assert order == ["0.0", "0.1", "1.0", "1.1"]


def test_later_turns_fall_with_a_failed_one():
    queue = queue_of(conversation(0, "one", "two", "three"), prompt(1))
    queue.take()
    assert [request.request_id for request in queue.fail("0.0")] == ["0.0", "0.1", "0.2"]
    assert queue.take().request_id == "1"


def test_without_a_chat_template_prompts_go_out_raw_and_conversations_are_refused():
    request = queue_of(prompt(0, " raw "), use_chat=False).take()
    assert (request.prompt, request.chat) == (" raw ", None)
    with pytest.raises(ConfigError, match=r"file:1 has turns, expected a prompt"):
        queue_of(conversation(0, "one"), use_chat=False)


@pytest.mark.parametrize("use_chat", [True, False])
def test_token_ids_go_out_as_they_stand_with_and_without_a_chat_template(use_chat):
    row = PromptRow(index=3, turns=(), is_conversation=False, origin="file:4", token_ids=(5, 6))
    queue = queue_of(row, use_chat=use_chat, n=2, max_requests=2, seed=1)
    first, second = queue.take(), queue.take()
    for request in (first, second):
        assert (request.prompt_token_ids, request.prompt, request.chat, request.text) == (
            (5, 6),
            None,
            None,
            None,
        )
    assert (first.request_id, first.title, first.origin) == ("3/0", "token ids 5, 6", "file:4")
    assert first.sampling.seed != second.sampling.seed
    assert queue.fail("3/0") == [first]
    queue.finish("3/1", "answer")
    assert queue.is_done


def test_a_given_seed_is_every_rows_seed_wherever_it_stands():
    seeds = {queue.take().sampling.seed for queue in (queue_of(prompt(i), seed=7) for i in range(3))}
    assert seeds == {7}


def test_without_a_seed_every_request_gets_a_fresh_one():
    queue = queue_of(*(prompt(index) for index in range(50)), max_requests=50)
    seeds = [queue.take().sampling.seed for _ in range(50)]
    assert len(set(seeds)) == 50  # by chance equal in one of 7e12 runs
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_sampling_carries_the_runs_options():
    settings = {"max_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 1}
    sampling = queue_of(prompt(0), **settings).take().sampling
    assert {name: getattr(sampling, name) for name in settings} == settings


def test_dropping_what_waits_leaves_what_is_in_flight():
    queue = queue_of(conversation(0, "one", "two"), prompt(1))
    queue.take()
    queue.drop_waiting()
    assert not queue.is_done
    queue.finish("0.0", "partial")
    queue.drop_waiting()
    assert queue.is_done
