"""The command `fusedcomm`: everything that can be wrong is said in one line each before any process starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from fusedcomm.train.config import Config
    from fusedcomm.train.launch import Place

app = typer.Typer(
    help="Train Transformers on a pipeline x data x tensor-parallel mesh whose communication hides behind computation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, such as examples/quickstart.yaml.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in train.steps=100; repeatable.")
]
Fit = Annotated[
    bool, typer.Option("--fit", help="Change the layout to one that fits the GPUs, or the ranks of a launcher.")
]


@dataclass(frozen=True)
class _Run:
    """A configuration found good, and this process's place among the ranks (None: they are still to start)."""

    config: Config
    place: Place | None

    @property
    def is_first(self) -> bool:
        return self.place is None or self.place.rank == 0


@app.callback()
def _commands() -> None:
    # A callback keeps the commands' names even if there is but one.
    pass


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|PATH", help="Go on from train.output_dir's newest checkpoint, or from this one."),
    ] = None,
    fit: Fit = False,
) -> None:
    """Train CONFIG's model.

    Starts the ranks itself on one machine; under torchrun, mpirun or srun it is one of theirs:

        torchrun --nproc-per-node 8 -m fusedcomm train CONFIG
    """
    from fusedcomm.train.config import ConfigError
    from fusedcomm.train.prepare import save_resolved

    run = _prepare(config, overrides, fit)
    if resume is not None and resume != "auto" and not (Path(resume) / "progress.json").is_file():
        what = "holds no complete checkpoint" if Path(resume).is_dir() else "there is no such folder"
        _refuse(run.place, [f"--resume {resume}: {what}; give a checkpoint's folder (step-XXXXXXXX), or auto"])
    if run.is_first:
        try:
            save_resolved(run.config)
        except ConfigError as error:
            _refuse(run.place, error.lines)
    raise typer.Exit(_run(run, _train_rank, run.config, resume))


@app.command()
def verify(
    config: ConfigPath,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 3,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every difference to this file too.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    fit: Fit = False,
) -> None:
    """Compare CONFIG's mesh with a single process, step by step from identical weights.

    Prints losses and gradient differences; the exit code is 1 where they exceed what rounding explains.
    """
    from fusedcomm.train.modes import comparison_problems

    run = _prepare(config, overrides, fit)
    if lines := list(comparison_problems(run.config)):
        _refuse(run.place, [f"{config}: {line}" for line in lines])
    _check_outputs(run, json_path, None)
    raise typer.Exit(_run(run, _verify_rank, run.config, steps, json_path))


@app.command()
def trace(
    config: ConfigPath,
    steps: Annotated[int, typer.Option(min=1, help="Train so many steps and draw the last.")] = 3,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Chrome trace, for Perfetto or chrome://tracing.")
    ] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Picture (PNG, SVG, PDF).")] = None,
    overrides: Overrides = [],  # noqa: B006
    fit: Fit = False,
) -> None:
    """Draw what every rank computes, waits for and sends during one training step of CONFIG."""
    run = _prepare(config, overrides, fit)
    if json_path is None and plot_path is None:
        _refuse(run.place, ["trace: nothing to write; give --json FILE, --plot FILE or both"])
    _check_outputs(run, json_path, plot_path)
    raise typer.Exit(_run(run, _trace_rank, run.config, steps, json_path, plot_path))


