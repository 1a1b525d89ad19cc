"""`warmstate cache` as a person meets it, over real servers that hold what a replica has put there."""

import asyncio
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmstate.cache_store.embedded import EmbeddedServer
from warmstate.cache_store.event_log import EventLog
from warmstate.cache_store.events import PrefixEvent
from warmstate.cache_store.index_rows import StoredCheckpoint, StoredSegment
from warmstate.cache_store.keys import ObjectKey
from warmstate.cache_store.names import LEASE, ROOM, WANTED_ROOM, index_names, object_name
from warmstate.cache_store.redis_client import StoreAddress, open_client
from warmstate.cache_store.redis_store import RedisStore
from warmstate.cache_store.store import Part, PartSpec, Stored
from warmstate.cluster.main import main
from warmstate.cluster.running_store import RunningStore, announce, find_running_stores

NAMESPACE = bytes(range(32))
OTHER_NAMESPACE = bytes(range(32, 64))
SHORT = NAMESPACE[:8].hex()
CREATED_MS = 1_700_000_000_000

Command = Callable[..., tuple[int, str, str]]


class Filled:
    """Puts whole checkpoints of 320 tokens, each with a KV segment of its own."""

    def __init__(self, payload: EmbeddedServer, index: EmbeddedServer) -> None:
        self.payload, self.index = payload, index

    def put(self, number: int, namespace: bytes = NAMESPACE, kind: str = "turn", hits: int = 0) -> bytes:
        key, segment = bytes([number]) * 32, bytes([number, 1]) * 16
        asyncio.run(self._put_objects(namespace, key, segment))
        row = StoredCheckpoint(320, 2, 80_000 + number, 0, None, segment, CREATED_MS + number, 600, 7, kind)
        log = EventLog(self.index.address, namespace, "replica-1", number)
        log.append(
            PrefixEvent("add", key, 320, "store"), row, {segment: StoredSegment(256, 4096, None, CREATED_MS, 600, 7)}
        )
        for _ in range(hits):
            log.count_hit(key)
        log.close()
        return key

    async def _put_objects(self, namespace: bytes, key: bytes, segment: bytes) -> None:
        store = RedisStore(self.payload.address, epoch=7)
        for group in range(2):
            part = Part(PartSpec("rec", "uint8", (40_000,)), np.full(40_000, group, dtype=np.uint8).data)
            assert isinstance(await store.put(ObjectKey("ck", namespace, key, 320, group), {"rec": part}), Stored)
        kv = Part(PartSpec("kv", "uint8", (4096,)), np.zeros(4096, dtype=np.uint8).data)
        assert isinstance(await store.put(ObjectKey("kv", namespace, segment, 256), {"kv": kv}), Stored)
        await store.close()


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(64 << 20) as running:
        yield running


@pytest.fixture
def filled(server: EmbeddedServer) -> Filled:
    return Filled(server, server)


