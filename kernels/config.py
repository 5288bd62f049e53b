"""How a GEMM is cut into tiles, what a chip offers for it, and the cuts that are known to be good ones."""

from __future__ import annotations

from dataclasses import dataclass, field

# On an H200 a reduce-scatter's kernel lost 10 to 19 % where a wave spanned 256 rows, and 2 % where it spanned these.
_WAVE_ROWS = 512


@dataclass(frozen=True)
class GemmConfig:
    """Tile sizes and the resources of one program; the defaults fit sm_90 without spilling registers.

    Attributes:
        tile_m, tile_n: rows and columns of the output that one program computes at a time.
        tile_k: depth of one step of its inner loop.
        group_m: tile rows visited together, column by column, so that the weights they share stay in L2.
        num_warps: warps of a program.
        num_stages: steps of the inner loop whose loads are in flight at once.
        tma: whether operands are loaded through TMA descriptors (sm_90 and later) where their strides allow it.
        speed: how fast a grid computes that is full of such tiles, next to the fastest of the same table.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    tma: bool = False
    speed: float = field(default=1.0, compare=False)

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k"):
            value = getattr(self, name)
            # Tensor cores work on at least 16 of each.
            if value < 16 or value & (value - 1):
                raise ValueError(f"GemmConfig: {name}={value}; tiles are powers of two from 16; use 16, 32, 64, ...")
        if self.num_warps < 1 or self.num_warps & (self.num_warps - 1):
            raise ValueError(f"GemmConfig: num_warps={self.num_warps}; warps are a power of two; use 4 or 8")
        for name in ("group_m", "num_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"GemmConfig: {name}={getattr(self, name)}; must be at least 1")

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n}x{self.tile_k} w{self.num_warps} s{self.num_stages}{' tma' * self.tma}"

    def group_for(self, chunk_rows: int, num_tiles_n: int, num_programs: int) -> int:
        """Tile rows to visit together when rows arrive or leave `chunk_rows` at a time.

        A larger group would make the first programs wait for later chunks, or finish no chunk until the end. With a
        smaller one a wave of `num_programs` tiles may span too few rows, and reads more weights than memory brings.
        """
        spanned = num_programs // num_tiles_n
        at_least = 1 if spanned * self.tile_m >= _WAVE_ROWS else _WAVE_ROWS // self.tile_m
        return max(1, min(self.group_m, max(at_least, chunk_rows // self.tile_m)))


@dataclass(frozen=True)
class Architecture:
    """What one program can have on a chip.

    Attributes:
        name: as in `fusedcomm kernels --target`.
        backend, version: Triton's names of it.
        warp_size: threads of a warp.
        shared_bytes: the most shared memory of one program.
        registers: 32-bit registers of one SM or compute unit.
        thread_registers: the most registers of one thread.
        resident_operands: whether operands of a product need registers, and one stage less is kept in shared memory.
        fp8_accumulators: accumulators that a product of fp8 e4m3 (as OCP defines it) needs; 0 where there is none.
    """

    name: str
    backend: str
    version: int | str
    warp_size: int
    shared_bytes: int
    registers: int
    thread_registers: int
    resident_operands: bool
    fp8_accumulators: int

    @property
    def has_tma(self) -> bool:
        return self.backend == "cuda" and not self.resident_operands

    @property
    def has_fp8(self) -> bool:
        return self.fp8_accumulators > 0


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("sm_80", "cuda", 80, 32, 166912, 65536, 255, resident_operands=True, fp8_accumulators=0),
        Architecture("sm_90", "cuda", 90, 32, 232448, 65536, 255, resident_operands=False, fp8_accumulators=2),
        Architecture("sm_100", "cuda", 100, 32, 232448, 65536, 255, resident_operands=False, fp8_accumulators=1),
        # Its own fp8 formats are the "fnuz" ones, which hold other numbers.
        Architecture("gfx942", "hip", "gfx942", 64, 65536, 131072, 512, resident_operands=True, fp8_accumulators=0),
    )
}

# By the bytes of an element, the fastest first; smaller tiles are there for GEMMs that would leave much of their last
# wave idle. NVIDIA's fp32 does without tensor cores, which would round it to tf32.
_FP32 = (GemmConfig(64, 64, 32, num_warps=4),)
# Speeds are those of an H200, at the shapes of the GPU benchmark.
_HALF = (
    GemmConfig(128, 256, 64, num_stages=4, tma=True),
    GemmConfig(128, 128, 64, num_warps=4, num_stages=4, tma=True, speed=0.92),
    GemmConfig(64, 128, 64, num_warps=4, num_stages=6, tma=True, speed=0.79),
)
CONFIGS: dict[str, dict[int, tuple[GemmConfig, ...]]] = {
    "sm_80": {4: _FP32, 2: (GemmConfig(128, 128, 64), GemmConfig(64, 128, 64, num_warps=4, speed=0.9))},
    "sm_90": {
        4: (GemmConfig(64, 64, 16, num_warps=4),),
        2: _HALF,
        1: (GemmConfig(128, 128, 128, tma=True),),
    },
    # Its compiler spills registers of the smallest tiles.
    "sm_100": {4: _FP32, 2: _HALF[:2], 1: (GemmConfig(128, 256, 128, tma=True),)},
    "gfx942": {
        4: (GemmConfig(64, 64, 16, num_warps=4, num_stages=2),),
        2: (
            GemmConfig(128, 128, 64, num_stages=2),
            GemmConfig(64, 128, 64, num_warps=4, num_stages=2, speed=0.9),
        ),
    },
}

# In the interpreter a step of a tile takes as long whatever its size, and what is tested has few rows.
INTERPRETER = GemmConfig(32, 64, 64, group_m=2)

# Registers besides accumulators and addresses, as compilers were seen to take: loop counters, masks, strides, and
# where operands pass through registers those too.
_OTHER_REGISTERS = {False: 90, True: 110}


def architecture(name: str) -> Architecture:
    """The chip of that name; ValueError names those that are known."""
    if name not in ARCHITECTURES:
        raise ValueError(f"kernels: target {name!r} is unknown; use one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def shared_bytes(config: GemmConfig, arch: Architecture, element_bytes: int) -> int:
    """Shared memory of one program: both operands of the steps in flight."""
    # Where operands pass through registers, those of the step that is computed have left shared memory.
    stages = max(1, config.num_stages - arch.resident_operands)
    return stages * (config.tile_m + config.tile_n) * config.tile_k * element_bytes


def thread_registers(config: GemmConfig, arch: Architecture, element_bytes: int) -> int:
    """An estimate of the registers of one thread: fp32 accumulators, addresses of 16-byte loads, and the rest."""
    threads = config.num_warps * arch.warp_size
    accumulators = config.tile_m * config.tile_n // threads * (arch.fp8_accumulators if element_bytes == 1 else 1)
    loads = (config.tile_m + config.tile_n) * config.tile_k * element_bytes // 16 // threads
    return accumulators + 2 * loads + _OTHER_REGISTERS[arch.resident_operands]


def misfit(config: GemmConfig, arch: Architecture, element_bytes: int) -> str | None:
    """Why the configuration cannot run well on the chip: the value and its limit; None if it can."""
    if element_bytes == 1 and not arch.has_fp8:
        return f"fp8e4nv is not supported on {arch.name}"
    if config.tma and not arch.has_tma:
        return f"{config} loads through TMA descriptors, which {arch.name} has not"
    shared = shared_bytes(config, arch, element_bytes)
    if shared > arch.shared_bytes:
        return f"{config} needs {shared} bytes of shared memory, {arch.name} has {arch.shared_bytes}"
    registers = thread_registers(config, arch, element_bytes)
    limit = min(arch.thread_registers, arch.registers // (config.num_warps * arch.warp_size))
    if registers > limit:
        return f"{config} needs about {registers} registers a thread, {arch.name} has {limit}"
    return None


def fits(config: GemmConfig, arch: Architecture, element_bytes: int) -> bool:
    """Whether the configuration has enough shared memory, and registers so that none is spilled."""
    return misfit(config, arch, element_bytes) is None


def check_fits(config: GemmConfig, arch: Architecture, element_bytes: int) -> None:
    """Raises ValueError, naming the value and the limit, unless the configuration fits."""
    reason = misfit(config, arch, element_bytes)
    if reason is not None:
        known = " or ".join(str(config) for config in CONFIGS[arch.name].get(element_bytes, ())) or "another type"
        raise ValueError(f"GemmConfig: {reason}; use {known}")
