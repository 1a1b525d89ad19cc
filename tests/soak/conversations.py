"""Owns what clients say: random trees of turns over a few shared beginnings, as token ids or as chat messages."""

import random
import threading
from dataclasses import dataclass
from typing import Any

TEMPERATURE = 0.8
MAX_PROMPT_TOKENS = 1200
_SAMPLING = {
    "temperature": TEMPERATURE,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "ignore_eos": True,
    "return_token_ids": True,
}
_SALTS = (None, None, "a", "b")
_NUM_OPEN_TURNS = 40
_VOCAB = range(1, 250)


@dataclass(frozen=True)
class Turn:
    """One point of a conversation, from which any number of others go on: token ids, or chat messages."""

    history: tuple[Any, ...]
    salt: str | None

    @property
    def is_chat(self) -> bool:
        return isinstance(self.history[0], dict)


@dataclass(frozen=True)
class Question:
    """One request; `turn` is where its answer will go on."""

    turn: Turn
    route: str
    body: dict[str, Any]
    leave_after: int | None


class Conversations:
    """Thread-safe, and as random as its seed; what is asked next depends on what was answered when."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._turns: list[Turn] = []
        self._systems = [self._text(length) for length in (90, 200, 420)]
        self._heads = [tuple(self._rng.choices(_VOCAB, k=length)) for length in (64, 190, 300)]

    def next_question(self) -> Question:
        with self._lock:
            rng = self._rng
            before = self._beginning() if not self._turns or rng.random() < 0.25 else rng.choice(self._turns)
            turn = self._asked(before, rng.choice([1, 20, 63, 64, 65, 130, 250]))
            field, route = ("messages", "chat/completions") if turn.is_chat else ("prompt", "completions")
            body = {**_SAMPLING, field: list(turn.history), "max_tokens": rng.randrange(1, 40)}
            body |= {"seed": rng.randrange(1 << 30), "cache_salt": turn.salt, "stream": rng.random() < 0.5}
            leave_after = rng.randrange(1, 20) if body["stream"] and rng.random() < 0.2 else None
            return Question(turn, f"/v1/{route}", body, leave_after)

    def go_on(self, turn: Turn, prompt: list[int], answer: list[int], text: str) -> None:
        """What was answered becomes a turn that others go on from, unless it has grown too long."""
        if len(prompt) + len(answer) > MAX_PROMPT_TOKENS:
            return
        said = [{"role": "assistant", "content": text}] if turn.is_chat else answer
        with self._lock:
            self._turns.append(Turn((*turn.history, *said), turn.salt))
            del self._turns[:-_NUM_OPEN_TURNS]

    def _beginning(self) -> Turn:
        salt = self._rng.choice(_SALTS)
        if self._rng.random() < 0.5:
            return Turn(self._rng.choice(self._heads), salt)
        return Turn(({"role": "system", "content": self._rng.choice(self._systems)},), salt)

    def _asked(self, before: Turn, length: int) -> Turn:
        if not before.is_chat:
            return Turn((*before.history, *self._rng.choices(_VOCAB, k=length)), before.salt)
        return Turn((*before.history, {"role": "user", "content": self._text(length)}), before.salt)

    def _text(self, length: int) -> str:
        return "".join(self._rng.choices("abcdefgh ", k=length))
