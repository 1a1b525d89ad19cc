"""The errors of starting the application: what a person at a terminal can put right.

LaunchError
├── ConfigError       a key of the config file or of Serve's `args` is unknown or has an impossible value
├── PortInUse         the HTTP port is taken
├── MemoryShort       the model, its KV and Ray do not fit the memory that is free
├── StoreProblem      a store cannot be looked into, or does not have what was asked for
└── StartFailed       Ray, Serve or a replica did not come up
"""


class LaunchError(Exception):
    """Base; the message is shown as it is, and the command ends with `exit_code`."""

    exit_code = 1


class ConfigError(LaunchError):
    """The configuration is wrong; the message names the key."""

    exit_code = 2


class PortInUse(LaunchError):
    """Another process listens on the HTTP port."""


class MemoryShort(LaunchError):
    """What was asked for does not fit the memory that is free."""


class StoreProblem(LaunchError):
    """A store cannot be looked into, or does not have what was asked for."""


class StartFailed(LaunchError):
    """The application did not come up."""
