"""A published checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.checkpoints.stored import Headers

CARD = "public knowledge of its config.json and of the names in its index; neither file was at hand"
QUOTED = "values of its config.json that public repositories quote; names: public knowledge"
SHARED = "public descriptions of the format of MTP heads"
DEFAULTS = (
    "the defaults of its config class in transformers 5.23, which are made from a published config; names of the class"
)


@dataclass(frozen=True)
class Published:
    """A checkpoint that people use.

    Attributes:
        name: on the Hub.
        what: size, layers and quantisation, in a few words.
        config: its `config.json`, without what the loader does not read.
        headers: makes the headers of its safetensors files.
        source: where the facts are from.
        kv_bytes: of one token in all layers, in bf16, worked out by hand.
        state_bytes: of one recurrent state in all layers, in bf16 and fp32, worked out by hand.
        parameters: of the language model, where the Hub states them.
        quantized: how many weights are stored quantised, stacked experts not counted.
        unread: pattern of tensors in decoder layers that are not read; "$^": none.
        serve: options of `slipstream serve` that it needs.
        max_model_len: the limit that has to be set, if any.
    """

    name: str
    what: str
    config: dict[str, Any]
    headers: Callable[[], Headers]
    source: str
    kv_bytes: int
    state_bytes: int = 0
    quantized: int = 0
    parameters: int | None = None
    unread: str = "$^"
    serve: str = ""
    max_model_len: int | None = None

    @property
    def command(self) -> str:
        """The command that serves it."""
        return f"slipstream serve {self.name}" + (f" {self.serve}" if self.serve else "")
