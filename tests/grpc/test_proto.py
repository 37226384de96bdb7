"""The interface's file and the code made from it: the same thing, and usable with the versions that are promised."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
from google.protobuf.descriptor import Descriptor

from protos import slipstream_v1_pb2 as pb
from runtime.frontend.client import EngineState
from runtime.grpc.service import STATES

ROOT = Path(__file__).parents[2]
NAME = "slipstream_v1"
GENERATED = (f"{NAME}_pb2.py", f"{NAME}_pb2.pyi", f"{NAME}_pb2_grpc.py")


def pinned(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


def floors() -> dict[str, str]:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {name: floor for name, _, floor in (line.partition(">=") for line in dependencies)}


def test_the_checked_in_code_is_what_the_pinned_tools_make(tmp_path: Path) -> None:
    if version("grpcio-tools") != pinned("grpcio-tools"):
        pytest.skip(f"grpcio-tools {version('grpcio-tools')} is not the pinned {pinned('grpcio-tools')}")
    (tmp_path / "protos").mkdir()
    shutil.copy(ROOT / "protos" / f"{NAME}.proto", tmp_path / "protos")
    command = ["-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--pyi_out=.", "--grpc_python_out=."]
    assert " ".join([*command, f"protos/{NAME}.proto"]) in (ROOT / "Makefile").read_text()
    subprocess.run([sys.executable, *command, f"protos/{NAME}.proto"], cwd=tmp_path, check=True, timeout=120)
    for name in GENERATED:
        made = (tmp_path / "protos" / name).read_text()
        assert (ROOT / "protos" / name).read_text() == made, f"{name} is stale: make protos"


def test_the_floors_are_what_the_code_needs() -> None:
    messages, stubs = ((ROOT / "protos" / name).read_text() for name in (GENERATED[0], GENERATED[2]))
    grpcio = re.search(r"GRPC_GENERATED_VERSION = '(.+)'", stubs)
    protobuf = re.search(r"Protobuf Python Version: (.+)", messages)
    assert grpcio is not None
    assert protobuf is not None
    assert floors()["grpcio"] == grpcio[1]
    assert floors()["protobuf"].startswith(protobuf[1].rsplit(".", 1)[0])
    assert {floors()[f"grpcio-{name}"] for name in ("health-checking", "reflection")} == {grpcio[1]}


def test_every_state_of_an_engine_has_a_name() -> None:
    assert STATES.keys() == set(get_args(EngineState))
    assert set(STATES.values()) | {pb.SERVER_STATE_UNSPECIFIED} == set(pb.ServerState.values())


def messages() -> list[Descriptor]:
    return list(pb.DESCRIPTOR.message_types_by_name.values())


def test_every_knob_is_optional_and_every_enum_begins_with_unspecified() -> None:
    knobs = [
        field
        for name in ("SamplingParams", "SpeculativeConfig", "StructuredOutputs")
        for field in pb.DESCRIPTOR.message_types_by_name[name].fields
    ]
    assert len(knobs) > 30
    assert not [field.full_name for field in knobs if not (field.has_presence or field.is_repeated)]
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        words = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        assert enum.values_by_number[0].name == f"{words}_UNSPECIFIED"
        assert all(value.name.startswith(words) for value in enum.values)


def test_names_and_numbers() -> None:
    assert pb.DESCRIPTOR.package == "slipstream.v1"
    assert pb.DESCRIPTOR.name == f"protos/{NAME}.proto"
    service = pb.DESCRIPTOR.services_by_name["GenerationService"]
    for method in service.methods:
        replies = "GenerateResponse" if method.name == "Generate" else f"{method.name}Response"
        assert (method.input_type.name, method.output_type.name) == (f"{method.name}Request", replies)
        assert method.server_streaming == (method.name == "Generate")
        assert not method.client_streaming
    for message in messages():
        numbers = [field.number for field in message.fields]
        assert sorted(numbers) == list(range(1, len(numbers) + 1)), message.name
