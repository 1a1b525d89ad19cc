"""Owns the estimated time of a trace: every engine in order, waiting for the data it needs. An estimate of a simulator.

Dependencies are read-after-write, write-after-read and write-after-write on overlapping bytes of one storage. Not
modelled: the compiler's own reordering, address reuse, bank conflicts and HBM contention between cores.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from warmstate.kernels.nki_sim.trace import ENGINES, QUEUES, Instruction, Region, Trace

RULES = ("1N", "2N")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Per rule (1N, 2N): microseconds from start to end, and busy microseconds per engine and DMA queue."""

    makespan_us: tuple[float, float]
    busy_us: dict[str, tuple[float, float]]
    counts: dict[str, int]
    dma_bytes: int
    sbuf_peak_bytes: int
    psum_peak_bytes: int


class _Times:
    """When each region of one storage can be read, and when it was last read."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads: dict[Region, float] = {}
        self.writes: dict[Region, float] = {}


def estimate(traces: tuple[Trace, ...]) -> Estimate:
    """The slowest core's makespan; busy times, counts and bytes are of the busiest core."""
    spans = [tuple(_makespan_us(trace, rule) for rule in (0, 1)) for trace in traces]
    main = traces[max(range(len(traces)), key=lambda i: spans[i][1])]
    busy = {name: (_busy_us(main, name, 0), _busy_us(main, name, 1)) for name in (*ENGINES, *QUEUES)}
    return Estimate(
        (max(span[0] for span in spans), max(span[1] for span in spans)),
        busy,
        dict(Counter(instruction.engine for instruction in main.instructions)),
        sum(instruction.dma_bytes for instruction in main.instructions),
        max(trace.peak_bytes("sbuf") for trace in traces),
        max(trace.peak_bytes("psum") for trace in traces),
    )


def profile(trace: Trace, rule: int) -> list[tuple[str, str, int, float]]:
    """(engine, operation, count, busy microseconds), the busiest first."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for instruction in trace.instructions:
        entry = totals[(instruction.engine, instruction.operation)]
        entry[0] += 1
        entry[1] += instruction.busy_ns[rule] / 1e3
    rows = [(engine, operation, int(count), busy) for (engine, operation), (count, busy) in totals.items()]
    return sorted(rows, key=lambda row: -row[3])


def _busy_us(trace: Trace, name: str, rule: int) -> float:
    busy = sum(i.busy_ns[rule] for i in trace.instructions if i.engine == name)
    return (busy + sum(i.issue_ns for i in trace.instructions if i.issue_engine == name)) / 1e3


def _makespan_us(trace: Trace, rule: int) -> float:
    free: dict[str, float] = dict.fromkeys((*ENGINES, *QUEUES), 0.0)
    memory: dict[int, _Times] = defaultdict(_Times)
    end = 0.0
    for instruction in trace.instructions:
        start = _ready(instruction, memory)
        if instruction.issue_engine is not None:
            start = max(start, free[instruction.issue_engine]) + instruction.issue_ns
            free[instruction.issue_engine] = start
        start = max(start, free[instruction.engine])
        finish = start + instruction.busy_ns[rule]
        free[instruction.engine] = finish
        visible = finish + instruction.latency_ns
        for region in instruction.reads:
            reads = memory[region[0]].reads
            reads[region] = max(reads.get(region, 0.0), finish)
        for region in instruction.writes:
            _written(memory[region[0]], region, visible)
        end = max(end, visible)
    transfers = sum(instruction.busy_ns[rule] for instruction in trace.instructions if instruction.engine in QUEUES)
    return max(end, transfers) / 1e3


def _ready(instruction: Instruction, memory: dict[int, _Times]) -> float:
    ready = 0.0
    for region in instruction.reads:
        for time in _overlapping(memory[region[0]].writes, region):
            ready = max(ready, time)
    for region in instruction.writes:
        times = memory[region[0]]
        for time in (*_overlapping(times.writes, region), *_overlapping(times.reads, region)):
            ready = max(ready, time)
    return ready


def _overlapping(times: dict[Region, float], region: Region) -> Iterator[float]:
    exact = times.get(region)
    if exact is not None and len(times) == 1:
        yield exact
        return
    _, first, last, low, high = region
    for (_, other_first, other_last, other_low, other_high), time in times.items():
        if other_first < last and first < other_last and other_low < high and low < other_high:
            yield time


def _written(times: _Times, region: Region, visible: float) -> None:
    """Notes a write and forgets what it covers."""
    _, first, last, low, high = region
    for entries in (times.reads, times.writes):
        covered = [r for r in entries if first <= r[1] and r[2] <= last and low <= r[3] and r[4] <= high]
        for other in covered:
            del entries[other]
    times.writes[region] = visible
