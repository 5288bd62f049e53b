"""A model's shape is refused with its numbers where it does not fit together, before any process starts."""

from __future__ import annotations

import dataclasses

import pytest

from fusedcomm.nn import TransformerConfig, check_tensor_parallel

LLAMA = TransformerConfig.llama(vocab_size=24, hidden=48, layers=2, heads=12, seq_len=7)


def test_presets_fill_in_what_is_usual():
    # 8/3 of 48 is a multiple of 64; 8/3 of 80 is 213.3, rounded up.
    assert LLAMA.ffn_hidden == 128
    assert LLAMA.kv_heads == 12
    assert LLAMA.head_dim == 4
    assert TransformerConfig.llama(vocab_size=24, hidden=80, layers=2, heads=4, seq_len=7).ffn_hidden == 256
    gpt2 = TransformerConfig.gpt2(vocab_size=24, hidden=48, layers=2, heads=4, seq_len=7)
    assert gpt2.ffn_hidden == 192
    assert gpt2.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 50}, "hidden=50 over heads=12 leaves 2"),
        ({"kv_heads": 5}, "heads=12 over kv_heads=5 leaves 2"),
        ({"heads": 16, "kv_heads": 16}, "head_dim=3; rope turns pairs of features"),
        ({"dropout": 1.0}, "dropout=1.0; the share of zeroed elements must be in"),
        ({"norm": "batchnorm"}, "norm='batchnorm'; choose one of"),
        ({"layers": 0}, "layers=0; it must be at least 1"),
        ({"checkpointing": "some"}, "checkpointing='some'; choose one of"),
        ({"checkpointing": ("full",) * 3}, "checkpointing has 3 entries for"),
        ({"tp_sync": "never"}, "tp_sync='never'; choose one of"),
        ({"tp_sync": "ladder", "split_dim": 0}, "tp_sync='ladder' with split_dim=0"),
        ({"tp_sync": "interleave", "checkpointing": "selective"}, "use 'full' or 'none'"),
    ],
)
def test_config_rejects_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LLAMA, **changes)


@pytest.mark.parametrize(
    ("changes", "tp_size", "message"),
    [
        ({"vocab_size": 255}, 2, "vocab_size=255 over tp=2 ranks leaves 1; it must divide; pad the vocabulary to 256"),
        ({}, 5, "vocab_size=24 over tp=5 ranks leaves 4"),
        ({}, 8, "heads=12 over tp=8 ranks leaves 4"),
        ({"kv_heads": 2}, 4, "kv_heads=2 over tp=4 ranks leaves 2; .* lower tp or raise kv_heads"),
        ({"ffn_hidden": 130}, 4, "ffn_hidden=130 over tp=4 ranks leaves 2; .* or split_dim=0"),
    ],
)
def test_a_split_that_does_not_divide_is_refused(changes, tp_size, message):
    with pytest.raises(ValueError, match=message):
        check_tensor_parallel(dataclasses.replace(LLAMA, **changes), tp_size)


def test_row_parallel_first_takes_inner_features_that_do_not_divide():
    check_tensor_parallel(dataclasses.replace(LLAMA, ffn_hidden=130, split_dim=0), 4)
