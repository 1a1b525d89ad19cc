"""`warmstate cache`: shows, verifies and empties a shared store. Starts nothing, and needs no Ray and no model."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis

from warmstate.cache_store.errors import StoreUnavailable
from warmstate.cache_store.key_report import report_key
from warmstate.cache_store.names import ROOM, WANTED_ROOM, parse_object_name
from warmstate.cache_store.object_check import check_object
from warmstate.cache_store.redis_client import StoreAddress, TlsFiles, open_client, translated_errors
from warmstate.cache_store.store_survey import (
    CheckpointEntry,
    find_checkpoints,
    find_lease,
    find_namespaces,
    flush_namespace,
    list_checkpoints,
    needed_objects,
    summarise_namespace,
    summarise_server,
)
from warmstate.cluster import cache_report as report
from warmstate.cluster.config import REDIS_PASSWORD_VARIABLE, AppConfig, merge, parse_config, read_config_file
from warmstate.cluster.launch.launch_errors import ConfigError, StoreProblem
from warmstate.cluster.running_store import find_running_stores

_HELP = f"""\
Which store: --store-url, or the store section of --config FILE, or, without either, the embedded store of the
application that you run on this machine. A password is read from {REDIS_PASSWORD_VARIABLE} (of an index on a server of
its own: WARMSTATE_REDIS_INDEX_PASSWORD), or from the file. The embedded store is found by the file that it leaves in
$XDG_RUNTIME_DIR/warmstate-stores or /tmp/warmstate-stores-UID, which only you can read."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "cache",
        help="look into a shared store",
        description="Shows, verifies and empties a shared store.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    stats = _add_action(actions, "stats", "sizes, ages and hits by namespace", _stats)
    stats.set_defaults(namespace=None)
    listing = _add_action(actions, "ls", "list checkpoints", _list)
    listing.add_argument("--namespace", metavar="NS", help="only of this one")
    listing.add_argument("--sort", choices=["age", "hits", "bytes", "position"], default="age", help="(default: age)")
    listing.add_argument("--limit", type=_positive, default=50, help="at most so many (default: 50)")
    inspect = _add_action(actions, "inspect", "verify a checkpoint, every byte; exit code 1 if any is wrong", _inspect)
    inspect.add_argument("key", metavar="KEY", help="as `ls` shows it, or longer, in hex; or any name of ours (ws:...)")
    inspect.add_argument("--namespace", metavar="NS", help="where the key is in several")
    flush = _add_action(actions, "flush", "remove everything of a namespace, and nothing else", _flush)
    flush.add_argument("--namespace", metavar="NS", required=True, help="as `stats` shows it, or the whole digest")
    flush.add_argument("--yes", action="store_true", help="do not ask")


