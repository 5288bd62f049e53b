"""Text and token files as one long row of tokens, read where it lies."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fusedcomm.train.config import ConfigError, DataConfig

# Parts of the standard library that some distributions leave out or package apart; without them the corpus is the
# same wherever that Python version is.
_OPTIONAL = {
    "__pycache__",
    "dist-packages",
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
    "venv",
}
_OPTIONAL_FILES = ("_sysconfigdata", "sitecustomize", "turtle.py", "usercustomize")
_TOKEN_SUFFIXES = (".bin", ".npy")
_BYTE_SEPARATOR = 0
# Names under which tokenizers know the token between two documents.
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# Files from this size on are mapped, not read, and only their ends go into the fingerprint.
_LARGE_BYTES = 16 * 2**20
_END_BYTES = 2**16


@dataclass(frozen=True)
class Document:
    """One file's tokens [num_tokens], of any integer type, perhaps memory-mapped."""

    name: str
    tokens: npt.NDArray[Any]


class Corpus:
    """Documents one after the other, each followed by `separator` if there is one; `unit` is what a token is."""

    def __init__(self, documents: Sequence[Document], separator: int | None, unit: str = "token") -> None:
        self.documents = list(documents)
        self.unit = unit
        self.separator = separator
        extra = 0 if separator is None else 1
        lengths = [len(document.tokens) + extra for document in documents]
        # Where each document ends, its separator included.
        self.ends = np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens `start` to `start + count`."""
        row = np.empty(count, dtype=np.int64)
        filled = 0
        index = int(np.searchsorted(self.ends, start, side="right"))
        while filled < count:
            tokens = self.documents[index].tokens
            offset = start + filled - self._start(index)
            piece = tokens[offset : offset + count - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
            if filled < count and self.separator is not None:
                row[filled] = self.separator
                filled += 1
            index += 1
        return row

    def locate(self, position: int) -> tuple[str, int]:
        """The file that holds the token at `position`, and the token's place in it."""
        index = int(np.searchsorted(self.ends, position, side="right"))
        return self.documents[index].name, position - self._start(index)

    def fingerprint(self) -> str:
        """A digest of names and tokens, of large files their ends alone, by which a resumed run knows its data."""
        digest = hashlib.blake2b(digest_size=16)
        for document in self.documents:
            tokens = document.tokens
            digest.update(f"{document.name} {len(tokens)} {tokens.dtype.str} {self.separator}".encode())
            if tokens.nbytes < _LARGE_BYTES:
                digest.update(np.ascontiguousarray(tokens).data)
            else:
                digest.update(np.ascontiguousarray(tokens[:_END_BYTES]).data)
                digest.update(np.ascontiguousarray(tokens[-_END_BYTES:]).data)
        return digest.hexdigest()

    def _start(self, index: int) -> int:
        return int(self.ends[index - 1]) if index else 0


def read_corpus(config: DataConfig, vocab_size: int) -> Corpus:
    """Everything that `config.path` names, in the order of the paths and of the names below each.

    Text becomes bytes, with a zero byte after each file, or the tokens of `config.tokenizer`, which are computed once
    and kept in the user's cache folder. Token files are taken as they are, without a separator.

    Raises:
        ConfigError: a path that does not exist, files that cannot be read as what they are, or no token at all.
    """
    files = _standard_library() if config.path is None else [file for path in config.path for file in _files(path)]
    names = {name for name, _ in files if name.endswith(_TOKEN_SUFFIXES)}
    if names and len(names) < len(files):
        text = next(name for name, _ in files if name not in names)
        raise ConfigError(
            [f"data.path: {min(names)} holds tokens and {text} text; give one kind, for example 'folder/**/*.txt'"]
        )
    if names:
        corpus = Corpus([_token_file(name, path, config.dtype) for name, path in files], None)
    elif config.tokenizer == "bytes":
        corpus = Corpus([Document(name, _text_bytes(name, path)) for name, path in files], _BYTE_SEPARATOR, "byte")
    else:
        corpus = _tokenized(files, Path(config.tokenizer), vocab_size)
    if len(corpus) == len(corpus.documents) * (corpus.separator is not None):
        raise ConfigError([f"data.path: {', '.join(config.path or ())} holds no token; give files with text"])
    return corpus


def _standard_library() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        (name, path)
        for name, path in _walk(root, without=_OPTIONAL)
        if name.endswith(".py") and not path.name.startswith(_OPTIONAL_FILES)
    ]
    if not files:
        raise ConfigError(
            [f"data.path: this Python has no source files in {root}, the default corpus; name files of your own"]
        )
    return files


def _files(path: str) -> list[tuple[str, Path]]:
    """The files that a path or pattern names, each with the name that it is known by; hidden ones only if named."""
    root = Path(path).expanduser()
    if root.is_file():
        return [(root.name, root)]
    if root.is_dir():
        return _walk(root)
    found = [Path(name) for name in sorted(glob.glob(str(root), recursive=True)) if os.path.isfile(name)]
    if not found:
        raise ConfigError([f"data.path: there is no file at {path} (seen from {Path.cwd()}); correct the path"])
    return [(file.as_posix(), file) for file in found]


