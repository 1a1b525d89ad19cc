"""How what a store holds is shown to people: tables of sizes, ages and hits. Knows no server and no arguments."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from warmstate.cache_store.key_report import KeyReport
from warmstate.cache_store.keys import SEGMENT_TOKENS
from warmstate.cache_store.object_check import ObjectReport
from warmstate.cache_store.store_survey import CheckpointEntry, NamespaceSummary, ServerSummary

_KEY_DIGITS = 16


def stats_json(servers: Sequence[ServerSummary], lease: str | None, namespaces: Sequence[NamespaceSummary]) -> str:
    return _json(
        {
            "servers": [asdict(server) for server in servers],
            "evicting_replica": lease,
            "namespaces": [asdict(namespace) for namespace in namespaces],
        }
    )


def stats_text(servers: Sequence[ServerSummary], lease: str | None, namespaces: Sequence[NamespaceSummary]) -> str:
    server_rows = [
        [
            server.role,
            server.version,
            f"{_size(server.used_bytes)} of {_size(server.max_bytes) if server.max_bytes else 'no limit'}",
            server.policy,
            str(server.evicted_keys),
            str(server.keys),
        ]
        for server in servers
    ]
    rows = [
        [
            each.namespace,
            f"{each.checkpoints} ({_size(each.checkpoint_bytes)})",
            f"{each.segments} ({_size(each.segment_bytes)})",
            str(each.hits),
            str(each.deepest_position),
            f"{_age(each.newest_age_s)} to {_age(each.oldest_age_s)}" if each.checkpoints else "-",
            str(each.replicas),
            " ".join(f"{kind or 'unnamed'}:{count}" for kind, count in each.kinds.items()) or "-",
        ]
        for each in namespaces
    ]
    return "\n".join(
        [
            _table(["server", "version", "memory", "policy", "evicted", "keys"], server_rows),
            f"evicting replica: {lease or 'none'}",
            "",
            _table(["namespace", "checkpoints", "kv", "hits", "deepest", "ages", "replicas", "kinds"], rows)
            if rows
            else "the store holds nothing",
        ]
    )


def list_json(entries: Sequence[CheckpointEntry]) -> str:
    return _json([asdict(entry) for entry in entries])


def list_text(entries: Sequence[CheckpointEntry]) -> str:
    rows = [
        [
            entry.key[:_KEY_DIGITS],
            entry.namespace,
            str(entry.position),
            entry.kind or "-",
            _size(entry.num_bytes),
            _age(entry.age_s),
            "gone" if entry.ttl_s is None else _age(entry.ttl_s),
            str(entry.hits),
            _age(entry.unused_s),
        ]
        for entry in entries
    ]
    heads = ["key", "namespace", "tokens", "kind", "state", "age", "ttl", "hits", "last hit"]
    return _table(heads, rows) if rows else "no checkpoints"


def inspect_json(entry: CheckpointEntry, reports: Sequence[ObjectReport]) -> str:
    return _json({"checkpoint": asdict(entry), "objects": [asdict(report) for report in reports]})


def inspect_text(entry: CheckpointEntry, reports: Sequence[ObjectReport]) -> str:
    lines = [
        f"checkpoint {entry.key} of namespace {entry.namespace}: {entry.position} tokens, "
        f"kind {entry.kind or 'unnamed'}, {entry.hits} hits, {_age(entry.age_s)} old"
    ]
    for report in reports:
        lines += _object_lines(report)
    num_kv = sum(report.name.endswith(":kv") for report in reports)
    if num_kv < num_segments(entry):
        lines.append(f"WRONG: the index knows {num_kv} of its {num_segments(entry)} KV segments")
    num_wrong = sum(bool(report.problems) for report in reports)
    if num_wrong or num_kv < num_segments(entry):
        lines.append(f"{num_wrong} of {len(reports)} objects are not whole")
    else:
        lines.append("every byte is as written")
    return "\n".join(lines)


def object_json(report: ObjectReport) -> str:
    return _json({"objects": [asdict(report)]})


def object_text(report: ObjectReport) -> str:
    verdict = [] if report.problems else ["every byte is as written"]
    return "\n".join([*_object_lines(report), *verdict])


def key_json(report: KeyReport) -> str:
    return _json({"key": asdict(report)})


def key_text(report: KeyReport) -> str:
    if report.kind == "none":
        return f"{report.name}: {report.meaning}; absent"
    unit = "bytes" if report.kind == "string" else "entries"
    return f"{report.name}: {report.meaning}; a {report.kind} of {report.size} {unit}, {_ttl(report.ttl_s)}"


def _object_lines(report: ObjectReport) -> list[str]:
    parts = ", ".join(f"{name} {shape}" for name, shape in report.parts.items())
    head = f"{_size(report.num_bytes)}, {_ttl(report.ttl_s)}, epoch {report.epoch}: {parts or 'nothing'}"
    return [report.name, f"  {head}", *(f"  WRONG: {problem}" for problem in report.problems)]


def _ttl(ttl_s: float | None) -> str:
    return "does not expire" if ttl_s is None else f"ttl {_age(ttl_s)}"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2)


def num_segments(entry: CheckpointEntry) -> int:
    """How many KV segments a checkpoint needs."""
    return entry.position // SEGMENT_TOKENS


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in (heads, *rows)) for column in range(len(heads))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (heads, *rows))
    return "\n".join(line.rstrip() for line in lines)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
