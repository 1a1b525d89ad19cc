"""The Ray Serve application: `serve run` and `warmstate serve` both come through here. Knows no HTTP route."""

import logging
import os
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException

from warmstate.cluster.config import parse_config
from warmstate.cluster.ingress_deployment import IngressDeployment
from warmstate.cluster.launch.launch_errors import LaunchError
from warmstate.cluster.launch.launch_plan import LaunchPlan, plan_launch
from warmstate.cluster.launch.local_ray import serve_environment, serve_environment_is_set
from warmstate.cluster.launch.logs import set_up_logging
from warmstate.cluster.replica_deployment import ReplicaDeployment
from warmstate.cluster.routing.serve_router import PrefixRouter
from warmstate.cluster.store_deployment import StoreDeployment
from warmstate.models.errors import ModelError

logger = logging.getLogger(__name__)

APPLICATION_NAME = "warmstate"

_HEALTH = {"health_check_period_s": 1.0, "health_check_timeout_s": 15.0}
"""A dead replica is replaced within seconds; one that computes a long step is not taken for dead."""

_STOP_GRACE_S = 5.0
_NUM_LOAD_ATTEMPTS = 3

_MANY = 100_000
"""No limit of Serve's: the engine's own queue refuses with 429, where Serve would make the request wait unseen."""

_SMALL_CPU = 0.1
_LEAST_CPU = 0.01


def build(args: dict[str, Any]) -> serve.Application:
    """The application for `import_path: warmstate.cluster.app:build`; `args` is `config.AppConfig`.

    Raises `NotServable` before any replica starts; Serve takes that for final, where it would try anew after others.
    """
    try:
        return _build(args)
    except (LaunchError, ModelError) as error:
        logger.error("the application cannot be served: %s", error)
        raise NotServable(str(error)) from error


class NotServable(RayServeException):  # type: ignore[misc]  # ray is not typed
    """The configuration or the checkpoint is wrong; the message is for the person who can put it right."""


def _build(args: dict[str, Any]) -> serve.Application:
    set_up_logging("info", "build")
    config = parse_config(args)
    set_up_logging(config.log_level, "build")
    if not serve_environment_is_set():
        settings = " ".join(f"{name}={value}" for name, value in serve_environment().items())
        logger.warning("Serve runs without our settings of its HTTP path; start it as: %s serve run ...", settings)
    return build_application(plan_launch(config))


def build_application(
    plan: LaunchPlan, replica_class: type[ReplicaDeployment] = ReplicaDeployment
) -> serve.Application:
    """Ingress and replicas, and the store where it is embedded; none waits for another to start."""
    store = _store(plan) if plan.config.store.kind == "embedded" else None
    replicas = serve.deployment(
        replica_class,
        name="replica",
        num_replicas=plan.config.replicas,
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=_STOP_GRACE_S,
        max_constructor_retry_count=_NUM_LOAD_ATTEMPTS,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        ray_actor_options={"num_cpus": _replica_cpus(plan)},
        **_HEALTH,
    ).bind(plan.replica, store, plan.config.log_level)
    ingress = serve.deployment(
        IngressDeployment,
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=_STOP_GRACE_S,
        ray_actor_options={"num_cpus": _SMALL_CPU},
        **_HEALTH,
    )
    application: serve.Application = ingress.bind(plan.config, plan.card, plan.replica, replicas, store)
    return application


def _store(plan: LaunchPlan) -> serve.Application:
    store: serve.Application = serve.deployment(
        StoreDeployment,
        name="store",
        num_replicas=1,
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=_STOP_GRACE_S,
        ray_actor_options={"num_cpus": _SMALL_CPU},
        **_HEALTH,
    ).bind(int(plan.config.store.maxmemory), plan.config.log_level)
    return store


def _replica_cpus(plan: LaunchPlan) -> float:
    """Leaves room for ingress and store, so that all of it fits the machine it was planned on."""
    free = (os.cpu_count() or 1) - 3 * _SMALL_CPU
    return round(max(_LEAST_CPU, min(plan.replica.num_threads, free / plan.config.replicas) - 0.005), 2)
