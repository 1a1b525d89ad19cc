"""The running Serve application as `warmstate serve` sees it: deploys it, and follows it until it is ready."""

import json
import time
import urllib.error
import urllib.request
from typing import Any

from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from warmstate.cluster.app import APPLICATION_NAME, build_application
from warmstate.cluster.launch.launch_errors import StartFailed
from warmstate.cluster.launch.launch_plan import LaunchPlan
from warmstate.cluster.launch.progress import Progress

_POLL_S = 0.2
_HTTP_TIMEOUT_S = 2.0


class Application:
    """One application on the Ray that this process is connected to."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._health_url = f"{plan.config.http.url}/health"

    def deploy(self) -> None:
        """Returns at once; the application comes up in the background."""
        target = serve.RunTarget(build_application(self._plan), name=APPLICATION_NAME, route_prefix="/")
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def wait_until_ready(self, progress: Progress) -> None:
        """Shows each phase until every replica takes requests; raises `StartFailed` when one cannot."""
        while True:
            overview = serve.status().applications[APPLICATION_NAME]
            if overview.status is ApplicationStatus.DEPLOY_FAILED:
                raise StartFailed(self._explain(overview))
            health = self._read_health()
            if overview.status is ApplicationStatus.RUNNING and health.get("phase") == "ready":
                return
            progress.show(*self._phase(health))
            time.sleep(_POLL_S)

    def _phase(self, health: dict[str, Any]) -> tuple[str, float | None]:
        if not health or not health["replicas"]:
            return "starting the processes", None
        if health["phase"] == "ready":
            ready = sum(phase["phase"] == "ready" for phase in health["replicas"].values())
            return f"{ready} of {self._plan.config.replicas} replicas are ready", None
        return f"{health['phase']} the model", health["fraction"]

    def _read_health(self) -> dict[str, Any]:
        """The body of /health, ready or not; empty while nothing answers."""
        try:
            with urllib.request.urlopen(self._health_url, timeout=_HTTP_TIMEOUT_S) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        except OSError:
            return {}
        try:
            found = json.loads(body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _explain(self, overview: ApplicationStatusOverview) -> str:
        """Serve's messages hold the traceback of the replica; its last line says what went wrong."""
        messages = [overview.message, *(deployment.message for deployment in overview.deployments.values())]
        lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line or "warmstate." in line] or lines
        reason = told[-1] if told else "no reason given"
        return f"the application did not come up: {reason}"