@app.command()
def plan(
    config: ConfigPath,
    cluster_path: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="FILE", help="YAML that describes the machines; else these are measured."),
    ] = None,
    num_ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="To measure; by default one per GPU, or as CONFIG has them.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 10,
    tries: Annotated[
        int, typer.Option("--try", min=0, help="Time so many of the best in training steps on this machine.")
    ] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the cluster and the layouts to this file.")
    ] = None,
    best_path: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write CONFIG with the fastest layout to this file.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Predict which layout of CONFIG's model is fastest on a cluster, among all that fit its memory.

    Samples a step, and all else that changes what is learned, stay as CONFIG has them.
    """
    from fusedcomm.plan.command import PlanRequest, run
    from fusedcomm.train.config import ConfigError

    place, loaded = _load(config, overrides)
    request = PlanRequest(config, cluster_path, num_ranks, top, tries, json_path, best_path)
    try:
        code = run(request, loaded, place)
    except ConfigError as error:
        _refuse(place, error.lines)
    raise typer.Exit(code)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A checkpoint, or a folder of transformers' model.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder to write, which must not exist.")],
    dtype: Annotated[str, typer.Option(metavar="fp32|bf16|fp16", help="Of the weights for transformers.")] = "fp32",
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, help="Of our checkpoint, padded: the ranks must divide it.")
    ] = None,
) -> None:
    """Write a checkpoint as a model that Hugging Face transformers read, or such a model as a checkpoint.

    Training begins with a converted model's weights by --resume TARGET.
    """
    from fusedcomm.train.convert import convert as run

    try:
        print(run(source, target, dtype=dtype, vocab_size=vocab_size))
    except (ValueError, OSError) as error:
        _refuse(None, [str(error)])


@app.command()
def doctor(
    num_ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="To start; by default one per GPU, or two.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for a rank.")] = 60.0,
) -> None:
    """Examine the ranks that start here, or that a launcher has started: versions, links, what can run.

        srun --ntasks-per-node 8 fusedcomm doctor

    The exit code is 1 where something would keep them from training together.
    """
    import torch

    from fusedcomm.train.launch import check_machine, on_ranks
    from fusedcomm.train.place import find_place
    from fusedcomm.train.sections import ConfigError

    try:
        place = find_place(os.environ)
        world = num_ranks or (torch.cuda.device_count() if torch.cuda.is_available() else 2)
        if place is None:
            check_machine(world)
    except ConfigError as error:
        _refuse(None, error.lines)
    except ValueError as error:
        _refuse(None, [str(error)])
    raise typer.Exit(on_ranks(_doctor_rank, (timeout_s,), place, world=world, describe_rank=lambda rank: f"of {world}"))


@app.command()
def kernels(
    target: Annotated[str, typer.Option(metavar="NAME", help="sm_80, sm_90, sm_100 or gfx942.")],
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the rows to this file too.")
    ] = None,
) -> None:
    """Compile every kernel for a GPU that need not be here, and say whether it can run there.

    The exit code is 1 where a kernel does not fit that should.
    """
    from fusedcomm.kernels.report import compile_all, print_rows, write_json

    try:
        rows = list(compile_all(target))
    except (ValueError, ModuleNotFoundError) as error:
        _refuse(None, [str(error)])
    print_rows(rows)
    if json_path is not None:
        try:
            write_json(rows, json_path)
        except OSError as error:
            _refuse(None, [f"--json {json_path}: cannot be written ({error.strerror}); choose another file"])
    raise typer.Exit(any(row.is_wrong for row in rows))


@app.command()
def bench(
    op: Annotated[
        str,
        typer.Argument(
            metavar="OP",
            help="all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, all_reduce, mlp, attention, gradients, "
            "train_step.",
        ),
    ],
    world: Annotated[int, typer.Option(help="Ranks, each on a core of this machine.")] = 2,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes that hold the ranks, with a link each; by default one per rank.")
    ] = None,
    link: Annotated[
        str,
        typer.Option(
            metavar="GBIT|balanced|half|double|loopback",
            help="Rate of every rank's link; balanced: that at which the wire takes as long as the GEMM.",
        ),
    ] = "balanced",
    dtype: Annotated[str, typer.Option(metavar="fp32|bf16|fp16")] = "fp32",
    shape: Annotated[str | None, typer.Option(metavar="M,N,K", help="The GEMM that one rank runs.")] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="PPxDPxTP", help="Of train_step's ranks: pipeline x data x tensor.")
    ] = None,
    methods: Annotated[str | None, typer.Option(metavar="A,B,...", help="Time these only.")] = None,
    rounds: Annotated[int, typer.Option(help="At least so many; more while the quartiles are apart.")] = 9,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the rows to this file.")
    ] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Picture (PNG, SVG, PDF).")] = None,
) -> None:
    """Time OP by every method, ours and torch's, over links of a given rate between processes of this machine.

    Shaped links are network namespaces, which need Linux, root and iproute2; --link loopback needs nothing.
    """
    from fusedcomm.bench.harness import Request, run

    request = Request(op, world, link, dtype, shape, methods, rounds, json_path, plot_path, nodes, layout)
    raise typer.Exit(run(request))


def main() -> None:
    """The console script."""
    app(prog_name="fusedcomm")


def _prepare(path: Path, overrides: list[str], fit: bool) -> _Run:
    """Read and check everything; on a mistake print it and exit with code 2."""
    from fusedcomm.train.config import ConfigError
    from fusedcomm.train.data import open_data
    from fusedcomm.train.prepare import settle_layout

    place, config = _load(path, overrides)
    try:
        config = settle_layout(config, place, fit=fit)
        # Reads little, except that a tokenizer works here, once, for all ranks.
        open_data(config)
    except ConfigError as error:
        _refuse(place, [f"{path}: {line}" for line in error.lines])
    return _Run(config, place)


def _load(path: Path, overrides: list[str]) -> tuple[Place | None, Config]:
    """Our place among a launcher's ranks, and the configuration; on a mistake print it and exit with code 2."""
    from fusedcomm.train.config import ConfigError, load_config
    from fusedcomm.train.launch import start_fork_server
    from fusedcomm.train.place import find_place

    try:
        place = find_place(os.environ)
    except ValueError as error:
        _refuse(None, [str(error)])
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        _refuse(place, [f"{path}: {line}" for line in error.lines])
    if place is None:
        # It imports while the checks go on.
        start_fork_server()
    return place, config


