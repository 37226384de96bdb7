"""The Ray Serve application: its arguments, its replicas and API keys."""

import asyncio
import contextvars
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.ray_serve.arguments import ELSEWHERE, SERVER, ServeArguments, ServerArguments
from protos.config import argument_names
from protos.config.engine import ParallelConfig
from protos.errors import ConfigError, EngineDeadError, PlacementError
from runtime.grpc.errors import StatusError
from tests.support.policies import always

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray's


def test_arguments_are_those_of_the_engine_and_of_the_server() -> None:
    given = ServeArguments.model_validate(
        {
            "tensor-parallel-size": 2,
            "device": "cpu",
            "request_timeout": 30,
            "tool_call_parser": "hermes",
            "heartbeat_timeout_s": "5",
        }
    )
    assert given.config.parallel.tensor_parallel_size == 2
    assert given.server.heartbeat_timeout_s == 5.0
    assert given.server.drain_s == 40.0  # longer than a request may take
    assert given.server.tools.parser == "hermes"
    assert ServeArguments.model_validate({}).server.drain_s == 600.0
    one_site = ServeArguments.model_validate({"allowed_origins": "https://a.example"})
    assert one_site.server.allowed_origins == ("https://a.example",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"modle": "x"}, "unknown argument 'modle', did you mean 'model'?"),
        ({"tensor_paralel_size": 2}, "did you mean 'tensor_parallel_size'?"),
        ({"reqest_timeout": 2}, "did you mean 'request_timeout'?"),
        ({"max_connections": 2}, "max_connections is not taken here: the connections are those of Ray Serve's proxies"),
        ({"api_key": ["a secret"]}, "api_key is not taken here: Ray logs arguments: put keys in SLIPSTREAM_API_KEY"),
        ({"port": 8000}, "port is not taken here: Ray Serve's proxies listen"),
        ({"shutdown-timeout": 5}, "shutdown_timeout is not taken here: drain_timeout_s is"),
        ({"max-num-seqs": 2, "max_num_seqs": 3}, "max_num_seqs is given twice, as max-num-seqs and as max_num_seqs"),
        ({"tp": 1, "tp-size": 2}, "tensor_parallel_size is given twice, as tp and as tp-size"),
        ({"engine": {}}, "unknown argument 'engine'"),
        ({"heartbeat_timeout_s": 0}, "greater than 0"),
        ({"tensor_parallel_size": "two"}, "tensor_parallel_size must be an integer, got 'two'"),
        ({"speculative_config": {"methd": "ngram"}}, "did you mean 'method'?"),
        ({"skip_tokenizer_init": True}, "serving needs a tokenizer"),
        ({"tool_call_parser": "nobody's"}, "tool_call_parser must be one of"),
        ("model", "args must hold"),
    ],
)
def test_unknown_arguments_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ServeArguments.model_validate(given)
    assert said in str(caught.value)


def test_a_chat_template_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}")
    for given in (str(file), file.read_text()):
        server = ServeArguments.model_validate({"chat_template": given}).server
        assert server.chat_template == file.read_text()
        assert ServerArguments.model_validate_json(server.model_dump_json()).chat_template == file.read_text()
    with pytest.raises(ValidationError, match=r"chat_template: cannot read .*: no such file"):
        ServeArguments.model_validate({"chat_template": str(tmp_path / "none")})


def test_requests_are_counted_off_whichever_news_comes_first() -> None:
    from cluster.ray_serve.choice import ENDED, PrefixChoice
    from cluster.ray_serve.router import PrefixRouter

    def asked(name: str) -> Any:
        return SimpleNamespace(metadata=SimpleNamespace(internal_request_id=name, session_id=""))

    router = PrefixRouter.__new__(PrefixRouter)
    choice = router._choice = PrefixChoice()
    where: Any = SimpleNamespace(unique_id="replica")
    for name in ("a", "b", "c"):
        router.on_request_routed(asked(name), where, None)
    assert choice.load("replica") == 3
    router.on_request_completed(where, "b")
    router.on_request_completed(where, "d")
    router.on_request_routed(asked("d"), where, None)
    assert choice.load("replica") == 2
    assert not choice._ended
    for number in range(1000):
        router.on_request_completed(where, f"refused {number}")
    assert len(choice._ended) == ENDED


