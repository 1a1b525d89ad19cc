"""What the NKI kernels say they can run, and who serves a call."""

import pytest
import torch

from warmstate.kernels.nki_support import GdnDims, Support, attention_support, gdn_support, router_support
from warmstate.kernels.select import select_nki

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("support", "can", "why"),
    [
        (gdn_support(GdnDims(16, 32, 128, 128), BF16), True, "within"),
        (gdn_support(GdnDims(16, 32, 128, 128), torch.float16), False, "float16"),
        (gdn_support(GdnDims(3, 4, 128, 128), BF16), False, "no multiple"),
        (gdn_support(GdnDims(1, 1, 256, 128), BF16), False, "at most 128"),
        (gdn_support(GdnDims(64, 128, 128, 128), BF16), False, "at most 64"),
        (attention_support(16, 2, 256, 64, BF16), True, "within"),
        (attention_support(16, 2, 256, 64, torch.float16), False, "float16"),
        (attention_support(3, 2, 256, 64, BF16), False, "a multiple"),
        (attention_support(16, 2, 96, 64, BF16), False, "heads of 96"),
        (attention_support(16, 2, 256, 48, BF16), False, "do not divide"),
        (router_support(512, 10), True, "within"),
        (router_support(4, 2), False, "8 to 16384"),
        (router_support(8, 9), False, "9 of 8"),
    ],
)
def test_support_names_its_reason(support: Support, can: bool, why: str) -> None:
    assert support[0] is can
    assert why in support[1]


def test_nki_serves_only_on_a_device_and_within_the_limits() -> None:
    yes, no = (True, "within the limits"), (False, "heads of 96")
    assert select_nki("attention", yes, has_neuron=False) == (False, "no Neuron device")
    assert select_nki("attention", no, has_neuron=True) == (False, "the NKI kernel does not run it: heads of 96")
    assert select_nki("attention", yes, has_neuron=True)[0] is True
