"""The errors of one replica. Those meant for the client carry the HTTP status.

ReplicaError
├── QueueFull            429   the waiting queue is at its limit
├── NotReady             503   the model is still loading, or loading failed
├── PromptTooLong        400   prompt plus one token does not fit the context
├── InvalidRequest       400   an empty prompt, a token id outside the vocabulary, or a request id in use
└── OutOfMemory          -     the configured slots, blocks or weights do not fit; raised at start
"""


class ReplicaError(Exception):
    """Base of every error raised by this package; `status` is the HTTP status a client should see."""

    status = 500


class QueueFull(ReplicaError):
    """The waiting queue is full; try again after `retry_after_s`."""

    status = 429

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class NotReady(ReplicaError):
    """The model is still loading, or loading failed."""

    status = 503


class PromptTooLong(ReplicaError):
    """The prompt leaves no room for one new token."""

    status = 400


class InvalidRequest(ReplicaError):
    """The prompt is empty or holds a token id that the model does not have, or the request's id is in use."""

    status = 400


class OutOfMemory(ReplicaError):
    """What the config asks for does not fit the machine."""
