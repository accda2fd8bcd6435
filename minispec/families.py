"""Model families as data: how each one calls its settings and its tensors, and what is fixed in it.

There is one model in this code base; a family is a table. `keys` says where config.json holds each
setting, `fixed` what all members share, `only` which settings we need to have one value (another
value is a feature we lack, and is refused), `names` what the file calls our parameters.

Read first: config.py, parameters.py. Read next: hf_config.py, hf_names.py.
Proven by: tests/test_families.py (logits and ids of transformers, family by family).
"""

from collections import namedtuple
from dataclasses import dataclass

REQUIRED = object()
# a setting's key in config.json, its value when absent (or null), and what the values are in ours
Key = namedtuple("Key", "name default values", defaults=(REQUIRED, None))

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu",
               "gelu_fast": "gelu", "gelu": "gelu_exact", "relu": "relu"}


@dataclass(frozen=True)
class Family:
    """One family.

    architecture  class name, written to config.json
    keys          {field of ModelConfig: Key}
    fixed         {field of ModelConfig: value}
    names         {our parameter, without .w .b .gain .bias: theirs, without .weight .bias}; one
                  name for q, k and v ("qkv") is one fused tensor
    prefixes      what may stand before every name but the head's, or not; the first is written
    only          {key of config.json: the one value that we support, also when absent}
    rotary        None, or the Key of the share of a head that rope rotates
    theta         key of the rotary base (beside rope_theta inside rope_parameters)
    out_in        matrices are stored (out, in), as torch's Linear does; else (in, out)
    per_head      fused q, k, v are interleaved head by head; else one after the other
    buffers       patterns of stored tensors that are no weights
    """

    architecture: str
    keys: dict
    fixed: dict
    names: dict
    prefixes: tuple = ("model.",)
    only: tuple = ()
    rotary: object = None
    theta: str = "rope_theta"
    out_in: bool = True
    per_head: bool = False
    buffers: tuple = (r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)


# --- llama and its relatives --------------------------------------------------------------------

LLAMA_KEYS = {
    "vocab_size": Key("vocab_size"), "width": Key("hidden_size"),
    "layers": Key("num_hidden_layers"), "heads": Key("num_attention_heads"),
    "kv_heads": Key("num_key_value_heads", None), "head_dim": Key("head_dim", None),
    "mlp_width": Key("intermediate_size"), "max_positions": Key("max_position_embeddings"),
    "norm_eps": Key("rms_norm_eps", 1e-6), "activation": Key("hidden_act", "silu", ACTIVATIONS),
    "tied": Key("tie_word_embeddings", False)}
LLAMA_NAMES = {
    "embed.tokens": "embed_tokens", "blocks.{}.norm1": "layers.{}.input_layernorm",
    "blocks.{}.attn.q": "layers.{}.self_attn.q_proj",
    "blocks.{}.attn.k": "layers.{}.self_attn.k_proj",
    "blocks.{}.attn.v": "layers.{}.self_attn.v_proj",
    "blocks.{}.attn.out": "layers.{}.self_attn.o_proj",
    "blocks.{}.norm2": "layers.{}.post_attention_layernorm",
    "blocks.{}.mlp.gate": "layers.{}.mlp.gate_proj", "blocks.{}.mlp.up": "layers.{}.mlp.up_proj",
    "blocks.{}.mlp.down": "layers.{}.mlp.down_proj", "norm": "norm", "head": "lm_head"}
LLAMA_FIXED = dict(norm="rms", positions="rope", gated=True)

LLAMA = Family(                         # also SmolLM2, TinyLlama, Llama 3
    "LlamaForCausalLM",
    {**LLAMA_KEYS, "qkv_bias": Key("attention_bias", False),
     "out_bias": Key("attention_bias", False), "mlp_bias": Key("mlp_bias", False)},
    LLAMA_FIXED, LLAMA_NAMES)

MISTRAL = Family(
    "MistralForCausalLM", {**LLAMA_KEYS, "sliding_window": Key("sliding_window", 0)},
    LLAMA_FIXED, LLAMA_NAMES)

QWEN2 = Family(                         # its q, k, v have biases though no key says so (H-40)
    "Qwen2ForCausalLM", LLAMA_KEYS, dict(LLAMA_FIXED, qkv_bias=True), LLAMA_NAMES,
    only=(("use_sliding_window", False),))

QWEN3 = Family(
    "Qwen3ForCausalLM",
    {**LLAMA_KEYS, "qkv_bias": Key("attention_bias", False),
     "out_bias": Key("attention_bias", False)},
    dict(LLAMA_FIXED, qk_norm=True),
    {**LLAMA_NAMES, "blocks.{}.attn.q_norm": "layers.{}.self_attn.q_norm",
     "blocks.{}.attn.k_norm": "layers.{}.self_attn.k_norm"},
    only=(("use_sliding_window", False),))


# --- families with LayerNorm --------------------------------------------------------------------

