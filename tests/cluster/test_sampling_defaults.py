"""The request comes before the model's generation_config.json, which comes before neutral."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from warmstate.cluster.api.openai_api import CompletionBody
from warmstate.cluster.api.sampling_defaults import for_choice, sampling_params
from warmstate.cluster.errors import InvalidRequest
from warmstate.cluster.model_card import ModelCard, read_model_card
from warmstate.models.demo.demo_checkpoint import write_demo_checkpoint


def _params(card: ModelCard, **fields: Any) -> Any:
    body = CompletionBody.model_validate({"prompt": "x", **fields})
    return sampling_params(body, card, num_prompt_tokens=100)


@pytest.fixture
def tuned(card: ModelCard) -> ModelCard:
    return dataclasses.replace(card, default_sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95})


def test_the_models_defaults_fill_what_the_request_leaves_open(card: ModelCard, tuned: ModelCard) -> None:
    assert (_params(tuned).temperature, _params(tuned).top_k, _params(tuned).top_p) == (0.6, 20, 0.95)
    asked = _params(tuned, temperature=0, top_k=0)
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.0, 0, 0.95)
    assert (_params(card).temperature, _params(card).top_k, _params(card).top_p) == (1.0, 0, 1.0)


def test_tiny_temperatures_are_greedy_and_wide_top_k_is_no_filter(card: ModelCard) -> None:
    assert _params(card, temperature=1e-9).temperature == 0.0
    assert _params(card, top_k=10**6).top_k == 0
    assert _params(card, top_k=-1).top_k == 0


def test_max_tokens_is_what_is_left_unless_said_otherwise(card: ModelCard) -> None:
    assert _params(card).max_tokens == card.max_model_len - 100
    assert _params(card, max_tokens=7).max_tokens == 7
    body = CompletionBody.model_validate({"prompt": "x"})
    assert sampling_params(body, card, 100, default_max_tokens=16).max_tokens == 16
    assert sampling_params(body, card, card.max_model_len - 3, default_max_tokens=16).max_tokens == 3


def test_more_than_is_left_is_refused_and_exactly_that_is_not(card: ModelCard) -> None:
    room = card.max_model_len - 100
    assert _params(card, max_tokens=room).max_tokens == room
    with pytest.raises(InvalidRequest, match=str(room + 1)):
        _params(card, max_tokens=room + 1)


def test_choices_of_a_seeded_request_have_seeds_of_their_own(card: ModelCard) -> None:
    seeded = _params(card, seed=5)
    assert [for_choice(seeded, i).seed for i in range(3)] == [5, 6, 7]
    assert for_choice(_params(card), 1).seed is None


def test_a_model_card_is_read_from_a_checkpoint(tmp_path: Path) -> None:
    write_demo_checkpoint(tmp_path)
    generation = tmp_path / "generation_config.json"
    values = json.loads(generation.read_text())
    generation.write_text(json.dumps({**values, "temperature": 0.7, "top_k": None, "do_sample": True}))
    card = read_model_card(tmp_path, "demo", 4096)
    assert card.default_sampling["temperature"] == 0.7
    assert "top_k" not in card.default_sampling
    assert card.eos_token_ids
    assert (card.served_name, card.max_model_len) == ("demo", 4096)
