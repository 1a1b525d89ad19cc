"""Weights as the model gets them, against the modules transformers built from the same files."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from warmstate.models.checkpoints.loading import load_weights
from warmstate.models.config import read_config
from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint
from warmstate.models.ranks import RankSlice

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
Weights = dict[int | None, dict[str, torch.Tensor]]


def load(path: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return dict(load_weights(path, read_config(path), RankSlice(), dtype))


def joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts).detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_outer_weights_and_norms_are_those_of_transformers(hf_checkpoint: Any, family: str) -> None:
    path, model = hf_checkpoint(family)
    weights = load(path)
    body = getattr(model.model, "language_model", model.model)
    assert torch.equal(weights[None]["embed"], body.embed_tokens.weight)
    assert torch.equal(weights[None]["final_norm"], body.norm.weight + 1)
    assert torch.equal(weights[None]["lm_head"], model.lm_head.weight)
    for i, layer in enumerate(body.layers):
        assert torch.equal(weights[i]["input_layernorm"], layer.input_layernorm.weight + 1)
        assert torch.equal(weights[i]["post_attention_layernorm"], layer.post_attention_layernorm.weight + 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_weights_are_those_of_transformers(hf_checkpoint: Any, family: str) -> None:
    path, model = hf_checkpoint(family, num_attention_heads=6, num_key_value_heads=2)
    layer = getattr(model.model, "language_model", model.model).layers[3].self_attn
    weights = load(path)[3]
    for ours, theirs in {"q_gate_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "o_proj"}.items():
        assert torch.equal(weights[ours], getattr(layer, theirs).weight)
    assert torch.equal(weights["q_norm"], layer.q_norm.weight + 1)
    assert torch.equal(weights["k_norm"], layer.k_norm.weight + 1)


@pytest.mark.parametrize("num_v_heads", [2, 4, 6])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_gated_delta_net_weights_are_those_of_transformers(hf_checkpoint: Any, family: str, num_v_heads: int) -> None:
    path, model = hf_checkpoint(family, linear_num_value_heads=num_v_heads, linear_value_head_dim=12)
    layer = model.model.layers[1].linear_attn
    weights = load(path)[1]
    hidden = torch.randn(1, 5, 32)
    if family == "qwen3_next":
        qkvz, ba = layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden)
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(qkvz, ba)
        expected = {"in_proj_qkv": torch.cat([part.flatten(2) for part in (q, k, v)], -1), "in_proj_z": z.flatten(2)}
        expected |= {"in_proj_b": b, "in_proj_a": a}
    else:
        expected = {
            name: getattr(layer, name)(hidden) for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        }
    for name, projected in expected.items():
        assert torch.allclose(hidden @ weights[name].T, projected, atol=1e-5), name
    assert torch.equal(weights["conv"], layer.conv1d.weight.squeeze(1))
    assert torch.equal(weights["A_log"], layer.A_log)
    assert torch.equal(weights["dt_bias"], layer.dt_bias)
    assert torch.equal(weights["norm"], layer.norm.weight)
    assert torch.equal(weights["out_proj"], layer.out_proj.weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_mlp_and_expert_weights_are_those_of_transformers(hf_checkpoint: Any, family: str) -> None:
    path, model = hf_checkpoint(family)
    weights = load(path)[2]
    mlp = getattr(model.model, "language_model", model.model).layers[2].mlp
    if not hasattr(mlp, "experts"):
        assert torch.equal(weights["gate_up_proj"], joined(mlp.gate_proj.weight, mlp.up_proj.weight))
        assert torch.equal(weights["down_proj"], mlp.down_proj.weight)
        return
    shared = mlp.shared_expert
    assert torch.equal(weights["router"], mlp.gate.weight)
    assert torch.equal(weights["experts_gate_up"], mlp.experts.gate_up_proj)
    assert torch.equal(weights["experts_down"], mlp.experts.down_proj)
    assert torch.equal(weights["shared_gate_up"], joined(shared.gate_proj.weight, shared.up_proj.weight))
    assert torch.equal(weights["shared_down"], shared.down_proj.weight)
    assert torch.equal(weights["shared_gate"], mlp.shared_expert_gate.weight)


def test_fused_and_single_experts_give_the_same_tensors(hf_checkpoint: Any, edit_tensors: Any) -> None:
    path, _ = hf_checkpoint("qwen3_5_moe_text")
    single = load(path)

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts."
            parts = {
                part: torch.stack([tensors.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in range(4)])
                for part in ("gate", "up", "down")
            }
            tensors[f"{prefix}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
            tensors[f"{prefix}down_proj"] = parts["down"]

    edit_tensors(path, fuse)
    fused = load(path)
    for layer in range(4):
        for name in ("experts_gate_up", "experts_down"):
            assert torch.equal(single[layer][name], fused[layer][name])


def test_interleaved_rows_land_where_the_worked_example_says(tmp_path: Path) -> None:
    """2 key heads of 2, 4 value heads of 3: each row of the file holds its own number."""
    sizes: dict[str, Any] = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 3,
    }
    write_demo_checkpoint(tmp_path / "demo", "qwen3_next", num_hidden_layers=4, dtype=torch.float32, **sizes)
    file = tmp_path / "demo" / "model.safetensors"
    tensors = load_file(file)
    for name in ("in_proj_qkvz", "in_proj_ba"):
        weight = tensors[f"model.layers.0.linear_attn.{name}.weight"]
        weight.copy_(torch.arange(float(len(weight)))[:, None])
    save_file(tensors, file)
    weights = load(tmp_path / "demo")[0]
    q, k = [0, 1, 16, 17], [2, 3, 18, 19]
    v, z = [*range(4, 10), *range(20, 26)], [*range(10, 16), *range(26, 32)]
    assert weights["in_proj_qkv"][:, 0].tolist() == q + k + v
    assert weights["in_proj_z"][:, 0].tolist() == z
    assert weights["in_proj_b"][:, 0].tolist() == [0, 1, 4, 5]
    assert weights["in_proj_a"][:, 0].tolist() == [2, 3, 6, 7]


def test_decays_and_norms_stay_float32_in_a_bfloat16_model(demo_checkpoint: Any) -> None:
    path = demo_checkpoint("qwen3_next", dtype=torch.bfloat16)
    stored = load_file(path / "model.safetensors")["model.layers.0.linear_attn.A_log"]
    weights = load(path, dtype=torch.bfloat16)
    kept = {"input_layernorm", "post_attention_layernorm", "A_log", "dt_bias", "norm", "q_norm", "k_norm", "final_norm"}
    for layer in weights.values():
        for name, tensor in layer.items():
            assert tensor.dtype == (torch.float32 if name in kept else torch.bfloat16), name
            assert tensor.is_contiguous(), name
    assert stored.dtype == torch.float32
    assert torch.equal(weights[0]["A_log"], stored)
    assert not torch.equal(weights[0]["A_log"], stored.bfloat16().float())


def test_one_is_added_to_norms_in_float32(demo_checkpoint: Any, edit_tensors: Any) -> None:
    path = demo_checkpoint()
    tiny = torch.full((64,), 2.0**-12, dtype=torch.bfloat16)
    edit_tensors(path, lambda tensors: tensors.update({"model.norm.weight": tiny}))
    assert load(path, dtype=torch.bfloat16)[None]["final_norm"].tolist() == [1 + 2.0**-12] * 64


def test_a_tied_head_is_the_embedding_itself(demo_checkpoint: Any) -> None:
    outer = load(demo_checkpoint(tie_word_embeddings=True))[None]
    assert outer["lm_head"] is outer["embed"]


def test_a_tied_head_stored_twice_is_still_one_tensor(demo_checkpoint: Any, edit_tensors: Any) -> None:
    path = demo_checkpoint(tie_word_embeddings=True)
    edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    outer = load(path)[None]
    assert outer["lm_head"] is outer["embed"]


def test_a_head_that_differs_from_a_tied_embedding_is_used_with_a_warning(
    demo_checkpoint: Any, edit_tensors: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = demo_checkpoint(tie_word_embeddings=True)
    edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(320, 64, dtype=torch.bfloat16)}))
    assert load(path)[None]["lm_head"].eq(1).all()
    assert "differs from embed_tokens" in caplog.text


def test_progress_ends_at_the_bytes_on_disk(demo_checkpoint: Any) -> None:
    path = demo_checkpoint("qwen3_next")
    calls: list[tuple[int, int]] = []
    weights = load_weights(
        path, read_config(path), RankSlice(), torch.float32, lambda done, total: calls.append((done, total))
    )
    assert len(list(weights)) == 5
    assert len(calls) == 5
    assert calls == sorted(calls)
    assert calls[-1] == (sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values()),) * 2


def test_the_files_can_go_once_they_are_loaded(demo_checkpoint: Any) -> None:
    """Nothing that was handed out may be a view of a file."""
    path = demo_checkpoint("qwen3_5_text", dtype=torch.float32)
    weights = load(path)
    before = weights[0]["out_proj"].clone()
    with (path / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * (path / "model.safetensors").stat().st_size)
    assert torch.equal(weights[0]["out_proj"], before)


MEASURE = """
import sys, torch
from pathlib import Path
from warmstate.models.config import read_config
from warmstate.models.checkpoints.loading import load_weights
from warmstate.models.ranks import RankSlice
torch.set_num_threads(1)
path = Path(sys.argv[1])
layers = [list(w.values()) for _, w in load_weights(path, read_config(path), RankSlice(), torch.bfloat16)]
sizes = [sum(t.nbytes for t in {id(t): t for t in layer}.values()) for layer in layers]
status = Path("/proc/self/status").read_text()
print(sum(sizes), max(sizes), 1024 * int(status.split("VmHWM:")[1].split()[0]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        # One tensor per expert, all experts in one, and no experts.
        ("qwen3_next", {"num_experts": 16}),
        ("qwen3_5_moe_text", {"num_experts": 16}),
        ("qwen3_5_text", {"intermediate_size": 12288}),
    ],
)
def test_memory_peaks_at_the_weights_plus_one_layer(
    hollow_checkpoint: Any, family: str, overrides: dict[str, int], num_files: int
) -> None:
    """Weights enough that loading them all first, or keeping the mapped pages, would go over."""
    path = hollow_checkpoint(family, num_files, vocab_size=32768, **overrides)
    command = [sys.executable, "-c", MEASURE, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    total, largest, peak = map(int, result.stdout.split())
    assert total > largest + (300 << 20), (total >> 20, largest >> 20, peak >> 20)
    assert peak <= total + largest + (300 << 20), (total >> 20, largest >> 20, peak >> 20)
