"""The errors of the cache store.

CacheStoreError
├── LayoutError            a part's name, dtype, shape or size is not what the caller expects
├── StoreUnavailable       the server cannot be reached, refused us, or took longer than its timeout
└── EmbeddedServerError    the embedded server could not be started
"""


class CacheStoreError(Exception):
    """Base of every error raised by this package."""


class LayoutError(CacheStoreError):
    """A named part does not have the dtype, shape or byte count that was expected."""


class StoreUnavailable(CacheStoreError):
    """The store did not answer in time; callers of `CheckpointStore` see a `Miss` or a `Dropped` instead."""


class EmbeddedServerError(CacheStoreError):
    """No Redis-protocol server binary was found, or it did not come up."""
