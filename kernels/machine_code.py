"""The machine code of the kernels, for a GPU that need not be here: what `fusedcomm kernels` reports."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedcomm.kernels import reduce
from fusedcomm.kernels._triton import INTERPRETED, triton
from fusedcomm.kernels.await_rows import await_rows_kernel
from fusedcomm.kernels.config import CONFIGS, Architecture, GemmConfig, misfit
from fusedcomm.kernels.flags import num_lanes
from fusedcomm.kernels.gemm_kernel import gemm_kernel
from fusedcomm.kernels.paced_copy import NUM_WARPS, PIECE_BYTES, paced_copy_kernel
from fusedcomm.kernels.row import NOT_SUPPORTED, Row

# Triton's names of the types.
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1}
# Which strides are 1: of x [M, K], w [N, K], y [M, N] as they are, and of the transposed views of backward.
LAYOUTS = {
    "forward": ("stride_xk", "stride_wk", "stride_yn"),
    "dgrad": ("stride_xk", "stride_wn", "stride_yn"),
    "wgrad": ("stride_xm", "stride_wn", "stride_yn"),
}
_SIGNALS = {"chunk_starts_ptr": "*i64", "flags_ptr": "*i32", "epoch_ptr": "*i32"}


@dataclass(frozen=True)
class Case:
    """A kernel as a layer launches it."""

    kernel: str
    layout: str = "forward"
    bias: bool = False
    activation: str | None = None
    # Its type, and the output's; "": as the operands, or as layers store their products.
    residual: str | None = None
    output: str = ""
    num_weights: int = 1
    wait: bool = False
    publish: bool = False


# Bias, activation and several weights go with the all-gather, never with the reduce-scatter; backward has none.
GEMM_CASES = (
    Case("gemm", bias=True, activation="gelu"),
    Case("gemm-residual", residual=""),
    Case("gemm-dgrad", layout="dgrad"),
    Case("gemm-wgrad", layout="wgrad"),
    Case("gemm-wgrad added", layout="wgrad", residual="fp32", output="fp32"),
    Case("all_gather_matmul", bias=True, activation="gelu", wait=True),
    Case("all_gather_matmul-swiglu", activation="swiglu", num_weights=2, wait=True),
    Case("all_gather_matmul-3 weights", num_weights=3, wait=True),
    Case("all_gather_matmul-dgrad", layout="dgrad", wait=True),
    Case("matmul_reduce_scatter", publish=True),
    Case("matmul_reduce_scatter-dgrad", layout="dgrad", publish=True),
    Case("matmul_reduce_scatter-dgrad added", layout="dgrad", residual="fp32", publish=True),
)
REDUCE = Case("reduce", bias=True)
AWAIT_ROWS = Case("await_rows", wait=True)
PACED_COPY = Case("paced_copy")
# What kernels without a configuration do at a time.
_TILES = {
    REDUCE.kernel: f"{reduce.TILE_M}x{reduce.TILE_N}",
    AWAIT_ROWS.kernel: "-",
    PACED_COPY.kernel: f"{PIECE_BYTES} bytes",
}


def shipped(arch: Architecture) -> Iterator[tuple[Case, GemmConfig | None, str]]:
    """Every kernel, configuration and type for a chip; no configuration where the chip lacks the type."""
    for dtype, element_bytes in DTYPE_BYTES.items():
        for config in CONFIGS[arch.name].get(element_bytes, (None,)):
            for case in GEMM_CASES:
                # Backward is not done in fp8.
                if element_bytes > 1 or case.layout == "forward":
                    yield case, config, dtype
        if element_bytes > 1:
            yield REDUCE, None, dtype
    # It looks at flags alone.
    yield AWAIT_ROWS, None, "i32"
    # To it types differ by their bytes alone.
    yield PACED_COPY, None, "bf16"


def compile_row(case: Case, config: GemmConfig | None, dtype: str, arch: Architecture) -> Row:
    """Compiles one kernel and reads its machine code."""
    if dtype == "fp8e4nv" and not arch.has_fp8:
        reason = f"{dtype} {NOT_SUPPORTED.format(arch.name)}"
        return Row(case.kernel, "-", arch.name, dtype, 0, 0, 0, 0, 0, fits=False, reason=reason)
    try:
        compiled = compile_case(case, config, dtype, arch)
    # The compiler raises whatever its passes do; the row says it.
    except Exception as error:
        reason = f"does not compile: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        return Row(case.kernel, str(config), arch.name, dtype, 0, 0, 0, 0, 0, fits=False, reason=reason)
    code = assembly(compiled, arch)
    registers, spill_bytes = resources(code, arch)
    shared = compiled.metadata.shared
    reason = _why_not(case, config, dtype, arch, registers, spill_bytes, shared)
    return Row(
        case.kernel,
        _TILES.get(case.kernel, str(config)),
        arch.name,
        dtype,
        registers,
        spill_bytes,
        shared,
        count(code, r"v_mfma\w*" if arch.backend == "hip" else r"(HMMA|[HQ]GMMA|UTC\w*MMA)\S*"),
        count(code, r"\w+load\S*lds\S*" if arch.backend == "hip" else r"(LDGSTS|UTMALDG)\S*"),
        fits=not reason,
        reason=reason,
    )


def compile_case(case: Case, config: GemmConfig | None, dtype: str, arch: Architecture) -> Any:
    """The compiled kernel."""
    pointers: dict[str, str]
    if case == AWAIT_ROWS:
        constants = {"LANES": num_lanes(8, num_warps=1), "CLOCK": arch.backend == "cuda"}
        return compile_kernel(await_rows_kernel, _SIGNALS | {"status_ptr": "*i32"}, constants, arch, num_warps=1)
    if case == PACED_COPY:
        constants = {"ELEMENTS": PIECE_BYTES // DTYPE_BYTES[dtype], "CLOCK": arch.backend == "cuda"}
        pointers = dict.fromkeys(("source_ptr", "target_ptr"), f"*{dtype}")
        return compile_kernel(paced_copy_kernel, pointers, constants, arch, num_warps=NUM_WARPS)
    if config is None:
        pointers = dict.fromkeys(("partials_ptr", "bias_ptr", "y_ptr"), f"*{dtype}")
        constants = {"stride_pn": 1, "stride_yn": 1, "WORLD": 8, "TILE_M": reduce.TILE_M, "TILE_N": reduce.TILE_N}
        return compile_kernel(reduce.reduce_kernel, pointers, constants, arch)
    fp8 = dtype == "fp8e4nv"
    names = ("x_ptr", "w_ptr", "w1_ptr", "w2_ptr")[: 1 + case.num_weights]
    num_outputs = 1 if case.activation == "swiglu" else case.num_weights
    outputs = ("y_ptr", "y1_ptr", "y2_ptr")[:num_outputs]
    stored = "bf16" if fp8 else dtype
    pointers = dict.fromkeys(names, f"*{dtype}")
    pointers |= dict.fromkeys(outputs, f"*{case.output or stored}")
    if case.bias:
        pointers["bias_ptr"] = f"*{stored}"
    if case.residual is not None:
        pointers["residual_ptr"] = f"*{case.residual or stored}"
    if fp8:
        pointers |= dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32")
    if case.wait or case.publish:
        pointers |= _SIGNALS | {"status_ptr" if case.wait else "counters_ptr": "*i32"}
    loads = load_paths(case, config)
    for name, tile, load in [("x_ptr", config.tile_m, loads[0]), ("w_ptr", config.tile_n, loads[1])]:
        if load != "pointer":
            block = (tile, config.tile_k) if load == "tma" else (config.tile_k, tile)
            pointers[name] = f"tensordesc<{dtype}[{block[0]}, {block[1]}]>"
    constants = dict.fromkeys(LAYOUTS[case.layout], 1) | {
        **({"stride_rm": 0} if case.residual is None else {}),
        "stride_rn": int(case.residual is not None),
        **({} if case.num_weights > 1 else {"N1": 0}),
        **({} if case.num_weights > 2 else {"N2": 0}),
        **({} if num_outputs > 1 else {"stride_y1m": 0}),
        **({} if num_outputs > 2 else {"stride_y2m": 0}),
        "WAIT": case.wait,
        "PUBLISH": case.publish,
        "LANES": num_lanes(8, config.num_warps),
        "CLOCK": arch.backend == "cuda",
        "X_LOAD": loads[0],
        "W_LOAD": loads[1],
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "TILE_K": config.tile_k,
        "GROUP_M": config.group_m,
        "ACTIVATION": case.activation,
        "UPCAST": False,
    }
    return compile_kernel(
        gemm_kernel, pointers, constants, arch, num_warps=config.num_warps, num_stages=config.num_stages
    )


def load_paths(case: Case, config: GemmConfig) -> tuple[str, str]:
    """How x and w are loaded where strides are multiples of 16, as `gemm.choose_load` would have it."""
    if not config.tma:
        return "pointer", "pointer"
    x = "tma" if "stride_xk" in LAYOUTS[case.layout] else "tma_transposed"
    w = "tma" if "stride_wk" in LAYOUTS[case.layout] else "tma_transposed"
    return x, "pointer" if case.num_weights > 1 else w


def compile_kernel(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], arch: Architecture, **options: int
) -> Any:
    """Compiles as a launch would, with every pointer, size and stride that is not 1 a multiple of 16."""
    if INTERPRETED:
        raise RuntimeError("kernels: Triton interprets in this process; unset TRITON_INTERPRET to compile")
    signature, constexprs, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants or (name.endswith("_ptr") and name not in pointers):
            signature[name] = "constexpr"
            constexprs[name] = constants.get(name)
            continue
        signature[name] = pointers.get(name, "i32")
        if name in pointers or name in ("M", "N", "N1", "N2", "K") or name.startswith("stride"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    target = GPUTarget(arch.backend, arch.version, arch.warp_size)
    return triton.compile(ASTSource(kernel, signature, constexprs, attributes), target=target, options=options)


def assembly(compiled: Any, arch: Architecture) -> str:
    """The machine code as text, and what it needs of registers and memory."""
    if arch.backend == "hip":
        return compiled.asm["amdgcn"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", "--dump-resource-usage", str(cubin)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def count(code: str, instruction: str) -> int:
    return len(re.findall(rf"(?<![\w.]){instruction}", code))


def resources(code: str, arch: Architecture) -> tuple[int, int]:
    """Registers of a thread, and bytes that it keeps in memory because they were too few."""
    if arch.backend == "hip":
        # The first counts accumulation registers too.
        return _number(r"\.vgpr_count:\s+(\d+)", code), _number(r"\.private_segment_fixed_size:\s+(\d+)", code)
    return _number(r"REG:(\d+)", code), _number(r"STACK:(\d+)", code) + _number(r"LOCAL:(\d+)", code)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"kernels: the compiler's output holds no {pattern}")
    return int(found[1])


def _why_not(
    case: Case,
    config: GemmConfig | None,
    dtype: str,
    arch: Architecture,
    registers: int,
    spill_bytes: int,
    shared: int,
) -> str:
    """Why the kernel cannot be launched as it should be; empty if it can."""
    if config is not None and (reason := misfit(config, arch, DTYPE_BYTES[dtype])):
        return reason
    if shared > arch.shared_bytes:
        return f"needs {shared} bytes of shared memory, {arch.name} has {arch.shared_bytes}"
    threads = arch.warp_size * (4 if config is None else config.num_warps)
    if registers * threads > arch.registers:
        return f"needs {registers} registers in {threads} threads, {arch.name} has {arch.registers}"
    if spill_bytes:
        return f"{case.kernel} spills {spill_bytes} bytes a thread"
    return ""
