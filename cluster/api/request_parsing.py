"""Owns turning a body's bytes into a checked request, and every fault into a sentence that names the field."""

import logging
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from warmstate.cluster.api.openai_api import GenerationBody
from warmstate.cluster.errors import InvalidRequest

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=GenerationBody)

MAX_LOGGED_NAMES = 1000
_NO_INPUT = ("json_invalid", "missing")


class RequestParser:
    """Parses bodies. Remembers which unknown fields it has mentioned in the log, each once."""

    def __init__(self) -> None:
        self._mentioned: set[str] = set()

    def parse(self, kind: type[BodyT], body: bytes) -> BodyT:
        """Raises `InvalidRequest` naming the first bad field."""
        try:
            request = kind.model_validate_json(body)
        except ValidationError as error:
            raise _invalid(error) from error
        for name in request.model_extra or ():
            self._mention(name)
        return request

    def _mention(self, name: str) -> None:
        if name not in self._mentioned and len(self._mentioned) < MAX_LOGGED_NAMES:
            self._mentioned.add(name)
            logger.info("request field %r is not known and is ignored", name[:80])


def _invalid(error: ValidationError) -> InvalidRequest:
    problems = error.errors(include_url=False, include_context=False)
    path = field_path(problems[0]["loc"])
    # The branches of a union report apart; the one that got furthest into the value, or found fault with no more than
    # its content, is the one that was meant.
    same_field = [problem for problem in problems if field_path(problem["loc"]).startswith(path)]
    problem = max(same_field, key=lambda candidate: (len(candidate["loc"]), _is_of_content(candidate)))
    path = field_path(problem["loc"])
    return InvalidRequest(_sentence(path, problem), param=path or None)


def _sentence(path: str, problem: ErrorDetails) -> str:
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] not in (*_NO_INPUT, "value_error"):
        text = f"{text}, got {problem['input']!r:.60}"
    return f"{path or 'body'}: {text}"


def field_path(location: tuple[int | str, ...]) -> str:
    """A location as OpenAI spells it, messages[0].content, without the names of union branches."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _is_branch(part):
            path += f".{part[:80]}" if path else part
    return path


def _is_of_content(problem: ErrorDetails) -> bool:
    return not problem["type"].endswith("_type")


def _is_branch(part: str) -> bool:
    return part in ("str", "constrained-str", "dict", "list") or "[" in part
