"""Server and clients with an engine that has no stages: who gets what, who is cancelled, who is told."""

import asyncio
import gc
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import pytest
import zmq

from pipeline.client import AsyncClient, Client
from pipeline.client_messages import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Generate,
    Open,
    Refused,
    ToClient,
    Welcome,
)
from pipeline.errors import EngineDead, EngineUnreachable, RequestError, RequestTimeout
from pipeline.messages import FinishReason, RequestFailed, RequestFinished, TextBlock
from tests.processes.runtime import open_files, wait_until
from tests.processes.serving import ROOT, ServingProcess, dealer, fake_server, stop
from tests.tiny_tokenizers import byte_level, save_model_folder

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.Decoder(ToClient).decode


@pytest.fixture
def base_folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("base"), byte_level())


@pytest.fixture
def server(tmp_path):
    with fake_server(tmp_path) as server:
        yield server


@pytest.fixture
def client(server):
    with Client(server.address, timeout_s=20) as client:
        yield client


def test_an_answer_has_text_tokens_reason_seed_and_figures(client, server):
    answer = client.generate("say one two", max_tokens=9, temperature=0.5, top_p=0.9)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("one two", [0, 1], FinishReason.LENGTH)
    (sampling,) = server.engine.samplings.values()
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.5, 0.9)
    assert answer.seed == sampling.seed
    assert answer.metrics.num_rounds == 11
    assert client.generate("say x", seed=5).seed == 5


def test_a_stream_has_one_event_a_block(client):
    with client.stream("say one two three") as stream:
        blocks = list(stream)
    assert [block.text for block in blocks] == ["one", " two", " three"]
    assert [(block.num_tokens, block.is_hit) for block in blocks] == [(1, False)] * 3
    assert stream.answer.text == "one two three"
    assert list(stream) == []


def test_a_conversation_goes_to_the_chat_template(client, server):
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say hi"}]
    assert client.generate(turns).text == "hi"
    (chat,) = server.engine.chats.values()
    assert [(turn.role, turn.content) for turn in chat] == [("system", "be brief"), ("user", "say hi")]


def test_token_ids_and_texts_in_dicts_reach_the_engine_as_they_stand(client, server):
    assert client.generate({"prompt_token_ids": [4, 0, 4]}, max_tokens=3).text == "4 0 4"
    with client.stream({"prompt_token_ids": (7,)}) as stream:
        assert [block.text for block in stream] == ["7"]
    assert client.generate({"prompt": "say x"}).text == "x"
    assert list(server.engine.token_ids.values()) == [[4, 0, 4], [7], None]
    assert list(server.engine.prompts.values()) == [None, None, "say x"]
    assert set(server.engine.chats.values()) == {None}

    async def ask():
        async with AsyncClient(server.address) as other:
            return await other.generate({"prompt_token_ids": [8, 9]})

    assert asyncio.run(ask()).text == "8 9"


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ("say x", {"temperature": -1}, "temperature: expected `float` >= 0"),
        ("say x", {"max_tokens": "many"}, "max_tokens: expected `int`, got `str`"),
        ("say x", {"tempature": 1}, "option tempature is not supported; did you mean temperature?"),
        ("say x", {"seed": object()}, "cannot be sent"),
        ("half a pair \ud83d", {}, "the prompt is not valid Unicode text"),
        ("say x", {"stop": "\ud83d"}, "cannot be sent"),
        ("say x", {"timeout_s": 0}, "timeout_s=0: expected a number of seconds above 0"),
        ("say x", {"timeout_s": math.nan}, "timeout_s=nan: expected a number of seconds above 0"),
        ("say x", {"timeout_s": "5"}, "timeout_s='5': expected a number of seconds above 0"),
        ("say x", {"n": 3}, "n is not supported here, where each request has one answer: ask n times"),
        ("say x", {"top_k": -2}, "top_k: expected `int` >= 0"),
        ([{"role": "user"}], {}, "expected turns like"),
        ([{"role": "user", "content": "x", "name": "y"}], {}, "expected turns like"),
        (7, {}, "or a list of turns, got int"),
        (
            {"prompt": "say x", "prompt_token_ids": [1]},
            {},
            "with this key alone, got prompt, prompt_token_ids",
        ),
        ({"prompt_token_ids": [1, True]}, {}, "prompt_token_ids[1]: expected a whole number, got True"),
        ({"prompt_token_ids": []}, {}, "expected at least one token id"),
        ({"prompt_token_ids": [1] * 9000}, {}, "has 9000 tokens, but the context holds 8192"),
        ("fail the prompt is too long", {}, "the prompt is too long"),
    ],
)
def test_a_bad_request_fails_alone_and_says_why(client, prompt, options, named):
    with pytest.raises(RequestError, match=r".") as caught:
        client.generate(prompt, **options)
    assert named in str(caught.value)
    assert client.generate("say on").text == "on"


