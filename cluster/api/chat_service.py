"""Owns a request's path through the ingress: check, render, key, ask a replica, answer. Knows no HTTP and no Ray."""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from warmstate.cache_store.keys import tenant_salt
from warmstate.cluster.api.answer import Answer
from warmstate.cluster.api.choice import Choice, OutputOptions
from warmstate.cluster.api.fan_in import FanIn
from warmstate.cluster.api.generation import Generation
from warmstate.cluster.api.http_metrics import HttpMetrics, RequestTimer
from warmstate.cluster.api.openai_api import ChatCompletionBody, CompletionBody, GenerationBody
from warmstate.cluster.api.prompt import PreparedPrompt, PromptPreparer
from warmstate.cluster.api.responses import AnswerHead, ChatResponses, CompletionResponses, ResponseBuilder
from warmstate.cluster.api.sampling_defaults import for_choice, sampling_params
from warmstate.cluster.errors import InvalidRequest, NotFound
from warmstate.cluster.model_card import ModelCard
from warmstate.cluster.replica_client import ReplicaClient
from warmstate.cluster.text.chat_template import ChatTemplate
from warmstate.cluster.text.tokenizer import Tokenizer
from warmstate.replicas.messages import GenerateRequest, ReplicaPhase, SamplingParams

T = TypeVar("T")

INLINE_BODY_BYTES = 4096
MAX_SEQUENCES_PER_REQUEST = 128
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for plain completions; chats get what is left of the context."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What came with a request besides its fields: who asks, under which id, which replica is asked for, its size."""

    request_id: str
    tenant: str = ""
    replica_id: str | None = None
    body_bytes: int = 0


class ChatService:
    """Answers chat and plain completions for one model."""

    def __init__(
        self,
        client: ReplicaClient,
        card: ModelCard,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        server_secret: bytes,
        *,
        num_threads: int = 2,
    ) -> None:
        self.card = card
        self.metrics = HttpMetrics(card.served_name)
        self._client = client
        self._tokenizer = tokenizer
        self._preparer = PromptPreparer(tokenizer, template, card)
        self._server_secret = server_secret
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenise")

    @classmethod
    def from_checkpoint(cls, client: ReplicaClient, card: ModelCard, path: Path, server_secret: bytes) -> "ChatService":
        """Reads tokenizer and template of the checkpoint at `path`; raises a `ModelError` that names a missing file."""
        tokenizer = Tokenizer.from_directory(path)
        return cls(client, card, tokenizer, ChatTemplate.from_directory(path, tokenizer), server_secret)

    async def chat(self, body: ChatCompletionBody, context: RequestContext) -> Answer:
        """Begins to answer; returns once replicas have accepted. Raises `ApiError`."""
        timer = self.metrics.timer()
        self._check_model(body.model)
        salt = tenant_salt(self._server_secret, context.tenant, body.cache_salt)
        prompt = await self._prepare(context, partial(self._preparer.chat, body, salt))
        head = self._head("chatcmpl", body)
        builder = ChatResponses(head, self._tokenizer)
        params = [sampling_params(body, self.card, len(prompt.token_ids))]
        return await self._begin(body, context, [prompt], params, builder, timer)

    async def complete(self, body: CompletionBody, context: RequestContext) -> Answer:
        """Begins to answer; returns once replicas have accepted. Raises `ApiError`."""
        timer = self.metrics.timer()
        self._check_model(body.model)
        if len(body.prompt) * (body.n or 1) > MAX_SEQUENCES_PER_REQUEST:
            raise InvalidRequest(
                f"prompt: {len(body.prompt)} prompts of {body.n or 1} choices each are more than the "
                f"{MAX_SEQUENCES_PER_REQUEST} sequences that one request may have",
                param="prompt",
            )
        salt = tenant_salt(self._server_secret, context.tenant, body.cache_salt)
        echo = bool(body.echo)
        prompts = await self._prepare(context, partial(self._preparer.completions, body, salt))
        builder = CompletionResponses(self._head("cmpl", body), self._tokenizer, echo=echo)
        params = [sampling_params(body, self.card, len(p.token_ids), COMPLETION_MAX_TOKENS) for p in prompts]
        return await self._begin(body, context, prompts, params, builder, timer)

    async def phases(self) -> Mapping[str, ReplicaPhase]:
        """Start-up phase of every replica known."""
        return await self._client.phases()

    def close(self) -> None:
        """Ends the threads; requests in flight still finish."""
        self._threads.shutdown(wait=False)

    async def _begin(
        self,
        body: GenerationBody,
        context: RequestContext,
        prompts: Sequence[PreparedPrompt],
        params: Sequence[SamplingParams],
        builder: ResponseBuilder,
        timer: RequestTimer,
    ) -> Answer:
        options = _output_options(body, split_reasoning=isinstance(body, ChatCompletionBody))
        num_choices = body.n or 1
        wanted = [
            (prompt, for_choice(sampling, i))
            for prompt, sampling in zip(prompts, params, strict=True)
            for i in range(num_choices)
        ]
        choices = [Choice(i, prompt, self._tokenizer, options) for i, (prompt, _) in enumerate(wanted)]
        requests = [_request(context, i, prompt, sampling) for i, (prompt, sampling) in enumerate(wanted)]
        fan_in = FanIn([self._client.generate(request, context.replica_id) for request in requests])
        replica_ids = await fan_in.open()
        generation = Generation(choices, num_choices, fan_in, timer)
        return Answer(generation, builder, replica_ids, include_usage=_include_usage(body))

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.card.served_name:
            raise NotFound(
                f"The model {model[:200]!r} does not exist; this server has {self.card.served_name!r}",
                param="model",
                code="model_not_found",
            )

    def _head(self, prefix: str, body: GenerationBody) -> AnswerHead:
        return AnswerHead(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.card.served_name,
            include_usage=_include_usage(body),
            return_token_ids=bool(body.return_token_ids),
            with_logprobs=body.num_logprobs is not None,
        )

    async def _prepare(self, context: RequestContext, work: Callable[[], T]) -> T:
        """Runs `work` where it disturbs others least: what is short costs less here than the way to a thread."""
        if context.body_bytes <= INLINE_BODY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _include_usage(body: GenerationBody) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def _output_options(body: GenerationBody, *, split_reasoning: bool) -> OutputOptions:
    return OutputOptions(
        stop=body.stop_strings,
        min_tokens=body.min_tokens or 0,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        split_reasoning=split_reasoning,
    )


def _request(context: RequestContext, index: int, prompt: PreparedPrompt, sampling: SamplingParams) -> GenerateRequest:
    return GenerateRequest(
        # A client may repeat its request id; what runs in the engine must be told apart.
        request_id=f"{context.request_id}-{uuid.uuid4().hex[:8]}-{index}",
        token_ids=prompt.token_ids,
        sampling=sampling,
        chain_root=prompt.chain_root,
        prompt_keys=prompt.prompt_keys,
        marks=prompt.marks,
    )