def replica(name: str, **reported: bool) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=reported)


@pytest.mark.parametrize("session", ["", "a"])
def test_a_replica_without_its_target_group_gets_no_requests(session: str) -> None:
    from cluster.ray_serve.affinity import keys_in
    from cluster.ray_serve.choice import PrefixChoice
    from cluster.ray_serve.router import PrefixRouter, reported

    class Everywhere(PrefixRouter):
        def apply_locality_routing(self, pending_request: Any = None) -> Any:
            return [each.replica_id for each in replicas]

    router = Everywhere.__new__(Everywhere)
    router._choice = PrefixChoice()
    router._choice.routed("earlier", keys_in(session), "lost")
    request: Any = SimpleNamespace(metadata=SimpleNamespace(session_id=session))

    def chosen() -> set[str]:
        ranks = asyncio.run(router.choose_replicas(replicas, request))
        return {each.replica_id.unique_id for rank in ranks for each in rank}

    replicas = [replica("lost", **reported(False)), replica("well", **reported(True))]
    assert chosen() == {"well"}
    replicas = [replica("lost", **reported(False)), replica("silent")]  # has not reported yet
    assert chosen() == {"silent"}
    replicas = [replica("lost", **reported(False))]  # where the request waits, or is refused with the reason
    assert chosen() == {"lost"}


def test_a_prefix_is_worth_so_many_requests_more_and_no_more() -> None:
    from cluster.ray_serve.choice import PrefixChoice

    choice = PrefixChoice(slack=2)
    choice.routed("first", ["short", "long"], "one")
    assert choice.preferred(["short", "other"], ["one", "two"]) == ["one"]
    assert choice.preferred(["unknown"], ["one", "two"]) == []
    for number in range(2):
        choice.routed(str(number), ["short"], "one")
    assert choice.preferred(["short"], ["one", "two"]) == []
    choice.completed("0", "one")
    assert choice.preferred(["short"], ["one", "two"]) == ["one"]
    choice.keep({"two"})
    assert choice.preferred(["short"], ["one", "two"]) == []


def test_a_request_that_one_replica_refused_counts_at_the_one_that_took_it() -> None:
    from cluster.ray_serve.choice import PrefixChoice

    choice = PrefixChoice()
    choice.completed("a", "full")  # Serve reports a refusal so
    choice.routed("a", [], "other")
    assert (choice.load("full"), choice.load("other")) == (0, 1)
    choice.completed("a", "other")
    assert choice.load("other") == 0


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.ray_serve.replica import with_keys

    settings = ServeArguments.model_validate({}).server
    monkeypatch.delenv("SLIPSTREAM_API_KEY", raising=False)
    assert with_keys(settings).keys.accepts(None)
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "one two")
    keys = with_keys(settings).keys
    assert keys.accepts("Bearer one")
    assert keys.accepts("Bearer two")
    assert not keys.accepts("Bearer three")
    assert not keys.accepts(None)
    monkeypatch.setenv("SLIPSTREAM_API_KEY", " ")
    with pytest.raises(ConfigError, match="is set, but has no key"):
        with_keys(settings)


def test_a_refusal_tells_no_value() -> None:
    with pytest.raises(ValidationError) as caught:
        ServeArguments.model_validate({"api_key": ["a secret"], "modle": 1})
    assert "a secret" not in str(caught.value)


def test_the_device_must_be_said_where_there_is_no_cluster_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from cluster.ray_serve.deployment import planned

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="device must be cpu or cuda here"):
        planned(ServeArguments.model_validate({}).config)
    assert planned(ServeArguments.model_validate({"device": "cuda"}).config)[0].worker == {"CPU": 1.0, "GPU": 1.0}
    plan, config = planned(ServeArguments.model_validate({"device": "cpu"}).config)
    assert plan.worker == config.parallel.worker_resources == {"CPU": 1.0}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    _, config = planned(ServeArguments.model_validate({}).config)
    assert config.model.device == "cpu", "whatever joins the cluster later"