@pytest.fixture
def cache(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `warmstate cache`; gives its exit code, what it printed and its errors."""
    monkeypatch.setenv("WARMSTATE_REDIS_PASSWORD", server.password)

    def run(*arguments: str, url: str | None = server.url, answer: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        try:
            code = main(["cache", *arguments, *(["--store-url", url] if url else [])])
        except SystemExit as left:
            code = int(left.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_stats_show_servers_and_namespaces(filled: Filled, cache: Command) -> None:
    filled.put(1, hits=3)
    filled.put(2, kind="system")
    filled.put(3, OTHER_NAMESPACE)
    code, out, _ = cache("stats")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith(SHORT))
    assert "2 (156.3 KiB)" in line
    assert "2 (8.0 KiB)" in line
    assert "system:1 turn:1" in line
    assert "valkey" in out or "redis" in out
    assert "of 64.0 MiB" in out
    assert "evicting replica: none" in out
    shown = json.loads(cache("stats", "--json")[1])
    mine = next(each for each in shown["namespaces"] if each["namespace"] == SHORT)
    assert (mine["digest"], mine["hits"], mine["deepest_position"]) == (NAMESPACE.hex(), 3, 320)
    assert mine["newest_age_s"] < mine["oldest_age_s"]
    assert len(shown["servers"]) == 1


def test_an_empty_store_says_so(cache: Command) -> None:
    assert "the store holds nothing" in cache("stats")[1]
    assert cache("ls") == (0, "no checkpoints\n", "")


def test_checkpoints_are_listed_in_the_order_asked_for(filled: Filled, cache: Command) -> None:
    for number, hits in ((1, 2), (2, 0), (3, 5)):
        filled.put(number, hits=hits)
    filled.put(9, OTHER_NAMESPACE)
    code, out, _ = cache("ls", "--namespace", SHORT)
    assert code == 0
    assert [line[:2] for line in out.splitlines()] == ["ke", "03", "02", "01"]
    assert "320" in out
    assert "gone" not in out
    shown = json.loads(cache("ls", "--json", "--sort", "hits", "--limit", "2", "--namespace", NAMESPACE.hex())[1])
    assert [(entry["key"][:2], entry["hits"]) for entry in shown] == [("03", 5), ("01", 2)]
    assert all(86_000 < entry["ttl_s"] <= 86_400 for entry in shown)
    assert shown[0]["unused_s"] < 60 < shown[0]["age_s"]
    assert len(cache("ls")[1].splitlines()) == 5
    assert cache("ls", "--sort", "bytes", "--limit", "1")[1].splitlines()[1].startswith("09")


def test_a_checkpoint_whose_objects_are_gone_is_listed_as_gone(filled: Filled, cache: Command) -> None:
    key = filled.put(1)
    client = open_client(filled.payload.address, 1)
    client.unlink(object_name(ObjectKey("ck", NAMESPACE, key, 320, 0)))
    client.close()
    assert " gone " in cache("ls")[1]


def test_a_whole_checkpoint_is_found_whole(filled: Filled, cache: Command) -> None:
    filled.put(1)
    filled.put(2)
    code, out, _ = cache("inspect", "0101")
    assert code == 0
    assert "every byte is as written" in out
    assert out.count("epoch 7") == 3
    assert "rec uint8[40000]" in out
    shown = json.loads(cache("inspect", "02", "--json")[1])
    assert [len(each["problems"]) for each in shown["objects"]] == [0, 0, 0]


def flip(client: Any, name: str, field: str) -> None:
    data = bytearray(client.hget(name, field))
    data[100 % len(data)] ^= 1
    client.hset(name, field, bytes(data))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda client, ck, kv: flip(client, ck, "rec.0"), "chunk rec.0 does not match its checksum"),
        (lambda client, ck, kv: flip(client, ck, "m"), "manifest does not match its seal"),
        (lambda client, ck, kv: client.hdel(ck, "m"), "manifest is missing"),
        (lambda client, ck, kv: client.hset(ck, "rec.0", b"x"), "chunk rec.0: 1 bytes instead of 40000"),
        (lambda client, ck, kv: client.hset(ck, "more", b"x"), "1 fields that the manifest does not name"),
        (lambda client, ck, kv: client.unlink(ck), "absent"),
        (lambda client, ck, kv: (client.unlink(ck), client.set(ck, b"x")), "a string, not a hash"),
        (lambda client, ck, kv: client.hset(ck, "m", bytes(2 << 20)), "manifest of 2097152 bytes"),
        (lambda client, ck, kv: client.setrange(kv, 2000, b"xxx"), "chunk kv.0 does not match its checksum"),
        (lambda client, ck, kv: client.append(kv, b"x"), "bytes instead of"),
        (lambda client, ck, kv: client.set(kv, b"rubbish"), "no manifest at its beginning"),
        (lambda client, ck, kv: client.set(kv, b"WSOB\1\0\xff\xff\xff\x7f rest"), "no manifest at its beginning"),
        (lambda client, ck, kv: client.copy(ck, ck.replace(".1}", ".0}"), replace=True), "manifest names ws:{"),
    ],
)
def test_inspect_says_what_is_wrong(
    filled: Filled, cache: Command, damage: Callable[[Any, str, str], object], words: str
) -> None:
    key = filled.put(1)
    client = open_client(filled.payload.address, 1)
    damage(
        client,
        object_name(ObjectKey("ck", NAMESPACE, key, 320, 1)),
        object_name(ObjectKey("kv", NAMESPACE, bytes([1, 1]) * 16, 256)),
    )
    client.close()
    code, out, _ = cache("inspect", key.hex())
    assert code == 1
    assert f"WRONG: {words}" in out or words in out
    assert "1 of 3 objects are not whole" in out


def test_inspect_says_when_the_index_has_lost_its_way_to_the_kv(filled: Filled, cache: Command) -> None:
    key = filled.put(1)
    client = open_client(filled.index.address, 1)
    names = index_names(NAMESPACE)
    row = StoredCheckpoint(640, 2, 80_000, 0, None, bytes([1, 1]) * 16, CREATED_MS, 600, 7)
    client.hset(names.checkpoints, key, row.encode())
    client.close()
    code, out, _ = cache("inspect", "01")
    assert code == 1
    assert "WRONG: the index knows 1 of its 2 KV segments" in out


def test_every_name_of_ours_can_be_inspected(filled: Filled, cache: Command) -> None:
    filled.put(1)
    for server in {filled.payload.url: filled.payload, filled.index.url: filled.index}.values():
        client = open_client(server.address, 1)
        client.set(LEASE, b"a 1")
        names = sorted(name.decode() for name in client.scan_iter(match="ws:*"))
        client.close()
        assert {name.rpartition(":")[2] for name in names} >= {"ck", "kv", "holder", "nss"}
        for name in names:
            code, out, err = cache("inspect", name)
            assert (code, err) == (0, ""), name
            assert name in out
            assert json.loads(cache("inspect", name, "--json")[1])


def test_what_a_name_stands_for_is_told(filled: Filled, cache: Command) -> None:
    filled.put(1)
    client = open_client(filled.payload.address, 1)
    kv = object_name(ObjectKey("kv", NAMESPACE, bytes([1, 1]) * 16, 256))
    assert "every byte is as written" in cache("inspect", kv)[1]
    client.append(kv, b"x")
    client.close()
    code, out, _ = cache("inspect", kv)
    assert (code, "WRONG" in out) == (1, True)
    temporary = f"ws:{{{SHORT}.{'00' * 32}.0}}:tmp:0123456789abcdef"
    code, out, _ = cache("inspect", temporary)
    assert (code, out) == (1, f"{temporary}: an object that is being written; absent\n")
    code, out, _ = cache("inspect", index_names(NAMESPACE).checkpoints)
    assert out == f"ws:ix:{{{SHORT}}}: rows of checkpoints; a hash of 1 entries, does not expire\n"
    code, _, err = cache("inspect", "ws:{x}:kv")
    assert (code, err) == (1, "error: ws:{x}:kv: no name that warmstate gives; see `warmstate cache ls`\n")


def test_a_key_that_is_unknown_or_ambiguous_is_told(filled: Filled, cache: Command) -> None:
    filled.put(1)
    filled.put(1, OTHER_NAMESPACE)
    code, _, err = cache("inspect", "ff")
    assert (code, err) == (1, "error: ff: the store's index has no such checkpoint; see `warmstate cache ls`\n")
    code, _, err = cache("inspect", "01")
    assert code == 1
    assert "2 checkpoints begin so" in err
    assert cache("inspect", "01", "--namespace", SHORT)[0] == 0


def test_flush_removes_one_namespace_and_nothing_else(filled: Filled, cache: Command) -> None:
    for number in range(1, 4):
        filled.put(number)
    filled.put(9, OTHER_NAMESPACE)
    client = open_client(filled.payload.address, 1)
    client.set("somebody else's", b"x")
    client.set(f"{SHORT}.user", b"x")
    kept = {name for name in client.scan_iter() if SHORT.encode() not in name}
    code, out, err = cache("flush", "--namespace", SHORT, answer="no\n")
    assert (code, out) == (1, "")
    assert "remove 3 checkpoints" in err
    assert cache("ls", "--namespace", SHORT)[0] == 0
    code, out, _ = cache("flush", "--namespace", SHORT, answer="y\n")
    assert (code, out) == (0, "removed 9 objects\n")
    assert {*client.scan_iter()} == kept | {f"{SHORT}.user".encode()}
    client.close()
    assert cache("flush", "--namespace", SHORT, "--yes")[0] == 1
    assert cache("flush", "--namespace", OTHER_NAMESPACE.hex(), "--yes", "--json")[1] == '{"removed_objects": 3}\n'


def test_an_unknown_namespace_names_those_there_are(filled: Filled, cache: Command) -> None:
    filled.put(1)
    code, _, err = cache("flush", "--namespace", "abcd", "--yes")
    assert (code, err) == (1, f"error: --namespace abcd: the store has {SHORT}\n")


def test_a_server_that_is_away_and_a_wrong_password_are_told_apart(
    cache: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = cache("stats", url="redis://127.0.0.1:1")
    assert (code, out) == (1, "")
    assert err.startswith("error: store at redis://127.0.0.1:1: ConnectionError")
    monkeypatch.setenv("WARMSTATE_REDIS_PASSWORD", "wrong")
    code, _, err = cache("stats")
    assert code == 1
    assert "Authentication" in err
    assert "wrong" not in err.replace("WRONGPASS", "")
    code, _, err = cache("stats", url="http://x")
    assert code == 2
    assert "store.url" in err


def test_an_index_on_a_server_of_its_own_is_looked_into_too(
    server: EmbeddedServer, cache: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(64 << 20) as index:
        monkeypatch.setenv("WARMSTATE_REDIS_INDEX_PASSWORD", index.password)
        Filled(server, index).put(1)
        code, out, _ = cache("stats", "--index-url", index.url)
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()[1:3]] == ["objects", "index"]
        assert cache("inspect", "01", "--index-url", index.url)[0] == 0
        # These lie with the objects.
        for name in (ROOM, WANTED_ROOM):
            open_client(server.address, 1).set(name, 5)
            assert "a string of 1 bytes" in cache("inspect", name, "--index-url", index.url)[1]


def test_the_store_may_be_named_by_the_configuration(
    server: EmbeddedServer, filled: Filled, cache: Command, tmp_path: Path
) -> None:
    filled.put(1)
    file = tmp_path / "app.yaml"
    file.write_text(f"store: {{kind: redis, url: '{server.url}', password: '{server.password}'}}\n")
    code, out, _ = cache("ls", "--config", str(file), url=None)
    assert code == 0
    assert out.splitlines()[1].startswith("01")
    file.write_text("store: {kind: none}\n")
    code, _, err = cache("ls", "--config", str(file), url=None)
    assert code == 2
    assert "store.kind is none" in err


def test_the_embedded_store_that_runs_here_is_found(
    server: EmbeddedServer, filled: Filled, cache: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("WARMSTATE_REDIS_PASSWORD")
    code, _, err = cache("ls", url=None)
    assert code == 2
    assert "run on this machine: none" in err
    filled.put(1)
    path = announce(RunningStore(server.url, server.password))
    assert path.stat().st_mode & 0o777 == 0o600
    assert cache("ls", url=None)[1].splitlines()[1].startswith("01")
    (path.parent / "999999999.json").write_text("{}")
    (path.parent / f"{os.getppid()}.json").write_text('{"url": "redis://127.0.0.1:5/0", "password": "x"}')
    code, _, err = cache("ls", url=None)
    assert code == 2
    assert server.url in err
    # Which one was meant is enough: its password is known.
    assert cache("ls", url=server.url)[1].splitlines()[1].startswith("01")
    assert not (path.parent / "999999999.json").exists()


def test_a_directory_that_others_may_read_is_neither_written_nor_believed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError):
        announce(RunningStore("redis://127.0.0.1:5/0", "secret"), tmp_path)
    (tmp_path / f"{os.getpid()}.json").write_text('{"url": "redis://127.0.0.1:5/0", "password": "x"}')
    assert find_running_stores(tmp_path) == []
    assert "secret" not in repr(RunningStore("redis://127.0.0.1:5/0", "secret"))


def test_the_names_that_flush_removes_are_those_of_the_index(server: EmbeddedServer, filled: Filled) -> None:
    filled.put(1, hits=1)
    client = open_client(StoreAddress(server.url, server.password), 1)
    mine = {name.decode() for name in client.scan_iter() if f"{{{SHORT}}}".encode() in name}
    client.close()
    assert mine <= set(index_names(NAMESPACE).all())
