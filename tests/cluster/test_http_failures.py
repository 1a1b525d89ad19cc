"""What fails is told in OpenAI's words, and a client that leaves takes its request with it."""

import json
import socket
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from warmstate.cluster.api.http_app import HttpLimits
from warmstate.cluster.errors import ReplicaLost
from warmstate.replicas.messages import Accepted, FinishReason, Refused, ReplicaPhase, TokenDelta

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
BROKEN = TokenDelta((), finish_reason=FinishReason.ERROR, error="NaN in the logits of this request")


def _eventually(holds: Callable[[], bool]) -> bool:
    """Whether `holds` becomes true within ten seconds, which only a failing test waits out."""
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


@pytest.mark.parametrize(
    ("refused", "status", "kind", "retry_after"),
    [
        (Refused(429, "queue full: 256 waiting", 3), 429, "rate_limit_error", "3"),
        (Refused(503, "loading", None), 503, "service_unavailable", "1"),
        (Refused(404, "no replica r9"), 404, "not_found_error", None),
        (Refused(400, "too long"), 400, "invalid_request_error", None),
        (Refused(502, "lost"), 502, "bad_gateway", None),
        (Refused(500, "broken"), 500, "internal_server_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_an_http_error_even_for_streams(
    http: httpx.Client, replica: Any, refused: Refused, status: int, kind: str, retry_after: str | None, stream: bool
) -> None:
    replica.script = lambda _: [refused]
    response = http.post(CHAT, json={**HELLO, "stream": stream})
    assert response.status_code == status
    assert response.json()["error"] == {"message": refused.message, "type": kind, "param": None, "code": None}
    assert response.headers.get("retry-after") == retry_after
    assert "x-warmstate-replica" not in response.headers


def test_one_refused_choice_refuses_the_request_and_closes_the_others(
    http: httpx.Client, replica: Any, hang: Any
) -> None:
    replica.script = lambda _: [Refused(429, "full")] if len(replica.requests) == 2 else [Accepted("r1"), hang]
    assert http.post(CHAT, json={**HELLO, "n": 3}).status_code == 429
    assert _eventually(lambda: replica.num_open == 0)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ([BROKEN], 500),
        ([ReplicaLost("replica r1 died")], 502),
        ([RuntimeError("a bug, with internals")], 500),
        ([], 502),
        ([Refused(502, "no other replica could go on")], 502),
    ],
    ids=["engine error", "replica lost", "client bug", "ended early", "refused late"],
)
def test_a_failure_in_the_middle_is_a_status_or_an_error_event(
    http: httpx.Client, replica: Any, end: list[Any], status: int
) -> None:
    replica.script = lambda _: [*replica.saying("Hel", finish=None), *end]
    whole = http.post(CHAT, json=HELLO)
    assert whole.status_code == status
    assert whole.headers["x-warmstate-replica"] == "r1"
    streamed = http.post(CHAT, json={**HELLO, "stream": True})
    assert streamed.status_code == 200
    *events, error, done, _ = streamed.text.split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: ")) == whole.json()
    assert "internals" not in streamed.text
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(texts) == "Hel"


