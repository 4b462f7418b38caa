"""Rules across fields: what breaks one is refused by name, with what was expected."""

import msgspec
import pytest

from conf.check import check
from conf.compose import compose, options_of
from conf.errors import ConfigError
from conf.keys import all_keys
from conf.limits import MAX_SEED, MAX_TEMPERATURE, MAX_WHOLE_NUMBER
from pipeline.messages import Sampling

WHOLE_NUMBER_KEYS = [
    key.name for key in all_keys().values() if "whole number" in key.expects and key.name != "seed"
]


def refused(*arguments, available_cores=2):
    with pytest.raises(ConfigError) as caught:
        check(compose(arguments), available_cores=available_cores)
    return str(caught.value)


@pytest.mark.parametrize("name", options_of("conf"))
@pytest.mark.parametrize("available_cores", [1, 2, 64])
@pytest.mark.parametrize("placement", options_of("placement"))
def test_every_named_run_passes_on_any_machine(name, available_cores, placement):
    check(compose([f"conf={name}", f"placement={placement}"]), available_cores=available_cores)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("max_tokens=0", "expected at least 1"),
        ("max_tokens=-1", "expected at least 1"),
        ("speculation.depth=129", "expected at most 128"),
        ("speculation.budget=500000000", "expected at most 1024"),
        ("temperature=-0.1", "expected a finite number of at least 0"),
        ("temperature=nan", "expected a finite number"),
        ("temperature=inf", "expected a finite number"),
        ("temperature=1e+31", "expected a finite number of at least 0 and at most 1e+30"),
        ("top_k=-1", "expected at least 0"),
        ("top_p=0.0", "expected more than 0 and at most 1"),
        ("top_p=1.01", "expected more than 0 and at most 1"),
        ("top_p=nan", "expected more than 0 and at most 1"),
        ("min_p=-0.1", "expected 0 to 1"),
        ("min_p=1.5", "expected 0 to 1"),
        ("min_p=nan", "expected 0 to 1"),
        ("seed=-1", "expected 0 to"),
        (f"seed={MAX_SEED + 1}", "expected 0 to"),
        ("max_requests=0", "expected at least 1"),
        ("model.path=", "it is empty"),
        ("model.max_context=1", "expected at least 2"),
        ("placement.page_size=0", "expected at least 1"),
        ("placement.prefill_chunk=0", "expected at least 1"),
        ("placement.target_cores=0", "expected 1 to 2, the cores this process may use; raise it"),
        ("placement.draft_cores=3", "expected 1 to 2, the cores this process may use; lower it"),
        ("speculation.depth=0", "expected at least 1"),
        ("speculation.budget=0", "expected at least 1"),
        ("speculation.draft.layers=0", "expected at least 1"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key(argument, expected):
    message = refused(argument)
    assert message.startswith(f"{argument}: ")
    assert expected in message


@pytest.mark.parametrize("value", [MAX_WHOLE_NUMBER + 1, 2**64, -(2**64), 10**99])
@pytest.mark.parametrize("key", WHOLE_NUMBER_KEYS)
def test_no_whole_number_is_so_large_that_it_could_not_travel(key, value):
    given = f"[{value}]" if key == "speculation.tree.widths" else value
    # Whether the run uses the key must not matter: every value travels to the stages.
    assert refused("conf=autoregressive", f"{key}={given}").startswith(f"{key}=")


def test_what_passes_is_what_the_messages_allow():
    def sampling(**settings):
        # Structured outputs have a test of their own.
        names = set(Sampling.__struct_fields__) - {"seed", "structured_outputs"}
        fields = {name: getattr(config, name) for name in names}
        return msgspec.convert({**fields, "seed": 0, **settings}, Sampling)

    config = compose(
        [f"temperature={MAX_TEMPERATURE}", f"max_tokens={MAX_WHOLE_NUMBER}", "min_p=1", "top_p=1"]
    )
    check(config, available_cores=2)
    assert sampling(seed=MAX_SEED).temperature == MAX_TEMPERATURE
    for name, value in (("temperature", MAX_TEMPERATURE * 2), ("seed", MAX_SEED + 1)):
        with pytest.raises(msgspec.ValidationError):
            sampling(**{name: value})


@pytest.mark.parametrize(
    "argument", [f"seed={MAX_SEED}", "seed=0", "temperature=0", "top_p=1", "top_p=1e-9", "min_p=1", "top_k=0"]
)
def test_the_ends_of_a_range_are_accepted(argument):
    check(compose([argument]), available_cores=2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["speculation.draft.kind=ngram", "speculation.draft.look_up=2"],
            "speculation.draft.look_up=2: expected a draft beside which to look up, and the run has "
            "speculation.draft.kind=ngram",
        ),
        (["speculation.draft.look_up=-1"], "speculation.draft.look_up=-1: expected at least 0"),
        (
            ["speculation.tree.widths=[]"],
            "widths=[]: expected 1 to 128 numbers of at least 1, such as [4,2,1]",
        ),
        (["speculation.tree.widths=[2,0]"], "widths=[2,0]: expected 1 to 128 numbers of at least 1"),
        (["speculation.tree.widths=[40,40]"], "expected at most 1024 nodes, these are 1640; lower some"),
        (["speculation.tree.nodes=0"], "speculation.tree.nodes=0: expected at least 1"),
        (["speculation.tree.nodes=2000"], "speculation.tree.nodes=2000: expected at most 1024"),
        (
            ["speculation.min_path_prob=1"],
            "speculation.min_path_prob=1.0: expected at least 0 and less than 1",
        ),
        (["speculation.tree.rows=0"], "speculation.tree.rows=0: expected at least 1"),
        (["speculation.tree.nodes=4", "speculation.tree.widths=[2]"], "expected either nodes or widths"),
    ],
)
def test_shapes_that_no_tree_has_are_refused(arguments, expected):
    assert expected in refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model=custom"], "expected model.path=ID|FOLDER|FILE.gguf beside it"),
        (["speculation.draft.kind=none"], "speculation.prepare_outcomes=true needs a draft"),
        (["speculation.draft.kind=model"], "expected speculation.draft.path=ID|FOLDER|FILE.gguf beside it"),
        (
            ["conf=speculative", "speculation.draft.kind=layers"],
            "expected speculation.draft.layers=N beside it",
        ),
        (["conf=autoregressive", "speculation.draft.path=x"], "speculation.draft.kind=model beside it"),
        (
            ["speculation.draft.kind=ngram", "speculation.draft.layers=2"],
            "expected speculation.draft.kind=layers beside it, and the run has ngram",
        ),
    ],
)
def test_keys_that_need_one_another_are_refused_alone(arguments, expected):
    assert expected in refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["speculation.saguaro_c=0.5"],
            "saguaro_c=0.5: expected speculation.verification=rejection beside it, and the run has coupled",
        ),
        (
            ["speculation.verification=rejection", "speculation.saguaro_c=1.5"],
            "saguaro_c=1.5: expected 0 to 1",
        ),
        (
            ["speculation.verification=rejection", "speculation.saguaro_c=nan"],
            "saguaro_c=nan: expected 0 to 1",
        ),
        (
            ["conf=saguaro_tree", "speculation.verification=rejection", "speculation.saguaro_c=0.5"],
            "saguaro_c=0.5: expected a chain or speculation.tree.widths beside it",
        ),
        (
            [
                "speculation.verification=rejection",
                "speculation.saguaro_c=0.5",
                "speculation.draft.kind=ngram",
            ],
            "expected a draft with a law to draw from, and the run proposes what look-up finds",
        ),
        (
            ["speculation.verification=rejection", "speculation.saguaro_c=0.5", "model.path=x"],
            "the run proposes what look-up finds; give speculation.draft.path=",
        ),
        (
            ["conf=autoregressive", "speculation.verification=rejection", "speculation.saguaro_c=0.5"],
            "saguaro_c=0.5: expected a draft with a law to draw from, and the run has no draft",
        ),
    ],
)
def test_saguaro_sampling_is_refused_where_nothing_is_drawn(arguments, expected):
    assert expected in refused(*arguments)


@pytest.mark.parametrize("c", ["0", "1", "null"])
def test_the_rejection_rule_takes_any_c(c):
    given = ["conf=saguaro", "speculation.verification=rejection", f"speculation.saguaro_c={c}"]
    check(compose(given), available_cores=2)


def test_split_cores_must_fit_side_by_side():
    message = refused("placement.target_cores=2", available_cores=2)
    assert "a sum of at most 2" in message
    assert "placement.draft_cores=null" in message
    check(compose(["placement.target_cores=2", "placement=cpu_shared"]), available_cores=2)
    check(compose(["placement.target_cores=2"]), available_cores=3)


def test_a_budget_is_only_needed_where_outcomes_are_prepared():
    check(compose(["conf=speculative", "speculation.budget=0"]), available_cores=2)
