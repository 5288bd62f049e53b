"""The machine code of the kernels, for GPUs that need not be here.

sm_90 is held to the rules with all kernels, the others with those that differ most, each with the first configuration
of its type; `fusedcomm kernels` compiles all of them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from triton.compiler import ASTSource

from fusedcomm.kernels import machine_code
from fusedcomm.kernels.config import ARCHITECTURES, CONFIGS, GemmConfig, fits
from fusedcomm.kernels.grid import count_programs
from fusedcomm.kernels.machine_code import (
    AWAIT_ROWS,
    GEMM_CASES,
    PACED_COPY,
    REDUCE,
    Case,
    assembly,
    compile_case,
    compile_row,
    count,
    load_paths,
    shipped,
)
from fusedcomm.kernels.paced_copy import NUM_WARPS, PIECE_BYTES
from fusedcomm.kernels.row import Row

CASES = {case.kernel: case for case in GEMM_CASES}
FIRST_LOAD = {"pointer": "cp.async.cg", "tma": "cp.async.bulk.tensor"}
POINTER = GemmConfig()
SM_90 = ARCHITECTURES["sm_90"]


@pytest.fixture(autouse=True, scope="module")
def _compile_anew(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def check_row(row: Row):
    assert row.fits, row
    assert row.spill_bytes == 0, row
    if row.dtype != "fp32":
        assert row.tensor_core_ops > 0, row
    # gfx942's compiler loads through registers.
    if row.target != "gfx942":
        assert row.async_loads > 0, row


@pytest.mark.parametrize("kernel", CASES)
def test_every_kernel_runs_on_sm_90(kernel):
    check_row(compile_row(CASES[kernel], CONFIGS["sm_90"][2][0], "bf16", SM_90))


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
@pytest.mark.parametrize("kernel", ["all_gather_matmul-swiglu", "matmul_reduce_scatter-dgrad"])
def test_kernels_run_on_other_targets(target, kernel):
    check_row(compile_row(CASES[kernel], CONFIGS[target][2][0], "bf16", ARCHITECTURES[target]))


@pytest.mark.parametrize("target", ARCHITECTURES)
def test_every_type_runs_or_says_why_not(target):
    arch = ARCHITECTURES[target]
    for dtype, element_bytes in {"fp32": 4, "fp16": 2, "fp8e4nv": 1}.items():
        config = CONFIGS[target].get(element_bytes, (None,))[0]
        row = compile_row(CASES["all_gather_matmul"], config, dtype, arch)
        if dtype == "fp8e4nv" and target in ("sm_80", "gfx942"):
            assert not row.fits
            assert not row.is_wrong
            assert row.reason == f"fp8e4nv is not supported on {target}"
        else:
            check_row(row)


@pytest.mark.parametrize("target", ARCHITECTURES)
def test_reduce_runs_without_spilling(target):
    row = compile_row(REDUCE, None, "bf16", ARCHITECTURES[target])
    assert row.fits
    assert row.spill_bytes == 0


@pytest.mark.parametrize("target", ARCHITECTURES)
def test_copies_need_few_registers(target):
    arch = ARCHITECTURES[target]
    row = compile_row(PACED_COPY, None, "bf16", arch)
    assert row.fits
    # Several programs share an SM, or they could not keep up with a link.
    assert row.registers <= 64
    if arch.backend == "cuda":
        code = assembly(compile_case(PACED_COPY, None, "bf16", arch), arch)
        assert count(code, r"LDG\.E\.128") == count(code, r"STG\.E\.128") == PIECE_BYTES // (NUM_WARPS * 32 * 16)


@pytest.mark.parametrize("target", ARCHITECTURES)
def test_the_wait_alone_runs_in_one_warp(target):
    arch = ARCHITECTURES[target]
    row = compile_row(AWAIT_ROWS, None, "i32", arch)
    assert row.fits
    assert row.spill_bytes == 0
    if arch.backend == "cuda":
        ptx = compile_case(AWAIT_ROWS, None, "i32", arch).asm["ptx"]
        assert 0 < ptx.find("ld.acquire.sys.global") < ptx.rfind("%globaltimer")


def test_products_of_sm_90_overlap_with_the_loads_of_the_next_steps():
    for kernel in ("all_gather_matmul", "matmul_reduce_scatter"):
        compiled = compile_case(CASES[kernel], POINTER, "bf16", SM_90)
        assert count(assembly(compiled, SM_90), "HGMMA") > 0
        # One product is in flight while the next is issued, and two steps of loads are.
        assert "wgmma.wait_group.sync.aligned 1" in compiled.asm["ptx"]
        assert re.search(r"cp\.async\.wait_group\s+2;", compiled.asm["ptx"])


@pytest.mark.parametrize("config", [CONFIGS["sm_90"][2][0], POINTER], ids=str)
def test_the_wait_hook_costs_no_asynchronous_load(config):
    plain, waiting = (compile_row(case, config, "bf16", SM_90) for case in hooked("gemm", wait=True))
    assert plain.async_loads == waiting.async_loads > 0


def hooked(kernel: str, **hook: bool) -> tuple[Case, Case]:
    return CASES[kernel], replace(CASES[kernel], **hook)


@pytest.mark.parametrize("config", [CONFIGS["sm_90"][2][0], POINTER], ids=str)
def test_the_spin_comes_before_the_loads(config):
    case = CASES["all_gather_matmul"]
    ptx = compile_case(case, config, "bf16", SM_90).asm["ptx"]
    first_load = ptx.find(FIRST_LOAD[load_paths(case, config)[0]])
    assert 0 < ptx.rfind("ld.acquire.sys.global") < first_load
    # It is bounded by the clock, and TMA reads after what it acquired.
    assert 0 < ptx.find("%globaltimer") < first_load
    if config.tma:
        assert ptx.rfind("ld.acquire.sys.global") < ptx.find("fence.proxy.async.global") < first_load


@pytest.mark.parametrize("release", ["atom.global.gpu.acq_rel.add", "atom.global.sys.release.exch"])
def test_a_barrier_stands_between_the_last_store_and_a_release(release):
    ptx = compile_case(CASES["matmul_reduce_scatter"], POINTER, "bf16", SM_90).asm["ptx"]
    assert ptx.count(release) == 1
    before = ptx[: ptx.find(release)]
    assert 0 < before.rfind("st.global") < before.rfind("bar.sync")


@pytest.mark.parametrize("config", [GemmConfig(num_warps=4), GemmConfig(num_stages=5)], ids=["registers", "shared"])
def test_what_is_said_not_to_fit_does_not(config):
    assert not fits(config, SM_90, 2)
    row = compile_row(CASES["gemm-dgrad"], config, "bf16", SM_90)
    assert row.spill_bytes > 0 or row.shared_bytes > SM_90.shared_bytes
    assert row.is_wrong


def unaligned(kernel, signature, constants, attributes):
    return ASTSource(kernel, signature, constants, {})


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_programs_are_resident_whose_operands_are_not_aligned(target):
    arch, config, shared_bytes = ARCHITECTURES[target], CONFIGS[target][4][0], 233472
    sm = SimpleNamespace(gcnArchName=target, major=arch.version // 10, minor=0, multi_processor_count=1)
    sm.shared_memory_per_multiprocessor = shared_bytes
    programs, _ = count_programs(config, sm, element_bytes=4, communication_sms=0)
    with patch.object(machine_code, "ASTSource", unaligned):
        row = compile_row(CASES["all_gather_matmul"], config, "fp32", arch)
    # They are given out by eights.
    registers = -(-row.registers // 8) * 8
    assert programs * registers * config.num_warps * arch.warp_size <= arch.registers
    assert programs * row.shared_bytes <= shared_bytes


def test_every_target_ships_every_kernel():
    for arch in ARCHITECTURES.values():
        rows = list(shipped(arch))
        assert {case.kernel for case, _, _ in rows} == {*CASES, "reduce", "await_rows", "paced_copy"}
        assert {dtype for _, _, dtype in rows} == {"fp32", "bf16", "fp16", "fp8e4nv", "i32"}
