"""float32 logits equal those of transformers 5, eager, for every family and head ratio."""

from typing import Any

import pytest
import torch

TOLERANCE = 2e-4

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 1.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MROPE: dict[str, Any] = {"mrope_interleaved": True, "mrope_section": [3, 3, 2]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "next_moe_1_2": ("qwen3_next", {}),
    "next_dense_1_1": ("qwen3_next", {"num_experts": 0, "linear_num_value_heads": 2, "tie_word_embeddings": True}),
    "next_wide_values_1_3": ("qwen3_next", {"linear_num_value_heads": 6, "linear_value_head_dim": 12}),
    "next_mixed_mlp": ("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "next_yarn": ("qwen3_next", {"rope_parameters": YARN}),
    "dense_tied_1_2": ("qwen3_5_text", {"tie_word_embeddings": True}),
    "dense_irregular": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 5,
            "layer_types": [
                "linear_attention",
                "full_attention",
                "full_attention",
                "linear_attention",
                "full_attention",
            ],
            "linear_conv_kernel_dim": 3,
        },
    ),
    "dense_yarn": ("qwen3_5_text", {"rope_parameters": YARN | {"attention_factor": 1.5, "truncate": False}}),
    "moe_1_3": ("qwen3_5_moe_text", {"linear_num_value_heads": 6}),
    "moe_one_kv_head": ("qwen3_5_moe_text", {"num_key_value_heads": 1, "num_experts": 8, "num_experts_per_tok": 3}),
    "nested_dense_1_1": ("qwen3_5", {"linear_num_value_heads": 2, "tie_word_embeddings": True}),
    "nested_dense_1_2": ("qwen3_5", {}),
    "nested_dense_1_3": ("qwen3_5", {"linear_num_value_heads": 6, "linear_value_head_dim": 12}),
    "nested_dense_yarn": ("qwen3_5", {"rope_parameters": YARN | MROPE}),
    "nested_moe_1_1": ("qwen3_5_moe", {"linear_num_value_heads": 2}),
    "nested_moe_1_2": ("qwen3_5_moe", {"tie_word_embeddings": True}),
    "nested_moe_1_3": ("qwen3_5_moe", {"linear_num_value_heads": 6}),
    "nested_moe_yarn": (
        "qwen3_5_moe",
        {"rope_parameters": YARN | MROPE | {"original_max_position_embeddings": 1024, "beta_fast": 8, "beta_slow": 2}},
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, hf_checkpoint: Any) -> tuple[Any, Any]:
    family, overrides = CASES[request.param]
    made: tuple[Any, Any] = hf_checkpoint(family, seed=4, **overrides)
    return made


@torch.no_grad()
def _expected(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_prefill_chunked_prefill_and_decode_give_the_logits_of_transformers(
    case: Any, make_driver: Any, random_tokens: Any
) -> None:
    path, model = case
    driver = make_driver(path)
    tokens = random_tokens(200, 1)
    theirs = _expected(model, tokens)
    for length in (1, 2, 63, 64, 65, 200):
        sequence = driver.open()
        _close(driver.prefill(sequence, tokens[:length]), theirs[length - 1])
        driver.close(sequence)
    sequence = driver.open()
    for end in (64, 128, 180):
        _close(driver.prefill(sequence, tokens[sequence.position : end]), theirs[end - 1])
    for position in range(180, 200):
        _close(driver.step((sequence, [tokens[position]])).logits[0], theirs[position])


def test_64_greedy_tokens_are_those_of_transformers(case: Any, make_driver: Any, random_tokens: Any) -> None:
    path, model = case
    prompt = random_tokens(77, 2)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None)[0, 77:]
    driver = make_driver(path)
    sequence = driver.open()
    logits = driver.prefill(sequence, prompt)
    ours = []
    for _ in range(64):
        ours.append(int(logits.argmax()))
        logits = driver.step((sequence, [ours[-1]])).logits[0]
    assert ours == theirs.tolist()


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"])
def test_a_restored_sequence_needs_every_part_of_its_state(
    hf_checkpoint: Any, make_driver: Any, random_tokens: Any, family: str, ratio: int
) -> None:
    path, model = hf_checkpoint(family, seed=3, linear_num_value_heads=2 * ratio)
    tokens = random_tokens(130, 4)
    theirs = _expected(model, tokens)[-1]
    driver = make_driver(path)
    first = driver.open()
    driver.prefill(first, tokens[:128])
    state, kv = driver.backend.read_state(first.slot), driver.copy_kv(first, 128)
    whole = driver.prefill(driver.restore(state, kv), tokens[128:])
    _close(whole, theirs)
    for part in (state.rec, state.conv, kv):
        kept = part.clone()
        part.zero_()
        broken = driver.prefill(driver.restore(state, kv), tokens[128:])
        part.copy_(kept)
        assert (broken - theirs).abs().max() > 50 * TOLERANCE
    _close(driver.prefill(driver.restore(state, kv), tokens[128:]), theirs)
