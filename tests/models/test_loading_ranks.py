"""What each rank of a group gets: its heads, rows and experts, cut from the whole weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from warmstate.models.checkpoints.loading import load_weights
from warmstate.models.config import read_config
from warmstate.models.errors import UnsupportedLayout
from warmstate.models.ranks import RankSlice

ONE_RANK = RankSlice()
Weights = dict[int | None, dict[str, torch.Tensor]]


def load(path: Path, ranks: RankSlice = ONE_RANK) -> Weights:
    return dict(load_weights(path, read_config(path), ranks, torch.float32))


def cut(total: int, rank: int, size: int) -> slice:
    return slice(rank * total // size, (rank + 1) * total // size)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text", "qwen3_5_text"])
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_hold_their_heads_and_rows(demo_checkpoint: Any, family: str, size: int) -> None:
    """4 heads over 2 key-value heads, 4 key and 8 value heads of a GDN: at 4 ranks key-value heads are repeated."""
    path = demo_checkpoint(family, linear_num_key_heads=4, linear_num_value_heads=8, linear_value_head_dim=24)
    whole = load(path)
    for rank in range(size):
        part = load(path, RankSlice(tp_rank=rank, tp_size=size))
        heads, k_heads, v_heads = cut(4, rank, size), cut(4, rank, size), cut(8, rank, size)
        kv_heads = slice(heads.start // 2, (heads.stop - 1) // 2 + 1)
        attention, gdn = whole[3], whole[0]
        q, k = (rows.view(4, 32, 64)[k_heads].flatten(0, 1) for rows in torch.split(gdn["in_proj_qkv"][:256], 128))
        v = gdn["in_proj_qkv"][256:].view(8, 24, 64)[v_heads].flatten(0, 1)
        conv = [*torch.split(gdn["conv"][:256], 128), gdn["conv"][256:]]
        expected = {
            (3, "q_gate_proj"): attention["q_gate_proj"].view(4, 64, 64)[heads].flatten(0, 1),
            (3, "k_proj"): attention["k_proj"].view(2, 32, 64)[kv_heads].flatten(0, 1),
            (3, "v_proj"): attention["v_proj"].view(2, 32, 64)[kv_heads].flatten(0, 1),
            (3, "o_proj"): attention["o_proj"].view(64, 4, 32)[:, heads].flatten(1),
            (3, "q_norm"): attention["q_norm"],
            (0, "in_proj_qkv"): torch.cat((q, k, v)),
            (0, "in_proj_z"): gdn["in_proj_z"].view(8, 24, 64)[v_heads].flatten(0, 1),
            (0, "in_proj_b"): gdn["in_proj_b"][v_heads],
            (0, "in_proj_a"): gdn["in_proj_a"][v_heads],
            (0, "conv"): torch.cat(
                (
                    conv[0].view(4, 32, 4)[k_heads].flatten(0, 1),
                    conv[1].view(4, 32, 4)[k_heads].flatten(0, 1),
                    conv[2].view(8, 24, 4)[v_heads].flatten(0, 1),
                )
            ),
            (0, "A_log"): gdn["A_log"][v_heads],
            (0, "dt_bias"): gdn["dt_bias"][v_heads],
            (0, "norm"): gdn["norm"],
            (0, "out_proj"): gdn["out_proj"].view(64, 8, 24)[:, v_heads].flatten(1),
            (None, "embed"): whole[None]["embed"],
            (None, "lm_head"): whole[None]["lm_head"][cut(320, rank, size)],
        }
        for (layer, name), tensor in (expected | mlp_shares(whole[0], rank, size)).items():
            assert torch.equal(part[layer][name], tensor), (rank, layer, name)


def mlp_shares(layer: dict[str, torch.Tensor], rank: int, size: int) -> dict[tuple[int | None, str], torch.Tensor]:
    """This rank's share of whole MLP weights of layer 0: gate and up are cut separately."""
    shares: dict[tuple[int | None, str], torch.Tensor] = {}
    for name in ("gate_up_proj", "shared_gate_up", "experts_gate_up"):
        if name in layer:
            gate, up = layer[name].chunk(2, dim=-2)
            rows = cut(gate.shape[-2], rank, size)
            shares[0, name] = torch.cat([gate[..., rows, :], up[..., rows, :]], dim=-2)
    for name in ("down_proj", "shared_down", "experts_down"):
        if name in layer:
            shares[0, name] = layer[name][..., cut(layer[name].shape[-1], rank, size)]
    return shares | {(0, name): layer[name] for name in ("router", "shared_gate") if name in layer}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_expert_parallel_ranks_hold_their_experts_and_all_else(demo_checkpoint: Any, family: str) -> None:
    path = demo_checkpoint(family)
    whole = load(path)[0]
    parts = [load(path, RankSlice(ep_rank=rank, ep_size=2))[0] for rank in range(2)]
    for name in ("experts_gate_up", "experts_down"):
        assert torch.equal(torch.cat((parts[0][name], parts[1][name])), whole[name])
        assert len(parts[1][name]) == 4
    for name in whole.keys() - {"experts_gate_up", "experts_down"}:
        assert torch.equal(parts[1][name], whole[name])


@pytest.mark.parametrize(
    ("ranks", "what"),
    [
        (RankSlice(tp_size=3), "vocabulary rows: 320"),
        (RankSlice(tp_size=8), "GDN key heads: 2"),
        (RankSlice(ep_size=3), "experts: 8"),
    ],
)
def test_a_degree_that_does_not_divide_is_refused(demo_checkpoint: Any, ranks: RankSlice, what: str) -> None:
    with pytest.raises(UnsupportedLayout, match=what):
        load(demo_checkpoint("qwen3_next"), ranks)
