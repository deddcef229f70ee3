"""The sizes of the three shipped models and their config.json, with the keys of the released checkpoints."""

from typing import Any

BASE_TOKENS = 1995
PRETOKENIZE_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Order as in the released vocabulary, so that every id is the released one minus a constant.
ADDED_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
_TEXT_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# `special` in tokenizer.json: all but the marks above and the fill-in-the-middle group.
CONTROL_TOKENS = tuple(
    token
    for token in ADDED_TOKENS
    if token not in _TEXT_MARKS and not token.startswith(("<|fim_", "<|repo_", "<|file_"))
)
VOCABULARY_ROWS = 2048  # 2028 tokens and 20 padded rows


def _rope(sections: list[int], partial_rotary_factor: float) -> dict[str, Any]:
    return {
        "mrope_interleaved": True,
        "mrope_section": sections,
        "partial_rotary_factor": partial_rotary_factor,
        "rope_theta": 10000000,
        "rope_type": "default",
    }


def text_config(
    *,
    layer_types: list[str],
    base_tokens: int = BASE_TOKENS,
    vocab_size: int = VOCABULARY_ROWS,
    tie_word_embeddings: bool,
    rope: dict[str, Any],
    mtp_layers: int = 0,
    **sizes: int,
) -> dict[str, Any]:
    """The `text_config` of a released checkpoint with our sizes; keys in the released (alphabetical) order."""
    config = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": base_tokens,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": layer_types,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": mtp_layers,
        "mtp_use_dedicated_embeddings": False,
        "num_hidden_layers": len(layer_types),
        "output_gate_type": "swish",
        "pad_token_id": None,
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rms_norm_eps": 1e-06,
        "rope_parameters": rope,
        "tie_word_embeddings": tie_word_embeddings,
        "use_cache": True,
        "vocab_size": vocab_size,
        **sizes,
    }
    return dict(sorted(config.items()))


LINEAR, FULL = "linear_attention", "full_attention"

# Value heads 8 on key heads 4: llama.cpp's value-head reorder is then not its own inverse (2 on 4 would be).
MAIN_TEXT = text_config(
    layer_types=[LINEAR, LINEAR, LINEAR, FULL] * 2, full_attention_interval=4, tie_word_embeddings=False,
    rope=_rope([3, 3, 2], 0.25), mtp_layers=1, hidden_size=256, intermediate_size=512, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32,
    linear_value_head_dim=32,
)  # fmt: skip
MAIN = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": BASE_TOKENS + ADDED_TOKENS.index("<|image_pad|>"),
    "language_model_only": False,
    "model_type": "qwen3_5",
    "text_config": MAIN_TEXT,
    "tie_word_embeddings": False,
    "transformers_version": "5.17.0",
    "video_token_id": BASE_TOKENS + ADDED_TOKENS.index("<|video_pad|>"),
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 48,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 80,
        "model_type": "qwen3_5",
        "num_heads": 3,
        "num_position_embeddings": 64,
        "out_hidden_size": 256,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": BASE_TOKENS + ADDED_TOKENS.index("<|vision_end|>"),
    "vision_start_token_id": BASE_TOKENS + ADDED_TOKENS.index("<|vision_start|>"),
}
# Another head ratio, another interval, half the head rotated, text only.
TIED = {
    "architectures": ["Qwen3_5ForCausalLM"],
    **text_config(
        layer_types=[LINEAR, FULL] * 2, full_attention_interval=2, tie_word_embeddings=True,
        rope=_rope([6, 5, 5], 0.5), hidden_size=256, intermediate_size=256, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=8, linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "transformers_version": "5.17.0",
}  # fmt: skip
# Every axis has its own size, key and value heads differ in width, and no interval explains the layer types.
ODD = {
    "architectures": ["Qwen3_5ForCausalLM"],
    **text_config(
        layer_types=[LINEAR, LINEAR, FULL, LINEAR, FULL], base_tokens=256, vocab_size=300, tie_word_embeddings=False,
        rope=_rope([2, 1, 1], 0.25), hidden_size=40, intermediate_size=56, num_attention_heads=6,
        num_key_value_heads=3, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=10, linear_key_head_dim=12,
        linear_value_head_dim=20,
    ),
    "transformers_version": "5.17.0",
}  # fmt: skip
