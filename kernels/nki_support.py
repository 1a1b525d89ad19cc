"""Owns what the NKI kernels can run: (can, why not). Imports no nki, so that it can be asked anywhere."""

from dataclasses import dataclass

import torch

MAX_GDN_DIM = 128
MAX_GDN_HEADS = 64
ATTENTION_DIM_STEP = 128
MAX_GROUP = 128
EXPERTS = (8, 16384)
DTYPES = (torch.float32, torch.bfloat16)

Support = tuple[bool, str]


@dataclass(frozen=True, slots=True)
class GdnDims:
    """Heads and dimensions of Gated DeltaNet on one rank."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int


def gdn_support(dims: GdnDims, dtype: torch.dtype) -> Support:
    """Whether `gdn_prefill`, `gdn_decode` and `causal_conv` run these."""
    if dtype not in DTYPES:
        return False, f"{dtype}: float32 or bfloat16"
    if dims.v_heads % dims.k_heads:
        return False, f"{dims.v_heads} value heads are no multiple of {dims.k_heads} key heads"
    if max(dims.k_dim, dims.v_dim) > MAX_GDN_DIM:
        return False, f"head dimensions {dims.k_dim} and {dims.v_dim}: at most {MAX_GDN_DIM}"
    if dims.v_heads > MAX_GDN_HEADS:
        return False, f"{dims.v_heads} value heads on a rank: at most {MAX_GDN_HEADS}"
    return True, "within the limits of the kernels"


def attention_support(q_heads: int, kv_heads: int, head_dim: int, page_tokens: int, dtype: torch.dtype) -> Support:
    """Whether `attention_d256` runs these."""
    if dtype not in DTYPES:
        return False, f"{dtype}: float32 or bfloat16"
    if q_heads % kv_heads or q_heads // kv_heads > MAX_GROUP:
        return False, f"{q_heads} query heads on {kv_heads} key heads: a multiple, at most {MAX_GROUP} each"
    if head_dim % ATTENTION_DIM_STEP:
        return False, f"heads of {head_dim}: a multiple of {ATTENTION_DIM_STEP}"
    if ATTENTION_DIM_STEP % page_tokens:
        return False, f"pages of {page_tokens} tokens do not divide {ATTENTION_DIM_STEP}"
    return True, "within the limits of the kernels"


def router_support(num_experts: int, k: int) -> Support:
    """Whether `router_topk` runs these."""
    least, most = EXPERTS
    if not least <= num_experts <= most:
        return False, f"{num_experts} experts: {least} to {most}"
    if k > num_experts:
        return False, f"{k} of {num_experts} experts"
    return True, "within the limits of the kernel"
