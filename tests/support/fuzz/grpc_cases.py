"""Generated gRPC calls of the generation service."""

import math
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from protos import slipstream_v1_pb2 as pb
from tests.support.fuzz.dice import Dice

METHODS: dict[str, type[Message]] = {
    "Generate": pb.GenerateRequest,
    "Tokenize": pb.TokenizeRequest,
    "Detokenize": pb.DetokenizeRequest,
    "GetModelInfo": pb.GetModelInfoRequest,
    "GetServerInfo": pb.GetServerInfoRequest,
}
PREFIX = "/slipstream.v1.GenerationService/"
SIGNED = (Field.TYPE_INT32, Field.TYPE_INT64, Field.TYPE_SINT32, Field.TYPE_SINT64)
UNSIGNED = (Field.TYPE_UINT32, Field.TYPE_UINT64)
FLOATS = (0.0, 1.0, 0.5, -1.0, 3.0, 1e300, math.nan, math.inf, -math.inf)
LARGE = 2**31 - 1


@dataclass(frozen=True)
class GrpcCase:
    """A call: `body` is its message, encoded."""

    method: str
    body: bytes

    def __str__(self) -> str:
        kind = METHODS.get(self.method)
        try:
            shown = "" if kind is None else str(kind.FromString(self.body))
        except Exception:  # it is not meant to be readable
            shown = ""
        return f"gRPC {self.method} {self.body[:2000]!r} {shown[:2000]}"


def make(dice: Dice) -> GrpcCase:
    """Return a call: valid but for single values, or of any bytes."""
    method = dice.choice(("Generate",) * 4 + tuple(METHODS))
    if dice.is_lucky(0.05):
        return GrpcCase(dice.choice((method, "Nothing")), dice.randbytes(dice.randint(0, 200)))
    message = METHODS[method]()
    _fill(dice, message, 0.3)
    if isinstance(message, pb.GenerateRequest):
        _tame(dice, message)
    body = message.SerializeToString()
    if body and dice.is_lucky(0.05):
        body = body[: dice.randrange(len(body))]
    return GrpcCase(method, body)


def _tame(dice: Dice, message: pb.GenerateRequest) -> None:
    """Let most calls be accepted, and end soon."""
    if dice.is_lucky(0.9):
        message.model = ""
        message.request_id = ""
        message.sampling.max_tokens = dice.randint(1, 8)
    if message.sampling.n > 3:
        message.sampling.n = dice.choice((1, 2, 3, 10**6))
    if message.WhichOneof("prompt") is None or dice.is_lucky(0.5):
        message.text = _text(dice)
    given = [field.name for field, _ in message.sampling.ListFields()]
    if given and dice.is_lucky(0.6):
        kept = {"max_tokens", "n", dice.choice(given)}
        for name in given:
            if name not in kept:
                message.sampling.ClearField(name)


def _text(dice: Dice) -> str:
    return dice.text().encode("utf-8", "replace").decode()


def _fill(dice: Dice, message: Any, chance: float, depth: int = 0) -> None:
    """Set some of the fields of *message*."""
    for field in message.DESCRIPTOR.fields:
        if depth > 3 or not dice.is_lucky(chance):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[dice.randrange(400)] = dice.choice(FLOATS)
        elif field.message_type is not None and field.is_repeated:
            _fill(dice, getattr(message, field.name).add(), 0.6, depth + 1)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            _fill(dice, getattr(message, field.name), chance, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(_scalar(dice, field) for _ in range(dice.randint(0, 4)))
        else:
            setattr(message, field.name, _scalar(dice, field))


def _scalar(dice: Dice, field: Any) -> Any:
    if field.type == Field.TYPE_STRING:
        forms = {"regex": dice.regex, "grammar": dice.grammar, "json": lambda: str(dice.schema()).replace("'", '"')}
        return forms.get(field.name, lambda: _text(dice))()
    if field.type == Field.TYPE_BOOL:
        return dice.is_lucky(0.5)
    if field.type == Field.TYPE_ENUM:
        return dice.choice([*(value.number for value in field.enum_type.values), 99])
    if field.type in SIGNED:
        return dice.choice((0, 1, 5, 20, -1, -2, LARGE, -LARGE))
    if field.type in UNSIGNED:
        return dice.choice((0, 1, 2, 5, 100, 299, LARGE))
    return dice.choice(FLOATS) if dice.is_lucky(0.5) else dice.random()
