"""What is settled, said and written before any rank starts."""

from __future__ import annotations

from pathlib import Path

import torch

from fusedcomm.train import layout
from fusedcomm.train.config import Config, ConfigError, dump_config
from fusedcomm.train.launch import check_machine
from fusedcomm.train.place import Place


def settle_layout(config: Config, place: Place | None, *, fit: bool) -> Config:
    """The configuration on a layout that can run here, which the first rank prints.

    With `fit` it is changed to one that fits the machine's GPUs, or the ranks of a launcher.

    Raises:
        ConfigError: it cannot run here.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked = config.parallel_config
    available = place.world if place is not None else num_gpus
    if fit and available:
        config = layout.fit(config, available)
    world = config.parallel_config.world
    layout.validate_for_world(config, world if place is None else place.world)
    if place is None:
        check_machine(world)
    if place is None or place.rank == 0:
        changed = "" if config.parallel_config == asked else f" (fitted to {available} {'ranks' if place else 'GPUs'})"
        print(f"{layout.describe_layout(config)}{changed}", flush=True)
    return config


def save_resolved(config: Config) -> None:
    """Every key with its value, into the output folder; ConfigError where it cannot be written."""
    folder = Path(config.train.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            [f"train.output_dir: {folder} cannot be written ({error.strerror}); choose another folder"]
        ) from error
    print(f"resolved configuration: {folder / 'config.yaml'}", flush=True)