def test_a_stop_string_closes_the_reply_at_once(http: httpx.Client, replica: Any, hang: Any) -> None:
    replica.script = lambda _: [*replica.saying("one STOP", finish=None), hang]
    response = http.post(CHAT, json={**HELLO, "stop": "STOP"})
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert _eventually(lambda: replica.num_open == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("accepted", [False, True])
def test_a_client_that_leaves_closes_the_reply(url: str, replica: Any, hang: Any, stream: bool, accepted: bool) -> None:
    replica.script = lambda _: [*(replica.saying("Hel", finish=None) if accepted else []), hang]
    body = json.dumps({**HELLO, "stream": stream, "n": 2}).encode()
    where = urlsplit(url)
    with closing(socket.create_connection((where.hostname, where.port))) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert _eventually(lambda: replica.num_open == 2)
        if stream and accepted:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert _eventually(lambda: replica.num_open == 0)


def test_a_request_id_is_echoed_or_made_and_a_strange_one_replaced(http: httpx.Client, replica: Any) -> None:
    echoed = http.post(CHAT, json=HELLO, headers={"x-request-id": "my-id.1"})
    assert echoed.headers["x-request-id"] == "my-id.1"
    assert replica.requests[0].request_id.startswith("my-id.1")
    made = {http.get("/version").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert http.get("/version", headers={"x-request-id": "a b<script>"}).headers["x-request-id"] != "a b<script>"
    assert http.get("/nowhere", headers={"x-request-id": "lost"}).headers["x-request-id"] == "lost"


def test_a_request_can_be_pinned_to_a_replica(http: httpx.Client, replica: Any) -> None:
    http.post(CHAT, json=HELLO, headers={"x-warmstate-replica": "r1"})
    http.post(CHAT, json=HELLO)
    assert replica.pins == ["r1", None]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version"])
def test_public_paths_ask_for_no_key(serve: Callable[..., str], replica: Any, path: str) -> None:
    assert httpx.get(serve(HttpLimits(api_keys={"alice": "k1"})) + path).status_code == 200


def test_only_known_keys_are_let_in_and_tenants_do_not_share_prefixes(serve: Callable[..., str], replica: Any) -> None:
    with httpx.Client(base_url=serve(HttpLimits(api_keys={"alice": "k1", "bob": "k2"}))) as client:
        for headers in ({}, {"authorization": "Bearer k3"}, {"authorization": "Basic k1"}, {"x-api-key": ""}):
            refused = client.post(CHAT, json=HELLO, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "authentication_error"
            assert "x-request-id" in refused.headers
        assert client.get("/v1/models").status_code == 401
        assert not replica.requests
        for headers in ({"authorization": "Bearer k1"}, {"x-api-key": "k1"}, {"authorization": "bearer k2"}):
            assert client.post(CHAT, json=HELLO, headers=headers).status_code == 200
    alice, alice_again, bob = (request.chain_root for request in replica.requests)
    assert alice == alice_again != bob


def test_health_tells_how_far_loading_has_got(http: httpx.Client, replica: Any) -> None:
    replica.phase_of = {"r1": ReplicaPhase("loading", 0.25), "r2": ReplicaPhase("loading", 0.5, "shard 2 of 4")}
    loading = http.get("/health")
    assert loading.status_code == 503
    assert loading.headers["retry-after"] == "1"
    body = loading.json()
    assert (body["phase"], body["fraction"], body["detail"]) == ("loading", 0.5, "shard 2 of 4")
    assert body["replicas"]["r1"]["fraction"] == 0.25


def test_health_is_good_once_one_replica_is_ready(http: httpx.Client, replica: Any) -> None:
    replica.phase_of = {"r1": ReplicaPhase("failed", 0.0, "no memory"), "r2": ReplicaPhase("ready", 1.0)}
    assert http.get("/health").status_code == 200
    replica.phase_of = {"r1": ReplicaPhase("failed", 0.3, "no memory")}
    assert http.get("/health").json()["detail"] == "no memory"
    replica.phase_of = {}
    assert http.get("/health").status_code == 503


def test_metrics_count_tokens_and_add_the_replicas_own(serve: Callable[..., str], replica: Any) -> None:
    figures = {"num_requests_running": 2.0, "prefix_cache_hits": 7.0, "host_hits": 5.0, "prompt_tokens": 9.0}
    replica.script = lambda _: replica.saying("Hi", cached=3)

    async def stats() -> dict[str, dict[str, float]]:
        return {"r1": figures}

    with httpx.Client(base_url=serve(replica_stats=stats)) as client:
        before = _series(client.get("/metrics").text)
        client.post(CHAT, json=HELLO)
        text = client.get("/metrics").text
    after = _series(text)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown['vllm:generation_tokens_total{model_name="demo"}'] == 3
    assert grown['vllm:prompt_tokens_total{model_name="demo"}'] == len(replica.requests[0].token_ids)
    assert grown['vllm:prompt_tokens_cached_total{model_name="demo"}'] == 3
    assert grown['vllm:request_success_total{finished_reason="stop",model_name="demo"}'] == 1
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert grown[f'vllm:{name}_count{{model_name="demo"}}'] >= 1
    assert after['vllm:num_requests_running{model_name="demo",replica="r1"}'] == 2
    assert after['vllm:prefix_cache_hits_total{model_name="demo",replica="r1"}'] == 7
    assert after['warmstate:host_hits_total{model_name="demo",replica="r1"}'] == 5
    assert "_created" not in text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families)), "a family is announced twice, which Prometheus refuses"


def _series(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}
