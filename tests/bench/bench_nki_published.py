"""Runs published NKI kernels, unmodified, in our simulator and compares them with numpy or torch. None is kept here.

    python tests/bench/bench_nki_published.py --sdk AWS-NEURON-SDK/nki --gdn-kernels NXDI/.../nki_kernels FORK/...

Checkouts of aws-neuron/aws-neuron-sdk (tutorials in files, and in the text of one), nki-samples and nki-library; each
of `--gdn-kernels` is a folder with files `nki_deltanet*.py` and `qwen_qk_norm_rope.py` as in
https://github.com/aws-neuron/neuronx-distributed-inference, contrib/models/Qwen3.5-2B/src. A kernel that breaks a rule
is printed with that rule. Times are estimates of a simulator.
"""

import argparse
import importlib
import importlib.util
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from warmstate.kernels.gated_delta_torch import recurrence
from warmstate.kernels.nki_sim.errors import SimulatorError
from warmstate.kernels.nki_sim.install import installed
from warmstate.kernels.nki_sim.launch import Kernel, launch
from warmstate.kernels.nki_sim.schedule import estimate
from warmstate.kernels.norm_torch import l2_norm_, rms_norm

D = 128
_count = itertools.count()

Case = tuple[str, Callable[[], tuple[Kernel, tuple[Any, ...], Any]]]
"""A name, and what gives the kernel, its arguments and the expected output, or outputs."""


