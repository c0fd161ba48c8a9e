"""Codecs of the exchanges: what is encoded is decoded, whatever the values, indices and hash seeds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embrace_fx.cost.blocks import record_bytes
from embrace_fx.runtime.exchanges.blocks import SHORT_BLOCK, cut_blocks, write_blocks_
from embrace_fx.runtime.exchanges.gradient import RowSet, sum_by_position
from embrace_fx.runtime.exchanges.hashing import hash_bitmap, ids_of_bitmap, index_sets, murmur, server_of
from embrace_fx.runtime.exchanges.record_codec import decode_records, encode_records

CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16])
SEEDS = st.integers(-(2**63), 2**63 - 1)
SERVERS = st.integers(1, 9)


@st.composite
def row_sets(draw: st.DrawFn, max_rows: int = 60) -> RowSet:
    """Draws a set of rows, which may be empty, contain row 0, or have rows of zeros."""
    num_rows = draw(st.integers(1, max_rows))
    ids = torch.tensor(sorted(draw(st.sets(st.integers(0, num_rows - 1)))), dtype=torch.int64)
    rows = torch.randn(ids.numel(), draw(st.integers(1, 7)), generator=_generator(draw)).to(draw(DTYPES))
    rows[torch.rand(ids.numel(), generator=_generator(draw)) < 0.2] = 0
    return RowSet(ids, rows, num_rows)


@st.composite
def dense_tensors(draw: st.DrawFn) -> Tensor:
    """Draws a tensor of any shape and density, which may contain infinities and NaN."""
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    dense = torch.randn(shape, generator=_generator(draw)).to(draw(DTYPES))
    kept = torch.rand(shape, generator=_generator(draw)) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    if dense.numel() > 2 and draw(st.booleans()):
        dense.view(-1)[0], dense.view(-1)[-1] = torch.nan, torch.inf
    return torch.where(kept, dense, 0)


@st.composite
def id_sets(draw: st.DrawFn, num_ids: int = 400) -> Tensor:
    return torch.tensor(sorted(draw(st.sets(st.integers(0, num_ids - 1)))), dtype=torch.int64)


def _generator(draw: st.DrawFn) -> torch.Generator:
    return torch.Generator().manual_seed(draw(st.integers(0, 2**31)))


def assert_same_rows(found: RowSet, expected: RowSet) -> None:
    assert found.num_rows == expected.num_rows
    assert torch.equal(found.ids, expected.ids)
    assert found.rows.dtype == expected.rows.dtype
    torch.testing.assert_close(found.rows, expected.rows, rtol=0, atol=0, equal_nan=True)


@given(row_sets(), st.sampled_from([0, 2**31 - 1 - 60, 2**31, 2**62]))
def test_records(rows: RowSet, offset: int) -> None:
    """Indices of 2^31 and more take 8 bytes."""
    limit = rows.num_rows + offset
    records = encode_records(rows.ids + offset, rows.rows, limit)
    assert records.shape == (rows.ids.numel(), record_bytes(limit, rows.width, rows.rows.itemsize))
    received = torch.cat([torch.zeros(3, dtype=torch.uint8), records.view(-1)])[3:]  # an unaligned view of the bytes
    ids, values = decode_records(received, limit, rows.width, rows.rows.dtype)
    assert_same_rows(RowSet(ids - offset, values, rows.num_rows), rows)


@given(dense_tensors(), st.integers(1, 2 * SHORT_BLOCK))
def test_blocks_of_a_dense_tensor(dense: Tensor, block_size: int) -> None:
    blocks = cut_blocks(dense, block_size)
    assert (blocks.rows != 0).any(dim=1).all()  # no zero block is sent
    written = torch.zeros_like(dense)
    write_blocks_(written, blocks)
    torch.testing.assert_close(written, dense, rtol=0, atol=0, equal_nan=True)


@given(dense_tensors(), st.integers(1, 2 * SHORT_BLOCK), st.integers(0, 2**31))
def test_blocks_are_written_in_any_order(dense: Tensor, block_size: int, seed: int) -> None:
    """Blocks that are not written keep their values."""
    blocks = cut_blocks(dense, block_size)
    order = torch.randperm(blocks.ids.numel(), generator=torch.Generator().manual_seed(seed))
    written = torch.full_like(dense, 5.0)
    write_blocks_(written, RowSet(blocks.ids[order], blocks.rows[order], blocks.num_rows))
    kept = torch.ones(blocks.num_rows, dtype=torch.bool)
    kept[blocks.ids] = False
    own = kept.repeat_interleave(block_size)[: dense.numel()].view(dense.shape)
    torch.testing.assert_close(written, torch.where(own, 5.0, dense), rtol=0, atol=0, equal_nan=True)


def test_murmur_is_the_published_finaliser() -> None:
    """Compares with the algorithm in Python's integers."""

    def finalise(x: int) -> int:
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ (x >> 33)) * multiplier % 2**64
        return x ^ (x >> 33)

    for seed in (0, 7, -1, 2**63 - 1):
        ids = [0, 1, 2, 1000, 2**40, 2**62]
        expected = [finalise(i ^ finalise((seed + 1) % 2**64)) for i in ids]
        found = [x % 2**64 for x in murmur(torch.tensor(ids), seed).tolist()]
        assert found == expected


@given(id_sets(), SERVERS, SEEDS)
def test_hash_bitmaps(ids: Tensor, servers: int, seed: int) -> None:
    sets = index_sets(400, servers, seed, CPU)
    assert torch.equal(torch.cat(sets).sort().values, torch.arange(400))
    server = server_of(ids, servers, seed)
    for index, index_set in enumerate(sets):
        own = ids[server == index]
        bitmap = hash_bitmap(own, index_set)
        assert bitmap.dtype == torch.uint8
        assert bitmap.numel() == -(-index_set.numel() // 8)
        padded = torch.cat([bitmap, torch.full((2,), 255, dtype=torch.uint8)])
        assert torch.equal(ids_of_bitmap(padded, index_set), own)


def test_sums_of_narrow_values_are_wide() -> None:
    """256 + 1 is 256 in bfloat16; 256 ranks that add 1 each to 256 must not be lost."""
    rows = torch.cat([torch.full((1, 1), 256.0), torch.ones(256, 1)]).bfloat16()
    total = sum_by_position(torch.zeros(257, dtype=torch.int64), rows, [1] * 257, size=1)
    assert total.item() == 512.0
