"""The errors of the cache store.

CacheStoreError
├── LayoutError            a part's name, dtype, shape or size is not what the caller expects
├── LoanEnded              a caller has taken back the buffers that a thread was still using
├── StoreUnavailable       the server cannot be reached, refused us, or took longer than its timeout
├── LeaseLost              another replica has begun to evict, so that this one must not go on
└── EmbeddedServerError    the embedded server could not be started
"""


class CacheStoreError(Exception):
    """Base of every error raised by this package."""


class LayoutError(CacheStoreError):
    """A named part does not have the dtype, shape or byte count that was expected."""


class LoanEnded(CacheStoreError):
    """The buffers are the caller's again. Only threads whose result nobody awaits any more see this."""


class StoreUnavailable(CacheStoreError):
    """The store did not answer in time; callers of `CheckpointStore` see a `Miss` or a `Dropped` instead."""


class LeaseLost(CacheStoreError):
    """The eviction lease is over, or a later holder has begun its work."""


class EmbeddedServerError(CacheStoreError):
    """No Redis-protocol server binary was found, or it did not come up."""
