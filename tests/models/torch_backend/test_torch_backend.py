"""The backend refuses plans that contradict its slots and blocks, and hands out whole states."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from warmstate.models.backend import PlanRow, SlotRestore, StepPlan
from warmstate.models.errors import BackendError


@pytest.fixture
def driver(hf_checkpoint: Any, make_driver: Any) -> Any:
    return make_driver(hf_checkpoint("qwen3_5_text", seed=1)[0])


def _plan(*rows: PlanRow, restores: tuple[SlotRestore, ...] = (), frees: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(7, rows, restores, frees)


ROW = PlanRow(1, slot=2, start=0, count=3, block_table=np.array([4], dtype=np.int32), sample=True)
IDS = np.array([5, 6, 7], dtype=np.int32)
FRESH = (SlotRestore(2, 0),)
BFLOAT16_MEAN_ERROR = 0.1


@pytest.mark.parametrize(
    ("row", "restores", "message"),
    [
        (replace(ROW, slot=8), (), "out of range"),
        (replace(ROW, start=64, block_table=np.array([4, 5], dtype=np.int32)), FRESH, "stands at position 0"),
        (replace(ROW, block_table=np.array([0], dtype=np.int32)), FRESH, "block ids"),
        (replace(ROW, block_table=np.array([160], dtype=np.int32)), FRESH, "block ids"),
        (replace(ROW, block_table=np.array([], dtype=np.int32)), FRESH, "do not cover"),
        (replace(ROW, checkpoint_after=(64,)), FRESH, "checkpoints"),
        (ROW, (SlotRestore(2, 64),), "write_state"),
    ],
)
def test_a_plan_that_contradicts_the_backend_is_refused(
    driver: Any, row: PlanRow, restores: tuple[SlotRestore, ...], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        driver.backend.forward(_plan(row, restores=restores), IDS)


def test_a_slot_that_was_freed_cannot_be_used_before_it_is_restored(driver: Any) -> None:
    driver.backend.forward(_plan(ROW, restores=FRESH), IDS)
    freed = _plan(replace(ROW, start=3), frees=(2,))
    with pytest.raises(BackendError, match="freed or never restored"):
        driver.backend.forward(freed, IDS)
    driver.backend.forward(_plan(ROW, restores=FRESH, frees=(2,)), IDS)


def test_two_rows_on_one_slot_or_one_written_block_are_refused(driver: Any) -> None:
    ids = np.concatenate((IDS, IDS))
    with pytest.raises(BackendError, match=r"slot \[2\]"):
        driver.backend.forward(_plan(ROW, ROW, restores=FRESH), ids)
    twin = replace(ROW, slot=3)
    with pytest.raises(BackendError, match=r"written block \[4\]"):
        driver.backend.forward(_plan(ROW, twin, restores=(*FRESH, SlotRestore(3, 0))), ids)


def test_a_slot_written_before_the_step_that_also_frees_it_keeps_what_was_written(
    driver: Any, random_tokens: Any
) -> None:
    tokens = random_tokens(70)
    first = driver.open()
    expected = driver.prefill(first, tokens)
    state, kv = driver.backend.read_state(first.slot), driver.copy_kv(first, 64)
    driver.close(first)
    again = driver.restore(state, kv)
    assert again.slot == first.slot
    assert torch.equal(driver.prefill(again, tokens[64:]), expected)


def test_rows_that_are_not_sampled_give_no_logits(driver: Any) -> None:
    assert driver.backend.forward(_plan(replace(ROW, sample=False), restores=FRESH), IDS).logits.shape == (0, 96)


def test_a_captured_state_is_that_of_a_sequence_which_ends_there(
    hf_checkpoint: Any, make_driver: Any, random_tokens: Any
) -> None:
    path, _ = hf_checkpoint("qwen3_next", seed=2, dtype=torch.bfloat16)
    for deterministic in (True, False):
        driver = make_driver(path, torch.bfloat16, deterministic)
        tokens, other = random_tokens(200, 3), random_tokens(130, 4)
        work = (driver.open(), tokens), (driver.open(), other)
        states = driver.step(*work, checkpoints={0: (64, 192), 1: (128,)}).states_at
        assert sorted(states) == [(0, 64), (0, 192), (1, 128)]
        for (row, position), state in states.items():
            short = driver.open()
            driver.prefill(short, work[row][1][:position])
            expected = driver.backend.read_state(short.slot)
            driver.close(short)
            assert (state.position, expected.position) == (position, position)
            torch.testing.assert_close(state.rec, expected.rec, atol=0.0 if deterministic else 0.02, rtol=0.0)
            torch.testing.assert_close(state.conv, expected.conv, atol=0.0 if deterministic else 0.1, rtol=0.0)


def test_a_decoded_token_that_completes_a_block_hands_out_its_state(driver: Any, random_tokens: Any) -> None:
    tokens = random_tokens(64)
    sequence = driver.open()
    driver.prefill(sequence, tokens[:63])
    state = driver.step((sequence, tokens[63:]), checkpoints={0: (64,)}).states_at[0, 64]
    expected = driver.backend.read_state(sequence.slot)
    assert torch.equal(state.rec, expected.rec)
    assert torch.equal(state.conv, expected.conv)


def test_kv_survives_a_round_trip_through_the_canonical_layout(driver: Any, random_tokens: Any) -> None:
    sequence, other = driver.open(), driver.open()
    driver.prefill(sequence, random_tokens(150))
    kv = driver.copy_kv(sequence, 150)
    assert torch.isfinite(kv).all()
    driver.prefill(other, random_tokens(150, 9))
    driver.backend.write_kv(other.blocks, 70, 150, kv[:, :, :, 70:])
    out = torch.empty(driver.backend.shapes.kv_shape(80))
    driver.backend.read_kv(other.blocks, 70, 150, out)
    assert torch.equal(out, kv[:, :, :, 70:])
    with pytest.raises(BackendError, match="shape"):
        driver.backend.read_kv(other.blocks, 0, 64, out)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_bfloat16_decode_and_hit_agree_with_one_prefill_and_a_zeroed_state_does_not(
    hf_checkpoint: Any, make_driver: Any, random_tokens: Any, family: str
) -> None:
    driver = make_driver(hf_checkpoint(family, seed=6, dtype=torch.bfloat16)[0], torch.bfloat16)
    tokens = random_tokens(149, 5)
    decoded = driver.all_logits(tokens)[-1]
    whole = driver.prefill(driver.open(), tokens)
    source = driver.open()
    driver.prefill(source, tokens[:128])
    state, kv = driver.backend.read_state(source.slot), driver.copy_kv(source, 128)
    hit = driver.prefill(driver.restore(state, kv), tokens[128:])
    state.rec.zero_()
    broken = driver.prefill(driver.restore(state, kv), tokens[128:])
    mean_errors = [float((logits - whole).abs().mean()) for logits in (decoded, hit, broken)]
    shown = ", ".join(f"{error:.3f}" for error in mean_errors)
    print(f"{family}: decoded, hit, hit on a zeroed state: logits differ by {shown} in the mean from one prefill's")
    assert max(mean_errors[:2]) < BFLOAT16_MEAN_ERROR < mean_errors[2] / 3, mean_errors


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0), (1, 2, 3, 0), (1, 2, 0), (0, 2), (3, 1)])
def test_rows_decoded_together_in_any_order_leave_each_slot_as_if_alone(
    hf_checkpoint: Any, make_driver: Any, random_tokens: Any, order: tuple[int, ...]
) -> None:
    """The states of neighbouring slots are changed where they lie; a gap between them has them copied."""
    driver = make_driver(hf_checkpoint("qwen3_next", seed=2, dtype=torch.bfloat16)[0], torch.bfloat16)
    prompts = [random_tokens(40 + 50 * i, i) for i in range(4)]

    def begin() -> list[Any]:
        sequences = [driver.open() for _ in prompts]
        for sequence, prompt in zip(sequences, prompts, strict=True):
            driver.prefill(sequence, prompt[:-2])
        return sequences

    alone, together = begin(), begin()
    for step in (-2, -1):
        for i in order:
            driver.step((alone[i], prompts[i][step:][:1]))
        driver.step(*((together[i], prompts[i][step:][:1]) for i in order))
    for i in range(4):
        expected, state = (driver.backend.read_state(sequences[i].slot) for sequences in (alone, together))
        torch.testing.assert_close(state.rec, expected.rec, atol=0.02, rtol=0.0)
        torch.testing.assert_close(state.conv, expected.conv, atol=0.1, rtol=0.0)
