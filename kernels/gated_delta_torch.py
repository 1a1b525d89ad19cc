"""Owns the gated delta rule: the token recurrence (the truth), its 64-row tile form, and the batched decode step.

Per value head, with state S [dk, dv]: S *= exp(g); S += k (beta (v - S^T k))^T; o = S^T q. Gated Delta Networks,
https://arxiv.org/abs/2412.06464; HF `torch_recurrent_gated_delta_rule` and `torch_chunk_gated_delta_rule`.
q and k come normalised (`norm_torch.l2_norm_`) and q scaled by dk ** -0.5. Value head h reads key head h // (Hv / Hk).
Knows no slot, no position and no projection.
"""

from dataclasses import dataclass

import torch

TILE_ROWS = 64

_LEAST_LOG_DECAY = -40.0
"""exp of it, 9e-27, is nothing beside float32's 6e-8, and what it is multiplied with stays a normal number: products of
subnormal ones take some CPUs 100 cycles each (measured on Sapphire Rapids: a prefill took twice as long)."""


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token, float32.

    q, k [T, Hk, dk], v [T, Hv, dv], g (log decay, <= 0) and beta [T, Hv], state [Hv, dk, dv].
    Returns o [T, Hv, dv] and the state after the last token; the arguments stay unchanged.
    """
    ratio = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(ratio, dim=1), k.repeat_interleave(ratio, dim=1)
    outputs = torch.empty_like(v)
    for t in range(v.shape[0]):
        state = state * g[t].exp()[:, None, None]
        delta = (v[t] - (state * k[t][:, :, None]).sum(1)) * beta[t][:, None]
        state = state + k[t][:, :, None] * delta[:, None, :]
        outputs[t] = (state * q[t][:, :, None]).sum(1)
    return outputs, state


def decode_step_(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """One token of each of B sequences; `states` [B, Hv, dk, dv] float32 contiguous is updated in place.

    q, k [B, Hk, dk], v [B, Hv, dv], g and beta [B, Hv]. Returns o [B, Hv, dv]. The state is read once for both k and q:
    S'^T q = exp(g) S^T q + (k . q) delta.
    """
    batch, v_heads, d_v = v.shape
    ratio = v_heads // k.shape[1]
    keys_queries = torch.stack((k, q), dim=2).repeat_interleave(ratio, dim=1).view(batch * v_heads, 2, -1)
    decay = g.exp().view(-1, 1, 1)
    flat = states.view(batch * v_heads, -1, d_v)
    read = torch.bmm(keys_queries, flat).mul_(decay)
    delta = (v.reshape(-1, 1, d_v) - read[:, :1]).mul_(beta.reshape(-1, 1, 1))
    key, query = keys_queries[:, :1], keys_queries[:, 1:]
    flat.mul_(decay).baddbmm_(key.transpose(1, 2), delta)
    overlap = (key * query).sum(-1, keepdim=True)
    return torch.addcmul(read[:, 1:], overlap, delta).view(batch, v_heads, d_v)


@dataclass(frozen=True, slots=True)
class TileOrdinal:
    """The i-th tiles of all sequences that have one: consecutive, in the order of the states they continue.

    The first `num_closed` of the `num_tiles` end at a tile boundary and hand their state on; the others are open (their
    sequence ends within them) and leave the state as it was.
    """

    first_tile: int
    num_tiles: int
    num_closed: int


@dataclass(frozen=True, slots=True)
class TileTerms:
    """What a tile contributes whatever state it starts from; H is the number of value heads.

    From state S: u - w S are the values written, (reads) S + scores (u - w S) the outputs, and
    exp(total decay) S + writes^T (u - w S) the state after.
    """

    u: torch.Tensor
    w_and_reads: torch.Tensor
    scores: torch.Tensor
    writes: torch.Tensor
    total_decay: torch.Tensor


def tile_terms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> TileTerms:
    """Solves each 64-row tile for itself. q, k [N, Hk, 64, dk], v [N, Hv, 64, dv], g and beta [N, Hv, 64], float32.

    A row with k, g and beta 0 is no token at all: it reads nothing that matters and changes nothing.
    """
    num_tiles, v_heads = v.shape[:2]
    ratio = v_heads // k.shape[1]
    decay = g.cumsum(-1)
    pairwise = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).clamp_min_(_LEAST_LOG_DECAY)
    future = torch.ones(TILE_ROWS, TILE_ROWS, dtype=torch.bool).triu(1)
    pairwise.masked_fill_(future, float("-inf")).exp_()
    inverse = _inverse(_per_v_head(k @ k.transpose(-1, -2), ratio) * pairwise * beta.unsqueeze(-1))
    scores = pairwise.mul_(_per_v_head(q @ k.transpose(-1, -2), ratio))
    inverse.mul_(beta.unsqueeze(-2))
    u = inverse @ v
    decay_in = decay.clamp_min(_LEAST_LOG_DECAY).exp_().unsqueeze(-1)
    q, k = _per_v_head(q, ratio), _per_v_head(k, ratio)
    w_and_reads = q.new_empty(num_tiles, v_heads, 2 * TILE_ROWS, q.shape[-1])
    w_and_reads[:, :, :TILE_ROWS] = inverse.mul_(decay_in.transpose(-1, -2)) @ k
    torch.mul(q, decay_in, out=w_and_reads[:, :, TILE_ROWS:])
    total = decay[..., -1:]
    writes = k * (total - decay).clamp_min_(_LEAST_LOG_DECAY).exp_().unsqueeze(-1)
    return TileTerms(u, w_and_reads, scores, writes, total.clamp_min(_LEAST_LOG_DECAY).exp_().unsqueeze(-1))


def scan_tiles(terms: TileTerms, ordinal: TileOrdinal, states: torch.Tensor) -> torch.Tensor:
    """Runs the tiles of one ordinal from `states` [S, Hv, dk, dv] and updates the states of closed tiles in place.

    Tile i of the ordinal continues state i. Returns o [num_tiles, Hv, 64, dv].
    """
    tiles = slice(ordinal.first_tile, ordinal.first_tile + ordinal.num_tiles)
    read = terms.w_and_reads[tiles] @ states[: ordinal.num_tiles]
    written = terms.u[tiles] - read[:, :, :TILE_ROWS]
    outputs = (terms.scores[tiles] @ written).add_(read[:, :, TILE_ROWS:])
    closed = ordinal.num_closed
    if closed:
        tiles = slice(ordinal.first_tile, ordinal.first_tile + closed)
        update = terms.writes[tiles].transpose(-1, -2) @ written[:closed]
        states[:closed].mul_(terms.total_decay[tiles]).add_(update)
    return outputs


def _per_v_head(x: torch.Tensor, ratio: int) -> torch.Tensor:
    return x if ratio == 1 else x.repeat_interleave(ratio, dim=1)


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    """(I + strictly lower part)^-1 of the last two dimensions, by forward substitution."""
    identity = torch.eye(TILE_ROWS, dtype=lower.dtype).expand_as(lower)
    inverse: torch.Tensor = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
    return inverse