def test_clients_with_the_same_request_ids_do_not_collide(server):
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(server.address)) for _ in range(8)]
        streams = [client.stream("hang", request_id="same") for client in clients[:4]]
        assert [next(stream).request_id for stream in streams] == ["same"] * 4
        with ThreadPoolExecutor(4) as pool:
            say = lambda number: clients[4 + number].generate(f"say w{number}", request_id="x")  # noqa: E731
            assert [a.text for a in pool.map(say, range(4))] == ["w0", "w1", "w2", "w3"]
        clients[0].cancel("same")
        assert list(streams[0]) == []
        assert streams[0].answer.finish_reason is FinishReason.CANCELLED
        assert streams[0].answer.text == "partial"
        assert clients[1].stats().num_running == 3


def test_an_id_in_use_is_refused_and_free_again_afterwards(client):
    stream = client.stream("hang", request_id="a")
    next(stream)
    with pytest.raises(RequestError, match="in use"):
        client.generate("say x", request_id="a")
    stream.close()
    assert client.generate("say x", request_id="a").text == "x"


def test_threads_may_share_a_client(client):
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: client.generate(f"say a{n} b{n}").text, range(64)))
    assert answers == [f"a{n} b{n}" for n in range(64)]


def test_no_more_requests_are_with_the_stages_than_can_be_soon_and_turns_go_by_client(tmp_path):
    with fake_server(tmp_path, max_requests=2) as server, ExitStack() as stack:
        busy, other = (stack.enter_context(Client(server.address)) for _ in range(2))
        holding = [busy.stream("hang") for _ in range(4)]
        for stream in holding:
            next(stream)
        threads = [threading.Thread(target=busy.generate, args=("say late",)) for _ in range(10)]
        for thread in threads:
            thread.start()
        wait_until(lambda: busy.stats().num_waiting == 10)
        answers = []
        quick = threading.Thread(target=lambda: answers.append(other.generate("say quick")))
        quick.start()
        wait_until(lambda: busy.stats().num_waiting == 11)
        assert len(server.engine.submitted) == server.engine.most_in_flight == 4
        holding[0].cancel()
        quick.join(10)
        assert answers[0].text == "quick"
        order = [server.engine.prompts[number] for number in server.engine.submitted[4:6]]
        assert "say quick" in order, "the second client's turn came among the first two"
        for stream in holding[1:]:
            stream.close()
        for thread in threads:
            thread.join(10)


def test_a_waiting_request_can_be_cancelled(tmp_path):
    with fake_server(tmp_path, max_requests=1) as server, Client(server.address) as client:
        holding = [client.stream("hang") for _ in range(3)]
        for stream in holding:
            next(stream)
        waiting = client.stream("say never", request_id="w")
        reader = threading.Thread(target=lambda: list(waiting))
        reader.start()
        wait_until(lambda: client.stats().num_waiting == 1)
        client.cancel("w")
        reader.join(10)
        assert waiting.answer.finish_reason is FinishReason.CANCELLED
        assert (waiting.answer.text, waiting.answer.metrics) == ("", None)
        assert len(server.engine.submitted) == 3


def is_idle(server):
    with Client(server.address) as client:
        stats = client.stats()
    return stats.num_running == stats.num_waiting == 0


def test_leaving_a_stream_cancels_its_request(client, server):
    for _ in client.stream("hang"):
        break
    wait_until(lambda: is_idle(server))
    assert server.engine.cancelled == ["1"]


def test_leaving_an_asynchronous_stream_with_break_cancels_its_request(server):
    async def ask():
        async with AsyncClient(server.address) as client:
            async for block in client.stream("hang", request_id="a"):
                assert block.text == "partial"
                break
            while (await client.stats()).num_running:
                await asyncio.sleep(0.01)
            assert (await client.generate("say x", request_id="a")).text == "x"
            async for _ in client.stream("say a b"):
                gc.collect()  # takes nothing that is in use

    asyncio.run(asyncio.wait_for(ask(), 20))
    assert server.engine.cancelled == ["1"]


