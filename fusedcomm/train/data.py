"""Which samples a step reads: a function of the seed and of how many were read before, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fusedcomm.train.config import Config, ConfigError
from fusedcomm.train.corpus import Corpus, read_corpus

# Labels that count neither in the loss nor in the number of tokens.
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """A data-parallel rank's samples: tokens and the token after each [B, S], global sample numbers [B]; all int64."""

    tokens: Tensor
    labels: Tensor
    sample_ids: Tensor

    def pieces(self, count: int) -> list[Batch]:
        """The rows in `count` equal parts, one per accumulation pass."""
        parts = (tensor.chunk(count) for tensor in (self.tokens, self.labels, self.sample_ids))
        return [Batch(*part) for part in zip(*parts)]

    def to(self, device: torch.device) -> Batch:
        return Batch(self.tokens.to(device), self.labels.to(device), self.sample_ids.to(device))


class Windows:
    """Tokens `start` to `stop` of a corpus, cut into samples of `seq_len` tokens and the one that follows."""

    def __init__(self, corpus: Corpus, start: int, stop: int, *, seq_len: int, vocab_size: int) -> None:
        self._corpus = corpus
        self._start = start
        self.seq_len = seq_len
        self._vocab_size = vocab_size
        self._count = max(0, stop - start - 1) // seq_len

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> npt.NDArray[np.int64]:
        """Sample `index`, [seq_len + 1].

        Raises:
            ConfigError: a token is not in the vocabulary.
        """
        first = self._start + index * self.seq_len
        row = self._corpus.read(first, self.seq_len + 1)
        if row.min() < 0 or row.max() >= self._vocab_size:
            place = int(np.flatnonzero((row < 0) | (row >= self._vocab_size))[0])
            name, offset = self._corpus.locate(first + place)
            raise ConfigError(
                [
                    f"data.path: {name} holds token {row[place]} at position {offset}, outside model.vocab_size "
                    f"{self._vocab_size} (0 to {self._vocab_size - 1}); raise vocab_size, or correct data.dtype"
                ]
            )
        return row


class TrainBatches:
    """The training samples in a new order every epoch, each once.

    The order of all samples depends on the seed alone; a data-parallel rank takes its rows of each global batch. So
    a run with other degrees, or one resumed from a position, reads the very same batches.
    """

    def __init__(self, windows: Windows, *, seed: int, global_batch: int, dp: int) -> None:
        self._windows = windows
        self._seed = seed
        self._rows = global_batch // dp

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self._windows)

    def batch(self, position: int, dp_rank: int) -> Batch:
        """A rank's rows of the global batch that starts with training sample number `position`."""
        first = position + self._rows * dp_rank
        numbers = np.arange(first, first + self._rows, dtype=np.int64)
        epochs, places = np.divmod(numbers, len(self))
        indices = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permuted(places[here], len(self), seed=self._seed, epoch=int(epoch))
        rows = torch.from_numpy(np.stack([self._windows.read(int(index)) for index in indices]))
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), torch.from_numpy(numbers))


