"""Products in MKL's strict mode, each time in a process of its own: it can be asked for only once."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os
from warmstate.cluster.launch.strict_products import ask_for_strict_products
from warmstate.kernels.linear_torch import UpcastLinear, rows_keep_their_bits

ask_for_strict_products()
print(os.environ.get("MKL_CBWR"), rows_keep_their_bits(UpcastLinear()))
"""


@pytest.mark.parametrize("own_setting", [None, "COMPATIBLE"])
def test_a_replica_gives_a_row_the_same_bits_in_any_batch_and_leaves_a_setting_of_the_users(
    own_setting: str | None,
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    if own_setting is not None:
        environment["MKL_CBWR"] = own_setting
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True)
    setting, holds = done.stdout.split()
    if own_setting is None:
        assert holds == "True"
    else:
        assert setting == own_setting