def _module(path: Path) -> ModuleType:
    name = f"published_{next(_count)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with installed():
        spec.loader.exec_module(module)
    return module


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _matmul_inputs(rows: int, contraction: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    left, right = (_normal(contraction, n).to(torch.bfloat16) for n in (rows, columns))
    return left, right, left.float().T @ right.float()


def sdk_cases(sdk: Path) -> Iterator[Case]:
    examples = sdk / "examples"

    def added(path: str, name: str) -> Callable[[], Any]:
        a, b = _normal(128, 512), _normal(512, 128).T.contiguous()
        return lambda: (getattr(_module(examples / path), name), (a, b), a + b)

    yield "tensor_addition", added("tensor_addition/tensor_addition_nki_kernels.py", "nki_tensor_add")
    yield "getting_started", added("getting_started_torch.py", "nki_tensor_add_kernel")
    yield "simulate example", added("simulate/nki_simulate_example.py", "add_kernel")
    rows = torch.arange(60, dtype=torch.int8).reshape(5, 12)
    turned = rows.reshape(5, 3, 4).transpose(1, 2).reshape(5, 12)
    file = examples / "transpose2d/transpose2d_nki_kernels.py"
    yield "transpose2d", _late(file, "tensor_transpose2D_kernel_", (rows, (3, 4)), turned)
    image = _normal(2, 6, 6)
    pooled, largest = torch.nn.functional.avg_pool2d(image, 2), torch.nn.functional.max_pool2d(image, 2)
    file = examples / "average_pool2d/average_pool2d_nki_kernels.py"
    yield "average_pool2d", _late(file, "tensor_avgpool_kernel", (image, 2), pooled)
    yield (
        "max pool (index)",
        lambda: (_module(examples / "index-case-3.py").tensor_maxpool_kernel_, (image, 2), largest),
    )
    odd = _normal(4, 5)
    halves = (odd[:, ::2], odd[:, 1::2])
    yield "split (index)", _late(examples / "index-case-1.py", "tensor_split_kernel_", (odd,), halves)
    tile = _normal(128, 512)
    yield "exp (layout)", _late(examples / "layout-pass.py", "tensor_exp_kernel_", (tile,), tile.exp())
    yield from matmul_cases(examples / "matrix_multiplication")
    for name in ("mamba_v1", "mamba_v2", "mamba_v3"):
        yield f"fused_mamba {name}", _late(examples / "fused_mamba/mamba_nki_kernels.py", name, *_mamba(256, 16, 512))


def matmul_cases(folder: Path, label: str = "") -> Iterator[Case]:
    for name in ("basic_", "tiled_", "hoist_load_", "block_free_dimension_", "fully_optimized_"):
        *given, product = _matmul_inputs(*((64, 128, 512) if name == "basic_" else (2048, 1024, 1024)))
        path = folder / "matrix_multiplication_nki_kernels.py"
        yield f"{label}matmul {name}", _late(path, f"nki_matmul_{name}", tuple(given), product)


def _late(path: Path, name: str, given: tuple[Any, ...], expected: Any) -> Callable[[], Any]:
    return lambda: (getattr(_module(path), name), given, expected)


def _mamba(channels: int, states: int, length: int) -> tuple[tuple[Any, ...], torch.Tensor]:
    delta, u = 0.1 * _normal(1, channels, length).abs(), _normal(1, channels, length + 1)[..., 1:].contiguous()
    a, b, c = -_normal(channels, states).abs(), _normal(1, states, length), _normal(1, states, length + 1)[..., 1:]
    state, out = torch.zeros(channels, states).double(), torch.zeros(1, channels, length).double()
    for t in range(length):
        step = delta[0, :, t, None].double()
        state = (step * a).exp() * state + step * b[0, None, :, t] * u[0, :, t, None]
        out[0, :, t] = state @ c[0, :, t].double()
    return (delta, u, a, b, c.contiguous()), out


def tutorial_cases(page: Path) -> Iterator[Case]:
    """The kernels that stand in the text of a tutorial on matrix multiplication."""
    blocks = re.findall(r"\.\. code-block:: python\n(?:[ ]+:.*\n)*\n((?:[ ]+.*\n|\n)+)", page.read_text())
    kernels = [textwrap.dedent(block) for block in blocks if "@nki.jit" in block]
    for i, source in enumerate(kernels):
        *given, product = _matmul_inputs(*((128, 128, 512) if "on a single tile" in source else (2048, 1024, 1024)))
        yield f"{page.stem} {i + 1}", _inline(source, tuple(given), product)


def _inline(source: str, given: tuple[Any, ...], expected: Any) -> Callable[[], Any]:
    def run() -> Any:
        scope: dict[str, Any] = {}
        with installed():
            exec("import nki\nimport nki.isa as nisa\nimport nki.language as nl\n" + source, scope)
        return next(value for value in scope.values() if isinstance(value, Kernel)), given, expected

    return run


def library_cases(source: Path) -> Iterator[Case]:
    """Kernels of nki-library 2.29 and later around the ones that this project is about."""
    sys.path.insert(0, str(source))

    def late(module: str, name: str, given: tuple[Any, ...], expected: Any) -> Callable[[], Any]:
        def run() -> Any:
            with installed():
                kernel: Kernel = getattr(importlib.import_module(f"nkilib.{module}"), name)
            return kernel, given, expected

        return run

    rows = _normal(128, 1000)
    yield "cumsum", late("core.cumsum.cumsum", "cumsum", (rows,), rows.double().cumsum(1))
    logits = _normal(2, 1, 4096)
    top = logits.max(-1, keepdim=True)
    yield "cascaded_max", late("core.max.cascaded_max", "cascaded_max", (logits,), (top.values, top.indices))
    x, angles = _normal(128, 1, 2, 256), _normal(64, 1, 256)
    first, second = x.chunk(2)
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin))
    yield "RoPE", late("core.embeddings.rope", "RoPE", (x, angles.cos(), angles.sin()), turned)
    image, filters = _normal(2, 32, 200), 0.1 * _normal(4, 32, 64)
    convolved = torch.nn.functional.conv1d(image, filters.permute(2, 1, 0))
    yield "conv1d", late("experimental.conv.conv1d", "conv1d", (image, filters), convolved)
    q, k, v = (_normal(3, 1, 256, 128)[i].to(torch.bfloat16) for i in range(3))
    attended = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    given = (q * 128**-0.5, k.transpose(1, 2).contiguous(), v)
    yield "attention_cte", late("core.attention.attention_cte", "attention_cte", given, attended)


