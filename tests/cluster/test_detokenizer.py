"""Text comes out whole and never half, however its bytes are cut into tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from warmstate.cluster.text.detokenizer import Detokenizer
from warmstate.cluster.text.tokenizer import Tokenizer
from warmstate.models.demo.demo_tokenizer import build_tokenizer

BYTES = Tokenizer(build_tokenizer())

SCRIPTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("👩‍👩‍👧🏽🇩🇪世界नमस्तेé́ü\ufffd"),
    ),
    max_size=40,
)


def _trained() -> Tokenizer:
    """A vocabulary with tokens that begin and end inside characters."""
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["世界你好世间", "👩👨👧🏽👩🏽", "नमस्ते दुनिया", "hello world " * 3] * 20, trainer)
    return Tokenizer(backend)


MERGED = _trained()


def _streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


@given(SCRIPTS)
@pytest.mark.parametrize("tokenizer", [BYTES, MERGED], ids=["bytes", "merged"])
def test_the_pieces_of_any_text_add_up_to_it_and_none_has_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    pieces = _streamed(tokenizer, tokenizer.encode(text).token_ids.tolist())
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


@given(st.lists(st.integers(0, 419), max_size=60))
@settings(max_examples=200)
def test_any_tokens_give_the_text_that_the_tokenizers_library_decodes(ids: list[int]) -> None:
    assert "".join(_streamed(MERGED, ids)) == MERGED._backend.decode(ids)


def test_an_emoji_of_four_tokens_appears_with_its_last_token() -> None:
    ids = BYTES.encode("a🙂b").token_ids.tolist()
    assert _streamed(BYTES, ids) == ["a", "", "", "", "🙂", "b", ""]


def test_a_character_that_is_never_completed_shows_at_the_end() -> None:
    assert _streamed(BYTES, BYTES.encode("🙂").token_ids.tolist()[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_are_dropped_unless_asked_for_and_tags_are_kept() -> None:
    ids = BYTES.encode("<think>x<|im_end|>").token_ids.tolist()
    assert "".join(_streamed(BYTES, ids)) == "<think>x"
    verbose = Detokenizer(BYTES, skip_special_tokens=False)
    assert "".join(verbose.feed(token_id) for token_id in ids) == "<think>x<|im_end|>"


def test_a_character_begun_in_the_prompt_is_completed_and_nothing_of_the_prompt_leaks() -> None:
    prompt, rest = [*b"hello \xf0\x9f"], [0x99, 0x82, ord("!")]
    detokenizer = Detokenizer(BYTES, prompt)
    assert [detokenizer.feed(token_id) for token_id in rest] == ["", "🙂", "!"]


def test_an_id_beyond_the_vocabulary_is_no_text() -> None:
    assert "".join(_streamed(BYTES, [65, 10_000, 66])) == "AB"
