"""What fits a chip, and how many programs run on it at once."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from fusedcomm.comm.exchanged import _nccl_sms
from fusedcomm.kernels.config import ARCHITECTURES, CONFIGS, GemmConfig, architecture, check_fits, fits, shared_bytes
from fusedcomm.kernels.grid import Grid, architecture_of, count_programs, relative_time

H100 = SimpleNamespace(
    gcnArchName="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_multiprocessor=233472,
)


def test_every_shipped_configuration_fits_its_chip():
    for name, by_size in CONFIGS.items():
        for element_bytes, configs in by_size.items():
            assert configs
            assert all(fits(config, ARCHITECTURES[name], element_bytes) for config in configs)


def test_shared_memory_is_that_of_the_steps_in_flight():
    # As the compiler says, less the barriers of TMA.
    assert shared_bytes(GemmConfig(), ARCHITECTURES["sm_90"], 2) == 147456
    assert shared_bytes(GemmConfig(128, 128, 64), ARCHITECTURES["sm_80"], 2) == 65536


@pytest.mark.parametrize(
    ("config", "target", "element_bytes", "message"),
    [
        (GemmConfig(num_stages=5), "sm_90", 2, "245760 bytes of shared memory, sm_90 has 232448; use 128x256x64 w8"),
        (GemmConfig(num_warps=4), "sm_90", 2, "registers a thread, sm_90 has 255"),
        (GemmConfig(), "sm_80", 2, "registers a thread, sm_80 has 255; use 128x128x64 w8 s3 or 64x128x64 w4 s3"),
        (GemmConfig(128, 128, 64, num_stages=4), "gfx942", 2, "98304 bytes of shared memory, gfx942 has 65536"),
        (GemmConfig(128, 128, 64, tma=True), "sm_80", 2, "TMA descriptors, which sm_80 has not"),
        (GemmConfig(128, 128, 128), "sm_80", 1, "fp8e4nv is not supported on sm_80; use another type"),
        (GemmConfig(128, 256, 128), "sm_90", 1, "registers a thread, sm_90 has 255"),
    ],
)
def test_what_does_not_fit_names_value_and_limit(config, target, element_bytes, message):
    with pytest.raises(ValueError, match="GemmConfig: .*" + message):
        check_fits(config, ARCHITECTURES[target], element_bytes)


def test_an_unknown_chip_is_named():
    with pytest.raises(ValueError, match="target 'sm_70' is unknown; use one of sm_80, sm_90, sm_100, gfx942"):
        architecture("sm_70")
    with pytest.raises(ValueError, match="'sm_120' is unknown"):
        architecture_of(SimpleNamespace(gcnArchName="NVIDIA RTX", major=12, minor=0))


def test_a_chip_is_recognised_by_its_properties():
    assert architecture_of(H100).name == "sm_90"
    assert architecture_of(SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)).name == "gfx942"


@pytest.mark.parametrize(
    ("config", "communication_sms", "programs"),
    [
        (GemmConfig(), 0, 132),
        (GemmConfig(), 20, 112),
        # Two programs of this size share an SM.
        (GemmConfig(64, 64, 64, num_warps=4), 12, 2 * 120),
    ],
)
def test_programs_are_those_resident_on_the_sms_left(config, communication_sms, programs):
    assert count_programs(config, H100, element_bytes=2, communication_sms=communication_sms)[0] == programs


@pytest.mark.parametrize(("capability", "sms"), [((8, 0), 16), ((9, 0), 32), ((10, 0), 32)])
def test_nccl_is_left_sms_for_four_programs_on_one_gpc(capability, sms):
    # More than three on each of eight GPCs.
    assert capability < (9, 0) or sms > 8 * 3
    with patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        assert _nccl_sms(torch.device("cuda", 0)) == sms


@pytest.mark.parametrize("communication_sms", [132, -1])
def test_a_grid_needs_an_sm(communication_sms):
    with pytest.raises(ValueError, match=rf"communication_sms={communication_sms} of 132; must be 0 to 131"):
        count_programs(GemmConfig(), H100, element_bytes=2, communication_sms=communication_sms)


def test_a_configuration_that_does_not_fit_gets_no_grid():
    with pytest.raises(ValueError, match="registers a thread"):
        count_programs(GemmConfig(num_warps=4), H100, element_bytes=2, communication_sms=0)


@pytest.mark.parametrize(
    ("rows", "columns", "tiles"),
    [
        # Measured on an H200, each the fastest of the table.
        (8192, (16384,), (128, 256)),
        (4096, (3584,), (128, 128)),
        (2048, (6656,), (128, 128)),
        (512, (1792,), (64, 128)),
    ],
)
def test_smaller_tiles_where_larger_ones_leave_the_last_wave_idle(rows, columns, tiles):
    grids = [
        Grid(config, count_programs(config, H100, element_bytes=2, communication_sms=0)[0])
        for config in CONFIGS["sm_90"][2]
    ]
    config = min(grids, key=lambda grid: relative_time(grid, rows, columns)).config
    assert (config.tile_m, config.tile_n) == tiles


@pytest.mark.parametrize(
    ("chunk_rows", "num_tiles_n", "group_m"),
    [
        # A wave of 132 tiles spans 5 tile rows by itself, or 2 unless they are grouped.
        (256, 26, 2),
        (256, 64, 4),
        (64, 64, 4),
        (512, 64, 4),
        (4096, 64, 8),
    ],
)
def test_groups_keep_to_chunks_unless_a_wave_would_span_too_few_rows(chunk_rows, num_tiles_n, group_m):
    assert GemmConfig().group_for(chunk_rows, num_tiles_n, 132) == group_m
