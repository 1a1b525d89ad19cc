"""The choice of tokens: right on average, and the same whatever the batch."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from warmstate.replicas.messages import SamplingParams
from warmstate.replicas.sampler import SampledToken, SamplerRow, finite_rows, sample, uniform

NOTHING = np.zeros(0, dtype=np.int32)


def row(seed: int = 0, index: int = 0, **params: Any) -> SamplerRow:
    history = {name: np.array(params.pop(name, ()), dtype=np.int32) for name in ("prompt", "output")}
    stop_ids = frozenset(params.pop("stop_ids", ()))
    return SamplerRow(
        SamplingParams(**{"max_tokens": 1, **params}), seed, index, history["prompt"], history["output"], stop_ids
    )


def one(logits: list[float], **params: Any) -> int:
    return sample(torch.tensor([logits]), [row(**params)])[0].token_id


def draw_many(logits: list[float], count: int = 4000, **params: Any) -> np.ndarray[Any, Any]:
    tokens = [one(logits, seed=7, index=i, **params) for i in range(count)]
    return np.bincount(tokens, minlength=len(logits)) / count


def test_temperature_0_takes_the_most_likely_token() -> None:
    assert one([0.0, 2.0, 1.0], temperature=0.0) == 1


def test_equal_logits_go_to_the_lowest_id() -> None:
    assert one([1.0, 2.0, 2.0], temperature=0.0) == 1


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    logits = [0.0, 1.0, 2.0]
    expected = torch.softmax(torch.tensor(logits) / 0.5, 0).numpy()
    assert np.abs(draw_many(logits, temperature=0.5) - expected).max() < 0.03


@pytest.mark.parametrize(
    ("filters", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.000001}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_the_right_tokens(filters: dict[str, Any], allowed: set[int]) -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    frequencies = draw_many(logits, count=1500, **filters)
    assert set(np.flatnonzero(frequencies).tolist()) == allowed


def test_top_p_of_a_flat_distribution_looks_beyond_the_first_candidates() -> None:
    tokens = {sample(torch.zeros(1, 3000), [row(seed=1, index=i, top_p=0.9)])[0].token_id for i in range(600)}
    assert len(tokens) > 500


def test_a_seed_repeats_and_another_index_or_seed_differs() -> None:
    draws = [uniform(5, i) for i in range(100)]
    assert draws == [uniform(5, i) for i in range(100)]
    assert len(set(draws)) == 100
    assert uniform(-5, 3) == uniform(-5, 3)
    assert uniform(6, 3) != uniform(5, 3)
    assert abs(np.mean([uniform(9, i) for i in range(4000)]) - 0.5) < 0.02


def test_repetition_penalty_looks_at_prompt_and_output() -> None:
    logits = [2.0, 1.9, -1.0]
    assert one(logits, temperature=0.0, repetition_penalty=1.5, prompt=[0]) == 1
    assert one(logits, temperature=0.0, repetition_penalty=1.5, output=[0, 1]) == 0
    assert one([-1.0, -1.2], temperature=0.0, repetition_penalty=1.5, output=[0]) == 1


def test_presence_and_frequency_penalties_look_at_the_output_only() -> None:
    logits = [2.0, 1.5, 1.1]
    assert one(logits, temperature=0.0, presence_penalty=1.0, prompt=[0]) == 0
    assert one(logits, temperature=0.0, presence_penalty=1.0, output=[0]) == 1
    assert one(logits, temperature=0.0, frequency_penalty=0.3, output=[0]) == 0
    assert one(logits, temperature=0.0, frequency_penalty=0.3, output=[0, 0]) == 1


def test_logit_bias_moves_and_bans_tokens_and_ignores_unknown_ones() -> None:
    assert one([2.0, 1.0], temperature=0.0, logit_bias={1: 5.0}) == 1
    assert one([2.0, 1.0], temperature=0.0, logit_bias={0: -100.0, 99: 100.0}) == 1


def test_min_tokens_holds_stop_tokens_back() -> None:
    assert one([2.0, 1.0], temperature=0.0, min_tokens=3, index=2, stop_ids={0}) == 1
    assert one([2.0, 1.0], temperature=0.0, min_tokens=3, index=3, stop_ids={0}) == 0


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    token = sample(logits, [row(temperature=0.0, logprobs=2, logit_bias={0: 50.0})])[0]
    expected = torch.log_softmax(logits[0], 0)
    assert token.token_id == 0
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[0]))
    assert [pair[0] for pair in token.logprobs.top] == [3, 2]
    assert token.logprobs.top[0][1] == pytest.approx(float(expected[3]))


def test_no_logprobs_are_reported_unless_asked() -> None:
    tokens = sample(torch.randn(2, 8), [row(), row(logprobs=0)])
    assert tokens[0].logprobs is None
    assert tokens[1].logprobs is not None
    assert tokens[1].logprobs.top == ()


def test_the_top_tokens_of_a_large_vocabulary_are_exact() -> None:
    logits = torch.randn(1, 50_001, generator=torch.Generator().manual_seed(4))
    token = sample(logits, [row(temperature=0.0, logprobs=20)])[0]
    assert token.logprobs is not None
    assert [i for i, _ in token.logprobs.top] == torch.topk(logits[0], 20).indices.tolist()


@pytest.mark.parametrize("vocab", [97, 1003, 20_011])
def test_batch_mates_change_no_bit(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=generator) * 3
    options: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 1.0, "logprobs": 5},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.01, "logprobs": 0},
        {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 1.0, "output": [3, 4, 4]},
        {"temperature": 1.0, "repetition_penalty": 1.3, "prompt": [1, 2, 3]},
        {"temperature": 0.9, "logit_bias": {5: 2.0}, "logprobs": 3},
        {"temperature": 1.0, "min_tokens": 9, "stop_ids": {0, 1}},
        {"temperature": 2.0},
    ]

    def rows() -> list[SamplerRow]:
        return [row(seed=i, index=4, **dict(choice)) for i, choice in enumerate(options)]

    together = sample(logits, rows())
    alone: list[SampledToken] = [sample(logits[i : i + 1].clone(), [rows()[i]])[0] for i in range(9)]
    assert together == alone


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    sample(logits, [row(logit_bias={3: 1.0}, top_k=3), row(min_p=0.1, repetition_penalty=2.0, prompt=[1])])
    assert torch.equal(logits, before)


def test_rows_with_nan_or_infinity_are_found() -> None:
    logits = torch.zeros(6, 5)
    logits[1, 2] = math.nan
    logits[2, 0] = math.inf
    logits[3, 4] = -math.inf
    logits[4, 1], logits[4, 2] = math.inf, -math.inf
    logits[5] = 3e38
    assert not math.isfinite(float(logits[5].sum())), "the sum of the last row overflows, though its logits do not"
    assert finite_rows(logits) == [True, False, False, False, False, True]
