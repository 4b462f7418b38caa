"""Bans, bias and penalties along a path: transformers' values, whatever is committed and whatever is not."""

import random

import pytest
import torch

from pipeline.messages import Sampling
from stages.model.logit_edits import LogitEdits
from stages.model.token_law import TokenLaw
from tests.plain_options import edited_logits

VOCAB = 40
EOS = 3
OPTIONS = {
    "presence": {"presence_penalty": 1.3},
    "frequency": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {4: 3.0, 9: -100.0}},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": [8, 11]},
    "all": {
        "presence_penalty": 0.3,
        "frequency_penalty": 0.9,
        "repetition_penalty": 0.6,
        "logit_bias": {4: 3.0, 9: -5.0},
        "min_tokens": 7,
        "stop_token_ids": [8, 11],
    },
}


def tokens(generator, count):
    """Few different ones, so that they repeat."""
    return [generator.randrange(12) for _ in range(count)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_every_row_has_the_law_of_its_own_path(options, seed):
    generator = random.Random(seed)
    prompt, output = tokens(generator, 6), tokens(generator, 4)
    sampling = Sampling(max_tokens=20, seed=0, **options)
    edits = LogitEdits(sampling, torch.arange(VOCAB), prompt_token_ids=prompt, eos_token_ids={EOS})
    edits.commit(output[:1])
    edits.commit(output[1:])
    paths = [[], [5], [5, 5], tokens(generator, 4), tokens(generator, 1), [4, 9, 4]]
    logits = torch.randn(
        len(paths), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    before = logits.clone()
    edited = edits.apply(logits, paths)
    assert torch.equal(logits, before)
    for row, path in enumerate(paths):
        expected = edited_logits(
            logits[row], prompt=prompt, output=[*output, *path], sampling=sampling, eos=EOS
        )
        torch.testing.assert_close(edited[row], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_token_on_the_path_counts_as_a_committed_one_to_the_last_bit(options, dtype):
    generator = random.Random(9)
    prompt, output = tokens(generator, 5), tokens(generator, 8)
    sampling = Sampling(max_tokens=20, seed=0, **options)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1), dtype=dtype)
    rows = []
    for num_committed in range(len(output) + 1):
        edits = LogitEdits(sampling, torch.arange(VOCAB), prompt_token_ids=prompt, eos_token_ids={EOS})
        edits.commit(output[:num_committed])
        rows.append(edits.apply(logits, [output[num_committed:]]))
    assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_reduced_head_gets_the_values_of_the_whole_one(options):
    """Its columns are some tokens only; others in prompt, output, path or options are passed over."""
    generator = random.Random(3)
    prompt, output, path = tokens(generator, 9), tokens(generator, 6), tokens(generator, 3)
    kept = torch.tensor([0, 2, 3, 4, 7, 8, 10, 20, 39])
    sampling = Sampling(max_tokens=20, seed=0, **options)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    laws = []
    for ids in (torch.arange(VOCAB), kept):
        law = TokenLaw(sampling, ids, prompt_token_ids=prompt, eos_token_ids=[EOS])
        law.commit(output)
        assert law.num_committed == len(prompt) + len(output)
        laws.append(law.log_law(logits[:, ids], [path]))
    whole, reduced = laws
    assert torch.equal(whole[:, kept], reduced)


def test_a_request_without_edits_keeps_its_logits_and_needs_no_paths():
    law = TokenLaw(Sampling(max_tokens=3, seed=0), torch.arange(VOCAB), prompt_token_ids=[1, 2])
    logits = torch.zeros(2, VOCAB)
    assert not law.reads_paths
    assert law.perturb(logits, [2, 3]) is logits
