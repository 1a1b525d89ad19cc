"""`warmstate bench nki` prints labelled estimates, and says what is wrong with its arguments."""

import pytest

from warmstate.cluster.main import main
from warmstate.kernels.nki_bench import kernel_names


def test_every_kernel_has_a_row_and_the_table_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nki", "--tokens", "130", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("ESTIMATES of a simulator")
    rows = [line.split()[0] for line in printed.splitlines()[4:]]
    assert rows == list(kernel_names())


def test_one_kernel_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nki", "--kernel", "gdn_decode", "--batch", "2", "--heads", "3"]) == 0
    assert "gdn_decode" in capsys.readouterr().out


def test_a_profile_names_the_chain_that_ends_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nki", "--kernel", "gdn_decode", "--heads", "4", "--profile"]) == 0
    row, *profile = capsys.readouterr().out.splitlines()[4:]
    over_bytes, over_chain = (float(pair.split("/")[1]) for pair in row.split()[-2:])
    assert over_bytes > over_chain > 1
    chain = next(line for line in profile if line.startswith("  longest chain"))
    assert "dma-in latency" in chain
    assert profile[-1].startswith("  DMA latency on the chain: 3.90 us")


@pytest.mark.parametrize("arguments", [["--kernel", "conv9"], ["--kernel", "gdn_decode", "--heads", "200"]])
def test_what_cannot_be_run_is_one_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nki", *arguments]) != 0
    assert capsys.readouterr().err.startswith("error: ")
