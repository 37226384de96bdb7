"""Which of the target's hidden states a draft reads, in one convention: the *input* of decoder layer i, from 0.

Three are in use: inputs, as vLLM and `speculators` write them (`eagle_aux_hidden_state_layer_ids` at the top of the
config, described there as "after layer id - 1"); outputs of layers, as DFlash writes them
(`dflash_config.target_layer_ids`); and no entry, which means the inputs of layers 2, n / 2 and n - 3 for EAGLE-3, and
for DFlash the outputs of as many layers as the draft has, evenly spaced from layer 1 to n - 3.
`eagle_config.eagle_aux_hidden_state_layer_ids` has either: as SGLang does, it is read as outputs if the first id is 1,
else as inputs (n is the output of the last layer, before the final norm).
"""

from proposers.formats.shared.layout import refuse
from proposers.formats.shared.values import Config, TargetDims, integer, integers, section

KEY = "eagle_aux_hidden_state_layer_ids"


def eagle_layers(title: str, config: Config, target: TargetDims) -> tuple[int, ...]:
    """Return the layers whose inputs an EAGLE-3 draft reads; raises `ModelError` if the target has no such layers."""
    inputs = integers(title, config, KEY)
    nested = integers(title, section(config, "eagle_config"), KEY)
    if nested[:1] == (1,):
        nested = tuple(i + 1 for i in nested)
    default = (2, target.layers // 2, target.layers - 3)
    return _checked(title, inputs or nested or default, target)


def dflash_layers(title: str, config: Config, target: TargetDims) -> tuple[int, ...]:
    """Return the layers whose inputs a DFlash draft reads; raises `ModelError` if the target has no such layers."""
    outputs = integers(title, section(config, "dflash_config"), "target_layer_ids")
    outputs = outputs or integers(title, config, "target_layer_ids") or _spaced(title, config, target)
    found = integers(title, config, "aux_hidden_state_layer_ids") or tuple(i + 1 for i in outputs)
    return _checked(title, found, target)


def _spaced(title: str, config: Config, target: TargetDims) -> tuple[int, ...]:
    """Return the layers whose outputs a DFlash draft reads if its config names none, as in the authors' code.

    Halves are rounded to even numbers. With one layer, it is the target's middle one.
    """
    count = integer(title, config, "num_hidden_layers")
    layers = integer(title, config, "num_target_layers", default=target.layers)
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


def _checked(title: str, layers: tuple[int, ...], target: TargetDims) -> tuple[int, ...]:
    for layer in layers:
        if not 0 <= layer <= target.layers:
            refuse(title, f"it reads the input of layer {layer}, but the target has {target.layers} layers")
    return layers