def test_serve_takes_what_the_command_takes() -> None:
    """Or says where it is set: addresses belong to Serve, and the drain time has another name here."""
    from typer.main import get_command

    from cluster.cli.main import app

    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {parameter.name for parameter in command.params}
    assert options - {"config", "positional_model"} <= SERVER | argument_names.NAMES | ELSEWHERE.keys()


# Replicas.


def test_a_replica_holds_the_worker_group() -> None:
    from cluster.ray.placement import layout
    from cluster.ray_serve.deployment import bundles

    settings: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "speculative_config": always({"method": "ngram", "num_speculative_tokens": 2}),
    }
    config = ServeArguments.model_validate(settings).config
    assert bundles(layout(config, {"GPU": 4.0}), config) == [{"CPU": 2.0}, *[{"CPU": 1.0, "GPU": 1.0}] * 2]
    alone = ServeArguments.model_validate({"worker_resources": {"GPU": 0.5}}).config
    assert bundles(layout(alone, {"GPU": 4.0}), alone) == [{"CPU": 1.0, "GPU": 0.5}]


def test_a_group_that_a_config_made_too_small_is_named() -> None:
    from cluster.ray.placement import BundleLayout
    from cluster.ray.placement_provider import check_room

    plan = BundleLayout(2, True, {"CPU": 1.0, "GPU": 1.0}, "PACK")
    check_room([{"CPU": 2.0}, *[{"CPU": 4.0, "GPU": 1.0}] * 3], plan)
    with pytest.raises(PlacementError, match="has 3 bundles, the engine needs 4"):
        check_room([{"CPU": 2.0}, *[{"CPU": 1.0, "GPU": 1.0}] * 2], plan)
    with pytest.raises(PlacementError, match=r"bundle 3 .* has 0 GPU, a worker needs 1"):
        check_room([{"CPU": 2.0}, *[{"CPU": 1.0, "GPU": 1.0}] * 2, {"CPU": 1.0}], plan)


class Engine:
    """The part of an engine that the health check reads."""

    def __init__(self, *, is_alive: bool = True, silence_s: float = 0.0) -> None:
        self.is_alive, self.silence_s = is_alive, silence_s


def test_only_a_controller_that_is_gone_or_silent_is_unhealthy() -> None:
    from cluster.ray_serve.replica import check

    check(Engine(silence_s=59.0), 60.0)
    with pytest.raises(EngineDeadError, match="has been silent for 61 s; heartbeat_timeout_s is 60"):
        check(Engine(silence_s=61.0), 60.0)
    with pytest.raises(EngineDeadError, match="the controller has ended"):
        check(Engine(is_alive=False), 60.0)


class Call:
    """A gRPC call on Serve with its metadata."""

    def __init__(self, **metadata: str) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return list(self._metadata.items())


def test_calls_need_a_key_and_keep_to_its_caches() -> None:
    from cluster.ray_serve.app import admit
    from runtime.frontend.keys import TENANT, Keys
    from runtime.http.server.limits import GuardOptions

    def tenant(guard: GuardOptions, call: Call) -> str:
        def inside() -> str:
            admit(guard, call)
            return TENANT.get()

        return contextvars.copy_context().run(inside)

    guarded = GuardOptions(Keys(["one", "two"]))
    tenants = [tenant(guarded, Call(authorization=f"Bearer {key}")) for key in ("one", "two", "one")]
    assert tenants[0] == tenants[2] != tenants[1]
    assert all(tenants)
    assert tenant(GuardOptions(Keys(["one"]), salts_by_key=False), Call(authorization="Bearer one")) == ""
    assert tenant(GuardOptions(), Call()) == ""
    for call in (Call(), Call(authorization="Bearer three"), Call(authorization="one")):
        with pytest.raises(StatusError, match="UNAUTHENTICATED: the API key is missing or wrong"):
            tenant(guarded, call)


def test_servers_wait_for_room_for_a_shorter_time_than_llm() -> None:
    assert ServeArguments.model_validate({"device": "cpu"}).config.parallel.rebuild_timeout_s == 30
    given = {"device": "cpu", "rebuild-timeout-s": 7}
    assert ServeArguments.model_validate(given).config.parallel.rebuild_timeout_s == 7
    assert ParallelConfig().rebuild_timeout_s == 300
