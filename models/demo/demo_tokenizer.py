"""Owns the tokenizer of demo checkpoints: bytes and a handful of special tokens.

One token per byte plus the special tokens keeps the vocabulary tiny while every text, in any script, round-trips.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from warmstate.models.demo.demo_chat_template import CHAT_TEMPLATE

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

# Control tokens never show in decoded text; the tags of thinking and tool calls do, because parsers need them.
CONTROL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
TAG_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

NUM_BYTES = 256


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: ids 0..255 are the bytes, then `CONTROL_TOKENS`, then `TAG_TOKENS`."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAG_TOKENS])
    return tokenizer


def token_id(token: str) -> int:
    """The id of a control or tag token."""
    return NUM_BYTES + (*CONTROL_TOKENS, *TAG_TOKENS).index(token)


def num_tokens() -> int:
    """Size of the vocabulary, special tokens included."""
    return NUM_BYTES + len(CONTROL_TOKENS) + len(TAG_TOKENS)


def write_tokenizer(directory: Path, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    build_tokenizer().save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE (GPT-2) writes for each byte: itself, or the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    replaced = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(replaced)) for byte in range(NUM_BYTES)]
