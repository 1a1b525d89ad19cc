"""Owns text to token ids and token ids to bytes, straight from tokenizer.json. Knows no template and no request."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from warmstate.models.checkpoints.json_fields import read_json
from warmstate.models.errors import CheckpointError, MissingFile, UnsupportedCheckpoint

TokenIds = npt.NDArray[np.int32]


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in a byte-level vocabulary (GPT-2's table): 188 bytes stand for themselves,
    the others are moved to 256 and up in order."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids of a text, and where in them each character went."""

    token_ids: TokenIds
    encoding: tokenizers.Encoding

    def token_at(self, char: int) -> int:
        """Index of the token that holds character `char`, or the nearest one before it; 0 for an empty text."""
        for position in range(char, -1, -1):
            index = self.encoding.char_to_token(position)
            if index is not None:
                return index
        return 0


class Tokenizer:
    """A byte-level tokenizer: every token is a run of bytes, so text is their concatenation and nothing else."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_directory(cls, path: Path) -> "Tokenizer":
        """Reads `path`/tokenizer.json; raises `CheckpointError`, `UnsupportedCheckpoint` if it is not byte-level."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise MissingFile(f"{file}: not there; a tokenizer.json is needed to serve text")
        decoder = read_json(file).get("decoder")
        if not _is_byte_level(decoder):
            raise UnsupportedCheckpoint(f"{file}: decoder {decoder!r:.80}; only byte-level tokenizers are served")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        # The library raises nothing more telling.
        except Exception as error:
            raise CheckpointError(f"{file}: the tokenizers library cannot read it: {error}") from error

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's padded vocabulary can be larger."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its content, e.g. "<think>"."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> EncodedText:
        """Tokenises `text`; added tokens written out in it become themselves. Releases the GIL; thread-safe."""
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return EncodedText(np.asarray(encoding.ids, dtype=np.int32), encoding)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; b"" for an id that only the model's padded vocabulary has."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = _token_bytes(self._backend.id_to_token(token_id))
        return known

    def token_text(self, token_id: int) -> str:
        """One token as text, part characters as U+FFFD (what OpenAI's logprobs show beside the bytes)."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def decode(self, token_ids: TokenIds | list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(int(token_id)) for token_id in token_ids if token_id not in skipped).decode(
            "utf-8", errors="replace"
        )


def _token_bytes(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        # An added token with characters outside the alphabet (a space, CJK) stands for its own text.
        return token.encode("utf-8")


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return any(_is_byte_level(part) for part in decoder.get("decoders", ()))
    return bool(decoder.get("type") == "ByteLevel")
