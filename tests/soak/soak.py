"""Wears a real server down and compares everything it says: tiny budgets, random chats, replicas and stores killed.

    PYTHONPATH=.types python -m warmstate.tests.soak.soak [--minutes 30] [--seed 1] [--clients 4]

Starts `warmstate serve` with two replicas of a tiny float32 model whose blocks, host tier and store are far too small.
Clients hold random conversations that branch, under random salts, streamed or not, some of them broken off, while
replicas and the store are killed with SIGKILL. Every token is compared with what a replica without a cache says.
In the second half one replica is spared, so that its memory can be watched. Ends with exit status 1 if any answer was
wrong or failed, or if blocks, slots, bytes, file descriptors or memory did not return to what they were.
"""

import argparse
import signal
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from warmstate.cluster.launch.strict_products import ask_for_strict_products
from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint
from warmstate.tests.soak.answers import Answer, ask
from warmstate.tests.soak.conversations import TEMPERATURE, Conversations, Question
from warmstate.tests.soak.destroyer import Destroyer, wait_until_whole
from warmstate.tests.soak.ledger import Ledger, Page
from warmstate.tests.soak.reference import Reference
from warmstate.tests.soak.soaked_server import SoakedServer, running

MIB = 1 << 20
MAX_MODEL_LEN = 2048
CONFIG: dict[str, Any] = {
    "engine": {"max_model_len": MAX_MODEL_LEN, "kv_tokens": 3072, "max_sequences": 4, "max_batch_tokens": 512},
    "cache": {"host_bytes": 3 * MIB, "fetch_policy": "always"},
    "store": {"maxmemory": 8 * MIB, "operation_timeout_s": 1.0},
}
SAMPLE_PERIOD_S = 2.0
KILL_PAUSE_S = (4.0, 16.0)
SETTLED_S = 5.0
MAX_GROWTH = 1.1
OURS = ("ray::ServeReplica:warmstate:", "python -m warmstate")
HELD_BY_REQUESTS = (
    "num_requests_running",
    "num_requests_waiting",
    "device_kv_bytes",
    "device_state_bytes",
    "parked_bytes",
    "store_publish_bytes",
    "store_fetch_held_bytes",
    "store_fetches_in_flight",
)


class Clients:
    """Threads that ask until they are told to stop; `problems` is empty as long as every answer was right."""

    def __init__(self, url: httpx.URL, conversations: Conversations, reference: Reference) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._url = url
        self._conversations = conversations
        self._reference = reference
        self._stop = threading.Event()

    def run(self, num_clients: int, seconds: float) -> None:
        """Returns after so many seconds, when the last answer has come."""
        self._stop.clear()
        with ThreadPoolExecutor(num_clients) as pool:
            running_clients = [pool.submit(self._keep_asking) for _ in range(num_clients)]
            self._stop.wait(seconds)
            self._stop.set()
            for client in running_clients:
                client.result()

    def _keep_asking(self) -> None:
        with httpx.Client(base_url=self._url, timeout=120) as http:
            while not self._stop.is_set():
                question = self._conversations.next_question()
                answer = ask(http, question)
                problem = answer.failure or self._compare(question, answer)
                if problem is not None:
                    self.problems.append(f"{time.strftime('%H:%M:%S')} {question.route}: {problem}")

    def _compare(self, question: Question, answer: Answer) -> str | None:
        """What is wrong with an answer; None, and the conversation goes on, when nothing is."""
        body = question.body
        expected = self._reference.answer(answer.prompt, body["max_tokens"], body["seed"]) if answer.prompt else []
        heard = expected[: len(answer.tokens)] if answer.was_left else expected
        if answer.tokens != heard:
            return f"WRONG: {answer.tokens} for {heard}, prompt of {len(answer.prompt)}, {body}"
        self.counts["left" if answer.was_left else "whole"] += 1
        self.counts["tokens"] += len(answer.tokens)
        if answer.num_cached_tokens is not None:
            self.counts["warm"] += answer.num_cached_tokens > 0
            self.counts["cached tokens"] += answer.num_cached_tokens
        if not answer.was_left:
            self._conversations.go_on(question.turn, answer.prompt, answer.tokens, answer.text)
        return None


def soak(server: SoakedServer, clients: Clients, num_clients: int, seconds: float, seed: int) -> list[str]:
    """Everything that was wrong."""
    clients.run(num_clients, SETTLED_S)
    problems = still_held(server)
    with Ledger(server, SAMPLE_PERIOD_S) as ledger, Destroyer(server, seed, KILL_PAUSE_S) as destroyer:
        clients.run(num_clients, seconds / 2)
        spared = destroyer.spare_one()
        clients.run(num_clients, seconds / 2)
        destroyer.stop()
        wait_until_whole(server)
        problems += still_held(server)
    print(f"killed: {dict(destroyer.num_killed)}")
    pages = [ledger.page(spared), *ledger.lifelong()]
    return problems + clients.problems + ledger.over_budget + [problem for page in pages for problem in leaks(page)]


def still_held(server: SoakedServer) -> list[str]:
    """What the replicas hold though nobody asks for anything."""
    time.sleep(SETTLED_S)
    figures = server.figures()
    print("figures:", {name: value for name, value in figures.items() if value and "_seconds" not in name})
    return [f"{name} is {figures[name]} at rest" for name in HELD_BY_REQUESTS if figures[name]]


def leaks(page: Page) -> list[str]:
    """What a process has more of than before; Ray's own, whose log monitor follows every process, are only shown."""
    print(page)
    if not page.title.startswith(OURS):
        return []
    grown = [f"grew by {page.growth():.2f}: {page}"] if page.growth() > MAX_GROWTH else []
    return grown + ([f"{page.num_new_fds()} new file descriptors: {page}"] if page.num_new_fds() > 0 else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    arguments = parser.parse_args()
    # The reference computes in this process.
    ask_for_strict_products()
    # A `timeout` must not leave the server behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "soak"
        write_demo_checkpoint(model, dtype=torch.float32, num_hidden_layers=4)
        reference = Reference(model, MAX_MODEL_LEN, TEMPERATURE)
        with running({**CONFIG, "model": {"path": str(model)}}, Path(folder)) as server:
            clients = Clients(server.http.base_url, Conversations(arguments.seed), reference)
            problems = soak(server, clients, arguments.clients, 60 * arguments.minutes, arguments.seed)
    print(f"answers: {dict(clients.counts)}")
    for problem in problems:
        print(problem)
    if problems:
        raise SystemExit(1)
    print("no answer was wrong, and nothing was left behind")


if __name__ == "__main__":
    main()
