"""Append, copies and swap of both backends against plain loops; slots not named must stay as they were, bit for bit."""

import pytest
import torch

from kvgate.kernels import ops


def pools(pages=12, size=16, dim=40, dtype=torch.float32, seed=0):
    """Strided views of one tensor, NaN in a few slots: copies must not care."""
    random = torch.Generator().manual_seed(seed)
    both = torch.randn((pages, 2, size, dim), generator=random).to(dtype)
    both[3, :, 5] = float("nan")
    return both[:, 0], both[:, 1], torch.randint(0, 99, (pages, size), generator=random).int()


def clone(three):
    both = torch.stack((three[0], three[1]), 1)
    return both[:, 0], both[:, 1], three[2].clone()


def same_bits(got, want):
    kinds = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
    for a, b in zip(got, want, strict=True):
        view = kinds.get(a.dtype, a.dtype)
        assert torch.equal(a.contiguous().view(view), b.contiguous().view(view))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("size", "dim"), [(8, 40), (16, 64), (32, 96), (16, 256)])
def test_append_writes_its_slots_and_no_other(backend, size, dim, dtype):
    pool = pools(9, size, dim, dtype)
    want = clone(pool)
    random = torch.Generator().manual_seed(1)
    k, v = (torch.randn((5, 3, dim), generator=random).to(dtype) for _ in range(2))
    position = torch.tensor([7, 100, 3, 2**20, 0], dtype=torch.int32)
    slots = torch.randperm(9 * size, generator=random)[:15].view(5, 3)
    for token in range(5):
        for head in range(3):
            page, slot = divmod(int(slots[token, head]), size)
            want[0][page, slot], want[1][page, slot] = k[token, head], v[token, head]
            want[2][page, slot] = position[token]
    ops.append_kv(k, v, position, slots, *pool, backend=backend)
    same_bits(pool, want)


def test_append_takes_a_slice_of_a_fused_projection(backend):
    pool, want = pools(dim=16), clone(pools(dim=16))
    fused = torch.randn(4, 10, 16)
    slots = torch.arange(8).view(4, 2)
    position = torch.arange(4, dtype=torch.int32)
    ops.append_kv(fused[:, 6:8], fused[:, 8:10], position, slots, *pool, backend=backend)
    ops.append_kv(fused[:, 6:8].clone(), fused[:, 8:10].clone(), position, slots, *want, backend="torch")
    same_bits(pool, want)


@pytest.mark.parametrize("count", [0, 1, 17, 60, 96])
def test_copy_slots(backend, count):
    pool = pools()
    want = clone(pool)
    order = torch.randperm(12 * 16, generator=torch.Generator().manual_seed(count))
    src, dst = order[:count], order[count : 2 * count]
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        for tensor in want:
            tensor[b // 16, b % 16] = tensor[a // 16, a % 16].clone()
    ops.copy_slots(src, dst, *pool, backend=backend)
    same_bits(pool, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_copy_pages(backend, count, dtype):
    pool = pools()
    want = clone(pool)
    src, dst = torch.arange(count, dtype=dtype), torch.arange(6, 6 + count, dtype=dtype)
    for tensor in want:
        tensor[6 : 6 + count] = tensor[:count].clone()
    ops.copy_pages(src, dst, *pool, backend=backend)
    same_bits(pool, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 32])
def test_swap_out_and_in(backend, size, dtype):
    pool = pools(12, size, 64, dtype)
    before = clone(pool)
    ids = torch.tensor([7, 0, 3], dtype=torch.int32)
    host = ops.gather_pages(ids, *pool, backend=backend)
    same_bits(host, [tensor[[7, 0, 3]] for tensor in before])
    assert all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in host)
    for tensor in pool:
        tensor[[7, 0, 3]] = 0
    back = torch.tensor([2, 5, 9], dtype=torch.int32)
    ops.scatter_pages(back, *host, *pool, backend=backend)
    same_bits([tensor[[2, 5, 9]] for tensor in pool], [tensor[[7, 0, 3]] for tensor in before])
    untouched = [1, 4, 6, 8, 10, 11]
    same_bits([tensor[untouched] for tensor in pool], [tensor[untouched] for tensor in before])


@pytest.mark.usefixtures("reversed_grid", "poisoned_memory")
def test_moves_in_reversed_order():
    pool = pools(40, 16, 16)
    want = clone(pool)
    src, dst = torch.arange(300), torch.arange(300, 600)
    ops.copy_slots(src, dst, *pool, backend="triton")
    ops.copy_slots(src, dst, *want, backend="torch")
    same_bits(pool, want)
    same_bits(ops.gather_pages(src[:20], *pool, backend="triton"), ops.gather_pages(src[:20], *want, backend="torch"))


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [([0, 1], [1, 2], "also a source"), ([0, 1], [5, 5], "twice"), ([0, 1], [5], "differ"), ([0], [999], "outside")],
)
def test_bad_copies_are_refused_and_change_nothing(backend, src, dst, words):
    pool = pools()
    before = clone(pool)
    with pytest.raises(ValueError, match=words):
        ops.copy_slots(torch.tensor(src), torch.tensor(dst), *pool, backend=backend)
    with pytest.raises(ValueError, match=words):
        ops.copy_pages(torch.tensor(src), torch.tensor(dst), *pool, backend=backend)
    same_bits(pool, before)
