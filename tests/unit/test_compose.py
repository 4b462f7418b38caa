"""Composition: what a command line means, and one clear error that names the key for what it cannot mean."""

from dataclasses import asdict
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

import conf
from conf.compose import compose, description_of, options_of
from conf.errors import ConfigError
from conf.keys import GROUPS, all_keys
from conf.schema import DraftKind, DType, FanOut

FOLDER = Path(conf.__file__).parent


def test_nothing_given_is_the_saguaro_run_on_the_demo_model():
    config = compose()
    assert config == compose(["conf=saguaro", "model=demo", "placement=cpu_split"])
    assert (config.model.name, config.model.path, config.max_tokens) == ("demo", None, 128)
    assert config.speculation.prepare_outcomes
    assert config.speculation.fan_out is FanOut.calibrated


@pytest.mark.parametrize(
    ("name", "has_draft", "prepares"),
    [
        ("autoregressive", False, False),
        ("speculative", True, False),
        ("ssd", True, True),
        ("saguaro", True, True),
        ("tree", True, False),
        ("saguaro_tree", True, True),
    ],
)
def test_each_named_run_is_its_system_on_split_cores(name, has_draft, prepares):
    config = compose([f"conf={name}"])
    assert (config.speculation.draft.kind is not DraftKind.none) == has_draft
    assert config.speculation.prepare_outcomes == prepares
    assert config.placement.name == "cpu_split"


def test_widths_take_the_place_of_the_named_runs_nodes():
    tree = compose(["conf=tree", "speculation.tree.widths=[4,2,1]"]).speculation.tree
    assert (tree.widths, tree.nodes) == ([4, 2, 1], None)
    both = compose(["conf=tree", "speculation.tree.widths=[4]", "speculation.tree.nodes=3"]).speculation.tree
    assert (both.widths, both.nodes) == ([4], 3)


def test_the_two_ssd_runs_differ_in_the_fan_out():
    assert compose(["conf=ssd"]).speculation.fan_out is FanOut.uniform
    assert compose(["conf=saguaro"]).speculation.fan_out is FanOut.calibrated


def test_the_command_line_wins_over_the_named_run_in_any_order():
    for arguments in (["conf=ssd", "speculation.depth=7"], ["speculation.depth=7", "conf=ssd"]):
        assert compose(arguments).speculation.depth == 7
    assert compose(["conf=autoregressive", "speculation=ssd"]).speculation.prepare_outcomes
    assert compose(["conf=saguaro", "placement=cpu_shared"]).placement.name == "cpu_shared"


@pytest.mark.parametrize(
    "arguments",
    [["max_tokens=3", "max_tokens=4"], ["conf=ssd", "conf=ssd"], ["model.path=a", "model.path=b"]],
)
def test_a_key_given_twice_is_refused(arguments):
    with pytest.raises(ConfigError, match="is given twice, expected it once") as caught:
        compose(["temperature=0", *arguments])
    assert str(caught.value).startswith(arguments[0].partition("=")[0])


def test_values_come_out_with_the_types_of_the_schema():
    config = compose(
        ["model.dtype=float64", "temperature=1", "seed=12", "chat=false", "speculation.tree.widths=[4,2]"]
    )
    assert config.model.dtype is DType.float64
    assert isinstance(config.temperature, float)
    assert (config.temperature, config.seed, config.chat) == (1.0, 12, False)
    assert config.speculation.tree.widths == [4, 2]
    assert compose(["seed=null"]).seed is None


def test_a_model_path_alone_chooses_the_custom_model():
    config = compose(["model.path=some/model"])
    assert (config.model.name, config.model.path) == ("custom", "some/model")
    with pytest.raises(ConfigError, match=r"model=demo and model\.path exclude each other"):
        compose(["model=demo", "model.path=some/model"])


@pytest.mark.parametrize(
    "path", ["a b", "a,b", "(a)", "${b}", "'a'", "a=b", "!a", "[1]", "12", "ü\n", "~/x", "a#b"]
)
@pytest.mark.parametrize("key", ["model.path", "speculation.draft.path"])
def test_paths_are_taken_as_they_stand(key, path):
    config = compose([f"{key}={path}"])
    assert path == (config.model.path if key == "model.path" else config.speculation.draft.path)


def test_a_draft_path_or_layer_count_alone_chooses_the_draft_kind():
    draft = compose(["speculation.draft.path=some/model"]).speculation.draft
    assert (draft.kind, draft.path, draft.layers) == (DraftKind.model, "some/model", None)
    draft = compose(["conf=speculative", "speculation.draft.layers=3"]).speculation.draft
    assert (draft.kind, draft.layers) == (DraftKind.layers, 3)
    draft = compose(["conf=autoregressive", "speculation.draft.layers=3"]).speculation.draft
    assert draft.kind is DraftKind.none


