"""The errors of the HTTP API. Each carries what the OpenAI error object and the HTTP response need.

ClusterError
└── ApiError                  a request that cannot be answered; `status` is the HTTP status
    ├── InvalidRequest   400  a field is missing, of the wrong type, out of range or not supported; `param` names it
    ├── Unauthorized     401  no API key, or an unknown one
    ├── NotFound         404  no such model, replica or route
    ├── BodyTooLarge     413  the body is over the limit
    ├── Overloaded       429  every queue is full; try again after `retry_after_s`
    ├── GenerationFailed 500  the engine ended the request
    ├── ReplicaLost      502  the replica died and no other could finish the request
    └── NotLoaded        503  no replica is ready yet; try again after `retry_after_s`
"""


class ClusterError(Exception):
    """Base of every error raised by this package."""


class ApiError(ClusterError):
    """A request that cannot be answered, as the client should see it."""

    status = 500
    type = "internal_server_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.replica_ids: tuple[str, ...] = ()
        """Who had accepted the request, where that is known."""


class InvalidRequest(ApiError):
    """The request itself is at fault; `param` is the path of the field."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(ApiError):
    """The server asks for an API key and got none that it knows."""

    status = 401
    type = "authentication_error"


class NotFound(ApiError):
    """No such model, replica or route."""

    status = 404
    type = "not_found_error"


class BodyTooLarge(ApiError):
    """The body is over the configured limit."""

    status = 413
    type = "request_too_large"


class Overloaded(ApiError):
    """Every queue is full."""

    status = 429
    type = "rate_limit_error"


class GenerationFailed(ApiError):
    """The engine ended the request; not the client's fault."""


class ReplicaLost(ApiError):
    """The replica died and no other could finish the request."""

    status = 502
    type = "bad_gateway"


class NotLoaded(ApiError):
    """No replica is ready yet."""

    status = 503
    type = "service_unavailable"


_REFUSALS: dict[int, type[ApiError]] = {
    kind.status: kind for kind in (InvalidRequest, NotFound, Overloaded, ReplicaLost, NotLoaded)
}


def refusal(status: int, message: str, retry_after_s: int | None = None) -> ApiError:
    """The error for a replica's refusal; a status that is not in the tree above is an internal error."""
    return _REFUSALS.get(status, GenerationFailed)(message, retry_after_s=retry_after_s)
