"""The machine code of the kernels, for a GPU that need not be here."""

from __future__ import annotations

import re
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedcomm.kernels._triton import INTERPRETED, triton
from fusedcomm.kernels.config import GemmConfig
from fusedcomm.kernels.gemm import gemm_kernel
from fusedcomm.kernels.reduce import TILE_M, TILE_N, reduce_kernel

H100 = GPUTarget("cuda", 90, 32)
H100_SHARED_BYTES = 232448
CONFIG = GemmConfig()
# Which strides are 1: of x [M, K], w [N, K], y [M, N] as they are, and of the transposed views of backward.
FORWARD = ("stride_xk", "stride_wk", "stride_yn")
DGRAD = ("stride_xk", "stride_wn", "stride_yn")
WGRAD = ("stride_xm", "stride_wn", "stride_yn")
CHUNKS = {"chunk_starts_ptr": "*i64", "flags_ptr": "*i32", "epoch_ptr": "*i32"}


@pytest.fixture(autouse=True)
def _compile_anew(tmp_path, monkeypatch):
    assert not INTERPRETED, "unset TRITON_INTERPRET: these tests compile"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_for_h100(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """Compiles as a launch would, with every pointer, size and stride that is not 1 a multiple of 16."""
    signature, constexprs, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants or (name.endswith("_ptr") and name not in pointers):
            signature[name] = "constexpr"
            constexprs[name] = constants.get(name)
            continue
        signature[name] = pointers.get(name, "i32")
        if name in pointers or name in ("M", "N", "K") or name.startswith("stride"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constexprs, attributes), target=H100, options=options)


def compile_gemm(
    *,
    dtype: str = "bf16",
    layout: tuple[str, ...] = FORWARD,
    bias: bool = False,
    activation: str | None = None,
    wait: bool = False,
    publish: bool = False,
) -> Any:
    pointers = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr", *(["bias_ptr"] if bias else [])), f"*{dtype}")
    if wait or publish:
        pointers |= CHUNKS | {"status_ptr" if wait else "counters_ptr": "*i32"}
    constants = dict.fromkeys(layout, 1) | {
        "WAIT": wait,
        "PUBLISH": publish,
        "MAX_CHUNKS": 8,
        "TILE_M": CONFIG.tile_m,
        "TILE_N": CONFIG.tile_n,
        "TILE_K": CONFIG.tile_k,
        "GROUP_M": CONFIG.group_m,
        "ACTIVATION": activation,
        "UPCAST": False,
    }
    return compile_for_h100(gemm_kernel, pointers, constants, num_warps=CONFIG.num_warps, num_stages=CONFIG.num_stages)


def count(instruction: str, compiled: Any) -> int:
    return len(re.findall(rf"\b{instruction}\b", compiled.asm["sass"]))


# What the layers launch: bias and activation go with the all-gather, never with the reduce-scatter or backward.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"bias": True, "activation": "gelu"}, id="plain"),
        pytest.param({"bias": True, "activation": "silu", "wait": True}, id="all_gather"),
        pytest.param({"bias": True, "activation": "silu", "wait": True, "dtype": "fp16"}, id="all_gather-fp16"),
        pytest.param({"publish": True}, id="reduce_scatter"),
        pytest.param({"layout": DGRAD, "wait": True}, id="all_gather-dgrad"),
        pytest.param({"layout": DGRAD, "publish": True}, id="reduce_scatter-dgrad"),
        pytest.param({"layout": WGRAD}, id="wgrad"),
    ],
)
def test_gemm_runs_on_tensor_cores_without_spilling(case):
    compiled = compile_gemm(**case)
    assert count("HGMMA[^ ]*", compiled) > 0
    # Spilled registers are stored to and loaded from local memory.
    assert count("STL[^ ]*", compiled) == count("LDL[^ ]*", compiled) == 0
    # Loads are asynchronous, and one product is in flight while the next is issued: the loop is pipelined.
    assert count("LDGSTS[^ ]*", compiled) > 0
    assert "wgmma.wait_group.sync.aligned 1" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= H100_SHARED_BYTES


def test_wait_comes_before_the_loads():
    ptx = compile_gemm(wait=True).asm["ptx"]
    assert 0 < ptx.rfind("ld.global.sys.acquire") < ptx.find("cp.async.cg")


@pytest.mark.parametrize("release", ["atom.global.gpu.acq_rel.add", "atom.global.sys.release.exch"])
def test_a_barrier_stands_between_the_last_store_and_a_release(release):
    ptx = compile_gemm(publish=True).asm["ptx"]
    assert ptx.count(release) == 1
    before = ptx[: ptx.find(release)]
    assert 0 < before.rfind("st.global") < before.rfind("bar.sync")


def test_reduce_compiles_without_spilling():
    pointers = {"partials_ptr": "*bf16", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    constants = {"stride_pn": 1, "stride_yn": 1, "WORLD": 8, "TILE_M": TILE_M, "TILE_N": TILE_N}
    compiled = compile_for_h100(reduce_kernel, pointers, constants)
    assert count("STL[^ ]*", compiled) == count("LDL[^ ]*", compiled) == 0
