"""How many replicas are asked for: the policy, under Ray Serve's own limits and delays."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from cluster.ray_serve.autoscaling import KV_DEMAND, LoadPolicy, reported
from protos.stats import EngineStats
from tests.support.distributed.deployments import DEPLOY, load

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray's
PATH = "cluster.ray_serve.autoscaling:LoadPolicy"


def config_of(**fields: Any) -> "AutoscalingConfig":
    from ray.serve.config import AutoscalingConfig

    return AutoscalingConfig.model_validate(
        {
            "min_replicas": 1,
            "max_replicas": 100,
            "target_ongoing_requests": 10,
            "upscale_delay_s": 0,
            "downscale_delay_s": 0,
            "policy": {"policy_function": PATH, "policy_kwargs": {"target_kv_usage": 0.5}},
            **fields,
        }
    )


def context(requests: float, *demands: float, config: "AutoscalingConfig | None" = None) -> "AutoscalingContext":
    """Return what Serve tells a policy of replicas with these *demands*, and of all requests."""
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve.config import AutoscalingContext

    deployment = DeploymentID(name="Slipstream", app_name="slipstream")
    replicas = [ReplicaID(unique_id=str(number), deployment_id=deployment) for number in range(len(demands))]
    return AutoscalingContext(
        deployment_id=deployment,
        deployment_name=deployment.name,
        app_name=deployment.app_name,
        current_num_replicas=len(replicas),
        target_num_replicas=len(replicas),
        running_replicas=replicas,
        total_num_requests=requests,
        total_queued_requests=0.0,
        aggregated_metrics={KV_DEMAND: dict(zip(replicas, demands, strict=True))},
        raw_metrics=None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=100,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=config or config_of(),
    )


def decider(config: "AutoscalingConfig") -> Callable[["AutoscalingContext"], tuple[int, dict[str, Any]]]:
    """Return the policy as Serve's controller makes it of its configuration."""
    from ray.serve._private.autoscaling_state import _resolve_policy_callable
    from ray.serve.autoscaling_policy import _apply_autoscaling_config

    return _apply_autoscaling_config(_resolve_policy_callable(config.policy))


@pytest.mark.parametrize(
    ("requests", "demands", "wanted"),
    [
        (40.0, (0.1, 0.1), 4),  # many short requests: ten a replica
        (4.0, (1.0, 1.0), 4),  # a few long ones: half of each cache
        (4.0, (2.0, 1.0), 6),  # and as many again wait on one replica
        (0.0, (0.0, 0.0), 1),
    ],
)
def test_the_scarcer_of_requests_and_kv_cache_decides(requests: float, demands: tuple[float, ...], wanted: int) -> None:
    decide = decider(config_of())
    assert max(1, decide(context(requests, *demands))[0]) == wanted


def test_serve_delays_what_the_policy_wants() -> None:
    config = config_of(upscale_delay_s=30)
    decide = decider(config)
    number, state = decide(context(40.0, 0.1, config=config))
    assert number == 1
    assert state


def test_replicas_that_have_not_reported_yet_are_counted_by_requests() -> None:
    silent = context(25.0, 0.0)
    silent.aggregated_metrics = None
    assert LoadPolicy()(silent) == (2.5, {})


def test_waiting_requests_count_as_running_ones() -> None:
    assert reported(EngineStats(kv_usage=0.6, num_running=4, num_waiting=2)) == {KV_DEMAND: pytest.approx(0.9)}
    assert reported(EngineStats(kv_usage=0.0, num_running=0, num_waiting=2)) == {KV_DEMAND: 0.0}


@pytest.mark.parametrize(
    "given", [{"target_kv_usage": 80}, {"target_kv_usage": 0.0}, {"target_kv_usage": "0.5"}, {"target": 0.5}]
)
def test_wrong_arguments_are_told_and_stop_nothing(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """An error of a policy stops Serve's controller from updating any application."""
    policy = LoadPolicy(**given)
    assert f"got {given if 'target_kv_usage' in given else {'target_kv_usage': 0.8, **given}}" in caplog.text
    assert policy(context(0, 0.4, 0.4)) == (pytest.approx(1.0), {})


def test_the_shipped_configuration_names_it() -> None:
    from ray.serve._private.autoscaling_state import _resolve_policy_callable
    from ray.serve.config import AutoscalingConfig

    (deployment,) = load(DEPLOY / "serve" / "config-8b.yaml")["applications"][0]["deployments"]
    config = AutoscalingConfig.model_validate(deployment["autoscaling_config"])
    assert isinstance(_resolve_policy_callable(config.policy), LoadPolicy)
