"""Owns what SIGINT and SIGTERM do to this process at each time of its life. Imports next to nothing."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def killed_by_interrupts() -> Iterator[None]:
    """Inside, SIGINT ends this process without a word, one that was held back by `interrupts_held_back` at once: while
    there is nothing to put in order, this is surer than an exception, which any import may swallow."""
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        # Whoever has stopped in order wants to hear of no more.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, previous)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Inside, SIGINT waits. A process that is started inside has it wait until that says what to do with it, because
    the interpreter's own way up ends in a traceback."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def raise_on_signals() -> None:
    """SIGINT and SIGTERM both raise KeyboardInterrupt in the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def ignore_signals() -> None:
    """SIGINT and SIGTERM have done their work: nothing may interrupt the way down."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
