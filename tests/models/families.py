"""Model families as data: a tiny config of each, and what is expected of it. docs/models.md is generated from this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from onekv import Window

VOCAB: Final = 97
_SIZE: Final = 7
_FULL, _SLIDING, _CHUNKED = Window.full(), Window.sliding(_SIZE), Window.chunked(_SIZE)

_PLAIN: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: Final = {**_PLAIN, "num_key_value_heads": 2}
_OWN_WIDTH: Final = {**_GROUPED, "head_dim": 8}
_GPT: Final = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED_MOE: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_WINDOWED: Final = {"sliding_window": _SIZE}
_HALF_WINDOWED: Final = {"use_sliding_window": True, "sliding_window": _SIZE, "max_window_layers": 2}
_THREE_TO_ONE: Final = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": _SIZE}
_ONE_TO_ONE: Final = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": _SIZE}
_GATED_DELTA: Final = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA2: Final = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_n_groups": 1}
_LATENT: Final = {
    **_PLAIN,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_DELTA_LATENT: Final = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
}
_EXPANDED: Final = "latent attention, gathered"
_OWN: Final = "attends by its own code, gathered"
_LEARNED: Final = "layer 0 stores keys and values that depend on position"


@dataclass(frozen=True)
class Family:
    """One family, or one variant of it.

    Attributes:
        model_type: transformers' name
        config:     settings of a tiny model
        windows:    expected window of every layer; None: it has no cells
        sources:    expected layer whose keys each layer reads, where not its own
        recurrent:  layers expected to keep recurrent states
        no_shift:   pattern of why its keys cannot be moved; None: they can, exactly
        refused:    pattern of why it cannot be served at all; None: it can
        is_pinned:  transformers alone would use other frequencies for short sequences than for long ones; onekv those of long ones
        notes:      what a reader of docs/models.md should know
    """

    model_type: str
    config: dict[str, Any]
    windows: tuple[Window | None, ...] = (_FULL,) * 4
    sources: tuple[int | None, ...] = (None,) * 4
    recurrent: tuple[int, ...] = ()
    no_shift: str | None = None
    refused: str | None = None
    is_pinned: bool = False
    notes: str = ""

    @property
    def is_gathered(self) -> bool:
        """Its layers go on with stored keys and values, so all that a step sees is copied together for every layer."""
        return "gathered" in self.notes


FAMILIES: Final[dict[str, Family]] = {
    "llama": Family("llama", _GROUPED),
    "llama_llama3": Family(
        "llama",
        {
            **_GROUPED,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "rope_theta": 500000.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        notes="scaled frequencies of Llama 3.1",
    ),
    "llama_yarn": Family(
        "llama",
        {
            **_GROUPED,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64},
        },
        notes="YaRN frequencies",
    ),
    "qwen2": Family("qwen2", _GROUPED),
    "qwen2_half_sliding": Family("qwen2", {**_GROUPED, **_HALF_WINDOWED}, (_FULL, _FULL, _SLIDING, _SLIDING)),
    "qwen3": Family("qwen3", _OWN_WIDTH),
    "mistral": Family("mistral", {**_OWN_WIDTH, "sliding_window": None}),
    "mistral_wide": Family(
        "mistral", {**_OWN_WIDTH, "sliding_window": 4096}, (Window.sliding(4096),) * 4, notes="window above the context"
    ),
    "mistral_sliding": Family("mistral", {**_OWN_WIDTH, **_WINDOWED}, (_SLIDING,) * 4),
    "ministral": Family("ministral", {**_OWN_WIDTH, **_THREE_TO_ONE}, (_SLIDING, _SLIDING, _SLIDING, _FULL)),
    "phi": Family("phi", {**_PLAIN, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "phi3": Family("phi3", {**_GROUPED, **_WINDOWED}, (_SLIDING,) * 4),
    "gemma": Family("gemma", _OWN_WIDTH),
    "gemma2": Family("gemma2", {**_OWN_WIDTH, **_WINDOWED, "query_pre_attn_scalar": 8}, (_SLIDING, _FULL) * 2, notes="soft-capped scores"),
    "gemma3": Family(
        "gemma3_text",
        {**_OWN_WIDTH, **_THREE_TO_ONE, "query_pre_attn_scalar": 8},
        (_SLIDING, _SLIDING, _SLIDING, _FULL),
        notes="own frequencies for each kind of layer",
    ),
    "gemma3n": Family(
        "gemma3n_text",
        {
            **_OWN_WIDTH,
            **_ONE_TO_ONE,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [48] * 4,
        },
        (_SLIDING, _FULL) * 2,
        (None, None, 0, 1),
        notes="own frequencies for each kind of layer",
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            **_OWN_WIDTH,
            **_ONE_TO_ONE,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "global_head_dim": 16,
        },
        (_SLIDING, _FULL) * 2,
        (None, None, 0, 1),
        notes="own head width and frequencies for each kind of layer",
    ),
    "gpt_oss": Family("gpt_oss", {**_OWN_WIDTH, **_MOE, **_WINDOWED}, (_SLIDING, _FULL) * 2, notes="attention sinks; experts"),
    "gpt_neox": Family("gpt_neox", _PLAIN),
    "gpt2": Family("gpt2", _GPT, (_FULL,) * 3, (None,) * 3, no_shift=_LEARNED),
    "gptj": Family("gptj", {**_GPT, "rotary_dim": 4}, (_FULL,) * 3, (None,) * 3),
    "gpt_bigcode": Family("gpt_bigcode", _GPT, (_FULL,) * 3, (None,) * 3, no_shift=_LEARNED, notes="one key head"),
    "opt": Family("opt", {**_PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32}, no_shift=_LEARNED),
    "biogpt": Family("biogpt", _PLAIN, no_shift=_LEARNED),
    "starcoder2": Family("starcoder2", {**_GROUPED, **_WINDOWED}, (_SLIDING,) * 4),
    "stablelm": Family(
        "stablelm", {**_GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
    ),
    "cohere": Family("cohere", _GROUPED),
    "cohere2": Family("cohere2", {**_GROUPED, **_THREE_TO_ONE}, (_SLIDING, _SLIDING, _SLIDING, _FULL), notes="full layers are not rotated"),
    "olmo": Family("olmo", _GROUPED),
    "olmo2": Family("olmo2", _GROUPED),
    "olmo3": Family("olmo3", {**_GROUPED, **_THREE_TO_ONE}, (_SLIDING, _SLIDING, _SLIDING, _FULL)),
    "granite": Family("granite", {**_GROUPED, "attention_multiplier": 0.3}),
    "glm4": Family("glm4", _OWN_WIDTH),
    "nemotron": Family("nemotron", _OWN_WIDTH),
    "smollm3": Family("smollm3", _GROUPED, notes="some layers are not rotated"),
    "exaone4": Family("exaone4", {**_GROUPED, **_THREE_TO_ONE}, (_SLIDING, _SLIDING, _SLIDING, _FULL), notes="full layers are not rotated"),
    "persimmon": Family("persimmon", _PLAIN),
    "mixtral": Family("mixtral", {**_GROUPED, **_MOE, **_WINDOWED}, (_SLIDING,) * 4, notes="experts"),
    "qwen2_moe": Family("qwen2_moe", {**_GROUPED, **_HALF_WINDOWED, **_SHARED_MOE}, (_SLIDING, _FULL, _FULL, _FULL), notes="experts"),
    "qwen3_moe": Family(
        "qwen3_moe",
        {**_OWN_WIDTH, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        notes="experts",
    ),
    "phimoe": Family("phimoe", {**_GROUPED, **_MOE, **_WINDOWED}, (_SLIDING,) * 4, notes="experts"),
    "olmoe": Family("olmoe", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}, notes="experts"),
    "granitemoe": Family("granitemoe", {**_GROUPED, **_MOE, "attention_multiplier": 0.3}, notes="experts"),
    "llama4": Family(
        "llama4_text",
        {
            **_OWN_WIDTH,
            "attention_chunk_size": _SIZE,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            # Small, so that the temperature of the layers without rotation changes within a short test.
            "floor_scale": 8,
            "attn_scale": 0.3,
        },
        (_CHUNKED, _CHUNKED, _CHUNKED, _FULL),
        notes="experts; full layers are not rotated, their queries are scaled by position",
    ),
    "llama_dynamic": Family(
        "llama",
        {**_GROUPED, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        notes="dynamic NTK frequencies, pinned for the context",
    ),
    "phi3_longrope": Family(
        "phi3",
        {
            **_GROUPED,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64,
            },
        },
        is_pinned=True,
        notes="LongRoPE frequencies, pinned for the context: the long factors for short sequences too",
    ),
    # --- recurrent layers beside attention ------------------------------------------------------------------------------------------
    "lfm2": Family(
        "lfm2",
        {**_GROUPED, "layer_types": ["conv", "full_attention"] * 2},
        (None, _FULL) * 2,
        recurrent=(0, 2),
        notes="short convolutions",
    ),
    "lfm2_moe": Family(
        "lfm2_moe",
        {
            **_GROUPED,
            "layer_types": ["conv", "full_attention"] * 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_dense_layers": 1,
        },
        (None, _FULL) * 2,
        recurrent=(0, 2),
        notes="short convolutions; experts",
    ),
    "qwen3_next": Family(
        "qwen3_next", {**_OWN_WIDTH, **_GATED_DELTA, **_SHARED_MOE}, (None, _FULL) * 2, recurrent=(0, 2), notes="gated delta rule; experts"
    ),
    "qwen3_5": Family("qwen3_5_text", {**_OWN_WIDTH, **_GATED_DELTA}, (None, _FULL) * 2, recurrent=(0, 2), notes="gated delta rule"),
    "olmo_hybrid": Family("olmo_hybrid", {**_GROUPED, **_GATED_DELTA}, (None, _FULL) * 2, recurrent=(0, 2), notes="gated delta rule"),
    "jamba": Family(
        "jamba",
        {
            **_GROUPED,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        (None, _FULL) * 2,
        recurrent=(0, 2),
        notes="Mamba; experts; positions are not encoded; a sequence that has a state takes one token a forward",
    ),
    "bamba": Family("bamba", {**_GROUPED, **_MAMBA2, "attn_layer_indices": [1, 3]}, (None, _FULL) * 2, recurrent=(0, 2), notes="Mamba 2"),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {**_GROUPED, **_MOE, **_MAMBA2, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 16},
        (None, _FULL) * 2,
        recurrent=(0, 2),
        notes="Mamba 2; experts",
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {**_OWN_WIDTH, **_MAMBA2, "mamba_d_ssm": 64},
        recurrent=(0, 1, 2, 3),
        notes="Mamba 2 and attention in every layer",
    ),
    "falcon": Family("falcon", _PLAIN, notes=f"{_OWN}; one key head"),
    "falcon_heads": Family("falcon", {**_PLAIN, "multi_query": False}, notes=_OWN),
    "falcon_new": Family("falcon", {**_PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2}, notes=_OWN),
    "xglm": Family(
        "xglm",
        {"vocab_size": VOCAB, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 256},
        (_FULL,) * 2,
        (None,) * 2,
        no_shift=_LEARNED,
        notes=_OWN,
    ),
    "deepseek_v2": Family("deepseek_v2", _LATENT, notes=f"{_EXPANDED}; experts"),
    "deepseek_v3": Family("deepseek_v3", _LATENT, notes=f"{_EXPANDED}; experts"),
    "deepseek_v3_yarn": Family(
        "deepseek_v3",
        {
            **_LATENT,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        notes=f"{_EXPANDED}; experts; YaRN frequencies",
    ),
    "axk1": Family("axk1", _LATENT, notes=f"{_EXPANDED}; experts"),
    "glm4_moe_lite": Family("glm4_moe_lite", _LATENT, notes=f"{_EXPANDED}; experts"),
    "longcat_flash": Family(
        "longcat_flash",
        {
            **_LATENT,
            "num_layers": 2,
            "head_dim": 8,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "zero_expert_num": 1,
            "moe_topk": 2,
        },
        notes=f"{_EXPANDED}; experts; two attentions a layer count as two layers",
    ),
    "minicpm3": Family("minicpm3", _LATENT, notes=_EXPANDED),
    "youtu": Family("youtu", _LATENT, notes=_EXPANDED),
    "dots3_note": Family(
        "dots3_note_text",
        {
            **_LATENT,
            **_WINDOWED,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "use_dsa": False,
            "head_dim": 16,
            "n_shared_experts": 1,
            "shared_experts_intermediate_size": 16,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 12,
            "swa_head_dim": 16,
            "swa_qk_nope_head_dim": 10,
            "swa_v_head_dim": 8,
        },
        (_SLIDING, _FULL) * 2,
        notes=f"{_EXPANDED}; experts; own widths for each kind of layer; without sparse attention",
    ),
    "diffllama": Family("diffllama", _GROUPED, notes="every layer attends twice, to values it computes from stored ones, gathered"),
    "kimi_linear": Family(
        "kimi_linear",
        {**_LATENT, **_DELTA_LATENT, "num_experts": 4},
        (None, _FULL) * 2,
        recurrent=(0, 2),
        notes=f"gated delta rule beside {_EXPANDED}; experts; positions are not encoded",
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        {**_LATENT, **_DELTA_LATENT, "num_experts": 4},
        (None, _FULL) * 2,
        recurrent=(0, 2),
        notes=f"gated delta rule beside {_EXPANDED}; experts",
    ),
    # --- refused, by name -----------------------------------------------------------------------------------------------------------
    "phimoe_longrope": Family(
        "phimoe",
        {
            **_GROUPED,
            **_MOE,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "short_mscale": 1.2,
                "long_mscale": 1.5,
                "original_max_position_embeddings": 64,
            },
        },
        refused="PhimoeForCausalLM",
    ),
    "falcon_alibi": Family("falcon", {**_PLAIN, "alibi": True}, refused="FalconForCausalLM attends by code of its own, .*ALiBi"),
    "bloom": Family(
        "bloom",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        refused="BloomForCausalLM attends by code of its own, .*ALiBi",
    ),
    "mpt": Family(
        "mpt",
        {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
        refused="MptForCausalLM attends by code of its own, .*ALiBi",
    ),
    "gpt_neo": Family(
        "gpt_neo",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": _SIZE,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        refused="GPTNeoForCausalLM attends by code of its own, .*a causal rule",
    ),
    "deepseek_v32": Family("deepseek_v32", _LATENT, refused="DeepseekV32ForCausalLM, layer 0 chooses the keys .*sparse attention"),
    "doge": Family("doge", _GROUPED, refused="DogeForCausalLM, layer 0: .*a mask the model made or changed itself"),
    "minimax": Family(
        "minimax",
        {**_OWN_WIDTH, **_MOE, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 4},
        refused="MiniMaxForCausalLM .*MiniMax uses cache of its own",
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {
            **_OWN_WIDTH,
            "hybrid_override_pattern": "M*M-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 4,
        },
        refused=r"NemotronHForCausalLM: layers \[3\] neither attend",
    ),
    "recurrent_gemma": Family(
        "recurrent_gemma", _GROUPED, refused=r"RecurrentGemmaForCausalLM: layers \[0, 1, 3\] neither attend .* nor keep recurrent states"
    ),
    "mamba": Family(
        "mamba",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        refused="MambaForCausalLM: all its layers are recurrent",
    ),
    "bart": Family(
        "bart",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "encoder_layers": 2,  # transformers counts these as the layers
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 256,
            "is_encoder_decoder": False,
            "is_decoder": True,
        },
        refused="BartForCausalLM.forward takes no position_ids",
    ),
}
SERVED: Final = [name for name, family in FAMILIES.items() if family.refused is None]
REFUSED: Final = [name for name, family in FAMILIES.items() if family.refused is not None]
RECURRENT: Final = [name for name, family in FAMILIES.items() if family.recurrent]


def tiny_model(name: str, **changes: Any) -> PreTrainedModel:
    """A random model of a family, the same every time, with weights large enough for attention to matter."""
    family = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **{**family.config, **changes})).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.15, generator=generator)
    return model


def settle(stock: PreTrainedModel) -> None:
    """Let transformers choose its frequencies for a long sequence, and keep them."""
    rotary = stock.model.rotary_emb
    short = rotary.inv_freq.clone()
    with torch.inference_mode():
        stock(torch.tensor([[5]]), position_ids=torch.tensor([[200]]))
    assert not torch.allclose(short, rotary.inv_freq)
    rotary.rope_type = "default"
