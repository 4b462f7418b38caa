"""`LLM` without its pipeline: arguments, sampling parameters, and many prompts through a fake engine."""

import json
import pickle
import subprocess
import sys

import pytest

from conf.check import check
from conf.compose import compose
from conf.schema import DraftKind, RunConfig
from pipeline import SamplingParams
from pipeline.client_options import resolve_options
from pipeline.errors import ConfigError, EngineDead, RequestError
from pipeline.given_prompt import prompt_of
from pipeline.jobs import jobs_of, outputs_of, run_jobs
from pipeline.llm_arguments import arguments_of
from pipeline.llm_outputs import PartialResults
from pipeline.messages import Sampling
from tests.fake_engine import FakeEngine


def configured(model=None, speculative_config=None, **keys):
    config = compose(arguments_of(model, speculative_config, keys))
    check(config, available_cores=2)
    return config


def test_without_arguments_it_is_the_default_run():
    assert configured() == compose([])


def test_vllms_names_become_our_keys():
    config = configured("owner/name", max_model_len=100, dtype="float32", max_num_seqs=4, seed=7)
    assert (config.model.path, config.model.max_context, config.model.dtype.name) == (
        "owner/name",
        100,
        "float32",
    )
    assert (config.max_requests, config.seed) == (4, 7)
    assert configured(dtype="auto") == configured()


def test_every_key_of_a_run_can_be_given():
    config = configured(placement="cpu_shared", **{"placement.page_size": 32, "model.weights": "int8"})
    assert (config.placement.name, config.placement.page_size) == ("cpu_shared", 32)
    assert config.model.weights.name == "int8"


def test_options_of_the_run_are_taken_as_python_has_them():
    config = configured(
        stop=["\n\n", 'a "b", c]'],
        stop_token_ids=[1, 2],
        logit_bias={5: -1.5, "6": 2},
        **{"structured_outputs.choice": ("yes", "no")},
    )
    assert (config.stop, config.stop_token_ids) == (["\n\n", 'a "b", c]'], [1, 2])
    assert config.logit_bias == {5: -1.5, 6: 2.0}
    assert config.structured_outputs.choice == ["yes", "no"]
    assert configured(stop="[END]").stop == ["[END]"]
    schema = {"type": "object", "properties": {"a": {"const": "{=,}"}}}
    assert json.loads(configured(**{"structured_outputs.json": schema}).structured_outputs.json) == schema


def test_none_says_nothing():
    assert configured(max_model_len=None, dtype=None, seed=None, max_num_seqs=None) == configured()
    asks_nothing = {"tensor_parallel_size": 1, "enforce_eager": True, "trust_remote_code": False}
    assert configured(**asks_nothing, quantization=None, enable_chunked_prefill=True) == configured()
    nothing = {"method": None, "model": None, "num_speculative_tokens": None}
    assert configured(None, nothing) == configured(None, {})


def test_a_speculative_config_chooses_run_draft_and_depth():
    config = configured(
        "m/t",
        {"method": "saguaro", "model": "m/d, with=signs", "num_speculative_tokens": 5, "budget": 9},
    )
    speculation = config.speculation
    assert speculation.prepare_outcomes
    assert (speculation.draft.kind, speculation.draft.path) == (DraftKind.model, "m/d, with=signs")
    assert (speculation.depth, speculation.budget) == (5, 9)
    tree = configured(None, {"method": "tree", "num_speculative_tokens": 12, "tree.rows": 3}).speculation.tree
    assert (tree.nodes, tree.rows) == (12, 3)
    assert configured(None, {"method": "tree", "tree.widths": [4, 2]}).speculation.tree.widths == [4, 2]
    assert configured(None, {"method": "autoregressive"}).speculation.draft.kind is DraftKind.none
    assert configured(None, {"method": "ngram"}).speculation.draft.kind is DraftKind.ngram
    assert not configured("a/b", {"method": "draft_model", "model": "c/d"}).speculation.prepare_outcomes
    assert configured(None, {}) == configured(None, {"method": "saguaro"})