def test_an_asynchronous_client_goes_on_in_the_next_loop(server):
    client = AsyncClient(server.address, timeout_s=10)

    async def say(words):
        answers = await asyncio.gather(*(client.generate(f"say {word}") for word in words))
        return [answer.text for answer in answers]

    async def begin():
        stream = client.stream("hang")
        await stream.start()
        with ThreadPoolExecutor(1) as pool, pytest.raises(RequestError, match="make one for each loop"):
            pool.submit(asyncio.run, say("x")).result()
        return stream

    assert asyncio.run(say("abc")) == ["a", "b", "c"]
    left = asyncio.run(begin())
    assert asyncio.run(say("de")) == ["d", "e"]
    with pytest.raises(EngineDead, match="the asyncio loop that asked has ended"):
        asyncio.run(anext(left))
    wait_until(lambda: is_idle(server))
    asyncio.run(client.close())


def test_a_stream_may_be_closed_after_its_client(server):
    with Client(server.address) as client, client.stream("hang") as stream:
        next(stream)
        client.close()
    stream.close()
    wait_until(lambda: is_idle(server))


@pytest.mark.parametrize("limits", [{"timeout_s": -1}, {"connect_timeout_s": math.nan}, {"timeout_s": True}])
def test_limits_that_are_none_are_refused_and_leave_no_thread(limits):
    num_threads = threading.active_count()
    for make in (Client, AsyncClient):
        with pytest.raises(RequestError, match=r"timeout_s=.*: expected a number of seconds above 0"):
            make("ipc:///nowhere", **limits)
        for address in (None, 5, b"ipc:///x"):
            with pytest.raises(EngineUnreachable, match=r"is no address: expected ipc:///PATH"):
                make(address)
    assert threading.active_count() == num_threads


def test_top_k_of_minus_1_keeps_every_token_as_in_vllm(client, server):
    assert client.generate("say x", top_k=-1).text == "x"
    assert server.engine.samplings["1"].top_k == 0


def test_a_request_that_takes_too_long_is_cancelled(client, server):
    with pytest.raises(RequestTimeout, match=r"took over 0\.2 s"):
        client.generate("hang", timeout_s=0.2)
    wait_until(lambda: is_idle(server))
    assert server.engine.cancelled == ["1"]


def test_ctrl_c_ends_the_call_and_cancels_its_request(client, server):
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        client.generate("hang")
    wait_until(lambda: is_idle(server))
    assert server.engine.cancelled == ["1"]
    assert client.generate("say on").text == "on"


def test_closing_a_client_cancels_its_requests_and_wakes_its_threads(server):
    client = Client(server.address)
    errors = []

    def ask():
        try:
            client.generate("hang")
        except EngineDead as error:
            errors.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(server.engine.submitted) == 3)
    client.close()
    client.close()
    for thread in threads:
        thread.join(10)
    assert errors == ["the client is closed"] * 3
    wait_until(lambda: is_idle(server))
    with pytest.raises(EngineDead, match="the client is closed"):
        client.generate("say x")


def test_threads_that_go_on_asking_while_others_close_the_client_all_end(server):
    for _ in range(20):
        client = Client(server.address)
        client.generate("say x")
        closed = threading.Event()
        refused = []

        def ask(client=client, closed=closed, refused=refused):
            while not closed.is_set():  # as a program does that asks again after EngineDead
                try:
                    client.stats()
                except EngineDead as error:
                    refused.append(str(error))

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        closers = [threading.Thread(target=client.close, daemon=True) for _ in range(2)]
        for thread in (*threads, *closers):
            thread.start()
        for thread in closers:
            thread.join(10)
        closed.set()
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in (*threads, *closers))
        assert set(refused) <= {"the client is closed"}


def test_a_cancel_that_is_repeated_reaches_the_stages_once(server):
    with dealer(server.address) as raw, Client(server.address) as client:
        raw.send(encode(Generate(request_id="mine", prompt="say " + "w " * 4000, options={})))
        wait_until(lambda: server.engine.submitted == ["1"])
        for _ in range(20):
            raw.send(encode(Cancel(request_id="mine")))
        wait_until(lambda: server.engine.cancelled)
        client.stats()  # the server goes on reading
    with Client(server.address) as client:  # and finds the first client gone
        wait_until(lambda: client.stats().num_clients == 0)
    assert server.engine.cancelled == ["1"]


