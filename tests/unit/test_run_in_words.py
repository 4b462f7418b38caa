"""What reports say of a configuration."""

import pytest

from conf.compose import compose
from tools.bench.engine_system import describe
from tools.run_in_words import model_in_words, speculation_in_words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["conf=autoregressive"], "no draft"),
        (
            ["conf=tree", "speculation.tree.widths=[4,2,1]", "speculation.draft.path=/a/b"],
            "draft model /a/b, weights=int8; trees of widths [4, 2, 1], 4 rows a step, paths from 0.1; "
            "plan fixed",
        ),
        (
            ["conf=saguaro_tree", "speculation.draft.look_up=3"],
            "draft auto; trees of 8 nodes, depth 5, 10 rows a step, paths from 0.25; 3 tokens looked up "
            "beside; budget 24, fan-out calibrated, backup auto; plan auto",
        ),
        (
            ["conf=ssd", "speculation.verification=rejection", "speculation.saguaro_c=0.5"],
            "draft auto; chains, depth 5, paths from 0.2; budget 16, fan-out uniform, backup sequential; "
            "plan fixed; verification rejection, C = 0.5",
        ),
    ],
)
def test_everything_that_tells_two_systems_apart_is_said(arguments: list[str], words: str) -> None:
    config = compose(arguments)
    assert "; ".join(speculation_in_words(config.speculation)) == words
    assert describe(config).endswith(f"; {words}")


def test_a_model_without_files_is_called_by_its_name() -> None:
    config = compose(["model=emulated_llama3_70b", "model.emulated.time_scale=4"])
    config.model.path = "/cache/emulated-1024-v1"
    assert model_in_words(config.model) == "emulated_llama3_70b"
    assert describe(config).startswith("emulated_llama3_70b, time scale 4; up to 1 request at once; ")
    assert model_in_words(compose(["model.path=/a/b"]).model) == "b"