class ValidationBatches:
    """The same samples at every evaluation, spread evenly over the validation part.

    Every pass has `rows` samples over all data-parallel ranks; where samples run out, rows of ignored labels fill up.
    """

    def __init__(self, windows: Windows, *, rows: int, passes: int | None, dp: int) -> None:
        self._windows = windows
        self._rows = rows
        self._dp = dp
        most = -(-len(windows) // rows)
        self._passes = most if passes is None else min(passes, most)
        self._count = min(len(windows), self._passes * rows)

    def __len__(self) -> int:
        """Passes in one evaluation."""
        return self._passes

    def passes(self, dp_rank: int) -> Iterator[Batch]:
        """A rank's rows of each pass."""
        rows = self._rows // self._dp
        for first in range(dp_rank * rows, self._passes * self._rows, self._rows):
            yield self._batch(np.arange(first, first + rows, dtype=np.int64))

    def _batch(self, numbers: npt.NDArray[np.int64]) -> Batch:
        seq_len = self._windows.seq_len
        tokens = np.zeros((len(numbers), seq_len), dtype=np.int64)
        labels = np.full_like(tokens, IGNORE_INDEX)
        for row, number in enumerate(numbers.tolist()):
            if number < self._count:
                sample = self._windows.read(number * len(self._windows) // self._count)
                tokens[row], labels[row] = sample[:-1], sample[1:]
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(numbers))


@dataclass(frozen=True)
class Data:
    """What a run reads: training and validation samples (None without a validation part), and what a token is."""

    train: TrainBatches
    validation: ValidationBatches | None
    identity: dict[str, Any]
    unit: str

    def state(self, position: int) -> dict[str, Any]:
        """For a checkpoint: how many training samples were read, and of what."""
        return {"position": position, **self.identity}

    def restore(self, state: dict[str, Any]) -> int:
        """The position saved by `state()`; ValueError if it counts samples of other data or in another order."""
        for name, value in self.identity.items():
            if state.get(name) != value:
                raise ValueError(
                    f"data: {name} is {value!r} but was {state.get(name)!r} when the checkpoint was written, so its "
                    "position means other samples; restore what it was, or start another run"
                )
        return int(state["position"])


def open_data(config: Config) -> Data:
    """Open the corpus and cut it into training and validation parts that share no token.

    Raises:
        ConfigError: the data cannot be read, or a part has less than one sample.
    """
    corpus = read_corpus(config.data, config.model.vocab_size)
    cut = _validation_start(corpus, config.data.validation_fraction)
    seq_len, train, dp = config.data.seq_len, config.train, config.parallel_config.data_parallel.size
    training, validation = (
        Windows(corpus, start, stop, seq_len=seq_len, vocab_size=config.model.vocab_size)
        for start, stop in ((0, cut), (cut, len(corpus)))
    )
    for name, windows, tokens in (("training", training, cut), ("validation", validation, len(corpus) - cut)):
        if not windows and (tokens or name == "training"):
            raise ConfigError(
                [
                    f"data: the {name} part has {tokens} tokens, fewer than data.seq_len {seq_len} + 1; give more "
                    "text, a shorter seq_len or another validation_fraction (0: no validation)"
                ]
            )
    identity = {
        "fingerprint": corpus.fingerprint(),
        "num_samples": len(training),
        "seq_len": seq_len,
        "seed": config.seed,
    }
    validation_batches = None
    if validation:
        rows = train.global_batch // train.accumulation
        validation_batches = ValidationBatches(validation, rows=rows, passes=train.eval_batches, dp=dp)
    training_batches = TrainBatches(training, seed=config.seed, global_batch=train.global_batch, dp=dp)
    return Data(training_batches, validation_batches, identity, corpus.unit)


def permuted(index: npt.NDArray[np.int64], size: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Where the shuffle of (seed, epoch) sends places of 0..size-1; needs no memory, whatever `size` is.

    A Feistel network permutes the next power of four; what falls outside `size` walks on until it is inside.
    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _mix(np.arange(6, dtype=np.uint64) + _mix(np.array([epoch], np.uint64) + _mix(np.array([seed], np.uint64))))
    value = index.astype(np.uint64)
    walking = np.ones(value.shape, dtype=bool)
    while walking.any():
        left, right = value[walking] >> half, value[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        value[walking] = (left << half) | right
        walking = value >= size
    return value.astype(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's scrambling of 64 bits (Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _validation_start(corpus: Corpus, fraction: float) -> int:
    """Where the validation part, the last tokens, begins: between two documents if that makes it 10 % off at most."""
    total = len(corpus)
    if fraction == 0:
        return total
    wanted = total - round(fraction * total)
    nearest = int(corpus.ends[np.abs(corpus.ends - wanted).argmin()])
    return nearest if abs(nearest - wanted) <= 0.1 * (total - wanted) else wanted
