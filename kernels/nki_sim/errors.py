"""The errors of the simulator.

SimulatorError
├── ConstraintViolation   a documented rule of the hardware or the API is broken; names the rule and its source
├── UnwrittenRead         an element is read that nothing has written
└── OutOfRange            an index, slice or dynamic offset leaves its tensor
"""

from warmstate.kernels.nki_sim.rules import RULES


class SimulatorError(Exception):
    """A kernel did what the device would not do, or would do wrongly."""


class ConstraintViolation(SimulatorError):
    """A rule of `rules.RULES` is broken; `rule` is its name."""

    def __init__(self, rule: str, detail: str) -> None:
        statement, source = RULES[rule]
        super().__init__(f"{rule}: {detail}; the rule: {statement} [{source}]")
        self.rule = rule


class UnwrittenRead(SimulatorError):
    """An uninitialised element is read."""


class OutOfRange(SimulatorError):
    """An index leaves its tensor."""
