"""The process tree, in processes of their own: a test that ended its own descendants would end other tests' servers."""

import subprocess
import sys
import time

import psutil

# A daemon that left its parent, a child that ignores SIGTERM, and one that does as it is told.
FAMILY = """
import subprocess, sys, time
from warmstate.cluster.launch.process_tree import adopt_orphans, end_descendants
adopt_orphans()
subprocess.run(["sh", "-c", "sleep 1000 & echo"], stdout=subprocess.DEVNULL, check=True)
stubborn = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('up', flush=True); time.sleep(1000)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
subprocess.Popen(["sleep", "1000"])
print(end_descendants(grace_s=0.5), flush=True)
time.sleep(1000)
"""

CHILD = """
import sys, time
from warmstate.cluster.launch.process_tree import die_with_parent
die_with_parent()
print("up", flush=True)
try:
    time.sleep(1000)
except KeyboardInterrupt:
    sys.exit(7)
"""

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(1000)
"""


# Its child leaves a process behind that ends at once, and stays itself.
BURYING = """
import subprocess, sys
from warmstate.cluster.launch.process_tree import adopt_orphans, wait_and_bury
adopt_orphans()
leave = "import subprocess, sys, time; subprocess.run(['sh', '-c', 'sleep 0.1 & echo $!']); "
leave += "time.sleep(float(sys.argv[1])); sys.exit(5)"
sys.exit(wait_and_bury(subprocess.Popen([sys.executable, "-c", leave, sys.argv[1]])))
"""


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)


def first_number(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; an ended one may be gone, or a zombie that nobody has waited for."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_orphans_and_the_stubborn_are_ended_too() -> None:
    process = start("-c", FAMILY)
    try:
        assert first_number(process) == 3
        assert psutil.Process(process.pid).children(recursive=True) == []
    finally:
        end(process)


def test_a_child_is_told_when_its_parent_is_killed() -> None:
    parent = start("-c", PARENT, CHILD)
    child = psutil.Process(first_number(parent))
    end(parent)
    deadline = time.monotonic() + 30
    while is_alive(child):
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.02)


def test_the_supervisor_passes_on_the_exit_code_and_the_output() -> None:
    supervise = (
        "import sys; from warmstate.cluster.launch.supervisor import supervise; sys.exit(supervise(sys.argv[1:]))"
    )
    process = start("-c", supervise, "version")
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "0.1.0\n")
    process = start("-c", supervise, "serve", "--supervised", "/no/such/model")
    process.communicate(timeout=60)
    assert process.returncode == 2


def test_an_orphan_that_ends_leaves_no_zombie() -> None:
    supervisor = start("-c", BURYING, "1000")
    try:
        orphan = first_number(supervisor)
        deadline = time.monotonic() + 30
        while psutil.pid_exists(orphan):
            assert time.monotonic() < deadline, "the orphan was never waited for"
            time.sleep(0.02)
    finally:
        for child in psutil.Process(supervisor.pid).children():
            child.kill()
        end(supervisor)


def test_the_exit_code_is_the_childs_and_not_an_orphans() -> None:
    supervisor = start("-c", BURYING, "0.5")
    assert supervisor.wait(20) == 5
    end(supervisor)
