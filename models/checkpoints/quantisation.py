"""Owns how a quantised checkpoint is recognised, from its configs and its tensor names. Dequantises nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warmstate.models.checkpoints.checkpoint import CheckpointIndex
from warmstate.models.checkpoints.json_fields import read_json
from warmstate.models.errors import UnsupportedCheckpoint

SUPPORTED = "unquantised BF16, F16 and F32 safetensors"

# First match counts, so the more telling suffixes stand first.
_SUFFIXES = {
    "weight_scale_inv": "FP8 block",
    "weight_scale_2": "NVFP4 (modelopt)",
    "weight_global_scale": "NVFP4 (compressed-tensors)",
    "weight_packed": "compressed-tensors packed",
    "_packed": "compressed-tensors packed experts",
    "g_idx": "GPTQ",
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "absmax": "bitsandbytes",
    "quant_state": "bitsandbytes",
    "weight_int8": "INT8",
    "pre_quant_scale": "AWQ (modelopt)",
    "svdquant_lora_up": "SVDQuant",
    "weight_scale": "FP8 or MXFP4",
    "scales": "MLX or GPTQ",
    "input_scale": "static activation scales",
    "k_scale": "FP8 KV cache scales",
    "v_scale": "FP8 KV cache scales",
}


def refuse_quantised_config(directory: Path) -> None:
    """Raises `UnsupportedCheckpoint` if a config file says that the weights are quantised; reads no weight file."""
    config_file = directory / "config.json"
    config = read_json(config_file)
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, dict) else {}):
        for name in ("quantization_config", "quantization", "compression_config"):
            if fields.get(name):
                raise _refusal(directory, _method(fields[name]), f"{config_file.name}: {name}")
    legacy = directory / "hf_quant_config.json"
    if legacy.exists():
        raise _refusal(directory, _method(read_json(legacy)), legacy.name)


def refuse_quantised_tensors(index: CheckpointIndex) -> None:
    """Raises `UnsupportedCheckpoint` if tensor names show quantised weights, whatever the config says."""
    for name, entry in index.tensors.items():
        last = name.rpartition(".")[2]
        method = _SUFFIXES.get(last) or (_SUFFIXES["_packed"] if last.endswith("_packed") else None)
        if method is not None:
            raise _refusal(index.directory, method, f"tensor {name} in {entry.file}")


def _method(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "unknown"
    nested = value.get("quantization")
    fields = {**(nested if isinstance(nested, Mapping) else {}), **value}
    named = [str(fields[name]) for name in ("quant_method", "quant_algo", "format") if fields.get(name)]
    return " ".join(named) or "unknown"


def _refusal(directory: Path, method: str, found: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{directory}: quantisation {method} (found {found}) is not supported; supported: {SUPPORTED}"
    )
