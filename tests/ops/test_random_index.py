"""Random bits depend on seed, salt and global index only."""

import itertools

import torch

from autopar.ops.random_index import full_runs, global_index, hash_bits, keep_mask

SEED = torch.tensor(1234)


def test_global_index_is_row_major() -> None:
    runs = (((1, 2),), ((0, 1), (3, 2)))
    expected = torch.arange(15).reshape(3, 5)[1:3][:, [0, 3, 4]]
    assert torch.equal(global_index((3, 5), runs, torch.device("cpu")), expected)


def test_hash_matches_splitmix64() -> None:
    """Against an implementation on unbounded Python integers."""

    def reference(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        return value ^ (value >> 31)

    increment, seed, salt = 0x9E3779B97F4A7C15, 77, 3
    step = ((increment - 2**64) * (salt + 1)) % 2**62
    key = reference(seed + step)
    expected = [reference((index * increment + key) % 2**64) for index in range(100)]
    bits = hash_bits(torch.arange(100), torch.tensor(seed), salt)
    assert [int(value) % 2**64 for value in bits] == expected


def test_every_cut_draws_the_same_mask() -> None:
    shape = (6, 8)
    whole = keep_mask(shape, 0.4, SEED, 5, full_runs(shape))
    for rows, columns in itertools.product([(0, 3), (3, 3)], [((0, 2), (4, 2)), ((2, 2), (6, 2))]):
        part = keep_mask(shape, 0.4, SEED, 5, ((rows,), columns))
        kept = [start + offset for start, length in columns for offset in range(length)]
        assert torch.equal(part, whole[rows[0] : rows[0] + rows[1]][:, kept])


def test_keep_rate_is_one_minus_p() -> None:
    shape = (1000, 1000)
    for p in (0.1, 0.5, 0.9):
        kept = keep_mask(shape, p, SEED, 0, full_runs(shape)).double().mean()
        assert abs(float(kept) - (1 - p)) < 3e-3


def test_salts_and_seeds_are_independent() -> None:
    shape = (100_000,)
    masks = [
        keep_mask(shape, 0.5, torch.tensor(seed), salt, full_runs(shape)) for seed, salt in [(1, 0), (1, 1), (2, 0)]
    ]
    for first, second in itertools.combinations(masks, 2):
        assert abs(float((first == second).double().mean()) - 0.5) < 1e-2
