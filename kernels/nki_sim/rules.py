"""The constraints that the simulator holds a kernel to: name -> (statement, source). Knows no tensor.

Sources: ISA is the docstring of the named function in the API reference of the AWS Neuron SDK 2.32, `nki/api/nki/isa`;
LANG the same for `nki/api/nki/language`; SHARED is `nki/api/nki.api.shared.rst`; TRN2 and TRN1 are
`nki/guides/architecture/trainium2_arch.rst` and `trainium_inferentia2_arch.rst`; NOTES are the SDK's NKI release notes.
All lie in https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a (2026-08-21).
"""

Rule = tuple[str, str]

TENSOR_RULES: dict[str, Rule] = {
    "on-chip-rank": ("an on-chip tensor has a partition and at least one free dimension", "LANG NkiTensor.__getitem__"),
    "positive-shape": ("every dimension is a positive integer", "LANG NkiTensor.__init__"),
    "known-buffer": ("a buffer is sbuf, psum, shared_hbm or private_hbm", "NOTES 2.29, nl.ndarray"),
    "known-dtype": ("a dtype is one of the NKI dtypes", "SHARED nki-dtype"),
    "partition-limit": ("an on-chip tensor spans at most 128 partitions", "LANG tile_size.pmax"),
    "psum-size": ("a PSUM tensor takes at most 16 KiB of each partition", "TRN1, PSUM: 8 banks of 2 KiB"),
    "sbuf-size": ("an SBUF tensor takes at most 224 KiB of each partition", "TRN2: 128 partitions of 224 KiB"),
    "partition-reshape": ("a reshape keeps the partition dimension of an on-chip tensor", "LANG NkiTensor.reshape"),
    "contiguous-reshape": ("a reshape must be possible without a copy", "LANG NkiTensor.reshape"),
    "reshape-size": ("a reshape keeps the number of elements", "LANG NkiTensor.reshape"),
    "partition-permute": ("a permutation leaves the partition dimension outermost", "LANG NkiTensor.permute"),
    "permutation": ("permute takes each dimension once", "LANG NkiTensor.permute"),
    "broadcast-size-1": ("only a dimension of size 1 is broadcast", "LANG NkiTensor.broadcast"),
    "broadcast-partition": ("the partition dimension is not broadcast", "LANG NkiTensor.broadcast"),
    "broadcast-rank": ("nl.broadcast_to keeps the number of dimensions", "LANG broadcast_to"),
    "language-broadcast": ("nl operators on two tiles need the same shape", "NOTES 2.29 and 2.30, known issues"),
    "language-operator": ("the nl operator is not supported on a device", "NOTES 2.29 and 2.30, known issues"),
    "squeeze-size-1": ("only a dimension of size 1 is squeezed", "LANG NkiTensor.squeeze_dim"),
    "view-dtype": ("a reinterpreted last dimension must be contiguous and divide evenly", "LANG NkiTensor.view"),
    "one-dynamic-select": ("a view has one dynamic offset at most", "LANG NkiTensor.is_indirect"),
    "vector-offset-hbm": ("only an HBM tensor takes a vector offset", "ISA dma_copy, indirect addressing"),
    "vector-offset-shape": ("a vector offset is an SBUF tile (P, 1) of 32-bit integers", "ISA dma_copy"),
    "scalar-offset-shape": ("a scalar offset is one 32-bit integer or a register", "ISA dma_copy"),
    "no-assignment": ("a tensor is written by instructions, not by assignment", "LANG NkiTensor.__setitem__"),
    "output-written": ("a kernel writes every element that it returns", "ISA dma_copy; SDK nki-simulator"),
    "output-shared-hbm": (
        "a kernel returns tensors in shared_hbm (nl.hbm is private_hbm), or its own arguments",
        "NOTES 2.29; nki/migration",
    ),
    "lnc-count": ("a kernel is launched on 1 or 2 logical cores", "API nki.jit"),
    "same-control-flow": ("both cores allocate the same shared tensors", "LANG shared_constant; NOTES 2.29"),
    "register-value": ("a register holds one 32-bit integer", "ISA register_alloc"),
    "loop-step": ("the step of a loop is a positive integer constant", "LANG fori_loop"),
    "inside-kernel": ("instructions are issued by a kernel", "API nki.jit"),
    "capacity": ("live SBUF and PSUM fit their partitions", "TRN2: 224 KiB and 16 KiB per partition"),
}

