"""How normalisations and sums are divided among programs: everything once, in whole groups, with aligned reads."""

import pytest

from effuse.fast.ops.kernels.tiling import HELD, SUMMED, SUMMERS, columns, tiling

PLANES = (1, 4, 16, 49, 64, 196, 256, 784, 1024, 4096)


@pytest.mark.parametrize("tensors", [1, 2])
def test_every_channel_has_one_program_which_has_whole_groups(tensors):
    for groups in range(1, 65):
        for C in range(groups, 513, groups):
            for P in PLANES:
                t = tiling(C, P, groups, tensors)
                assert t["D"] * groups == C and t["CHUNK"] % t["D"] == 0 and t["D"] <= t["CHUNK"] <= C
                assert t["CHUNK"] <= t["BC"] < 2 * t["CHUNK"] and t["BC"] & (t["BC"] - 1) == 0 == t["BP"] & (t["BP"] - 1)
                assert t["BP"] * t["BC"] <= max(HELD, t["BC"]) and (not t["WHOLE"] or t["BP"] >= P)


@pytest.mark.parametrize(
    ("channels", "groups", "plane", "chunk"),
    [
        (128, 32, 1024, 32),  # eight groups of four
        (256, 32, 64, 64),
        (96, 32, 1024, 24),  # of three: eight groups are 48 bytes, a multiple of sixteen
        (192, 32, 1024, 24),  # of six: four
        (384, 32, 1024, 24),  # of twelve: two
        (160, 32, 256, 20),  # of five: eight groups would be 40 channels; four are 40 bytes, a multiple of eight
        (224, 32, 256, 28),  # of seven: likewise
        (288, 32, 1024, 18),  # of nine: two are 36 bytes, a multiple of four
        (81, 9, 1024, 27),  # rows of 81 cannot be aligned
        (18, 1, 784, 18),
        (512, 1, 784, 512),
    ],
)
def test_programs_start_at_aligned_addresses(channels, groups, plane, chunk):
    assert tiling(channels, plane, groups, 1)["CHUNK"] == chunk


@pytest.mark.parametrize("channels", [160, 192, 224, 256])
def test_small_planes_are_read_once(channels):
    """16x16 positions of 32 channels are 8,192 numbers, which fit a program's registers."""
    assert tiling(channels, 256, 32, 1)["WHOLE"]


@pytest.mark.parametrize("last", [False, True])
def test_every_row_is_summed_once(last):
    """Few programs sum, and each has rows. In the last step one program sums its columns."""
    assert columns(8, 0, last).programs == 1, "no rows: one program writes zeros"
    for C in (1, 3, 18, 48, 64, 96, 102, 204, 512):
        for rows in (1, 15, 128, 2048, 6272, 131072, 10**7):
            t = columns(C, rows, last)
            assert (t.programs - 1) * t.each < rows <= t.programs * t.each and t.each % t.BR == 0
            assert t.programs == 1 if last else t.programs <= SUMMERS
            assert t.BR * t.BC == SUMMED and t.BC & (t.BC - 1) == 0


@pytest.mark.parametrize(
    ("channels", "wide"), [(64, 64), (96, 32), (128, 64), (160, 32), (192, 64), (3, 4), (102, 64), (208, 64)]
)
def test_few_columns_are_read_out_of_bounds(channels, wide):
    """96 are three times 32. If less than 32 divides them, as with 208, the last program has spare columns."""
    assert wide == columns(channels, 1000).BC