def test_a_client_that_is_killed_has_its_requests_cancelled(server):
    program = (
        "import sys; from pipeline.client import Client\n"
        "for block in Client(sys.argv[1]).stream('hang'): print(block.text, flush=True)"
    )
    command = [sys.executable, "-c", program, server.address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "partial\n"
        process.kill()
    wait_until(lambda: server.engine.cancelled == ["1"])
    wait_until(lambda: is_idle(server))


def test_a_program_that_never_closes_its_client_still_ends(server):
    program = "import sys; from pipeline import Client; print(Client(sys.argv[1]).generate('say bye').text)"
    done = subprocess.run(
        [sys.executable, "-c", program, server.address], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "bye\n", "")


def test_a_lost_stage_is_told_to_every_client(server):
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(server.address, connect_timeout_s=5)) for _ in range(3)]
        streams = [client.stream("hang") for client in clients[:2]]
        for stream in streams:
            next(stream)
        for lost in (lambda: clients[2].generate("die"), lambda: next(streams[0]), lambda: next(streams[1])):
            with pytest.raises(EngineDead, match=r"ended: stage lost: target-verifier \(pid 1\)"):
                lost()


def test_a_stopped_engine_is_told_and_its_successor_is_found(tmp_path):
    with fake_server(tmp_path) as first:
        client = Client(first.address, connect_timeout_s=20)
        stream = client.stream("hang")
        next(stream)
        stop(first.interrupts)
        with pytest.raises(EngineDead, match=r"the engine was stopped \(SIGTERM\)"):
            next(stream)
    with fake_server(tmp_path) as second, client:
        assert client.generate("say again").text == "again"
        assert second.engine.prompts == {"1": "say again"}


def test_a_server_that_is_killed_is_noticed_at_once_and_its_successor_is_found(tmp_path, base_folder):
    arguments = [f"listen=ipc://{tmp_path / 'engine.sock'}", f"model.path={base_folder}"]
    with ServingProcess(*arguments, module="tests.fake_engine") as first:
        client = Client(first.wait_ready().address, connect_timeout_s=60, timeout_s=60)
        stream = client.stream("hang")
        next(stream)
        first.process.kill()
        with pytest.raises(EngineDead, match=r"the connection to the engine at .* is lost"):
            next(stream)
    with ServingProcess(*arguments, module="tests.fake_engine") as second, client:
        assert client.generate("say again").text == "again"
        second.process.send_signal(signal.SIGTERM)
        assert second.wait() == 128 + signal.SIGTERM
        assert sorted(tmp_path.glob("engine*")) == []


def test_where_no_engine_is_the_error_says_how_to_start_one(tmp_path):
    address = f"ipc://{tmp_path / 'none.sock'}"
    with (
        pytest.raises(EngineUnreachable, match=rf"no engine answers at {address} .*listen={address}"),
        Client(address, connect_timeout_s=0.2),
    ):
        pass
    with pytest.raises(EngineUnreachable, match=r"is no address.*expected ipc:///PATH"):
        Client("no address").generate("x")


def test_async_requests_run_side_by_side_and_a_cancelled_task_cancels_its_request(server):
    async def ask_many():
        async with AsyncClient(server.address) as client:
            texts = await asyncio.gather(*(client.generate(f"say a{n}") for n in range(20)))
            assert [answer.text for answer in texts] == [f"a{n}" for n in range(20)]
            task = asyncio.create_task(client.generate("hang"))
            while not any(prompt == "hang" for prompt in server.engine.prompts.values()):
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with client.stream("say x y") as stream:
                assert [block.text async for block in stream] == ["x", " y"]
            while (await client.stats()).num_running:
                await asyncio.sleep(0.01)

    asyncio.run(ask_many())
    assert server.engine.cancelled == ["21"]


def test_an_address_in_use_and_one_open_to_the_network_are_said_in_one_line(tmp_path, base_folder, server):
    for address, said in (
        (server.address, "another engine serves there; choose another address"),
        ("tcp://0.0.0.0:*", "allow_remote=true"),
        (f"ipc://{tmp_path}/n n=2", "n=2: expected 1 with listen"),
    ):
        arguments = [*f"listen={address}".split(" "), f"model.path={base_folder}"]
        with ServingProcess(*arguments, module="tests.fake_engine") as refused:
            assert refused.wait(60) == 2
            (line,) = [line for line in refused.lines if line.startswith("error: ")]
            assert said in line
            assert "loading" not in refused.stderr


# --- what no client of ours would do --------------------------------------------------------------------