def test_another_draft_kind_drops_what_the_named_run_leaves_over():
    for kind in ("ngram", "none", "model"):
        draft = compose(["conf=ssd", f"speculation.draft.kind={kind}"]).speculation.draft
        assert (draft.kind, draft.path, draft.layers) == (DraftKind[kind], None, None)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("max_token=3", "did you mean max_tokens?"),
        ("speculation.dept=3", "did you mean speculation.depth?"),
        ("depth=3", "did you mean speculation.depth?"),
        ("prompts=x", "did you mean prompt"),
        ("hydra.job.name=x", "there is no key"),
        ("+max_tokens=3", "there is no key"),
        ("~conf", "expected key=value"),
        ("hello", "expected key=value"),
        ("=3", "there is no key ''"),
        ("model.name=x", "this key follows from model=NAME"),
        ("speculation.draft=ngram", "there is no key"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(argument, expected):
    with pytest.raises(ConfigError) as caught:
        compose([argument])
    assert argument in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("conf=saguro", "there is no named run 'saguro'; did you mean saguaro?"),
        ("conf=null", "autoregressive, saguaro, saguaro_tree, speculative, ssd, tree"),
        ("conf=[ssd,saguaro]", "there is no named run"),
        ("conf=../conf/ssd", "there is no named run"),
        ("model=llama", "a model of your own is given as model.path="),
        ("placement=gpu", "available: cpu_shared, cpu_split"),
        ("speculation=4", "available: linear, none, saguaro, saguaro_tree, ssd, tree"),
    ],
)
def test_an_unknown_group_file_is_refused_with_those_there_are(argument, expected):
    with pytest.raises(ConfigError) as caught:
        compose([argument])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("max_tokens=abc", "a whole number"),
        ("max_tokens=1.5", "a whole number"),
        ("max_tokens=true", "a whole number"),
        ("max_tokens=null", "a whole number"),
        ("max_tokens=", "a whole number"),
        ("max_tokens=[1]", "a whole number"),
        ("max_tokens=(1", "a whole number"),
        ("max_tokens=${nothing}", "a whole number"),
        ("max_tokens=1,2", "a whole number"),
        ("temperature=hot", "a number"),
        ("temperature=${oc.env:PATH}", "a number"),
        ("chat=maybe", "true or false or null"),
        ("model.dtype=fp8", "one of bfloat16, float32, float64"),
        ("speculation.draft.kind=null", "one of none, auto, model, layers, ngram"),
        ("speculation.tree.widths=[a]", "a list of whole numbers such as [4,2,1] or null"),
        ("speculation.tree.widths=3", "a list of whole numbers such as [4,2,1] or null"),
    ],
)
def test_a_value_of_the_wrong_type_fails_with_the_key_and_what_it_expects(argument, expected):
    with pytest.raises(ConfigError) as caught:
        compose(["conf=ssd", argument])
    assert str(caught.value) == f"{argument}: expected {expected}"


def test_every_group_file_composes_and_describes_itself():
    for group in GROUPS:
        assert options_of(group)
        for name in options_of(group):
            assert compose([f"{group}={name}"]) is not None
            assert description_of(group, name).endswith(".")


def test_every_key_of_the_schema_is_known_and_described():
    def leaves(tree, prefix=""):
        for name, value in tree.items():
            if isinstance(value, dict) and name != "logit_bias":  # which is a value, no group
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield prefix + name

    assert set(all_keys()) == set(leaves(asdict(compose()))) - {"model.name", "placement.name"}
    assert all(key.description for key in all_keys().values())


def test_composing_leaves_a_programs_own_hydra_state_alone(tmp_path):
    (tmp_path / "own.yaml").write_text("x: 1\n", encoding="utf-8")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        compose()
        assert hydra_compose("own").x == 1


def test_composing_creates_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose(["conf=ssd"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argument",
    ["speculation.tree.widths=[", "speculation.tree.widths=[1,", "seed={", "max_tokens='"],
)
def test_a_value_with_broken_syntax_is_reported_with_its_key(argument):
    with pytest.raises(ConfigError) as caught:
        compose(["temperature=0", argument])
    assert str(caught.value).startswith(argument)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize(
    "argument",
    [
        "max_tokens=" + "9" * 5000,
        "max_tokens='" + "9" * 5000 + "'",
        "max_tokens=" + "x" * 100_000,
        "speculation.tree.widths=[" + "9" * 5000 + "]",
        "speculation.tree.widths=" + "[" * 3000,
        "model.name=" + "x" * 100_000,
        "conf=" + "x" * 100_000,
        "x" * 100_000,
        "x" * 100_000 + "=3",
        "max_tokens=\x1b[2J\r\x07",
        "\x1b[2J\r\u202e=3",
        "conf=\x1b[2J",
        "max_tokens=(\x1b[2J",
    ],
    ids=lambda argument: argument[:20].encode("unicode_escape").decode(),
)
def test_a_refusal_fits_on_a_line_and_shows_what_a_terminal_would_obey(argument):
    with pytest.raises(ConfigError) as caught:
        compose([argument])
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
    assert (
        "expected" in str(caught.value) or "there is no" in str(caught.value) or "give" in str(caught.value)
    )
