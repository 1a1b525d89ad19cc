"""The ACL roles: all that replicas, routers and operators do works under theirs, nothing else does; on every server."""

import secrets
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.event_follower import EventFollower
from warmstate.cache_store.event_log import EventLog
from warmstate.cache_store.events import PrefixEvent
from warmstate.cache_store.index_rows import StoredCheckpoint, StoredSegment
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.known_paths import KnownPaths
from warmstate.cache_store.names import REPLICA_IDS, object_name, short_namespace
from warmstate.cache_store.object_check import check_object
from warmstate.cache_store.prefix_index import PrefixIndex
from warmstate.cache_store.redis_client import StoreAddress
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.replica_rows import ReplicaRow, ReplicaRows
from warmstate.cache_store.store import Dropped, DropReason, Exists, Hit, Miss, MissReason, Part, Stored
from warmstate.cache_store.store_keeper import KeeperLimits, StoreKeeper
from warmstate.cache_store.store_survey import (
    find_checkpoints,
    find_lease,
    find_namespaces,
    flush_namespace,
    list_checkpoints,
    needed_objects,
    summarise_namespace,
    summarise_server,
)

Connect = Callable[[StoreAddress], redis.Redis]
Run = Callable[[Awaitable[Any]], Any]
MakeKey = Callable[..., ObjectKey]
MakeParts = Callable[..., dict[str, Part]]
EmptyLike = Callable[[dict[str, Part]], dict[str, Part]]
Eventually = Callable[[Callable[[], bool]], None]

ACL_FILE = Path(__file__).resolve().parents[2] / "cache_store" / "acl" / "warmstate.acl"
ROLES = {"replica": "warmstate-replica", "router": "warmstate-router", "operator": "warmstate-operator"}


def acl_lines() -> list[str]:
    return ACL_FILE.read_text(encoding="ascii").splitlines()


@pytest.fixture
def admin(each_server: EmbeddedServer, connect: Connect) -> redis.Redis:
    return connect(each_server.address)


@pytest.fixture
def roles(each_server: EmbeddedServer, admin: redis.Redis) -> Iterator[dict[str, StoreAddress]]:
    """The addresses of all roles, which log in with passwords of their own."""
    found = {}
    for line in acl_lines():
        _, user, *rules = line.split()
        password = secrets.token_hex(8)
        # A selector is one argument, although the file writes it with spaces.
        joined = " ".join(rules)
        start = joined.find("(")
        arguments = [*joined[:start].split(), joined[start:]] if start >= 0 else rules
        admin.execute_command("ACL", "SETUSER", user, *arguments, "on", f">{password}")
        role = next(role for role, name in ROLES.items() if name == user)
        found[role] = StoreAddress(each_server.url, password, username=user)
    admin.execute_command("ACL", "LOG", "RESET")
    yield found
    admin.execute_command("ACL", "DELUSER", *ROLES.values())


def denied(admin: redis.Redis) -> list[tuple[bytes, bytes]]:
    """What the server refused since the roles were made. The client library tries to name itself, and may not."""
    entries = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in admin.execute_command("ACL", "LOG")]
    return [(entry[b"reason"], entry[b"object"]) for entry in entries if entry[b"object"] != b"client|setinfo"]


@pytest.mark.parametrize("kind", ["ck", "kv"])
def test_a_replica_may_do_all_that_it_does_with_objects(
    roles: dict[str, StoreAddress],
    admin: redis.Redis,
    kind: str,
    run: Run,
    make_key: MakeKey,
    make_parts: MakeParts,
    empty_like: EmptyLike,
) -> None:
    store, key, parts = RedisStore(roles["replica"]), make_key(kind), make_parts()
    assert run(store.get(key, empty_like(parts))) == Miss(MissReason.ABSENT)
    assert isinstance(run(store.put(key, parts)), Stored)
    assert run(store.put(key, parts, ttl_s=1_000_000)) == Exists()
    assert isinstance(run(store.get(key, empty_like(parts))), Hit)
    if kind == "ck":
        admin.hset(object_name(key), "rec.0", b"damaged")
    else:
        admin.setrange(object_name(key), 80, b"damaged")
    assert run(store.get(key, empty_like(parts))).reason is MissReason.CORRUPT
    run(store.delete(key))
    run(store.close())
    assert denied(admin) == []


def test_replicas_and_routers_may_do_all_that_they_do_with_the_index(
    roles: dict[str, StoreAddress], admin: redis.Redis, make_key: MakeKey, eventually: Eventually
) -> None:
    replica, router, namespace = roles["replica"], roles["router"], secrets.token_bytes(32)
    index, heard_by_replica, paths = PrefixIndex(), PrefixIndex(), KnownPaths()
    rows, read_rows = ReplicaRows(replica), ReplicaRows(router)
    admin.sadd(REPLICA_IDS, "expired")
    rows.write(ReplicaRow("a", 1, "ready", 1.0, namespace=namespace.hex()))
    assert "a" in read_rows.read()
    log = EventLog(replica, namespace, "a", epoch=1, snapshot_period_s=0.1)
    follower, own_follower = (
        EventFollower(router, namespace, index),
        EventFollower(replica, namespace, heard_by_replica, paths=paths),
    )
    keeper = StoreKeeper(replica, replica, "a", KeeperLimits(budget_bytes=1), period_s=0.05)
    keys = [secrets.token_bytes(32) for _ in range(2)]
    log.append(PrefixEvent("add", keys[0], 64, "host"))
    log.append(
        PrefixEvent("add", keys[1], 64, "store"), StoredCheckpoint(64, 1, 10, 0, None, None, 0, 60, 1), path=keys[1:]
    )
    log.count_hit(keys[1])
    # A refusal ends the wait, so that it is what the test reports.
    eventually(lambda: bool(denied(admin)) or index.find(keys[0], "a") is not None)
    eventually(lambda: bool(denied(admin)) or keeper.stats()["rounds"] >= 3)
    eventually(lambda: bool(denied(admin)) or len(paths) == 1)
    assert denied(admin) == []
    log.append(PrefixEvent("remove", keys[0], 64, "host"))
    eventually(lambda: index.find(keys[0], "a") is None)
    late = EventFollower(router, namespace, PrefixIndex())
    assert late.wait_caught_up(10)
    log.close()
    keeper.close()
    for each in (follower, own_follower, late):
        each.close()
    rows.delete("a")
    assert read_rows.read() == {}
    rows.close()
    read_rows.close()
    assert keeper.stats()["failures"] == 0
    assert denied(admin) == []