def test_garbage_is_refused_and_harms_nobody(client, server):
    generator = random.Random(4)
    good = Generate(request_id="1", prompt="say x", options={})
    frames = [
        *(generator.randbytes(generator.randrange(1, 300)) for _ in range(200)),
        encode(good)[:-1],
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"cos\nsystem\n(S'touch /tmp/executed'\ntR.",
        encode({"type": "Generate", "request_id": "1"}),
        encode({"type": "Generate", "request_id": 1, "options": {}}),
        encode({"type": "Nothing"}),
        encode(RequestFailed(request_id="1", reason="from a client")),
    ]
    with dealer(server.address) as raw:
        for frame in frames:
            raw.send(frame)
        raw.send_multipart([b"", encode(good)])
        assert [type(decode(raw.recv())) for _ in range(len(frames) + 1)] == [Refused] * (len(frames) + 1)
        raw.send(encode(Open(protocol=999)))
        assert "version" in decode(raw.recv()).reason
        for options in ({"n": "\ud83d".encode("utf-8", "surrogatepass")}, {"max_tokens": {"a": [[[]]]}}):
            raw.send(encode(Generate(request_id="2", prompt="say x", options=options)))
            assert isinstance(decode(raw.recv()), RequestFailed)
        for wrong, named in [
            (
                {"prompt": "say x", "chat": []},
                "exactly one of prompt, chat and prompt_token_ids, got prompt and",
            ),
            ({"chat": [], "prompt_token_ids": [1]}, "got chat and prompt_token_ids"),
            ({}, "got none of them"),
            ({"prompt_token_ids": []}, "expected at least one token id"),
            ({"prompt_token_ids": [1, True]}, "[1]: expected a whole number, got True of type bool"),
            ({"prompt_token_ids": ["1", None]}, "[0]: expected a whole number, got '1' of type str"),
            (
                {"prompt_token_ids": [2**63]},
                "[0]: expected a token id, 0 to 2147483647, got 9223372036854775808",
            ),
        ]:
            raw.send(encode(Generate(request_id="3", options={}, **wrong)))
            failed = decode(raw.recv())
            assert isinstance(failed, RequestFailed)
            assert named in failed.reason
        raw.send(encode(Cancel(request_id="unknown")))
        raw.send(encode(Open(protocol=PROTOCOL_VERSION)))
        assert isinstance(decode(raw.recv()), Welcome)
    assert client.stats().num_refused == len(frames) + 1
    with socket.socket(socket.AF_UNIX) as raw_unix:
        raw_unix.connect(server.address.removeprefix("ipc://"))
        raw_unix.sendall(generator.randbytes(5000))
    assert client.generate("say alive").text == "alive"


def test_a_client_that_does_not_read_delays_nobody_and_is_told_when_it_reads(tmp_path):
    with (
        fake_server(tmp_path, most_unsent=50) as server,
        dealer(server.address, receive_high_water_mark=1) as slow,
        Client(server.address, timeout_s=60) as client,
    ):
        words = "w" * 2000 + " "
        slow.send(encode(Generate(request_id="flood", prompt="say " + words * 4000 + "end", options={})))
        wait_until(lambda: server.engine.submitted == ["1"])
        assert client.generate("say quick").text == "quick"
        wait_until(lambda: server.engine.cancelled == ["1"], timeout_s=60)
        assert client.generate("say still").text == "still"
        news = []
        while not news or not isinstance(news[-1], RequestFailed | RequestFinished):
            news.append(decode(slow.recv()))
        assert isinstance(news[0], Accepted)
        assert "does not read" in news[-1].reason
        numbers = [block.token_ids[0] for block in news if isinstance(block, TextBlock)]
        assert numbers == list(range(len(numbers))), "what came before was whole and in order"
        assert len(numbers) < 4001


def test_a_message_larger_than_may_be_ends_that_connection_only(client, server):
    with pytest.raises(RequestError, match="expected at most 67108864; shorten it"):
        client.generate("x" * (1 << 26))
    with dealer(server.address) as raw:
        raw.send(b"x" * ((1 << 26) + 1))
        raw.rcvtimeo = 500
        with pytest.raises(zmq.Again):
            raw.recv()
    assert client.generate("say alive").text == "alive"


def test_a_hundred_clients_later_no_descriptor_is_left(server):
    def use(number):
        with Client(server.address) as client:
            return client.generate(f"say {number}").text

    use(0)
    before = open_files()
    for number in range(100):
        assert use(number) == str(number)
    wait_until(lambda: open_files() <= before)


def test_the_client_imports_no_torch():
    code = (
        "import sys, pipeline, pipeline.client; "
        "heavy = {'torch', 'transformers', 'tokenizers', 'jinja2', 'hydra', 'numpy'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
