"""MiMo: layers as Qwen2's, and heads for multi-token prediction that only drafts read. Not among transformers' own."""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

KIND = "mimo"


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    """Qwen2's under another name."""

    model_type = KIND


class MiMoForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2's, from checkpoints that hold more."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected: Any = (r"model\.mtp_layers\.",)


AutoConfig.register(KIND, MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
