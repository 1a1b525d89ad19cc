"""Owns how weights get from files into one rank's tensors: one layer at a time, cut before copied. Knows no module."""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from warmstate.models.checkpoints.checkpoint import read_index
from warmstate.models.checkpoints.dialects import Dialect, probe_dialect
from warmstate.models.checkpoints.expected_tensors import layer_tensors
from warmstate.models.checkpoints.weight_reader import WeightReader
from warmstate.models.config import ModelConfig
from warmstate.models.ranks import RankSlice

_log = logging.getLogger(__name__)

_COMPARED_ROWS = 4096

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) after each layer."""

LayerWeights = tuple[int | None, dict[str, Tensor]]


def load_weights(
    path: Path, config: ModelConfig, ranks: RankSlice, dtype: torch.dtype, progress: Progress | None = None
) -> Iterator[LayerWeights]:
    """Yields the outer weights (None) and then each layer's, cut for this rank and contiguous.

    Matrices and the conv are in `dtype`; norms, A_log and dt_bias in float32, zero-centred norms with their 1 added.
    Heads, MLP rows and the rows of each expert are cut over the tensor-parallel ranks, experts over the
    expert-parallel ones; norms, router, shared gate and embedding are whole on each. Key and value heads are repeated
    where there are fewer of them than ranks. With the head tied and one rank, "lm_head" is the tensor "embed" itself.

    The checkpoint is taken to have passed `preflight`. Raises `UnsupportedLayout` for a degree that does not divide.
    """
    index = read_index(path)
    dialect = probe_dialect(index, config)
    total = sum(entry.num_bytes for entry in dialect.tensors.values())
    loader = _RankLoader(WeightReader(path), dialect, config, ranks, dtype)
    done = 0
    for layer in (None, *range(config.num_layers)):
        done += _num_bytes(config, dialect, layer)
        yield layer, loader.outer() if layer is None else loader.layer(layer)
        if progress is not None:
            progress(done, total)


def _num_bytes(config: ModelConfig, dialect: Dialect, layer: int | None) -> int:
    if layer is None:
        names: Iterable[str] = (name for name in dialect.tensors if not name.startswith("layers."))
    else:
        names = (name for name, _ in layer_tensors(config, dialect, layer))
    return sum(dialect.tensors[name].num_bytes for name in names)


class _RankLoader:
    """Builds the tensors of one rank; every method returns tensors that own their memory."""

    def __init__(
        self, reader: WeightReader, dialect: Dialect, config: ModelConfig, ranks: RankSlice, dtype: torch.dtype
    ) -> None:
        self._reader = reader
        self._dialect = dialect
        self._config = config
        self._ranks = ranks
        self._dtype = dtype

    def outer(self) -> dict[str, Tensor]:
        embed = self._copy(self._take("embed_tokens.weight"))
        self._reader.release()
        weights = {"embed": embed, "final_norm": self._zero_centred("norm.weight"), "lm_head": self._lm_head(embed)}
        self._reader.release()
        return weights

    def layer(self, layer: int) -> dict[str, Tensor]:
        weights = self._layer(layer)
        self._reader.release()
        return weights

    def _layer(self, layer: int) -> dict[str, Tensor]:
        prefix = f"layers.{layer}."
        weights = {
            name: self._zero_centred(f"{prefix}{name}.weight")
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        if self._config.layer_types[layer] == "full_attention":
            weights |= self._attention(f"{prefix}self_attn.")
        else:
            weights |= self._gated_delta_net(f"{prefix}linear_attn.")
        experts = self._dialect.experts[layer]
        if experts is None:
            gate_up, down = self._mlp(f"{prefix}mlp.", self._config.intermediate_size)
            return weights | {"gate_up_proj": gate_up, "down_proj": down}
        return weights | self._mixture(f"{prefix}mlp.", fused=experts == "fused")

    def _lm_head(self, embed: Tensor) -> Tensor:
        rows = self._tp(self._config.vocab_size, "vocabulary rows")
        tied = embed if self._ranks.tp_size == 1 else embed[rows].clone()
        if not self._dialect.has_lm_head:
            return tied
        head = self._take("lm_head.weight")
        if self._config.tie_word_embeddings:
            if self._same(head, embed):
                return tied
            # Both are there although the config ties them: as transformers 5 does, believe the tensors.
            _log.warning("lm_head.weight differs from embed_tokens.weight although the config ties them; using it")
        return self._copy(head[rows])

    def _same(self, head: Tensor, embed: Tensor) -> bool:
        pieces = zip(torch.split(head, _COMPARED_ROWS), torch.split(embed, _COMPARED_ROWS), strict=True)
        return all(torch.equal(self._copy(ours), theirs) for ours, theirs in pieces)

    def _attention(self, prefix: str) -> dict[str, Tensor]:
        config = self._config
        heads = self._tp(config.num_heads, "attention heads")
        share = config.num_heads // config.num_kv_heads
        kv_heads = slice(heads.start // share, (heads.stop - 1) // share + 1)
        if config.num_kv_heads % self._ranks.tp_size and self._ranks.tp_size % config.num_kv_heads:
            self._tp(config.num_kv_heads, "key-value heads")
        query = _by_head(self._take(f"{prefix}q_proj.weight"), config.num_heads)
        key = _by_head(self._take(f"{prefix}k_proj.weight"), config.num_kv_heads)
        value = _by_head(self._take(f"{prefix}v_proj.weight"), config.num_kv_heads)
        output = self._take(f"{prefix}o_proj.weight").view(config.hidden_size, config.num_heads, config.head_dim)
        return {
            "q_gate_proj": self._copy(query[heads]).flatten(0, 1),
            "k_proj": self._copy(key[kv_heads]).flatten(0, 1),
            "v_proj": self._copy(value[kv_heads]).flatten(0, 1),
            "o_proj": self._copy(output[:, heads]).flatten(1),
            "q_norm": self._zero_centred(f"{prefix}q_norm.weight"),
            "k_norm": self._zero_centred(f"{prefix}k_norm.weight"),
        }

    def _gated_delta_net(self, prefix: str) -> dict[str, Tensor]:
        config = self._config
        k_heads = self._tp(config.num_k_heads, "GDN key heads")
        v_heads = self._tp(config.num_v_heads, "GDN value heads")
        read = self._interleaved if self._dialect.gdn == "interleaved" else self._split
        output = self._take(f"{prefix}out_proj.weight").view(config.hidden_size, config.num_v_heads, config.v_head_dim)
        conv = self._take(f"{prefix}conv1d.weight").squeeze(1)
        return read(prefix, k_heads, v_heads) | {
            "conv": self._stack(self._cut_qkv(conv, k_heads, v_heads)),
            "A_log": _float32(self._take(f"{prefix}A_log")[v_heads]),
            "dt_bias": _float32(self._take(f"{prefix}dt_bias")[v_heads]),
            "norm": _float32(self._take(f"{prefix}norm.weight")),
            "out_proj": self._copy(output[:, v_heads]).flatten(1),
        }

    def _split(self, prefix: str, k_heads: slice, v_heads: slice) -> dict[str, Tensor]:
        config = self._config
        z = _by_head(self._take(f"{prefix}in_proj_z.weight"), config.num_v_heads)
        return {
            "in_proj_qkv": self._stack(self._cut_qkv(self._take(f"{prefix}in_proj_qkv.weight"), k_heads, v_heads)),
            "in_proj_z": self._stack([z[v_heads]]),
            "in_proj_b": self._copy(self._take(f"{prefix}in_proj_b.weight")[v_heads]),
            "in_proj_a": self._copy(self._take(f"{prefix}in_proj_a.weight")[v_heads]),
        }

    def _interleaved(self, prefix: str, k_heads: slice, v_heads: slice) -> dict[str, Tensor]:
        """Qwen3-Next: rows come per key head as [q | k | v of its value heads | z of them], and [b | a].

        The rank's groups are one contiguous range of rows, so they are cut first and then put in order.
        """
        config, ratio = self._config, self._config.num_v_heads // self._config.num_k_heads
        key, value = config.k_head_dim, ratio * config.v_head_dim
        qkvz = _by_head(self._take(f"{prefix}in_proj_qkvz.weight"), config.num_k_heads)[k_heads]
        ba = _by_head(self._take(f"{prefix}in_proj_ba.weight"), config.num_k_heads)[k_heads]
        return {
            "in_proj_qkv": self._stack([qkvz[:, :key], qkvz[:, key : 2 * key], qkvz[:, 2 * key : 2 * key + value]]),
            "in_proj_z": self._stack([qkvz[:, 2 * key + value :]]),
            "in_proj_b": self._stack([ba[:, :ratio]]),
            "in_proj_a": self._stack([ba[:, ratio:]]),
        }

    def _cut_qkv(self, rows: Tensor, k_heads: slice, v_heads: slice) -> list[Tensor]:
        """This rank's rows of a tensor whose rows are [q|k|v], as [heads, head rows, ...] views."""
        config = self._config
        key = config.num_k_heads * config.k_head_dim
        q, k = (_by_head(part, config.num_k_heads)[k_heads] for part in (rows[:key], rows[key : 2 * key]))
        return [q, k, _by_head(rows[2 * key :], config.num_v_heads)[v_heads]]

    def _mlp(self, prefix: str, inner: int) -> tuple[Tensor, Tensor]:
        rows = self._tp(inner, "MLP rows")
        gate, up, down = (self._take(f"{prefix}{name}_proj.weight") for name in ("gate", "up", "down"))
        return self._stack([gate[None, rows], up[None, rows]]), self._copy(down[:, rows])

    def _mixture(self, prefix: str, fused: bool) -> dict[str, Tensor]:
        shared_gate_up, shared_down = self._mlp(f"{prefix}shared_expert.", self._config.shared_expert_intermediate_size)
        gate_up, down = self._fused_experts(prefix) if fused else self._single_experts(prefix)
        return {
            "router": self._copy(self._take(f"{prefix}gate.weight")),
            "experts_gate_up": gate_up,
            "experts_down": down,
            "shared_gate_up": shared_gate_up,
            "shared_down": shared_down,
            "shared_gate": self._copy(self._take(f"{prefix}shared_expert_gate.weight")),
        }

    def _fused_experts(self, prefix: str) -> tuple[Tensor, Tensor]:
        inner, experts = self._config.moe_intermediate_size, self._ranks.ep_range(self._config.num_experts)
        rows, own = self._tp(inner, "expert rows"), slice(experts.start, experts.stop)
        gate_up = self._take(f"{prefix}experts.gate_up_proj")[own].view(len(experts), 2, inner, -1)[:, :, rows]
        down = self._take(f"{prefix}experts.down_proj")[own, :, rows]
        return self._copy(gate_up).flatten(1, 2), self._copy(down)

    def _single_experts(self, prefix: str) -> tuple[Tensor, Tensor]:
        """One tensor per expert and projection, written in place into the final fused ones."""
        inner, hidden = self._config.moe_intermediate_size, self._config.hidden_size
        rows, experts = self._tp(inner, "expert rows"), self._ranks.ep_range(self._config.num_experts)
        share = rows.stop - rows.start
        gate_up = torch.empty(len(experts), 2, share, hidden, dtype=self._dtype)
        down = torch.empty(len(experts), hidden, share, dtype=self._dtype)
        for i, expert in enumerate(experts):
            gate_up[i, 0].copy_(self._take(f"{prefix}experts.{expert}.gate_proj.weight")[rows])
            gate_up[i, 1].copy_(self._take(f"{prefix}experts.{expert}.up_proj.weight")[rows])
            down[i].copy_(self._take(f"{prefix}experts.{expert}.down_proj.weight")[:, rows])
            self._reader.release()
        return gate_up.flatten(1, 2), down

    def _tp(self, total: int, what: str) -> slice:
        share = self._ranks.tp_range(total, what)
        return slice(share.start, share.stop)

    def _take(self, name: str) -> Tensor:
        return self._reader.take(self._dialect.tensors[name])

    def _zero_centred(self, name: str) -> Tensor:
        """A norm weight w that acts as 1 + w, baked in float32: 1 + w in bfloat16 would lose bits."""
        return _float32(self._take(name)).add_(1.0)

    def _copy(self, view: Tensor) -> Tensor:
        return torch.empty(view.shape, dtype=self._dtype).copy_(view)

    def _stack(self, views: list[Tensor]) -> Tensor:
        """Puts [groups, rows, columns] views under each other: [sum of groups * rows, columns]."""
        columns = views[0].shape[2:]
        out = torch.empty(sum(view.shape[0] * view.shape[1] for view in views), *columns, dtype=self._dtype)
        start = 0
        for view in views:
            stop = start + view.shape[0] * view.shape[1]
            out[start:stop].view(view.shape).copy_(view)
            start = stop
        return out


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """[heads * n, ...] as [heads, n, ...]."""
    return rows.view(heads, -1, *rows.shape[1:])


def _float32(view: Tensor) -> Tensor:
    return torch.empty(view.shape, dtype=torch.float32).copy_(view)