OPERAND_RULES: dict[str, Rule] = {
    "on-chip-operand": ("an engine reads and writes SBUF and PSUM only", "TRN2, data movement"),
    "start-partition": (
        "more than 64 partitions start at 0, more than 32 at 0 or 64, fewer at 0, 32, 64 or 96",
        "ISA nc_stream_shuffle; TRN1, partition access",
    ),
    "partition-stride": ("the partitions of an operand are adjacent", "TRN1, accessing SBUF/PSUM tensors"),
    "free-dims": ("an operand has at most 4 free dimensions", "TRN1, tensor access patterns"),
    "same-partitions": ("operands have the same number of partitions", "ISA tensor_tensor, tile size"),
    "same-elements": ("operands have the same number of elements per partition", "ISA tensor_tensor, tile size"),
    "both-psum": ("two tensor inputs are not both in PSUM", "ISA tensor_tensor, scalar_tensor_tensor"),
    "gpsimd-psum": ("GpSimd does not reach PSUM", "ISA tensor_copy"),
    "static-operand": ("a compute operand has no dynamic offset by vector", "ISA dma_copy, indirect addressing"),
    "unknown-engine": ("the instruction does not run on that engine", "ISA, parameter engine"),
    "bitvec-integers": ("bitvec operators take integer tiles", "ISA tensor_tensor"),
    "known-operator": ("the operator is not one that this instruction has", "SHARED nki-aluop"),
    "vector-operand-shape": ("a vector operand is (P, 1)", "ISA tensor_scalar"),
    "vector-operand-float32": ("a vector operand is float32", "ISA tensor_scalar, activation"),
    "scalar-operand": ("a scalar operand is a number or a tile", "ISA tensor_scalar"),
    "second-operand": ("op1 and operand1 come together", "ISA tensor_scalar"),
    "mixed-operators": ("op0 and op1 are both bitvec or both arithmetic", "ISA tensor_scalar"),
    "trn3-only": ("the feature needs NeuronCore-v4", "ISA, activate2, exponential, indirect"),
}

TENSOR_ENGINE_RULES: dict[str, Rule] = {
    "matmul-inputs-sbuf": ("a matmul reads SBUF", "ISA nc_matmul, memory types"),
    "matmul-output-psum": ("a matmul writes PSUM", "ISA nc_matmul, memory types"),
    "matmul-output-float32": ("a matmul writes float32 on NeuronCore-v3", "ISA nc_matmul, data types"),
    "matmul-dtypes": ("matmul inputs are fp8, bfloat16, float16, tfloat32 or float32", "ISA nc_matmul"),
    "matmul-dtype-pair": ("float32 or tfloat32 pairs with the same two", "ISA nc_matmul, data types"),
    "matmul-contraction": ("both inputs have the same partitions, at most 128", "ISA nc_matmul, tile size"),
    "matmul-same-quadrant": ("both inputs start at the same partition", "TRN1, tensor engine layout"),
    "matmul-stationary": ("the stationary tile has at most 128 columns", "ISA nc_matmul, tile size"),
    "matmul-moving": ("the moving tile has at most 512 columns on NeuronCore-v3", "ISA nc_matmul, tile size"),
    "matmul-output-shape": ("the output is (stationary columns, moving columns)", "ISA nc_matmul, layout"),
    "matmul-bank": ("a matmul writes within one 2 KiB bank of PSUM", "ISA nc_matmul; LANG tile_size.psum_bank_fmax"),
    "matmul-tile": ("tile position and size are given together, in units of 32, 64 or 128", "ISA nc_matmul"),
    "accumulate-unwritten": ("accumulation starts from a matmul that overwrites", "ISA nc_matmul, accumulation mode"),
    "accumulate-foreign": (
        "accumulation onto a value that no matmul wrote is undefined on NeuronCore-v3",
        "ISA nc_matmul, note",
    ),
    "accumulate-mixed": ("an inferred accumulation must find the whole output written, or none", "ISA nc_matmul"),
    "double-row": ("double_row takes fp8 tiles [K, 2, N]", "ISA nc_matmul, performance mode"),
    "transpose-dtype": ("a transpose keeps the dtype", "ISA nc_transpose; TRN2, transpose"),
    "transpose-moving": ("a transposing matmul moves the identity", "ISA nc_matmul, transpose mode"),
    "transpose-size": (
        "a transpose is at most 128 x 128 on the tensor, 32 x 32 on the vector engine",
        "ISA nc_transpose",
    ),
    "transpose-memory": ("the tensor engine transposes from SBUF to PSUM", "ISA nc_transpose, memory types"),
    "transpose-shape": ("the output has the partitions and elements of the input exchanged", "ISA nc_transpose"),
}

