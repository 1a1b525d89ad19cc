"""Owns one replica's ties to the shared store: objects, events and index, opened and closed together."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from warmstate.cache_store.event_follower import EventFollower
from warmstate.cache_store.event_log import EventLog
from warmstate.cache_store.known_paths import KnownPaths
from warmstate.cache_store.prefix_index import PrefixIndex
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store_keeper import StoreKeeper
from warmstate.replicas.cache.other_namespaces import OtherNamespaces
from warmstate.replicas.cache.state_codec import CheckpointNames
from warmstate.replicas.cache.store_directory import EventDirectory
from warmstate.replicas.cache.store_link import StoreLink
from warmstate.replicas.config import StoreConfig

_DRAIN_TIMEOUT_S = 2.0
_CATCH_UP_S = 1.0


def new_epoch() -> int:
    """Tells one life of a replica from the next; grows."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class StoreEndpoints:
    """Where the index is and where the objects are: two servers, or one under two names."""

    index: StoreAddress
    payload: StoreAddress


def store_endpoints(config: StoreConfig) -> StoreEndpoints | None:
    """None when this replica shares nothing."""
    if config.url is None:
        return None
    payload = StoreAddress(
        config.url,
        config.password,
        connect_timeout_s=config.connect_timeout_s,
        operation_timeout_s=config.operation_timeout_s,
        username=config.username,
        tls=config.tls,
        min_bytes_per_s=config.min_bytes_per_s,
    )
    if config.index_url is None:
        return StoreEndpoints(payload, payload)
    return StoreEndpoints(replace(payload, url=config.index_url, password=config.index_password), payload)


def _fetch_timeout(address: StoreAddress) -> Callable[[int], float]:
    """A little more than one operation may take, so that the store's breaker hears of the operation that was late."""
    return lambda num_bytes: address.connect_timeout_s + address.timeout_s(num_bytes)


class SharedStore:
    """Opens lazily and never fails for a server that is away: that is counted, and tried again."""

    def __init__(
        self,
        endpoints: StoreEndpoints,
        config: StoreConfig,
        names: CheckpointNames,
        replica_id: str,
        epoch: int,
        loop: asyncio.AbstractEventLoop,
        max_in_flight_bytes: int,
    ) -> None:
        index, payload = endpoints.index, endpoints.payload
        prefixes, paths = PrefixIndex(), KnownPaths()
        self._store = RedisStore(
            payload,
            ttl_s=config.ttl_s,
            max_object_bytes=config.max_object_bytes,
            max_in_flight_bytes=max_in_flight_bytes,
            epoch=epoch,
            budget_bytes=config.keeper.budget_bytes,
        )
        # An index on a server of its own may be lost while the objects are not.
        self._log = EventLog(index, names.namespace, replica_id, epoch, keeps_store_rows=index.url != payload.url)
        self.directory = EventDirectory(prefixes, paths, self._log, epoch, config.ttl_s)
        self.link = StoreLink(
            self._store,
            self.directory,
            names,
            loop,
            _fetch_timeout(payload),
            max_in_flight_bytes,
            ttl_s=config.ttl_s,
        )
        self._follower = EventFollower(
            index,
            names.namespace,
            prefixes,
            on_reset=self.link.forget_stored,
            on_lost_segments=self.link.forget_segments,
            on_lost_checkpoint=self.link.forget_checkpoint,
            paths=paths,
        )
        self.elsewhere = OtherNamespaces(index, names.namespace)
        self._keeper = StoreKeeper(index, payload, replica_id, config.keeper)

    async def catch_up(self) -> None:
        """Waits a moment for the index to know what the store holds; a store that is away costs no more than that."""
        await asyncio.to_thread(self._follower.wait_caught_up, _CATCH_UP_S)

    def stats(self) -> dict[str, float]:
        sources = (self._store.stats(), self._log.stats(), self._follower.stats())
        stats = {f"store_{name}": value for source in sources for name, value in source.items()}
        return {**stats, **{f"store_keeper_{name}": value for name, value in self._keeper.stats().items()}}

    async def close(self) -> None:
        """Gives what is being published a moment to end, and lets go of the server."""
        await self.link.close(_DRAIN_TIMEOUT_S)
        self.elsewhere.close()
        await asyncio.to_thread(self._keeper.close)
        await asyncio.to_thread(self._log.close)
        await asyncio.to_thread(self._follower.close)
        await self._store.close()