def _add_action(actions: Any, name: str, help_text: str, work: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=help_text, epilog=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store-url", metavar="URL", help="redis://HOST:PORT of the objects")
    parser.add_argument("--index-url", metavar="URL", help="of the index, where it has a server of its own")
    parser.add_argument("--username", help="ACL user to log in as")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the application")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run, work=work)
    return parser


def run(options: argparse.Namespace) -> int:
    index_address, payload_address = find_addresses(options)
    index, payload = open_client(index_address, 1), open_client(payload_address, 1)
    try:
        for address, client in ((index_address, index), (payload_address, payload)):
            with translated_errors(address):
                client.ping()
        with translated_errors(payload_address):
            code: int = options.work(options, index, payload)
    except StoreUnavailable as error:
        raise StoreProblem(str(error)) from error
    finally:
        index.close()
        payload.close()
    return code


def find_addresses(options: argparse.Namespace) -> tuple[StoreAddress, StoreAddress]:
    """Where the index and the objects are. Raises `ConfigError` when nothing says so."""
    values = read_config_file(options.config) if options.config else {}
    given = {"url": options.store_url, "index_url": options.index_url, "username": options.username}
    if options.store_url is not None:
        given["kind"] = "redis"
    # The model does not matter here, and need not be named.
    config = parse_config(merge({"model": {"path": ""}}, merge(values, {"store": given})))
    if config.store.kind == "redis":
        return _configured(config)
    if config.store.kind == "none":
        raise ConfigError(f"--config {options.config}: store.kind is none; name a store with --store-url")
    return _running()


def _configured(config: AppConfig) -> tuple[StoreAddress, StoreAddress]:
    store = config.store
    assert store.url is not None, "the schema asks for it"
    payload = StoreAddress(
        store.url,
        config.redis_password() or _known_password(store.url),
        connect_timeout_s=store.connect_timeout_s,
        operation_timeout_s=store.operation_timeout_s,
        username=store.username,
        tls=TlsFiles(store.tls_ca_file, store.tls_cert_file, store.tls_key_file),
    )
    if store.index_url is None:
        return payload, payload
    return replace(payload, url=store.index_url, password=config.redis_index_password()), payload


def _known_password(url: str) -> str | None:
    """That of an embedded store of this user's at `url`; None when there is none."""
    return next((store.password for store in find_running_stores() if store.url == url), None)


def _running() -> tuple[StoreAddress, StoreAddress]:
    stores = find_running_stores()
    if len(stores) != 1:
        found = ", ".join(store.url for store in stores) or "none"
        raise ConfigError(
            f"embedded stores of yours that run on this machine: {found}; name the one you mean with --store-url"
        )
    address = StoreAddress(stores[0].url, stores[0].password)
    return address, address


def _stats(options: argparse.Namespace, index: redis.Redis, payload: redis.Redis) -> int:
    is_one = _place(index) == _place(payload)
    servers = [summarise_server(payload, "store" if is_one else "objects")]
    if not is_one:
        servers.append(summarise_server(index, "index"))
    namespaces = [summarise_namespace(index, short) for short in find_namespaces(index)]
    show = report.stats_json if options.json else report.stats_text
    print(show(servers, find_lease(index), namespaces))
    return 0


def _place(client: redis.Redis) -> tuple[object, ...]:
    settings = client.connection_pool.connection_kwargs
    return tuple(settings.get(name) for name in ("host", "port", "path", "db"))


def _list(options: argparse.Namespace, index: redis.Redis, payload: redis.Redis) -> int:
    shorts = _namespaces(options, index)
    show = report.list_json if options.json else report.list_text
    print(show(list_checkpoints(index, payload, shorts, options.sort, options.limit)))
    return 0


def _inspect(options: argparse.Namespace, index: redis.Redis, payload: redis.Redis) -> int:
    if options.key.startswith("ws:"):
        return _inspect_name(options, index, payload)
    entry = _the_one(options, find_checkpoints(index, _namespaces(options, index), options.key.lower()))
    reports = [check_object(payload, name) for name in needed_objects(index, entry)]
    show = report.inspect_json if options.json else report.inspect_text
    print(show(entry, reports))
    is_short = len(reports) < entry.num_groups + report.num_segments(entry)
    return int(is_short or any(each.problems for each in reports))


def _inspect_name(options: argparse.Namespace, index: redis.Redis, payload: redis.Redis) -> int:
    """One key of ours: an object is verified, of anything else is told what it is."""
    name = parse_object_name(options.key)
    if name is not None and name.kind != "tmp":
        checked = check_object(payload, name)
        print(report.object_json(checked) if options.json else report.object_text(checked))
        return int(bool(checked.problems))
    told = report_key(payload if name is not None or options.key in (ROOM, WANTED_ROOM) else index, options.key)
    if told is None:
        raise StoreProblem(f"{options.key}: no name that warmstate gives; see `warmstate cache ls`")
    print(report.key_json(told) if options.json else report.key_text(told))
    return int(told.kind == "none")


def _flush(options: argparse.Namespace, index: redis.Redis, payload: redis.Redis) -> int:
    (short,) = _namespaces(options, index)
    summary = summarise_namespace(index, short)
    if not options.yes and not _confirmed(summary.namespace, summary.checkpoints, summary.replicas):
        print("nothing was removed", file=sys.stderr)
        return 1
    num_objects = flush_namespace(index, payload, short)
    print(f'{{"removed_objects": {num_objects}}}' if options.json else f"removed {num_objects} objects")
    return 0


def _confirmed(short: str, num_checkpoints: int, num_replicas: int) -> bool:
    question = f"remove {num_checkpoints} checkpoints of namespace {short}, which {num_replicas} replicas use? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _namespaces(options: argparse.Namespace, index: redis.Redis) -> list[str]:
    """All, or the one that was asked for; a whole digest names it too."""
    known = find_namespaces(index)
    if options.namespace is None:
        return known
    short = options.namespace.lower()[:16]
    if short not in known:
        raise StoreProblem(f"--namespace {options.namespace}: the store has {', '.join(known) or 'no namespace'}")
    return [short]


def _the_one(options: argparse.Namespace, found: Sequence[CheckpointEntry]) -> CheckpointEntry:
    if len(found) == 1:
        return found[0]
    if not found:
        raise StoreProblem(f"{options.key}: the store's index has no such checkpoint; see `warmstate cache ls`")
    listed = ", ".join(f"{entry.key} in {entry.namespace}" for entry in found[:5])
    raise StoreProblem(f"{options.key}: {len(found)} checkpoints begin so: {listed}; give more digits or --namespace")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number
