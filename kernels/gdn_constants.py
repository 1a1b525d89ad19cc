"""Owns the constant tiles of the GDN prefill kernel, built on the host. Knows no kernel."""

import torch

CHUNK = 128
BASE_BLOCK = 4
"""Blocks that are inverted in closed form; larger ones are merged."""

MERGED_BY_MASK = (4, 8, 16, 32)
"""Block sizes whose merge is masked; blocks of 64 are merged as whole tiles."""

BIG = 1.0e9
"""exp(-BIG) is 0 in float32."""


def planes() -> torch.Tensor:
    """[4, 128, 128] float32: the identity; 1 in the strict lower half of each 4 x 4 diagonal block; BIG where column >=
    row; -BIG where column < row."""
    row, column = torch.arange(CHUNK)[:, None], torch.arange(CHUNK)[None, :]
    block = (row // BASE_BLOCK == column // BASE_BLOCK) & (column < row)
    later, earlier = (column >= row).float() * BIG, (column < row).float() * -BIG
    return torch.stack((torch.eye(CHUNK), block.float(), later, earlier))


def pair_masks() -> torch.Tensor:
    """[4, 128, 64] uint8, per size of block: 1 where row lies in the first and column in the second block of a pair.

    The 64 columns are those of second blocks, in order.
    """
    row, column = torch.arange(CHUNK)[:, None], torch.arange(CHUNK)[None, :]
    masks = []
    for block in MERGED_BY_MASK:
        same_pair = row // (2 * block) == column // (2 * block)
        chosen = same_pair & (row // block % 2 == 0) & (column // block % 2 == 1)
        second = (torch.arange(CHUNK) // block % 2 == 1).nonzero().squeeze(1)
        masks.append(chosen[:, second])
    return torch.stack(masks).to(torch.uint8)