def _refuse(place: Place | None, lines: list[str]) -> NoReturn:
    if place is None or place.rank == 0:
        for line in lines:
            print(line, file=sys.stderr)
    raise typer.Exit(2)


def _check_outputs(run: _Run, json_path: Path | None, plot_path: Path | None) -> None:
    from fusedcomm.train.outputs import output_problems

    # Those that are the first rank's to write, on its machine.
    if run.is_first and (lines := list(output_problems(json_path=json_path, plot_path=plot_path))):
        _refuse(run.place, lines)


def _run(run: _Run, task: Callable[..., int | None], *args: Any) -> int:
    from fusedcomm.train.launch import on_ranks
    from fusedcomm.train.layout import coordinates

    parallel = run.config.parallel_config
    return on_ranks(task, args, run.place, world=parallel.world, describe_rank=lambda rank: coordinates(parallel, rank))


def _train_rank(config: Config, resume: str | None) -> None:
    from fusedcomm.train.loop import train
    from fusedcomm.train.place import init_distributed

    train(config, resume=resume, device=init_distributed(config.train.startup_timeout_s))


def _verify_rank(config: Config, steps: int, json_path: Path | None) -> int:
    from fusedcomm.train.place import init_distributed
    from fusedcomm.train.verify import verify

    return verify(config, steps=steps, json_path=json_path, device=init_distributed(config.train.startup_timeout_s))


def _trace_rank(config: Config, steps: int, json_path: Path | None, plot_path: Path | None) -> None:
    from fusedcomm.train.place import init_distributed
    from fusedcomm.train.trace import trace

    device = init_distributed(config.train.startup_timeout_s)
    trace(config, steps=steps, json_path=json_path, plot_path=plot_path, device=device)


def _doctor_rank(timeout_s: float) -> int:
    from fusedcomm.train.doctor import examine
    from fusedcomm.train.place import init_distributed

    return examine(timeout_s=timeout_s, device=init_distributed(timeout_s))