GPT2 = Family(
    "GPT2LMHeadModel",
    {"vocab_size": Key("vocab_size"), "width": Key("n_embd"), "layers": Key("n_layer"),
     "heads": Key("n_head"), "mlp_width": Key("n_inner", None),
     "max_positions": Key("n_positions"), "norm_eps": Key("layer_norm_epsilon", 1e-5),
     "activation": Key("activation_function", "gelu_new", ACTIVATIONS),
     "tied": Key("tie_word_embeddings", True)},
    dict(norm="layer", positions="learned", gated=False, qkv_bias=True, out_bias=True,
         mlp_bias=True),
    {"embed.tokens": "wte", "embed.positions": "wpe", "blocks.{}.norm1": "h.{}.ln_1",
     "blocks.{}.attn.qkv": "h.{}.attn.c_attn", "blocks.{}.attn.out": "h.{}.attn.c_proj",
     "blocks.{}.norm2": "h.{}.ln_2", "blocks.{}.mlp.up": "h.{}.mlp.c_fc",
     "blocks.{}.mlp.down": "h.{}.mlp.c_proj", "norm": "ln_f", "head": "lm_head"},
    prefixes=("transformer.",), out_in=False,
    only=(("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)),
    buffers=(r"h\.\d+\.attn\.(masked_)?bias",))           # the causal mask, not c_attn.bias

GPT_NEOX = Family(                      # Pythia
    "GPTNeoXForCausalLM",
    {"vocab_size": Key("vocab_size"), "width": Key("hidden_size"),
     "layers": Key("num_hidden_layers"), "heads": Key("num_attention_heads"),
     "mlp_width": Key("intermediate_size"), "max_positions": Key("max_position_embeddings"),
     "norm_eps": Key("layer_norm_eps", 1e-5),
     "activation": Key("hidden_act", "gelu", ACTIVATIONS),
     "residual": Key("use_parallel_residual", True, {True: "parallel", False: "chained"}),
     "qkv_bias": Key("attention_bias", True), "out_bias": Key("attention_bias", True),
     "tied": Key("tie_word_embeddings", False)},
    dict(norm="layer", positions="rope", gated=False, mlp_bias=True),
    {"embed.tokens": "embed_in", "blocks.{}.norm1": "layers.{}.input_layernorm",
     "blocks.{}.attn.qkv": "layers.{}.attention.query_key_value",
     "blocks.{}.attn.out": "layers.{}.attention.dense",
     "blocks.{}.norm2": "layers.{}.post_attention_layernorm",
     "blocks.{}.mlp.up": "layers.{}.mlp.dense_h_to_4h",
     "blocks.{}.mlp.down": "layers.{}.mlp.dense_4h_to_h", "norm": "final_layer_norm",
     "head": "embed_out"},
    prefixes=("gpt_neox.",), per_head=True, rotary=Key("rotary_pct", 0.25),
    theta="rotary_emb_base",
    buffers=(r"layers\.\d+\.attention\.(masked_)?bias",
             r"(layers\.\d+\.attention\.)?rotary_emb\.inv_freq"))

OPT = Family(
    "OPTForCausalLM",
    {"vocab_size": Key("vocab_size"), "width": Key("hidden_size"),
     "layers": Key("num_hidden_layers"), "heads": Key("num_attention_heads"),
     "mlp_width": Key("ffn_dim"), "max_positions": Key("max_position_embeddings"),
     "activation": Key("activation_function", "relu", ACTIVATIONS),
     "residual": Key("do_layer_norm_before", True, {True: "chained", False: "post"}),
     "final_norm": Key("do_layer_norm_before", True),
     "qkv_bias": Key("enable_bias", True), "out_bias": Key("enable_bias", True),
     "mlp_bias": Key("enable_bias", True), "embed_width": Key("word_embed_proj_dim", 0),
     "tied": Key("tie_word_embeddings", True)},
    dict(norm="layer", positions="learned", position_offset=2, gated=False, norm_eps=1e-5),
    {"embed.tokens": "embed_tokens", "embed.positions": "embed_positions",
     "embed.project": "project_in", "blocks.{}.norm1": "layers.{}.self_attn_layer_norm",
     "blocks.{}.attn.q": "layers.{}.self_attn.q_proj",
     "blocks.{}.attn.k": "layers.{}.self_attn.k_proj",
     "blocks.{}.attn.v": "layers.{}.self_attn.v_proj",
     "blocks.{}.attn.out": "layers.{}.self_attn.out_proj",
     "blocks.{}.norm2": "layers.{}.final_layer_norm", "blocks.{}.mlp.up": "layers.{}.fc1",
     "blocks.{}.mlp.down": "layers.{}.fc2", "norm": "final_layer_norm",
     "head.project": "project_out", "head": "lm_head"},
    prefixes=("model.decoder.", "decoder."), buffers=(),
    only=(("layer_norm_elementwise_affine", True), ("_remove_final_layer_norm", False)))

PHI = Family(                           # Phi-1, 1.5 and 2; Phi-3 is another family
    "PhiForCausalLM",
    {"vocab_size": Key("vocab_size"), "width": Key("hidden_size"),
     "layers": Key("num_hidden_layers"), "heads": Key("num_attention_heads"),
     "kv_heads": Key("num_key_value_heads", None), "mlp_width": Key("intermediate_size"),
     "max_positions": Key("max_position_embeddings"), "norm_eps": Key("layer_norm_eps", 1e-5),
     "activation": Key("hidden_act", "gelu_new", ACTIVATIONS),
     "tied": Key("tie_word_embeddings", False)},
    dict(norm="layer", positions="rope", gated=False, qkv_bias=True, out_bias=True, mlp_bias=True,
         residual="shared", head_bias=True),
    {"embed.tokens": "embed_tokens", "blocks.{}.norm1": "layers.{}.input_layernorm",
     "blocks.{}.attn.q": "layers.{}.self_attn.q_proj",
     "blocks.{}.attn.k": "layers.{}.self_attn.k_proj",
     "blocks.{}.attn.v": "layers.{}.self_attn.v_proj",
     "blocks.{}.attn.out": "layers.{}.self_attn.dense", "blocks.{}.mlp.up": "layers.{}.mlp.fc1",
     "blocks.{}.mlp.down": "layers.{}.mlp.fc2", "norm": "final_layernorm", "head": "lm_head"},
    rotary=Key("partial_rotary_factor", 0.5), only=(("qk_layernorm", False),))

FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3,
            "gpt_neox": GPT_NEOX, "opt": OPT, "phi": PHI}
