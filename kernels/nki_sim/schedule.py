"""Owns the estimated time of a trace: every engine in order, waiting for the data it needs. An estimate of a simulator.

Dependencies are read-after-write, write-after-read and write-after-write on overlapping bytes of one storage. Not
modelled: the compiler's own reordering, address reuse, bank conflicts and HBM contention between cores.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from warmstate.kernels.nki_sim.trace import ENGINES, QUEUES, Instruction, Region, Trace, covers, overlap

RULES = ("1N", "2N")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Per rule (1N, 2N): microseconds from start to end, and busy microseconds per engine and DMA queue.

    `trace` is that of the core that ends last by the 2N rule.
    """

    makespan_us: tuple[float, float]
    busy_us: dict[str, tuple[float, float]]
    counts: dict[str, int]
    dma_bytes: int
    sbuf_peak_bytes: int
    psum_peak_bytes: int
    trace: Trace = field(repr=False)


@dataclass(frozen=True, slots=True)
class Span:
    """What an engine or queue does, in nanoseconds: dependents see it at `visible`, the engine is free at `finish`.

    `cause` is the span that it waited for last, None at the beginning.
    """

    engine: str
    operation: str
    start: float
    finish: float
    visible: float
    cause: int | None


Moment = tuple[float, int | None]
"""When something allows to go on, and the span that it comes from."""

BEGIN: Moment = (0.0, None)
ISSUE = "descriptors"
"""The operation of the engine that issues a DMA."""


class _Times:
    """When each region of one storage can be read, and when it was last read."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads: dict[Region, Moment] = {}
        self.writes: dict[Region, Moment] = {}


def estimate(traces: tuple[Trace, ...]) -> Estimate:
    """The slowest core's makespan; busy times, counts and bytes are of the core that ends last."""
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
        main,
    )


def profile(trace: Trace, rule: int) -> list[tuple[str, str, int, float]]:
    """(engine, operation, count, busy microseconds), the busiest first."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for instruction in trace.instructions:
        entry = totals[(instruction.engine, instruction.operation)]
        entry[0] += 1
        entry[1] += instruction.busy_ns[rule] / 1e3
    return _sorted_rows(totals)


def _sorted_rows(totals: dict[tuple[str, str], list[float]]) -> list[tuple[str, str, int, float]]:
    rows = [(engine, operation, int(count), busy) for (engine, operation), (count, busy) in totals.items()]
    return sorted(rows, key=lambda row: -row[3])


def _busy_us(trace: Trace, name: str, rule: int) -> float:
    busy = sum(i.busy_ns[rule] for i in trace.instructions if i.engine == name)
    return (busy + sum(i.issue_ns for i in trace.instructions if i.issue_engine == name)) / 1e3


def critical_path(trace: Trace, rule: int) -> list[tuple[str, str, int, float]]:
    """(engine, operation or "latency", count, microseconds) of the chain that ends last, the longest first.

    Every span of the chain waited for the one before it, so that the microseconds add up to the end of the chain.
    """
    spans = timeline(trace, rule)
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    at, cause = max(((span.visible, i) for i, span in enumerate(spans)), default=BEGIN)
    while cause is not None:
        span = spans[cause]
        until = min(at, span.finish)
        for what, lasted in ((span.operation, until - span.start), ("latency", at - until)):
            if lasted > 0:
                totals[(span.engine, what)][0] += 1
                totals[(span.engine, what)][1] += lasted / 1e3
        at, cause = span.start, span.cause
    return _sorted_rows(totals)


def _makespan_us(trace: Trace, rule: int) -> float:
    end = max((span.visible for span in timeline(trace, rule)), default=0.0)
    transfers = sum(instruction.busy_ns[rule] for instruction in trace.instructions if instruction.engine in QUEUES)
    return max(end, transfers) / 1e3


def timeline(trace: Trace, rule: int) -> list[Span]:
    """What every engine and queue does when, in program order; each begins as soon as what it waits for allows."""
    free: dict[str, Moment] = dict.fromkeys((*ENGINES, *QUEUES), BEGIN)
    memory: dict[int, _Times] = defaultdict(_Times)
    spans: list[Span] = []

    def place(engine: str, operation: str, ready: Moment, busy: float, latency: float) -> None:
        start, cause = _later(ready, free[engine])
        free[engine] = (start + busy, len(spans))
        spans.append(Span(engine, operation, start, start + busy, start + busy + latency, cause))

    for instruction in trace.instructions:
        ready = _ready(instruction, memory)
        if instruction.issue_engine is not None:
            place(instruction.issue_engine, ISSUE, ready, instruction.issue_ns, 0.0)
            ready = (spans[-1].finish, len(spans) - 1)
        place(instruction.engine, instruction.operation, ready, instruction.busy_ns[rule], instruction.latency_ns)
        span, index = spans[-1], len(spans) - 1
        for region in instruction.reads:
            reads = memory[region[0]].reads
            reads[region] = _later((span.finish, index), reads.get(region, BEGIN))
        for region in instruction.writes:
            _written(memory[region[0]], region, (span.visible, index))
    return spans


def _later(one: Moment, other: Moment) -> Moment:
    return one if one[0] >= other[0] else other


def _ready(instruction: Instruction, memory: dict[int, _Times]) -> Moment:
    ready = BEGIN
    for region in instruction.reads:
        for moment in _overlapping(memory[region[0]].writes, region):
            ready = _later(ready, moment)
    for region in instruction.writes:
        times = memory[region[0]]
        for moment in (*_overlapping(times.writes, region), *_overlapping(times.reads, region)):
            ready = _later(ready, moment)
    return ready


def _overlapping(times: dict[Region, Moment], region: Region) -> Iterator[Moment]:
    exact = times.get(region)
    if exact is not None and len(times) == 1:
        yield exact
        return
    for other, moment in times.items():
        if overlap(region, other):
            yield moment


def _written(times: _Times, region: Region, visible: Moment) -> None:
    """Notes a write and forgets what it covers."""
    for entries in (times.reads, times.writes):
        for other in [other for other in entries if covers(region, other)]:
            del entries[other]
    times.writes[region] = visible