ENGINE_RULES: dict[str, Rule] = {
    "activation-function": ("the function is not one of the scalar engine", "SHARED nki-act-func"),
    "activation-range": ("an input lies outside the function's valid range", "SHARED nki-act-func"),
    "activation-reduce-op": ("an activation reduces with nl.add", "ISA activation"),
    "activation-copy-bias": ("op=nl.copy ignores its bias on the device", "aws-neuron-sdk issue 1296"),
    "reduce-result-shape": ("a reduction result is (P, 1)", "ISA activation, tensor_scalar_reduce"),
    "reduce-command": ("the reduce command does not fit the instruction", "ISA activation, tensor_scalar_reduce"),
    "scalar-engine-operators": (
        "tensor_scalar on the scalar engine is multiply, add or multiply then add",
        "ISA tensor_scalar",
    ),
    "gpsimd-tensor-scalar": ("tensor_scalar runs on GpSimd for rsqrt only", "ISA tensor_scalar, engine"),
    "power-engine": ("nl.power runs on GpSimd", "ISA tensor_tensor"),
    "reduce-axes": ("a reduction takes the last free dimensions", "ISA tensor_reduce"),
    "reduce-operator": ("the operator does not reduce", "SHARED nki-aluop, legal reduction op"),
    "cumulative-operators": ("a cumulative op1 is add, subtract, multiply, max or min", "ISA tensor_scalar_cumulative"),
    "cumulative-dtype": ("a cumulative instruction takes no 32-bit integers", "ISA tensor_scalar_cumulative"),
    "scan-initial": ("the initial value of a scan is a number or (P, 1)", "ISA tensor_tensor_scan"),
    "copy-predicate": ("a predicate is uint8, uint16 or uint32", "ISA tensor_copy_predicated"),
    "copy-predicate-dtype": ("predicated copy keeps the dtype", "ISA tensor_copy_predicated"),
    "select-predicate": ("a select predicate is an 8- or 16-bit integer", "ISA select_reduce"),
    "select-dtype": ("select takes no tfloat32, int32 or uint32", "ISA select_reduce"),
    "bn-stats-width": ("bn_stats reads at most 512 elements and writes 6", "ISA bn_stats"),
    "bn-aggr-width": ("bn_aggr reads triples and writes 2", "ISA bn_aggr"),
    "shuffle-mask": ("a shuffle mask has 32 entries, each below 32 or 255", "ISA nc_stream_shuffle"),
    "shuffle-dtype": ("a shuffle keeps the dtype", "ISA nc_stream_shuffle"),
    "max8-width": ("max8 reads 8 to 16384 elements and writes 8", "ISA max8"),
    "find8-index": ("indices are uint16 or uint32", "ISA nc_find_index8"),
    "memset-type": ("the type of a memset value fits the dtype", "NOTES 2.29, memset"),
    "memset-engine": ("memset runs on the vector engine or GpSimd", "ISA memset"),
    "pattern-dims": ("a pattern has 1 to 4 [step, count] pairs", "ISA iota"),
    "pattern-elements": ("a pattern has as many elements as the tile per partition", "ISA iota"),
    "gpsimd-sbuf": ("iota and affine_select read and write SBUF", "ISA iota, affine_select"),
    "affine-comparison": ("affine_select compares", "ISA affine_select"),
    "partition-reduce-operator": (
        "a partition reduction adds, averages or takes the maximum",
        "ISA tensor_partition_reduce",
    ),
}

DMA_RULES: dict[str, Rule] = {
    "dma-psum": ("DMA does not reach PSUM", "NOTES 2.29, dma_copy"),
    "dma-elements": ("source and destination have the same number of elements", "ISA dma_copy, tile size"),
    "dma-shape": (
        "a gather or scatter keeps the shape up to dimensions of size 1",
        "ISA dma_copy, indirect addressing",
    ),
    "dma-hwdge-dtype": ("hardware descriptors do not cast", "TRN2, DGE; ISA dma_copy"),
    "dma-hwdge-indirect": ("hardware descriptors do not gather or scatter", "TRN2, DGE note"),
    "dma-static-dynamic": ("a dynamic address needs generated descriptors", "ISA dma_copy"),
    "dma-engine": ("an engine is named with hwdge only: sync or scalar", "ISA dma_copy, engine"),
    "dma-priority": ("priority needs NeuronCore-v4", "ISA dma_copy, priority"),
    "dma-bounds": ("a dynamic index leaves its tensor", "ISA dma_copy, oob_mode"),
    "dma-transpose-axes": ("transposes are (1, 0), (2, 1, 0) and (3, 1, 2, 0)", "ISA dma_transpose"),
    "dma-transpose-dtype": ("a DMA transpose keeps the dtype", "ISA dma_transpose"),
    "dma-transpose-shape": ("the destination has the permuted shape", "NOTES 2.30, dma_transpose"),
    "dma-transpose-sbuf": ("a DMA transpose writes SBUF", "ISA dma_transpose"),
    "dma-transpose-hwdge": (
        "a hardware transpose takes 2-byte elements, at most 128 columns and 16 rows (1, 2, 4, 8 of more dimensions)",
        "ISA dma_transpose",
    ),
}

RULES: dict[str, Rule] = {**TENSOR_RULES, **OPERAND_RULES, **TENSOR_ENGINE_RULES, **ENGINE_RULES, **DMA_RULES}
