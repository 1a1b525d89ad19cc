"""Owns what each figure of a replica means: its kind, its help text and its label. Knows no exporter.

A figure is called what `ReplicaService.stats` calls it. A name that ends in `_*` stands for all that begin with it, and
their ends are the values of the label.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Figure:
    """`label` is None where the family has one series."""

    kind: Kind
    text: str
    label: str | None = None
    is_vllm: bool = False


_COUNTERS = {
    "engine_steps": "Steps of the engine.",
    "engine_step_rows": "Sequences computed, summed over steps.",
    "engine_step_tokens": "Tokens computed, summed over steps.",
    "engine_step_seconds": "Seconds spent in steps.",
    "twin_waits": "Sequences that waited for another one to make their prefix usable.",
    "open_outputs_refused": "Ends of answers that found no room beside preempted states and are not kept.",
    "parking_refused": "Preempted states that found no room and are computed again.",
    "host_hits": "Objects read from the host tier.",
    "host_misses": "Objects asked of the host tier that were not there.",
    "host_refused": "Checkpoints and segments for which the host tier had no room.",
    "store_published": "Checkpoints published to the store, whole.",
    "store_fetch_hits": "Prefixes fetched from the store, whole and verified.",
    "store_fetched_bytes": "Bytes of objects fetched.",
    "store_fetch_objects_joined": "Objects that a fetch did not read because another was reading them.",
    "store_fetch_waits_for_room": "Sequences that waited because too much was being fetched.",
    "store_fetches_refused_room": "Prefixes larger than what may be in flight for which the host tier had no room.",
    "store_hits": "Objects read from the store.",
    "store_stored": "Objects written to the store.",
    "store_exists": "Objects that the store had already.",
    "store_deletes": "Objects deleted from the store.",
    "store_deletes_failed": "Deletions that failed.",
    "store_read_bytes": "Bytes read from the store.",
    "store_written_bytes": "Bytes written to the store.",
    "store_get_seconds": "Seconds spent reading objects, summed over reads that may overlap.",
    "store_put_seconds": "Seconds spent writing objects, summed over writes that may overlap.",
    "store_breaker_opened": "Times the store was left alone after failures in a row.",
    "store_events_sent": "Events told to other replicas and routers.",
    "store_events_lost": "Events that could not be told.",
    "store_events_read": "Events heard.",
    "store_event_gaps": "Times that events of a replica were missing.",
    "store_stream_resets": "Times that the event stream was another one than before.",
    "store_connections_opened": "Connections opened to the server of the objects.",
    "store_follower_failures": "Failed attempts to read events.",
    "store_snapshots_unreadable": "Entries of the index met that should have named a replica's snapshot and did not.",
    "store_hits_told": "Hits written to the index.",
    "store_hits_lost": "Hits that could not be written to the index.",
    "cache_requests_left_out": "Requests not accounted for: too many began at once, or the thread has ended.",
    "store_keeper_rounds": "Looks that this replica took after the store.",
    "store_keeper_failures": "Rounds of looking after the store (eviction, lost and ownerless objects) that failed.",
    "store_keeper_evicted_bytes": "Bytes evicted from the store.",
    "store_keeper_checkpoints_renewed": "Checkpoints in the store that got their full time to live again after use.",
    "store_keeper_rows_unreadable": "Rows of the index that could not be read.",
    "store_keeper_orphans_removed": "Objects removed from the store that no row of the index names.",
    "store_keeper_namespaces_forgotten": "Namespaces removed from the index because nobody used them.",
    "store_keeper_lease_lost": "Times that another replica took over looking after the store.",
    "store_snapshots_written": "Snapshots of this replica's tiers written.",
}

_GAUGES = {
    "figures_age_s": "Seconds since the replica told its figures; since it was first asked where it never has.",
    "prefill_tokens_per_s": "Tokens of prompts computed per second, estimated from recent steps.",
    "kv_blocks_resident": "KV blocks that can be found by their prefix.",
    "device_kv_bytes": "Bytes of KV blocks that running sequences hold.",
    "device_kv_resident_bytes": "Bytes of KV blocks that can be found by their prefix.",
    "device_kv_budget_bytes": "Bytes of all KV blocks.",
    "device_state_bytes": "Bytes of GDN slots that running sequences hold.",
    "device_state_budget_bytes": "Bytes of all GDN slots.",
    "host_bytes": "Bytes in the host tier.",
    "host_lent_bytes": "Bytes given up by the host tier that somebody still reads; part of its bytes.",
    "host_budget_bytes": "Bytes that the host tier may hold.",
    "host_objects": "Objects in the host tier.",
    "host_checkpoints": "GDN checkpoints in the host tier.",
    "host_checkpoints_whole": "GDN checkpoints in the host tier that can be resumed from.",
    "checkpoints_in_copy": "Checkpoints that are being copied from the device, beside the steps.",
    "open_output_bytes": "Bytes of states at the latest boundaries of running answers.",
    "seen_prefix_blocks": "Blocks of prompts remembered, to find where the next ones fork.",
    "parked_bytes": "Bytes of the states of preempted sequences.",
    "parked_budget_bytes": "Bytes that the states of preempted sequences may hold.",
    "store_bytes_per_s": "Bandwidth of fetches, estimated from recent ones.",
    "store_latency_ms": "Milliseconds that a fetch takes beside moving bytes, estimated from recent ones.",
    "store_publish_bytes": "Bytes on their way to the store.",
    "store_fetches_in_flight": "Prefixes on their way from the store.",
    "store_fetch_held_bytes": "Bytes of prefixes on their way from the store, or come and not used yet.",
    "store_in_flight_bytes": "Bytes of objects being written.",
    "store_breaker_open": "1 while the store is left alone after failures.",
    "store_events_waiting": "Events not told yet.",
    "store_snapshot_age_s": "Seconds since this replica's tiers were last written down.",
    "store_rows_loaded": "Rows and snapshots of the index read by starting over, instead of hearing their events.",
    "cache_analysis_thread_alive": "1 while the thread runs that accounts for requests; 0 after a fault.",
    "store_keeper_thread_alive": "1 while the thread runs that looks after the store, or stands by; 0 after a fault.",
    "store_keeper_used_bytes": "Bytes of ours: payload that rows describe, objects seen without a row, and the index.",
    "store_keeper_budget_bytes": "Bytes that may be ours; 0 where there is no limit.",
    "store_keeper_server_bytes": "Bytes that the server of the objects uses, for whomever.",
    "store_keeper_server_max_bytes": "Bytes that the server of the objects may use; 0 where it has no limit.",
    "store_keeper_rows": "Rows of the index.",
    "store_keeper_index_bytes": "Bytes that the index itself takes.",
    "store_keeper_lease_held": "1 while this replica looks after the store.",
    "store_replicas_incomplete": "Replicas of which not all events were heard.",
    "store_follower_caught_up": "1 while all events were heard.",
    "store_follower_alive": "1 while the thread works that hears events; 0 from a fault until it has begun anew.",
}

_HISTOGRAMS = {
    "cache_load_seconds": "Seconds that it took to bring a local or fetched prefix to hand.",
    "cache_restore_seconds": "Seconds that it took to write a prefix into a slot and its blocks.",
    "prompt_divergence_lost_tokens": "Tokens of the latest prompt on the same path that a prompt did not go on with.",
    "prompt_divergence_position_tokens": "Tokens, in whole blocks, shared with the latest prompt on the same path.",
    "store_fetch_seconds": "Seconds that a fetch of a prefix took, hit or miss.",
    "store_publish_seconds": "Seconds that publishing a checkpoint took.",
}

_LABELLED: Mapping[str, tuple[str, str]] = {
    "restores_*": ("source", "Sequences that began at a prefix, by where it came from."),
    "restored_tokens_*": ("source", "Tokens restored, not computed, by where they came from."),
    "cache_requests_*": ("result", "Requests by where their prefix came from, or why there was none."),
    "cache_blocked_tokens_*": (
        "by",
        "Prompt tokens computed, by what resuming them lacked.",
    ),
    "cache_blocked_requests_*": ("by", "Requests that computed prompt tokens, by what resuming lacked."),
    "checkpoints_kept_*": ("kind", "Checkpoints taken of sequences, by why they were wanted."),
    "host_evictions_*": ("reason", "Objects that went from the host tier, by reason."),
    "store_publish_dropped_*": ("reason", "Checkpoints not published, by reason."),
    "store_keeper_rows_reconciled_*": ("reason", "Rows of the index removed because nobody could use them, by reason."),
    "store_keeper_evictions_*": ("reason", "Objects evicted from the store, by reason."),
    "store_fetch_misses_*": ("reason", "Prefixes whose fetch failed, by reason."),
    "store_fetch_decisions_*": ("reason", "Requests by what decided whether to fetch."),
    "store_misses_*": ("reason", "Objects not read from the store, by reason."),
    "store_dropped_*": ("reason", "Objects not written to the store, by reason."),
}

_VLLM = {
    "num_requests_running": Figure("gauge", "Sequences that run.", is_vllm=True),
    "num_requests_waiting": Figure("gauge", "Sequences that wait.", is_vllm=True),
    "kv_cache_usage_perc": Figure("gauge", "Share of the KV blocks in use; 1 is all.", is_vllm=True),
    "prefix_cache_queries": Figure("counter", "Prompt tokens looked for on the device and the host.", is_vllm=True),
    "prefix_cache_hits": Figure("counter", "Prompt tokens resumed from the replica's own memory.", is_vllm=True),
    "external_prefix_cache_queries": Figure("counter", "Prompt tokens beyond the local hit.", is_vllm=True),
    "external_prefix_cache_hits": Figure("counter", "Of those, tokens resumed from the store.", is_vllm=True),
    "num_preemptions": Figure("counter", "Sequences that had to give up their blocks.", is_vllm=True),
}

FIGURES: Mapping[str, Figure] = {
    **_VLLM,
    **{name: Figure("counter", text) for name, text in _COUNTERS.items()},
    **{name: Figure("gauge", text) for name, text in _GAUGES.items()},
    **{name: Figure("histogram", text) for name, text in _HISTOGRAMS.items()},
    **{name: Figure("counter", text, label) for name, (label, text) in _LABELLED.items()},
}

# The ingress counts these itself; the same series twice would double every sum.
COUNTED_AT_INGRESS = ("prompt_tokens", "generation_tokens", "request_success_")