class Tokens:
    """One head: q, k (of length 1, q scaled), v [S, 128], g, beta [S]; the state before, and the truth in float64."""

    def __init__(self, length: int) -> None:
        self.q, self.k, self.v = (_normal(3, length, D)[i] for i in range(3))
        self.k, self.q = l2_norm_(self.k.clone()), l2_norm_(self.q.clone()) * D**-0.5
        self.v = self.v.contiguous()
        gates = torch.rand(2, length, generator=torch.Generator().manual_seed(1))
        self.g, self.beta = -0.2 * gates[0], gates[1].contiguous()
        self.state = 0.3 * _normal(D, D)

    def truth(self, from_zero: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, g, beta = (t[:, None].double() for t in (self.q, self.k, self.v, self.g, self.beta))
        before = torch.zeros(1, D, D).double() if from_zero else self.state[None].double()
        out, state = recurrence(q, k, v, g, beta, before)
        return out[:, 0], state[0]


def _short(file: Path) -> str:
    return file.stem.rpartition("__")[2]


def gdn_cases(folder: Path) -> Iterator[Case]:
    ones = torch.ones(D, D)
    masks = (ones.tril(-1), torch.eye(D), ones.tril())
    x, short = Tokens(512), Tokens(64)
    columns = (x.g[:, None].contiguous(), x.beta[:, None].contiguous())
    whole = (x.q, x.k, x.v, *columns)
    for file in sorted(folder.glob("*nki_deltanet_fused*.py")):
        source, name = file.read_text(), _short(file)
        takes_state = "initial_state" in source
        given: tuple[Any, ...] = (*whole, *((x.state,) if takes_state else ()), *masks)
        yield f"{name} fwd", _late(file, "deltanet_fused_chunked_fwd", given, x.truth(not takes_state))
        if "deltanet_fused_chunked_fwd_multihead" in source:
            heads = (*(t[None] for t in whole), x.state[None], *masks)
            truth = tuple(t[None] for t in x.truth())
            yield f"{name} multihead", _late(file, "deltanet_fused_chunked_fwd_multihead", heads, truth)
        if "deltanet_autocp_affine_sequence" in source:
            given = (*whole, *masks, x.state)
            yield f"{name} autocp", _autocp(file, True, given, x.truth())
            yield f"{name} autocp x3", _autocp(file, False, given, x.truth())
    for file in sorted(folder.glob("*nki_deltanet_chunked.py")):
        yield f"{_short(file)} step", _late(file, "deltanet_chunk_step", *_chunk(Tokens(D), masks))
    for file in sorted(folder.glob("*nki_deltanet.py")):
        wide = tuple(t[:, None].expand(-1, D).contiguous() for t in (short.g, short.beta))
        given = (short.q, short.k, short.v, *wide)
        yield f"{_short(file)} fwd", _late(file, "deltanet_recurrent_fwd", given, short.truth(True)[0])
        yield f"{_short(file)} fwd_state", _late(file, "deltanet_recurrent_fwd_state", given, short.truth(True))
        one = Tokens(1)
        step = (one.q, one.k, one.v, one.g[:, None].expand(1, D), one.beta[:, None].expand(1, D), one.state)
        if "def deltanet_recurrent_step(" in file.read_text():
            yield f"{_short(file)} step", _late(file, "deltanet_recurrent_step", step, one.truth())
            batched = (one.q, one.k, one.v, one.g[:, None], one.beta[:, None], one.state)
            yield (
                f"{_short(file)} batched",
                _late(file, "_deltanet_recurrent_step_batched_kernel", batched, one.truth()),
            )
    for file in sorted(folder.glob("*qwen_qk_norm_rope.py")):
        yield _short(file), _late(file, "qwen_qk_norm_partial_rope_kernel", *_norm_and_rope())


def _autocp(file: Path, fused: bool, given: tuple[Any, ...], expected: Any) -> Callable[[], Any]:
    """The scan over chunks in two launches, or in three, as one program."""

    def case() -> Any:
        module = _module(file)

        def run(*arguments: Any) -> Any:
            *inputs, state = arguments
            base, coefficient, matrix, bias = module.deltanet_autocp_affine_sequence(*inputs)
            if fused:
                return module.deltanet_autocp_prefix_apply_output(base, coefficient, matrix, bias, state)
            states, final = module.deltanet_autocp_state_prefix(matrix, bias, state)
            return module.deltanet_autocp_apply_output(base, coefficient, states), final

        return Kernel(run), given, expected

    return case


def _chunk(x: Tokens, masks: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], Any]:
    summed = x.g.cumsum(0)
    wide = [t.expand(D, D).contiguous() for t in (x.beta[:, None], summed[:, None], summed[-1:, None])]
    return (x.q, x.k, x.v, *wide, x.state, *masks), x.truth()


