import io
import re

from warmstate.cluster.launch.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO) -> str:
    """What was written, without the clock."""
    return re.sub(r"\[ *\d+\.\d s\] ", "", stream.getvalue())


def test_a_log_gets_one_line_per_phase_and_per_tenth() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.show("starting")
    progress.show("starting")
    for percent in range(101):
        progress.show("loading", percent / 100)
    lines = shown(stream).splitlines()
    assert lines[:3] == ["starting", "loading   0%", "loading  10%"]
    assert len(lines) in (11, 12)


def test_a_terminal_line_with_its_bar_is_rewritten_within_a_phase_and_kept_after_it() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress.show("loading", 0.0)
    progress.show("loading", 0.5)
    progress.show("warming")
    progress.end()
    empty, half = "." * 24, "#" * 12 + "." * 12
    assert shown(stream) == f"loading [{empty}]   0%\r\x1b[Kloading [{half}]  50%\nwarming\n"


def test_a_phase_that_comes_back_is_shown_again() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for phase in ("loading", "warming", "loading"):
        progress.show(phase)
    assert shown(stream).split() == ["loading", "warming", "loading"]


def test_a_note_takes_a_line_of_its_own_and_the_phase_is_shown_again() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress.show("loading", 0.5)
    bar = shown(stream)
    progress.note("something")
    assert shown(stream) == f"{bar}\r\x1b[Ksomething\n{bar}"


def test_notes_are_dropped_while_everything_is_being_stopped() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.note("the store answers")
    progress.mute()
    progress.note("the store is away")
    assert shown(stream) == "the store answers\n"
