"""DMA, run-time addresses, registers and loops. ISA dma_copy, dma_transpose, register_*; LANG fori_loop, while_loop."""

from typing import Any

import numpy as np
import pytest


def _random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_dma_casts(bench: Any) -> None:
    table = _random(16, 8)
    out = bench.after(
        lambda dst: bench.isa.dma_copy(dst, bench.of(table, buffer="private_hbm")), 16, 8, dtype="float16"
    )
    np.testing.assert_array_equal(out, table.astype(np.float16))


@pytest.mark.parametrize("shape", [(4, 4), (1, 16), (2, 2, 4), (16, 1)])
def test_dma_keeps_the_order_of_elements_and_not_the_shape(bench: Any, shape: tuple[int, ...]) -> None:
    """ISA dma_copy: the total number of elements must match, and no more."""
    table = _random(2, 8)
    out = bench.after(lambda dst: bench.isa.dma_copy(dst, bench.of(table, buffer="private_hbm")), *shape)
    np.testing.assert_array_equal(out, table.reshape(shape))


def test_dma_gathers_and_scatters_rows(bench: Any) -> None:
    table, new = _random(16, 8), _random(3, 8, seed=1)

    def body() -> Any:
        index = bench.of([[3], [0], [15]], "uint32")
        source, target, rows = bench.of(table, buffer="private_hbm"), bench.hbm(16, 8), bench.fresh(3, 8)
        bench.isa.dma_copy(rows, source.ap([[8, 3], [1, 8]], vector_offset=index, indirect_dim=0))
        bench.isa.dma_copy(target.ap([[8, 3], [1, 8]], vector_offset=index), bench.of(new))
        return rows, target

    rows, target = bench.run(body)
    np.testing.assert_array_equal(rows, table[[3, 0, 15]])
    np.testing.assert_array_equal(target[[3, 0, 15]], new)
    assert np.count_nonzero(target.any(1)) == 3


def test_dma_at_a_register_or_a_loaded_scalar(bench: Any) -> None:
    table = _random(16, 8)

    def body() -> Any:
        source, seen, loaded = bench.of(table, buffer="private_hbm"), [], bench.fresh(1, 8)

        def step(i: Any) -> None:
            tile = bench.fresh(1, 8)
            bench.isa.dma_copy(tile, source.ap([[8, 1], [1, 8]], scalar_offset=i, indirect_dim=0))
            seen.append(tile)

        bench.nl.fori_loop(0, bench.isa.register_alloc(16), step, step=5)
        bench.isa.dma_copy(loaded, source.select(0, bench.of([[7]], "int32")))
        return (*seen, loaded)

    *seen, loaded = bench.run(body)
    np.testing.assert_array_equal(np.concatenate(seen), table[0:16:5])
    np.testing.assert_array_equal(loaded, table[7:8])


def test_dma_skips_what_is_out_of_bounds_when_asked(bench: Any) -> None:
    table = _random(4, 8)

    def body() -> Any:
        source, skip = bench.of(table, buffer="private_hbm"), bench.isa.oob_mode.skip
        gathered, selected = bench.tile(2, 8), bench.tile(1, 8)
        index = bench.of([[9], [1]], "uint32")
        bench.isa.dma_copy(gathered, source.ap([[8, 2], [1, 8]], vector_offset=index), oob_mode=skip)
        bench.isa.dma_copy(selected, source.select(0, bench.isa.register_alloc(4)), oob_mode=skip)
        return gathered, selected

    gathered, selected = bench.run(body)
    np.testing.assert_array_equal(gathered, np.stack((np.zeros(8), table[1])).astype(np.float32))
    np.testing.assert_array_equal(selected, np.zeros((1, 8)))


@pytest.mark.parametrize(("shape", "axes"), [((6, 4), (1, 0)), ((3, 2, 4), (2, 1, 0)), ((3, 2, 5, 4), (3, 1, 2, 0))])
def test_dma_transpose_permutes(bench: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    values = _random(*shape)
    out = bench.after(
        lambda dst: bench.isa.dma_transpose(dst, bench.of(values, buffer="private_hbm"), axes=axes),
        *(shape[a] for a in axes),
    )
    np.testing.assert_array_equal(out, values.transpose(axes))


def test_registers_move_load_and_store(bench: Any) -> None:
    def body() -> Any:
        isa = bench.isa
        first, second, third = isa.register_alloc(5), isa.register_alloc(), isa.register_alloc()
        isa.register_move(dst=second, src=first)
        out, again = bench.fresh(1, 1, dtype="int32"), bench.fresh(1, 1, dtype="int32")
        isa.register_store(out, second)
        isa.register_load(third, out)
        isa.register_store(again, third)
        return out, again

    assert [tile.item() for tile in bench.run(body)] == [5, 5]


def test_loops_run_their_bodies(bench: Any) -> None:
    assert list(bench.nl.affine_range(3)) == [0, 1, 2]
    assert list(bench.nl.sequential_range(1, 7, 3)) == [1, 4]

    def body() -> Any:
        count, total = bench.tile(1, 1, "int32"), bench.tile(1, 1)

        def step(_register: Any) -> Any:
            bench.isa.tensor_scalar(total, total, bench.nl.add, 1.0)
            bench.isa.tensor_scalar(count, count, bench.nl.subtract, 1)
            left = bench.isa.register_alloc()
            bench.isa.register_load(left, count)
            return left

        bench.isa.memset(count, 3)
        bench.nl.while_loop(bench.isa.register_alloc(3), step)
        return total

    assert bench.run(body).item() == 3.0
