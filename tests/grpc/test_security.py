"""API keys and TLS of the gRPC server."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster.serving.tls import TlsFiles, tls_files
from protos import slipstream_v1_pb2 as pb
from protos import slipstream_v1_pb2_grpc as stubs
from protos.errors import ConfigError
from tests.support.serving.certificates import Authority
from tests.support.serving.fake_engine import expected, local_engine
from tests.support.serving.grpc_checks import SERVING, Code, checked, failure
from tests.support.serving.grpc_server import SERVICE, Served, answer, request, serving


def test_keys_open_everything_but_health() -> None:
    with serving(local_engine(), keys=("first-key", "second-key")) as locked, locked.channel() as channel:
        stub = stubs.GenerationServiceStub(channel)
        for given in ((), (("authorization", "Bearer wrong"),), (("authorization", "first-key"),)):
            failure(lambda given=given: list(stub.Generate(request("x"), metadata=given)), Code.UNAUTHENTICATED)
            failure(
                lambda given=given: stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=given), Code.UNAUTHENTICATED
            )
        failure(lambda: ProtoReflectionDescriptorDatabase(channel).get_services(), Code.UNAUTHENTICATED)
        failure(lambda: list(channel.unary_stream("/no.Such/Method")(b"")), Code.UNAUTHENTICATED)
        assert checked(channel, SERVICE) == SERVING
        for key in ("first-key", "second-key"):
            metadata = (("authorization", f"Bearer {key}"),)
            _, (end,) = answer(stub.Generate(request("x", 4), metadata=metadata))
            assert end.text == expected("x", 4)


def test_each_key_has_caches_of_its_own() -> None:
    prompt = "the quick brown fox jumps over the lazy dog and then some more of it, on and on and on"

    def cached(stub: Any, key: str, salt: str = "") -> int:
        metadata = (("authorization", f"Bearer {key}"),)
        _, (end,) = answer(stub.Generate(request(prompt, 2, cache_salt=salt), metadata=metadata))
        return int(end.usage.cached_tokens)

    with serving(local_engine(), keys=("first", "second")) as locked, locked.stub() as stub:
        assert cached(stub, "first") == 0
        assert cached(stub, "first") > 0
        assert cached(stub, "second") == 0
        assert cached(stub, "first", "salted") == 0
        assert cached(stub, "first", "salted") > 0


# TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours", "ours")


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    own = authority.sign("server")
    found = tls_files(("cert", "key"), str(own.cert), str(own.key), str(authority.cert))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def secured(files: TlsFiles) -> Iterator[Served]:
    plain = TlsFiles(files.cert, files.key)
    with serving(local_engine(), grpc_tls=files, http_tls=plain) as running:
        yield running


def asked_with(served: Served, credentials: grpc.ChannelCredentials) -> str:
    """Return an answer over TLS. Raises `RpcError`."""
    with grpc.secure_channel(served.address, credentials) as channel:
        _, (end,) = answer(stubs.GenerationServiceStub(channel).Generate(request("safe", 5), timeout=20))
        return str(end.text)


def test_mutual_tls(secured: Served, authority: Authority, tmp_path: Path) -> None:
    ca, known = authority.cert.read_bytes(), authority.sign("client")
    stranger = Authority(tmp_path / "theirs", "theirs")
    assert asked_with(secured, grpc.ssl_channel_credentials(ca, *known.pair)) == expected("safe", 5)
    for wrong in (
        grpc.ssl_channel_credentials(ca),  # no client certificate
        grpc.ssl_channel_credentials(ca, *stranger.sign("client").pair),
        grpc.ssl_channel_credentials(stranger.cert.read_bytes(), *known.pair),  # does not trust the server
    ):
        failure(lambda wrong=wrong: asked_with(secured, wrong), Code.UNAVAILABLE)
    with secured.stub() as plain:
        failure(lambda: list(plain.Generate(request("x"), timeout=20)), Code.UNAVAILABLE)
    assert asked_with(secured, grpc.ssl_channel_credentials(ca, *known.pair)) == expected("safe", 5)


def test_https(secured: Served, authority: Authority) -> None:
    assert secured.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=str(authority.cert))
    body = {"prompt": "safe", "max_tokens": 5, "temperature": 0}
    told = httpx.post(secured.url + "/v1/completions", json=body, verify=trusting)
    assert told.json()["choices"][0]["text"] == expected("safe", 5)
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(secured.url + "/health")


def test_certificates_are_checked_before_anything_is_loaded(authority: Authority, tmp_path: Path) -> None:
    one, other = authority.sign("one"), authority.sign("other")
    names = ("grpc_tls_cert", "grpc_tls_key")
    assert tls_files(names, None, None) is None
    with pytest.raises(ConfigError, match="both grpc_tls_cert and grpc_tls_key"):
        tls_files(names, str(one.cert), None)
    with pytest.raises(ConfigError, match="both grpc_tls_cert and grpc_tls_key"):
        tls_files(names, None, None, str(authority.cert))
    with pytest.raises(ConfigError, match="No such file"):
        tls_files(names, str(one.cert), str(tmp_path / "gone.pem"))
    with pytest.raises(ConfigError, match=r"(?i)mismatch"):
        tls_files(names, str(one.cert), str(other.key))
    (tmp_path / "empty.pem").touch()
    with pytest.raises(ConfigError, match="client certificate authority"):
        tls_files(names, str(one.cert), str(one.key), str(tmp_path / "empty.pem"))
