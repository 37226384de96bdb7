"""Published checkpoints with recurrent layers. See `checkpoints`."""

from collections.abc import Mapping

from tests.support.published.checkpoints import NORMS, Published, sized
from tests.support.published.tensors import attention, gated, linears, mamba, norms, under, vectors, whole


def qwen3_next() -> Published:
    config = sized(
        "qwen3_next", 2048, 5120, 48, 16, 2, 151936, head_dim=256, full_attention_interval=4, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        decoder_sparse_step=1, mlp_only_layers=[], partial_rotary_factor=0.25,
    )  # fmt: skip
    experts = linears({"gate": (512, 2048), "shared_expert_gate": (1, 2048)}) | gated("shared_expert", 2048, 512)
    for i in range(512):
        experts |= gated(f"experts.{i}", 2048, 512)
    shared = norms(2048, *NORMS) | under("mlp", experts)
    delta = under(
        "linear_attn",
        linears({"in_proj_qkvz": (12288, 2048), "in_proj_ba": (64, 2048), "out_proj": (2048, 4096)}),
        {"conv1d.weight": ("BF16", (8192, 1, 4))},
        vectors(A_log=32, dt_bias=32, norm__weight=128),
    )
    gate = linears({"self_attn.q_proj": (16 * 256 * 2, 2048)})
    full = attention(2048, 16, 2, 256) | gate | vectors(self_attn__q_norm__weight=256, self_attn__k_norm__weight=256)
    header = whole([shared | (full if i % 4 == 3 else delta) for i in range(48)], 2048, 151936)
    head = under("mtp", linears({"fc": (2048, 4096)}), under("layers.0", shared, full),
                 norms(2048, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"))  # fmt: skip
    return Published(config, header | head, 12 * 2 * 2 * 256, unread=("mtp.",))


def nemotron_nano() -> Published:
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    config = sized(
        "nemotron_h", 4480, 15680, len(pattern), 40, 8, 131072, head_dim=128, hybrid_override_pattern=pattern,
        mamba_num_heads=128, mamba_head_dim=80, ssm_state_size=128, n_groups=8, conv_kernel=4, use_conv_bias=True,
        mlp_hidden_act="relu2",
    )  # fmt: skip
    mlp = linears({"mixer.up_proj": (15680, 4480), "mixer.down_proj": (4480, 15680)})
    attended = {name.replace("self_attn", "mixer"): kind for name, kind in attention(4480, 40, 8, 128).items()}
    recurrent = mamba("mixer", 4480, 128, 80, 8, 128) | vectors(mixer__norm__weight=128 * 80)
    kinds = {"M": recurrent, "-": mlp, "*": attended}
    layers = [norms(4480, "norm") | kinds[kind] for kind in pattern]
    header = whole(layers, 4480, 131072, prefix="backbone", embedding="embeddings", norm="norm_f")
    return Published(config, header, pattern.count("*") * 2 * 8 * 128)


def lfm2() -> Published:
    full = (2, 5, 8, 10, 12, 14)
    config = sized(
        "lfm2", 2048, 12288, 16, 32, 8, 65536, tied=True, block_auto_adjust_ff_dim=True, block_multiple_of=256,
        block_ffn_dim_multiplier=1.0, conv_L_cache=3, conv_bias=False, full_attn_idxs=[*full],
    )  # fmt: skip
    convolution = linears({"conv.in_proj": (6144, 2048), "conv.out_proj": (2048, 2048)})
    convolution |= {"conv.conv.weight": ("BF16", (2048, 1, 3))}
    attended = attention(2048, 32, 8, 64, output="out_proj")
    attended |= vectors(self_attn__q_layernorm__weight=64, self_attn__k_layernorm__weight=64)
    shared = norms(2048, "operator_norm", "ffn_norm") | gated("feed_forward", 2048, 8192, names="w1 w3 w2")
    layers = [shared | (attended if i in full else convolution) for i in range(16)]
    header = whole(layers, 2048, 65536, head=None, norm="embedding_norm")
    return Published(config, header, 6 * 2 * 8 * 64, parameters=1_170_340_608)


def granite_4_small() -> Published:
    full = (5, 15, 25, 35)
    config = sized(
        "granitemoehybrid", 4096, 768, 40, 32, 8, 100352, tied=True, num_local_experts=72, num_experts_per_tok=10,
        shared_intermediate_size=1536, mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1,
        mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, position_embedding_type="nope",
        layer_types=["attention" if i in full else "mamba" for i in range(40)],
    )  # fmt: skip
    experts = {
        "input_linear.weight": ("BF16", (72, 1536, 4096)),
        "output_linear.weight": ("BF16", (72, 4096, 768)),
        **linears({"router.layer": (72, 4096)}),
    }
    shared = {
        **norms(4096, *NORMS), **under("block_sparse_moe", experts),
        **linears({"shared_mlp.input_linear": (3072, 4096), "shared_mlp.output_linear": (4096, 1536)}),
    }  # fmt: skip
    recurrent = mamba("mamba", 4096, 128, 64, 1, 128) | vectors(mamba__norm__weight=8192)
    layers = [shared | (attention(4096, 32, 8, 128) if i in full else recurrent) for i in range(40)]
    return Published(config, whole(layers, 4096, 100352, head=None), 4 * 2 * 8 * 128)


def falcon_h1() -> Published:
    config = sized(
        "falcon_h1", 3072, 12288, 44, 12, 2, 130048, head_dim=128, mamba_d_ssm=3072, mamba_n_heads=24,
        mamba_d_head=128, mamba_d_state=256, mamba_n_groups=1, mamba_d_conv=4, mamba_rms_norm=False,
        mamba_conv_bias=True, mamba_proj_bias=False,
    )  # fmt: skip
    layer = {
        **norms(3072, "input_layernorm", "pre_ff_layernorm"), **gated("feed_forward", 3072, 12288),
        **attention(3072, 12, 2, 128), **mamba("mamba", 3072, 24, 128, 1, 256),
    }  # fmt: skip
    header = whole([layer] * 44, 3072, 130048, norm="final_layernorm")
    return Published(config, header, 44 * 2 * 2 * 128)


HYBRID: Mapping[str, Published] = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": qwen3_next(),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": nemotron_nano(),
    "LiquidAI/LFM2-1.2B": lfm2(),
    "ibm-granite/granite-4.0-h-small": granite_4_small(),
    "tiiuae/Falcon-H1-7B-Instruct": falcon_h1(),
}