def _norm_and_rope() -> tuple[tuple[Any, ...], Any]:
    """160 tokens, 2 and 1 heads of 256 of which 64 are rotated."""
    width, half, length = 256, 32, 160
    q, k = _normal(1, length, 2 * width), _normal(1, length, width)
    weights = [1 + 0.1 * _normal(1, width) for _ in range(2)]
    angles = _normal(1, length, half).repeat(1, 1, 2)
    expected = []
    for x, weight in ((q, weights[0]), (k, weights[1])):
        heads = rms_norm(x.reshape(1, length, -1, width), weight[0], 1e-6).transpose(1, 2)
        rotated, rest = heads[..., : 2 * half], heads[..., 2 * half :]
        turned = torch.cat((-rotated[..., half:], rotated[..., :half]), dim=-1)
        expected.append(torch.cat((rotated * angles.cos()[:, None] + turned * angles.sin()[:, None], rest), dim=-1))
    return (q, k, *weights, angles.cos(), angles.sin(), 1e-6), tuple(expected)


def _row(name: str, case: Callable[[], Any]) -> str:
    try:
        kernel, given, expected = case()
        made = launch(kernel, *given)
    except (SimulatorError, ImportError, AttributeError, TypeError) as error:
        return f"{name[-43:]:<44}{type(error).__name__}: {str(error).splitlines()[0]}"
    found = made.outputs if isinstance(made.outputs, tuple) else (made.outputs,)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    worst = max(_error(a, b) for a, b in zip(found, wanted, strict=True))
    one, two = estimate(made.traces).makespan_us
    return f"{name[-43:]:<44}{worst:>10.1e}{one:>10.1f}{two:>10.1f}"


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdk", type=Path, help="the folder nki of a checkout of aws-neuron-sdk")
    parser.add_argument("--nki-samples", type=Path, help="src/nki_samples/tutorials of a checkout of nki-samples")
    parser.add_argument("--nki-library", type=Path, help="src/nkilib_src of a checkout of nki-library")
    parser.add_argument("--gdn-kernels", type=Path, nargs="*", default=[], help="folders with nki_deltanet*.py")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases: list[Case] = []
    if options.sdk is not None:
        cases += [*sdk_cases(options.sdk), *tutorial_cases(options.sdk / "guides/tutorials/kernel-optimization.rst")]
    if options.nki_samples is not None:
        cases += matmul_cases(options.nki_samples / "matrix_multiplication", "samples: ")
    if options.nki_library is not None:
        cases += library_cases(options.nki_library)
    for folder in options.gdn_kernels:
        cases += [(f"{folder.name}: {name}", case) for name, case in gdn_cases(folder)]
    print("ESTIMATES of a simulator, one trn2 core, microseconds under the 1N and 2N rule; error over max |reference|")
    print(f"{'kernel':<44}{'error':>10}{'1N':>10}{'2N':>10}")
    for name, case in cases:
        print(_row(name, case), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