def test_an_operator_may_look_into_a_store_and_empty_a_namespace(
    roles: dict[str, StoreAddress], admin: redis.Redis, connect: Connect, run: Run, make_parts: MakeParts
) -> None:
    """All that `warmstate cache` does."""
    namespace, prefix, client = secrets.token_bytes(32), secrets.token_bytes(32), connect(roles["operator"])
    short = short_namespace(namespace)
    store, log = RedisStore(roles["replica"]), EventLog(roles["replica"], namespace, "a", epoch=1)
    for key in (ObjectKey("ck", namespace, prefix, 320), ObjectKey("kv", namespace, prefix, 256)):
        assert isinstance(run(store.put(key, make_parts())), Stored)
    segments = {prefix: StoredSegment(256, 10, None, 0, 60, 1)}
    log.append(
        PrefixEvent("add", prefix, 320, "store"), StoredCheckpoint(320, 1, 10, 0, None, prefix, 0, 60, 1), segments
    )
    log.close()
    run(store.close())
    assert short in find_namespaces(client)
    assert find_lease(client) is None
    assert summarise_server(client, "store").keys > 0
    assert summarise_namespace(client, short).checkpoints == 1
    (entry,) = list_checkpoints(client, client, [short], "age", 5)
    assert find_checkpoints(client, [short], prefix.hex())[0].key == entry.key
    reports = [check_object(client, name) for name in needed_objects(client, entry)]
    assert [report.problems for report in reports] == [[], []]
    assert flush_namespace(client, client, short) == 2
    assert denied(admin) == []


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("EVAL", "return 1", "0"),
        ("SHUTDOWN",),
        ("ACL", "LIST"),
        ("REPLICAOF", "NO", "ONE"),
        ("CLIENT", "LIST"),
        ("PUBLISH", "channel", "text"),
        ("GET", "of somebody else"),
        ("SET", "of somebody else", "text"),
    ],
    ids=lambda command: command[0] + " " + command[-1],
)
def test_no_role_may_do_anything_else(
    roles: dict[str, StoreAddress], connect: Connect, role: str, command: tuple[str, ...]
) -> None:
    with pytest.raises(NoPermissionError):
        connect(roles[role]).execute_command(*command)


def test_a_router_may_neither_read_objects_nor_write(
    roles: dict[str, StoreAddress], connect: Connect, admin: redis.Redis, make_key: MakeKey
) -> None:
    name, client = object_name(make_key()), connect(roles["router"])
    admin.hset(name, "m", b"x")
    for command in (
        ("HGET", name, "m"),
        ("UNLINK", name),
        ("HSET", "ws:ix:{0}", "k", "v"),
        ("XADD", "ws:ev:{0}", "*", "k", "v"),
        ("SADD", REPLICA_IDS, "me"),
        ("SREM", "ws:live:{0}", "a"),
        ("SET", "ws:{lease}:holder", "me"),
    ):
        with pytest.raises(NoPermissionError):
            client.execute_command(*command)


def test_a_user_without_the_right_is_a_miss_and_a_drop(
    roles: dict[str, StoreAddress], run: Run, make_key: MakeKey, make_parts: MakeParts, empty_like: EmptyLike
) -> None:
    store, key, parts = RedisStore(roles["router"]), make_key(), make_parts()
    miss, drop = run(store.get(key, empty_like(parts))), run(store.put(key, parts))
    assert (type(miss), miss.reason) == (Miss, MissReason.UNAVAILABLE)
    assert (type(drop), drop.reason) == (Dropped, DropReason.UNAVAILABLE)
    assert store.stats()["misses_unavailable"] == store.stats()["dropped_unavailable"] == 1
    run(store.close())


@pytest.mark.parametrize("binary", ["redis-server", "valkey-server"])
def test_a_server_starts_with_the_file(binary: str, tmp_path: Path, eventually: Eventually) -> None:
    if shutil.which(binary) is None:
        pytest.skip(f"no {binary} on this machine")
    path, socket = tmp_path / "users.acl", tmp_path / "s"
    path.write_text("\n".join(acl_lines()).replace(" off ", " on >secret ").replace("resetpass ", "") + "\n")
    command = [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--aclfile", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path) as process:
        try:
            eventually(socket.exists)
            for user in ROLES.values():
                with redis.Redis(unix_socket_path=str(socket), username=user, password="secret") as client:
                    assert client.ping()
        finally:
            process.terminate()


def test_as_shipped_nobody_can_log_in() -> None:
    assert [line.split()[2:4] for line in acl_lines()] == [["off", "resetpass"]] * len(ROLES)


def test_the_roles_name_their_commands_one_by_one() -> None:
    """A category would grow with the server's version."""
    for line in acl_lines():
        assert "-@all" in line
        assert not [rule for rule in line.split() if rule.startswith(("+@", "allcommands", "allkeys", "~*"))]
