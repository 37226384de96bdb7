"""MiMo, which transformers lacks: the layers of Qwen2, and heads for multi-token prediction that only drafts read."""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

KIND = "mimo"


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    """The configuration of Qwen2."""

    model_type = KIND


class MiMoForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2, loaded from checkpoints with additional weights."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected: Any = (r"model\.mtp_layers\.",)


AutoConfig.register(KIND, MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
