"""Deterministic mode: a token's logits are the same bits whatever its batch mates, chunks, restores and threads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3_5_text", {"linear_num_value_heads": 6, "vocab_size": 97, "hidden_size": 36}),
    "moe": ("qwen3_next", {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": 24, "num_key_value_heads": 1}),
}
LENGTH = 140


@pytest.fixture(params=["dense_float32", "moe_float32", "moe_bfloat16"])
def driver(request: pytest.FixtureRequest, hf_checkpoint: Any, make_driver: Any) -> Any:
    name, dtype_name = request.param.split("_")
    family, overrides = FAMILIES[name]
    dtype = getattr(torch, dtype_name)
    path, _ = hf_checkpoint(family, seed=5, dtype=dtype, **overrides)
    return make_driver(path, dtype, deterministic=True)


def test_any_mix_of_chunks_decodes_and_batch_mates_gives_the_same_bits(driver: Any, random_tokens: Any) -> None:
    prompts = [random_tokens(LENGTH, seed) for seed in (10, 11)]
    expected = [driver.all_logits(prompt) for prompt in prompts]
    rng = np.random.default_rng(0)
    for num_live in (2, 5, 7):
        live = [(driver.open(), int(rng.integers(2))) for _ in range(num_live)]
        for _ in range(9):
            work = [
                (sequence, prompts[which][sequence.position : sequence.position + _draw_count(rng, sequence.position)])
                for sequence, which in live
                if sequence.position < LENGTH and rng.random() < 0.8
            ]
            if not work:
                continue
            logits = driver.step(*work).logits
            whiches = {sequence.number: which for sequence, which in live}
            for row, (sequence, _) in zip(logits, work, strict=True):
                assert torch.equal(row, expected[whiches[sequence.number]][sequence.position - 1])
        for sequence, _ in live:
            driver.close(sequence)


def test_a_sequence_restored_at_any_boundary_goes_on_with_the_same_bits(driver: Any, random_tokens: Any) -> None:
    tokens = random_tokens(LENGTH, 12)
    expected = driver.all_logits(tokens)
    source = driver.open()
    states = driver.step((source, tokens[:135]), checkpoints={0: (64, 128)}).states_at
    captured = [states[0, 64], states[0, 128], driver.backend.read_state(source.slot)]
    assert [state.position for state in captured] == [64, 128, 128]
    for state in captured:
        twin = driver.restore(state, driver.copy_kv(source, state.position))
        while twin.position < LENGTH:
            count = min(LENGTH - twin.position, 1 if twin.position % 3 else 23)
            row = driver.step((twin, tokens[twin.position : twin.position + count])).logits[0]
            assert torch.equal(row, expected[twin.position - 1])
        driver.close(twin)


def test_the_number_of_threads_changes_no_bit(driver: Any, random_tokens: Any) -> None:
    tokens = random_tokens(97, 13)
    expected = driver.prefill(driver.open(), tokens)
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(driver.prefill(driver.open(), tokens), expected)


def test_keys_beyond_the_first_tile_keep_their_order_of_summation(driver: Any, random_tokens: Any) -> None:
    tokens = random_tokens(1100, 14)
    whole = driver.prefill(driver.open(), tokens)
    assert torch.equal(driver.prefill(driver.open(), tokens, chunk=192), whole)
    decoded = driver.open()
    driver.prefill(decoded, tokens[:1088], chunk=512)
    for token in tokens[1088:]:
        row = driver.step((decoded, [token])).logits[0]
    assert torch.equal(row, whole)


def test_bfloat16_weights_are_deterministic_only_on_request(hf_checkpoint: Any, make_driver: Any) -> None:
    path: Path = hf_checkpoint("qwen3_5_text", dtype=torch.bfloat16)[0]
    assert not make_driver(path, torch.bfloat16).backend.deterministic
    assert make_driver(path, torch.float32).backend.deterministic


def _draw_count(rng: np.random.Generator, position: int) -> int:
    """One token, or a chunk that ends at a block boundary or at the end of the prompt."""
    if rng.random() < 0.5:
        return 1
    return int(rng.choice([64, 128, LENGTH])) - position % 64
