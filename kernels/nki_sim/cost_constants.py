"""The constants of the cost model, each with its source. Frozen before any kernel was compared; knows no instruction.

Sources as in `rules.py`; DMA is `nki/deep-dives/nki-dma-bandwidth-guide.rst` of the same SDK. Where the documents are
silent, the entry says ASSUMED. The result is an estimate: it ranks kernels whose estimates are far apart (about 1.5x).
"""

TENSOR_GHZ = 2.4
"""TRN2, compute engine specifications."""

VECTOR_GHZ = 0.96
"""TRN2, compute engine specifications."""

SCALAR_GHZ = 1.2
"""TRN2, compute engine specifications."""

GPSIMD_GHZ = 1.2
"""TRN2, compute engine specifications."""

MATMUL_MIN_CYCLES = 64
"""TRN1, tensor engine: a MultiplyMoving costs max(N, 64)."""

LOAD_STATIONARY_SPEEDUP = 4
"""TRN1, tensor engine: LoadStationary is up to 4 times faster than MultiplyMoving, and runs in the background."""

FLOAT32_MATMUL_FACTOR = 4
"""TRN1, tensor engine: float32 costs 4 times bfloat16; TRN2: 20 against 79 TFLOPS."""

FLOAT32_ONEZERO_SPEEDUP = 2
"""ISA nc_matmul, is_stationary_onezero and is_moving_onezero: 2 times faster for float32."""

FLOAT32_TRANSPOSE_FACTOR = 2
"""TRN2, transpose: the transpose mode makes float32 transposes 2 times faster."""

TENSOR_LATENCY_CYCLES = 64
"""ASSUMED: what a dependent waits after a matmul; the array's own fill, TRN1 MM_INIT_LATENCY."""

ENGINE_MIN_CYCLES = 64
"""SHARED nki-engine-sel: MIN_II, the least interval between instructions."""

ENGINE_LATENCY_CYCLES = 100
"""TRN1, vector engine: overhead where an instruction depends on the one before."""

READ_ACCUMULATOR_CYCLES = 64
"""TRN1, scalar engine: ActReadAccumulator."""

VECTOR_RECIPROCAL_FACTOR = 8
"""SHARED nki-engine-sel: reciprocal on the vector engine."""

GPSIMD_RSQRT_FACTOR = 4
"""SHARED nki-engine-sel: rsqrt on GpSimd is 4 times slower than on the scalar engine."""

VECTOR_FAST_COPY = 4
"""TRN2, vector performance mode: tensor_copy and tensor_scalar, 2-byte floats, SBUF to SBUF, contiguous."""

VECTOR_FAST_COPY_PSUM = 2
"""TRN2, vector performance mode: the same with one side in PSUM, or not contiguous."""

VECTOR_FAST_TENSOR = 2
"""TRN2, vector performance mode: tensor_tensor, 2-byte floats, inputs in SBUF."""

TWO_INPUT_FACTORS = (1, 2)
"""TRN1: two input tiles cost about 2N cycles. TRN2 gives the engine twice the data path, so N is printed as well."""

DMA_BYTES_PER_NS = 368.0
"""DMA: 16 engines of 23 bytes/ns per core."""

DMA_LATENCY_NS = 1300.0
"""DMA: semaphore-to-start latency."""

DMA_ROW_OVERHEAD_BYTES = 256
"""ASSUMED from DMA's curve: a contiguous run of 2 KiB approaches the peak, one of 256 bytes reaches half."""

DMA_TRANSPOSE_EFFICIENCY = 0.9
"""TRN2, DMA transpose from HBM."""

DMA_SBUF_TRANSPOSE_EFFICIENCY = 0.5
"""TRN2, DMA transpose from SBUF."""

HWDGE_ISSUE_NS = 600.0
"""TRN2, DGE: about 600 ns per instruction, on the sequencer that issues it."""

PEAK_BF16_TFLOPS = 79.0
"""TRN2, tensor engine; the tutorial matmul is checked against it."""