def _walk(root: Path, without: Collection[str] = ()) -> list[tuple[str, Path]]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            [f"data.path: {name} cannot be read ({error.strerror}); leave it out, or ask for permission"]
        ) from error


def _text_bytes(name: str, path: Path) -> npt.NDArray[np.uint8]:
    with _reading(name):
        if path.stat().st_size >= _LARGE_BYTES:
            content = np.memmap(path, dtype=np.uint8, mode="r")
        else:
            content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if (content[:8192] == 0).any():
        raise ConfigError(
            [
                f"data.path: {name} is no text (it holds zero bytes); leave it out by a pattern such as "
                "'folder/**/*.txt', or name it .bin and set data.dtype: uint8"
            ]
        )
    return content


def _token_file(name: str, path: Path, dtype: str) -> Document:
    if name.endswith(".npy"):
        with _reading(name):
            try:
                tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            # An empty file is the latter.
            except (ValueError, EOFError) as error:
                raise ConfigError([f"data.path: {name} is no NumPy array file ({error})"]) from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ConfigError(
                [f"data.path: {name} holds {tokens.dtype} of shape {list(tokens.shape)}; it must be a row of integers"]
            )
        return Document(name, tokens)
    size, itemsize = path.stat().st_size, np.dtype(dtype).itemsize
    if size % itemsize:
        raise ConfigError(
            [f"data.path: {name} has {size} bytes, no multiple of {itemsize}; data.dtype {dtype} is not what it holds"]
        )
    with _reading(name):
        # An empty file cannot be mapped.
        return Document(name, np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype))


def _tokenized(files: Sequence[tuple[str, Path]], tokenizer_path: Path, vocab_size: int) -> Corpus:
    try:
        import tokenizers
    except ImportError as error:
        message = f"data.tokenizer: {tokenizer_path} needs the package tokenizers; install it with fusedcomm[hf]"
        raise ConfigError([message]) from error
    try:
        definition = tokenizer_path.read_bytes()
        tokenizer = tokenizers.Tokenizer.from_buffer(definition)
    except Exception as error:
        raise ConfigError([f"data.tokenizer: {tokenizer_path} is no tokenizer.json ({error})"]) from error
    if tokenizer.get_vocab_size() > vocab_size:
        raise ConfigError(
            [
                f"data.tokenizer: {tokenizer_path} has {tokenizer.get_vocab_size()} tokens, more than model.vocab_size "
                f"{vocab_size}; raise it"
            ]
        )
    known = tokenizer.get_vocab()
    separator = next((known[name] for name in _SEPARATORS if name in known), None)
    digest = hashlib.blake2b(definition + tokenizers.__version__.encode(), digest_size=16)
    for name, path in files:
        status = path.stat()
        digest.update(f"{name} {path.resolve()} {status.st_size} {status.st_mtime_ns}".encode())
    return Corpus(_cached_tokens(digest.hexdigest(), tokenizer, files), separator)


def _cached_tokens(key: str, tokenizer: Any, files: Sequence[tuple[str, Path]]) -> list[Document]:
    """The documents as tokens, mapped from the cache; the first process to ask writes it, others wait for that one."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedcomm" / "tokens"
    tokens_path, index_path = folder / f"{key}.bin", folder / f"{key}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{key}.lock", "w") as lock:
            # Given back by the system when the holder dies, so this waits no longer than somebody works.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not index_path.exists():
                _write_tokens(tokenizer, files, tokens_path, index_path)
    except OSError as error:
        raise ConfigError(
            [f"data.tokenizer: {folder}, which keeps tokens, cannot be written ({error.strerror}); set XDG_CACHE_HOME"]
        ) from error
    index = json.loads(index_path.read_text())
    total = sum(length for _, length in index["documents"])
    tokens = np.memmap(tokens_path, dtype=index["dtype"], mode="r") if total else np.empty(0, dtype=index["dtype"])
    ends = np.cumsum([length for _, length in index["documents"]])
    return [Document(name, tokens[end - length : end]) for (name, length), end in zip(index["documents"], ends)]


def _write_tokens(tokenizer: Any, files: Sequence[tuple[str, Path]], tokens_path: Path, index_path: Path) -> None:
    dtype = "uint16" if tokenizer.get_vocab_size() <= 2**16 else "uint32"
    documents = []
    with open(tokens_path, "wb") as output:
        for name, path in files:
            length = 0
            for text in _pieces(name, path):
                ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=dtype)
                ids.tofile(output)
                length += len(ids)
            documents.append([name, length])
    # Its presence says that the tokens are complete, so it comes last and whole.
    unfinished = index_path.with_suffix(".tmp")
    unfinished.write_text(json.dumps({"dtype": dtype, "documents": documents}))
    unfinished.rename(index_path)


def _pieces(name: str, path: Path) -> Iterator[str]:
    """A text in parts of whole lines, about a megabyte each, to bound the tokenizer's memory."""
    try:
        # Here, since an OSError further up is the cache's.
        with _reading(name), open(path, encoding="utf-8", newline="") as lines:
            while part := lines.readlines(2**20):
                yield "".join(part)
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"data.path: {name} is not UTF-8 ({error.reason} at byte {error.start}); convert it or leave it out"]
        ) from error
