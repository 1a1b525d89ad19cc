"""Two processes that add up through gloo compute what one rank computes. Run as a program, this file is one of them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from warmstate.models.backend import PlanRow, SlotRestore, StepPlan
from warmstate.models.ranks import ProcessGroup, RankGroups, RankSlice
from warmstate.models.torch_backend import TorchBackend

PROMPT_TOKENS = 100
DECODED_TOKENS = 3
WORLD_SIZE = 2
TABLE = np.array([1, 2], dtype=np.int32)


def run_rank(checkpoint: str, folder: str, rank: int) -> None:
    """Writes [prefill and decode logits] to `folder`/rank.pt; the ranks find each other through a file there."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE)
    groups = RankGroups(tp=ProcessGroup())
    ranks = RankSlice(rank, WORLD_SIZE)
    backend = TorchBackend.load(Path(checkpoint), torch.float32, True, 1, 4, 256, None, ranks, groups)
    tokens = np.load(f"{folder}/tokens.npy")
    logits = []
    starts = [0, *range(PROMPT_TOKENS, len(tokens))]
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        row = PlanRow(0, 0, start, stop - start, TABLE, sample=True)
        plan = StepPlan(start, (row,), () if start else (SlotRestore(0, 0),))
        logits.append(backend.forward(plan, tokens[start:stop]).logits[0])
    torch.save(torch.stack(logits), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_give_the_logits_of_one(
    hf_checkpoint: Any, make_driver: Any, random_tokens: Any, tmp_path: Path
) -> None:
    path, _ = hf_checkpoint("qwen3_next", seed=8)
    tokens = random_tokens(PROMPT_TOKENS + DECODED_TOKENS, 8)
    np.save(tmp_path / "tokens.npy", np.array(tokens, dtype=np.int32))
    # gloo would otherwise look up this machine's name.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(path), str(tmp_path), str(rank)], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(WORLD_SIZE)
    ]
    whole = make_driver(path, deterministic=True)
    sequence = whole.open()
    expected = [whole.prefill(sequence, tokens[:PROMPT_TOKENS])]
    expected += [whole.prefill(sequence, [token]) for token in tokens[PROMPT_TOKENS:]]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors.decode()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logits = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD_SIZE)]
    torch.testing.assert_close(logits[0], torch.stack(expected), atol=2e-4, rtol=0)
    assert torch.equal(logits[0], logits[1])


if __name__ == "__main__":
    run_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