@pytest.mark.parametrize(
    ("speculative_config", "keys", "named"),
    [
        ({"method": "eagle"}, {}, "method=eagle: expected one of autoregressive"),
        ({"metod": "saguaro"}, {}, "metod=saguaro: there is no such key; did you mean method?"),
        ({"draft_tensor_parallel_size": 1}, {}, "supported: method, model, num_speculative_tokens"),
        ({"method": "draft_model"}, {}, "expected model=DRAFT beside it"),
        ("saguaro", {}, "speculative_config='saguaro': expected a dict such as"),
        ({5: 6}, {}, "5=6: there is no such key"),
        (None, {"stop": [b"x"]}, "LLM(stop=[b'x']): expected what JSON can hold"),
        ({"num_speculative_tokens": 0}, {}, "speculation.depth=0: expected at least 1"),
        ({"method": "saguaro"}, {"conf": "ssd"}, "conf and speculative_config are both given"),
        (None, {"tensor_parallel_size": 2}, "LLM(tensor_parallel_size=2): not supported; the target runs on"),
        (None, {"trust_remote_code": True}, "LLM(trust_remote_code=True): not supported; no code of a model"),
        (None, {"quantization": "awq"}, "LLM(quantization=awq): not supported; **{'model.weights': 'int8'}"),
        (None, {"max_num_seq": 2}, "did you mean max_num_seqs?"),
        (None, {"load_format": "dummy"}, "supported: model, speculative_config, max_model_len"),
        (None, {"temperature": 1}, "give it in SamplingParams"),
        (None, {"max_num_seqs": "four"}, "max_requests=four: expected a whole number"),
        (None, {"max_num_seqs": 2, "max_requests": 3}, "max_requests is given twice"),
        (None, {"dtype": "float16"}, "model.dtype=float16: expected one of bfloat16, float32, float64"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(speculative_config, keys, named):
    with pytest.raises(ConfigError) as caught:
        configured(None, speculative_config, **keys)
    assert named in str(caught.value)


def test_sampling_params_have_vllms_defaults():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(max_tokens=None).max_tokens == 2**31 - 1
    assert eval(repr(params)) == params
    assert SamplingParams(seed=1) != SamplingParams(seed=2)
    with pytest.raises(AttributeError, match="no option 'color'"):
        _ = params.color


def test_sampling_params_that_are_set_later_are_checked_and_count():
    params = SamplingParams(seed=1)
    other = params.clone()
    params.max_tokens, params.temperature, params.stop, params.n = 5, 0, "END", 2
    expected = SamplingParams(seed=1, max_tokens=5, temperature=0, stop="END", n=2)
    assert (params, params.n, params.options) == (expected, 2, expected.options)
    assert other == pickle.loads(pickle.dumps(other)) == SamplingParams(seed=1)
    for name, value in (("temprature", 1), ("top_p", 7), ("n", 0), ("options", {}), ("min_tokens", 6)):
        with pytest.raises(RequestError, match=f"{name}"):
            setattr(params, name, value)
    assert params == expected


def test_none_is_vllms_default_and_not_the_engines():
    given = SamplingParams(temperature=None, top_k=None, top_p=None, min_p=None)
    assert given == SamplingParams()
    config = RunConfig(temperature=0.0, top_k=3, top_p=0.5, min_p=0.25)
    assert resolve_options(given.options, config).temperature == 1.0


def test_every_field_of_sampling_is_a_sampling_parameter():
    values = {name: getattr(Sampling(max_tokens=3, seed=4), name) for name in Sampling.__struct_fields__}
    assert resolve_options(SamplingParams(**values).options, RunConfig()) == Sampling(max_tokens=3, seed=4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"best_of": 2}, "SamplingParams(best_of=...) is not supported: ask for several answers"),
        ({"temprature": 2}, "did you mean temperature?"),
        ({"bad_words": ["x"]}, "supported: max_tokens, temperature"),
        ({"guided_json": {}}, "the name is structured_outputs"),
        ({"top_p": 0}, "top_p: expected `float` > 0"),
        ({"max_tokens": 0}, "max_tokens: expected `int` >= 1"),
        ({"temperature": "hot"}, "temperature: expected `float`, got `str`"),
        ({"n": 0}, "n=0: expected a whole number of at least 1"),
        ({"n": True}, "n=True: expected a whole number"),
        ({"n": 10**7}, "n=10000000: expected a whole number of at least 1, at most 1024"),
        ({"stop": ["a", "b\ud800"]}, "stop: expected Unicode text"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs: expected Unicode text"),
    ],
)
def test_bad_sampling_parameters_are_refused_by_name(options, named):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert named in str(caught.value)


def jobs_for(*prompts, num_samples=1, first_id=1):
    sampling = Sampling(max_tokens=5, seed=1)
    return [
        job
        for index, prompt in enumerate(prompts)
        for job in jobs_of(
            prompt_of(prompt), sampling, num_samples, index=index, request_id=str(first_id + index)
        )
    ]


def run(jobs, engine=None, **options):
    engine = engine or FakeEngine(RunConfig())
    run_jobs(engine, jobs, max_requests=2, **{"use_tqdm": False, **options})
    return engine


def test_outputs_come_in_the_order_of_the_prompts():
    jobs = jobs_for(*(f"say a{n} b{n}" for n in range(20)))
    engine = run(list(reversed(jobs)))
    outputs = outputs_of(jobs)
    assert [output.outputs[0].text for output in outputs] == [f"a{n} b{n}" for n in range(20)]
    assert [output.prompt for output in outputs] == [f"say a{n} b{n}" for n in range(20)]
    first = outputs[0]
    assert (first.outputs[0].token_ids, first.outputs[0].finish_reason) == ([0, 1], "length")
    assert (first.metrics.num_rounds, first.num_prompt_tokens, first.finished) == (11, 5, True)
    assert engine.most_in_flight == 4


def test_texts_and_token_ids_may_be_mixed_and_bad_ids_do_not_cost_the_others():
    prompts = ["say one", {"prompt_token_ids": [7, 8]}, {"prompt": "say three"}, {"prompt_token_ids": (9,)}]
    jobs = jobs_for(*prompts)
    engine = run(jobs)
    outputs = outputs_of(jobs)
    assert [output.outputs[0].text for output in outputs] == ["one", "7 8", "three", "9"]
    assert [output.prompt for output in outputs] == ["say one", None, "say three", None]
    assert [output.prompt_token_ids for output in outputs] == [[1, 2, 3, 4, 5], [7, 8], [1, 2, 3, 4, 5], [9]]
    assert engine.token_ids == {"1": None, "2": [7, 8], "3": None, "4": [9]}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {},
            'expected {"prompt": "..."} or {"prompt_token_ids": [1, 2, ...]}, with this key alone, got none',
        ),
        ({"prompt": "a", "prompt_token_ids": [1]}, "got prompt, prompt_token_ids; correct the keys"),
        ({"prompt": "a", "multi_modal_data": {}}, "got prompt, multi_modal_data; correct the keys"),
        ({"prompt": 7}, "prompt: expected a text, got int"),
        ({"prompt_token_ids": []}, "expected at least one token id"),
        ({"prompt_token_ids": [1, False]}, "prompt_token_ids[1]: expected a whole number, got False"),
        (
            {"prompt_token_ids": [10**6000]},
            "expected a token id, 0 to 2147483647, got a number of 19932 bits",
        ),
        ({"prompt_token_ids": None}, "got NoneType"),
        ({"prompt_token_ids": {1, 2}}, "got set; give a list (of an array or a tensor .tolist() makes one)"),
        ("a\ud800", "the prompt is not valid Unicode text"),
        ([{"role": "user", "content": "\ud800"}], "the prompt is not valid Unicode text"),
        ([1, 2], 'token ids are given as {"prompt_token_ids": [1, 2, ...]}'),
        (7, "or a list of turns, got int"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(given, named):
    with pytest.raises(RequestError) as caught:
        prompt_of(given)
    assert named in str(caught.value)


def test_several_answers_to_a_prompt_have_seeds_of_their_own():
    jobs = jobs_for("say one", "say two", num_samples=3)
    engine = run(jobs)
    first, second = outputs_of(jobs)
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert [output.text for output in second.outputs] == ["two"] * 3
    assert (first.request_id, second.request_id) == ("1", "2")
    seeds = [output.seed for output in first.outputs]
    assert seeds[0] == 1
    assert len(set(seeds)) == 3
    assert seeds == [engine.samplings[f"1/{sample}"].seed for sample in range(3)]


def test_an_option_left_out_is_the_engines_own():
    config = RunConfig(max_tokens=7, temperature=0.5, seed=3)
    assert resolve_options({}, config) == Sampling(max_tokens=7, temperature=0.5, seed=3)
    assert resolve_options({"seed": None, "top_k": 2}, config).seed == 3
    config.seed = None
    assert resolve_options({}, config).seed != resolve_options({}, config).seed


def test_a_prompt_that_fails_does_not_cost_the_others():
    jobs = jobs_for("say one", "fail too long", "say three")
    run(jobs)
    with pytest.raises(PartialResults, match=r"1 of 3 prompts could not .*: prompt 1: too long") as caught:
        outputs_of(jobs)
    texts = [output and output.outputs[0].text for output in caught.value.outputs]
    assert texts == ["one", None, "three"]


def test_an_interrupted_call_cancels_its_requests_and_the_next_one_finds_the_engine_idle(monkeypatch):
    engine = FakeEngine(RunConfig())
    events = engine.events

    def interrupt(timeout_s):
        monkeypatch.setattr(engine, "events", events)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "events", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(jobs_for("hang", "say x", "hang"), engine)
    assert engine.cancelled == ["1", "2", "3"]
    jobs = jobs_for("say y", first_id=9)
    run(jobs, engine)
    assert outputs_of(jobs)[0].outputs[0].text == "y"


def test_a_lost_stage_ends_the_call():
    with pytest.raises(EngineDead, match="stage lost: target-verifier"):
        run(jobs_for("say x", "die"))


def test_a_progress_bar_counts_prompts_on_stderr(capsys):
    run(jobs_for("say one", "fail two"), use_tqdm=True)
    captured = capsys.readouterr()
    assert "2/2" in captured.err
    assert captured.out == ""
    run(jobs_for("say one"))
    assert capsys.readouterr().err == ""


def test_the_package_itself_imports_next_to_nothing():
    code = (
        "import sys, pipeline; before = set(sys.modules)\n"
        "assert not {'torch', 'numpy', 'zmq', 'msgspec', 'hydra', 'asyncio'} & before\n"
        "from pipeline import LLM, SamplingParams\n"
        "heavy = {'torch', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_that_the_package_has_not_is_an_attribute_error():
    with pytest.raises(ImportError, match="LMM"):
        from pipeline import LMM  # noqa: F401
