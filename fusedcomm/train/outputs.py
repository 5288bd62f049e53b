"""Files that a command writes when all else is done: what would fail then is said before it begins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def output_problems(*, json_path: Path | None, plot_path: Path | None) -> Iterator[str]:
    """One line for each file of the options --json and --plot that cannot be written as what it is."""
    yield from file_problems("--json", json_path)
    yield from file_problems("--plot", plot_path)
    if plot_path is not None:
        yield from _plot_problems(plot_path)


def file_problems(option: str, path: Path | None) -> Iterator[str]:
    """One line if the file of an option, if it is given, cannot be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        yield f"{option} {path}: there is no folder {folder}; make it first"
    elif path.is_dir():
        yield f"{option} {path}: is a folder; name a file"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        yield f"{option} {path}: may not be written; choose another file"


def _plot_problems(path: Path) -> Iterator[str]:
    try:
        from matplotlib import backend_bases
    except ImportError:
        yield "--plot needs matplotlib: pip install 'fusedcomm[plots]', or leave --plot out"
        return
    # Without a suffix matplotlib adds its own.
    if path.suffix and path.suffix[1:].lower() not in backend_bases.FigureCanvasBase.get_supported_filetypes():
        yield f"--plot {path}: {path.suffix} is no kind of picture that matplotlib writes; use .png, .svg or .pdf"
