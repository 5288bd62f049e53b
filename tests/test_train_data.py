"""Samples depend on the seed and on how many were read before, on nothing else; files are read as what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedcomm.train.config import Config, ConfigError, DataConfig, parse_config
from fusedcomm.train.corpus import Corpus, Document, read_corpus
from fusedcomm.train.data import IGNORE_INDEX, Batch, open_data, permuted


def _config(
    path: Any, *, dp: int = 1, seq_len: int = 8, vocab_size: int = 256, seed: int = 0, **sections: Any
) -> Config:
    return parse_config(
        {
            "seed": seed,
            "model": {"layers": 1, "hidden": 4, "heads": 1, "vocab_size": vocab_size},
            "data": {"path": path, "seq_len": seq_len, **sections.get("data", {})},
            "train": {"steps": 10, "global_batch": 8, **sections.get("train", {})},
            "parallel_config": {"data_parallel": {"size": dp}},
        }
    )


@pytest.fixture
def numbers(tmp_path) -> str:
    """Tokens 0, 1, 2, ... in order, so that a sample shows where it was read."""
    np.save(tmp_path / "numbers.npy", np.arange(1000, dtype=np.int32))
    return str(tmp_path / "numbers.npy")


def _global_batch(config: Config, position: int) -> Batch:
    data = open_data(config)
    parts = [data.train.batch(position, rank) for rank in range(config.parallel_config.data_parallel.size)]
    return Batch(*(torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "labels", "sample_ids")))


def test_default_corpus_is_python_and_the_same_every_time():
    config = DataConfig(seq_len=8)
    corpus = read_corpus(config, 256)
    names = [document.name for document in corpus.documents]
    assert names == sorted(names)
    assert "json/decoder.py" in names
    assert not [name for name in names if "site-packages" in name or name.startswith(("test/", "idlelib/"))]
    assert len(corpus) > 5_000_000
    assert corpus.fingerprint() == read_corpus(config, 256).fingerprint()
    start = int(corpus.ends[names.index("json/decoder.py") - 1])
    source = bytes(corpus.read(start - 1, 200).astype(np.uint8))
    assert source.startswith(b"\x00")
    assert source[1:] in Path(json.decoder.__file__).read_bytes()


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    separator=st.sampled_from([None, 99]),
    data=st.data(),
)
def test_corpus_reads_documents_one_after_the_other(lengths, separator, data):
    documents = [Document(str(n), np.arange(length, dtype=np.uint8) + 10 * n) for n, length in enumerate(lengths)]
    corpus = Corpus(documents, separator)
    between = [] if separator is None else [separator]
    whole = [token for document in documents for token in [*document.tokens.tolist(), *between]]
    assert len(corpus) == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - start))
    assert corpus.read(start, count).tolist() == whole[start : start + count]
    if start < len(whole) and whole[start] != separator:
        name, offset = corpus.locate(start)
        assert documents[int(name)].tokens[offset] == whole[start]


@given(size=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 5))
def test_permuted_is_a_permutation(size, seed, epoch):
    places = permuted(np.arange(size), size, seed=seed, epoch=epoch)
    assert sorted(places) == list(range(size))


def test_permuted_shuffles_and_differs_by_epoch_and_seed():
    index = np.arange(10_000)
    orders = [permuted(index, 10_000, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        # A random order correlates with none of the others, nor with the unshuffled one, beyond 4 / sqrt(n).
        others = [index, *(other for other in orders if other is not order)]
        assert max(abs(np.corrcoef(order, other)[0, 1]) for other in others) < 0.04
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04


def test_an_epoch_reads_every_sample_once(numbers):
    config = _config(numbers, vocab_size=1000, data={"validation_fraction": 0})
    train = open_data(config).train
    assert len(train) == 999 // 8
    batches = [train.batch(position, 0) for position in range(0, 2 * len(train), 8)]
    rows = torch.cat([batch.tokens for batch in batches])
    assert (torch.diff(rows, dim=1) == 1).all()
    assert all((batch.labels == batch.tokens + 1).all() for batch in batches)
    for epoch in range(2):
        starts = rows[epoch * len(train) : (epoch + 1) * len(train), 0]
        assert sorted(starts.tolist()) == list(range(0, 8 * len(train), 8))
    assert torch.cat([batch.sample_ids for batch in batches]).tolist() == list(range(len(batches) * 8))
    assert rows[: len(train)].tolist() != rows[len(train) : 2 * len(train)].tolist()


def test_the_global_batch_does_not_depend_on_the_layout(numbers):
    for position in (0, 8, 120):
        one = _global_batch(_config(numbers, vocab_size=1000), position)
        for dp in (2, 4, 8):
            other = _global_batch(_config(numbers, vocab_size=1000, dp=dp), position)
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.sample_ids, other.sample_ids)


def test_a_resumed_run_reads_what_an_uninterrupted_one_would(numbers):
    config = _config(numbers, vocab_size=1000)
    state = json.loads(json.dumps(open_data(config).state(24)))
    # With twice the data-parallel ranks and half the batch.
    resumed = open_data(_config(numbers, vocab_size=1000, dp=2, train={"global_batch": 4}))
    position = resumed.restore(state)
    rest = _global_batch(config, 24)
    rows = [resumed.train.batch(position + first, rank).tokens for first in (0, 4) for rank in (0, 1)]
    assert torch.equal(torch.cat(rows), rest.tokens)


@pytest.mark.parametrize("change", [{"seed": 1}, {"seq_len": 4}, {"data": {"validation_fraction": 0.5}}])
def test_restore_refuses_a_position_in_other_samples(numbers, change):
    state = open_data(_config(numbers, vocab_size=1000)).state(8)
    with pytest.raises(ValueError, match="when the checkpoint was written"):
        open_data(_config(numbers, vocab_size=1000, **change)).restore(state)


def test_restore_refuses_other_files(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 500)
    config = _config(str(tmp_path))
    state = open_data(config).state(8)
    (tmp_path / "a.txt").write_text("y" * 500)
    with pytest.raises(ValueError, match="fingerprint"):
        open_data(config).restore(state)


def test_batches_are_cut_into_passes(numbers):
    batch = open_data(_config(numbers, vocab_size=1000)).train.batch(0, 0)
    pieces = batch.pieces(4)
    assert [piece.tokens.shape for piece in pieces] == [(2, 8)] * 4
    assert torch.equal(torch.cat([piece.labels for piece in pieces]), batch.labels)
    assert torch.equal(torch.cat([piece.sample_ids for piece in pieces]), batch.sample_ids)


def test_training_and_validation_share_no_token(numbers):
    data = open_data(_config(numbers, vocab_size=1000, data={"validation_fraction": 0.2}))
    trained = {token for position in range(0, len(data.train), 8) for token in _seen(data.train.batch(position, 0))}
    validated = {token for batch in data.validation.passes(0) for token in _seen(batch)}
    assert max(trained) < 800 <= min(validated)


def _seen(batch: Batch) -> set[int]:
    return {*batch.tokens[batch.labels != IGNORE_INDEX].tolist(), *batch.labels[batch.labels != IGNORE_INDEX].tolist()}


def test_validation_begins_with_a_document_where_one_ends_near(tmp_path):
    for name, length in (("a", 700), ("b", 246), ("c", 51)):
        (tmp_path / f"{name}.txt").write_text(name * length)
    config = _config(str(tmp_path), data={"validation_fraction": 0.05})
    data = open_data(config)
    assert {token for batch in data.validation.passes(0) for token in _seen(batch)} <= {0, ord("c")}
    # No document ends near: cut within one.
    data = open_data(_config(str(tmp_path), data={"validation_fraction": 0.2}))
    assert ord("b") in _seen(next(iter(data.validation.passes(0))))


@pytest.mark.parametrize(("eval_batches", "passes", "samples"), [(None, 4, 13), (2, 2, 8), (9, 4, 13)])
def test_validation_is_whole_or_spread_and_filled_up(numbers, eval_batches, passes, samples):
    train = {"global_batch": 8, "accumulation": 2, "eval_batches": eval_batches}
    # 110 tokens are 13 samples; 4 rows a pass.
    config = _config(numbers, vocab_size=1000, dp=2, train=train, data={"validation_fraction": 0.11})
    validation = open_data(config).validation
    batches = [list(validation.passes(rank)) for rank in range(2)]
    assert [len(own) for own in batches] == [passes, passes] == [len(validation)] * 2
    assert {batch.tokens.shape for own in batches for batch in own} == {(2, 8)}
    rows = torch.cat([torch.cat([own[index].labels for own in batches]) for index in range(passes)])
    kept = rows[(rows != IGNORE_INDEX).all(dim=1)]
    assert len(kept) == samples
    assert len(set(kept[:, 0].tolist())) == samples
    spread = {891 + number * 13 // samples * 8 for number in range(samples)}
    assert set(kept[:, 0].tolist()) == spread


def test_files_folders_and_patterns(tmp_path):
    for name in ("b.txt", "sub/a.txt", ".hidden", "sub/.git/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def names(*paths: str) -> list[str]:
        return [document.name for document in read_corpus(DataConfig(seq_len=1, path=list(paths)), 256).documents]

    assert names(str(tmp_path)) == ["b.txt", "sub/a.txt"]
    assert names(str(tmp_path / "b.txt"), str(tmp_path / "sub")) == ["b.txt", "a.txt"]
    assert [Path(name).name for name in names(str(tmp_path / "**" / "*.txt"))] == ["b.txt", "a.txt"]
    assert names(str(tmp_path / ".hidden")) == [".hidden"]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_bin_files_are_arrays_of_their_dtype(tmp_path, dtype):
    np.arange(200, dtype=dtype).tofile(tmp_path / "a.bin")
    np.arange(0, dtype=dtype).tofile(tmp_path / "b.bin")
    corpus = read_corpus(DataConfig(seq_len=1, path=[str(tmp_path)], dtype=dtype), 256)
    assert corpus.read(0, 200).tolist() == list(range(200))
    assert isinstance(corpus.documents[0].tokens, np.memmap)


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    tokens = np.zeros(100, dtype=np.int32)
    tokens[77] = 300
    np.save(tmp_path / "a.npy", np.zeros(50, dtype=np.int32))
    np.save(tmp_path / "b.npy", tokens)
    config = _config(str(tmp_path), data={"validation_fraction": 0}, train={"global_batch": 18})
    message = r"data.path: b.npy holds token 300 at position 77, outside model.vocab_size 256 \(0 to 255\)"
    with pytest.raises(ConfigError, match=message):
        open_data(config).train.batch(0, 0)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"data.path: there is no file at .*missing"),
        ({"a.txt": b"", "b.txt": b""}, "holds no token"),
        ({"a.txt": b"text", "b.bin": b"1234"}, "b.bin holds tokens and a.txt text"),
        ({"a.bin": b"123"}, "a.bin has 3 bytes, no multiple of 2; data.dtype uint16"),
        ({"a.npy": b"123"}, "a.npy is no NumPy array file"),
        ({"a.npy": b""}, "a.npy is no NumPy array file"),
        ({"a.png": b"x\0y"}, "a.png is no text .* name it .bin and set data.dtype: uint8"),
        ({"a.txt": b"text"}, r"the training part has \d tokens, fewer than data.seq_len 8 \+ 1"),
        ({"a.txt": b"x" * 110}, r"the validation part has \d tokens, fewer than"),
    ],
)
def test_files_at_fault_are_named(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_data(_config(str(tmp_path if files else tmp_path / "missing")))


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="needs Linux, where reading this file fails")
def test_files_that_cannot_be_read_are_named(tmp_path, tokenizer):
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")
    for changes in ({}, {"tokenizer": tokenizer}):
        with pytest.raises(ConfigError, match=r"a.txt cannot be read \(Input/output error\)"):
            open_data(_config(str(tmp_path / "a.txt"), data=changes))


def test_npy_files_must_be_one_row_of_integers(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 3), dtype=np.float32))
    with pytest.raises(ConfigError, match=r"a.npy holds float32 of shape \[2, 3\]; it must be a row of integers"):
        open_data(_config(str(tmp_path)))


@pytest.fixture
def tokenizer(tmp_path, monkeypatch) -> str:
    """A word-level tokenizer.json; the cache is a folder of the test."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers (extra hf)")
    vocabulary = {"[UNK]": 0, "</s>": 1, "one": 2, "two": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(tmp_path / "tokenizer.json")


def test_tokenizer_runs_once_and_is_cached(tmp_path, tokenizer):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_text("one two\none three")
    (tmp_path / "text" / "b").write_text("")
    (tmp_path / "text" / "c").write_text("two")
    config = DataConfig(seq_len=1, path=[str(tmp_path / "text")], tokenizer=tokenizer)
    corpus = read_corpus(config, 4)
    assert corpus.read(0, len(corpus)).tolist() == [2, 3, 2, 0, 1, 1, 3, 1]
    (cached,) = (tmp_path / "cache").rglob("*.bin")
    written = cached.stat().st_mtime_ns
    again = read_corpus(config, 4)
    assert again.fingerprint() == corpus.fingerprint()
    assert cached.stat().st_mtime_ns == written
    (tmp_path / "text" / "c").write_text("one one")
    assert read_corpus(config, 4).read(6, 3).tolist() == [2, 2, 1]


def test_tokenizers_at_fault_are_named(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    config = DataConfig(seq_len=1, path=[str(tmp_path / "a.txt")], tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"has 4 tokens, more than model.vocab_size 3"):
        read_corpus(config, 3)
    with pytest.raises(ConfigError, match=r"a.txt is not UTF-8"):
        read_corpus(config, 4)
    with pytest.raises(ConfigError, match=r"a.txt is no tokenizer.json"):
        read_corpus(config.model_copy(update={"tokenizer": str(tmp_path / "a.txt")}), 4)
