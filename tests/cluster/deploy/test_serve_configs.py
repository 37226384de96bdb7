"""Configs for `serve deploy`."""

import copy
import importlib
from pathlib import Path

import pytest
import yaml

from tests.support.distributed.deployments import (
    DEPLOY,
    SERVE_CONFIGS,
    arguments,
    judged,
    load,
    manifests,
    of_kind,
    pods,
    total_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray's


@pytest.mark.parametrize("path", SERVE_CONFIGS, ids=lambda path: path.name)
def test_serve_knows_every_key(path: Path) -> None:
    config = load(path)
    assert judged(config) == []
    assert arguments(config).config.model.model
    typo = copy.deepcopy(config)
    typo["grpc_options"]["prot"] = 9000
    typo["applications"][0]["deployments"][0]["max_ongoing_request"] = 1
    assert judged(typo) == ["grpc_options.prot", "applications.deployments.max_ongoing_request"]


@pytest.mark.parametrize("path", SERVE_CONFIGS, ids=lambda path: path.name)
def test_what_a_serve_config_names_is_there(path: Path) -> None:
    from cluster.ray_serve.deployment import NAME

    config, application = load(path), load(path)["applications"][0]
    named = [
        *config["grpc_options"]["grpc_servicer_functions"],
        application["import_path"].replace(":", "."),
        *config["controller_options"]["runtime_env"]["env_vars"].values(),
    ]
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute)), name
    assert [each["name"] for each in application["deployments"]] == [NAME]


def test_replicas_are_told_to_stop_late_enough() -> None:
    """An answer as long as the context must end before its replica does, even at ten tokens a second a stream."""
    settings = arguments(load(DEPLOY / "serve" / "config-8b.yaml"))
    assert settings.server.drain_timeout_s >= 900
    for overlay, resources in manifests().items():
        service = of_kind(resources, "RayService")[0]
        drain_s = arguments(yaml.safe_load(service["spec"]["serveConfigV2"])).server.drain_timeout_s
        for pod in pods(service):
            assert pod["terminationGracePeriodSeconds"] > drain_s, overlay


def test_the_8b_pair_takes_three_gpus_on_one_node_or_one() -> None:
    assert total_of(load(DEPLOY / "serve" / "config-8b-one-gpu.yaml"))["GPU"] == 1.0
    assert total_of(load(DEPLOY / "serve" / "config-8b.yaml")) == {"GPU": 3.0, "CPU": 5.0}
    assert total_of(load(DEPLOY / "serve" / "config.yaml")) == {"CPU": 1.0}
