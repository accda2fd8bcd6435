"""Makes tests/golden/: a tiny random checkpoint of every family and what transformers makes of it.

    python tests/make_golden.py [NAME ...]          needs torch and transformers

NAME/        config.json, generation_config.json, model.safetensors as transformers saves them
             expected.npz: ids (24,), logits (24, V) float32, greedy (20,) ids after the first 6

Weights are hot (std 0.4, gains and biases random), so that a wrong rule shows. A seed is taken only
if every greedy choice is clear (top two at least 0.01 apart) and the ids are not one token again
and again.
"""

import argparse
import pathlib
import shutil

import numpy as np

GOLDEN = pathlib.Path(__file__).parent / "golden"
START, NEW = 6, 20
COMMON = dict(vocab_size=67, bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA = dict(COMMON, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
NEOX = dict(COMMON, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=64)
OPT = dict(COMMON, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
           max_position_embeddings=64)

# folder: (class, settings, dtype of the file)
VARIANTS = {
    "gpt2": ("GPT2", dict(COMMON, n_embd=16, n_layer=2, n_head=4, n_positions=64), "float32"),
    "llama": ("Llama", dict(LLAMA, tie_word_embeddings=True, rms_norm_eps=1e-5), "float32"),
    "llama3": ("Llama", dict(LLAMA, head_dim=8, attention_bias=True, mlp_bias=True,
                             eos_token_id=[2, 5], rope_theta=5000.0, rope_scaling=dict(
                                 rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                 high_freq_factor=4.0, original_max_position_embeddings=64)),
               "bfloat16"),
    "llama_linear": ("Llama", dict(LLAMA, rope_scaling=dict(rope_type="linear", factor=2.5)),
                     "float32"),
    "mistral": ("Mistral", dict(LLAMA, sliding_window=5), "float32"),
    "qwen2": ("Qwen2", dict(LLAMA, tie_word_embeddings=True), "float16"),
    "qwen3": ("Qwen3", dict(LLAMA, hidden_size=24, head_dim=8), "float32"),
    "gpt_neox": ("GPTNeoX", dict(NEOX, rotary_pct=0.25), "float32"),
    "gpt_neox_chained": ("GPTNeoX", dict(NEOX, rotary_pct=0.5, use_parallel_residual=False,
                                         hidden_act="gelu_new"), "float32"),
    "opt": ("OPT", OPT, "float32"),
    "opt_350m": ("OPT", dict(OPT, do_layer_norm_before=False, word_embed_proj_dim=12), "float32"),
    "phi": ("Phi", dict(NEOX, partial_rotary_factor=0.5), "float32"),
}


def random_model(name, seed):
    """A transformers model with hot weights, rounded to the dtype of its file, in float32."""
    import torch
    import transformers

    kind, settings, dtype = VARIANTS[name]
    config = getattr(transformers, f"{kind}Config")(**settings)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, kind + head)._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, value in sorted(model.named_parameters()):
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in label and label.endswith("weight") or ".ln_" in label and value.ndim == 1:
                value.copy_((1 if label.endswith("weight") else 0) + 0.4 * noise)
            else:
                value.copy_((1.0 if "embed" in label or "wte" in label else 0.4) * noise)
            # not model.to(dtype): that would round the rotary frequencies, too
            value.copy_(value.to(getattr(torch, dtype)))
    model.eval()
    model.generation_config.eos_token_id = settings["eos_token_id"]
    return model


def expect(model, seed):
    """(ids, logits, greedy ids) of a model, and how clear its greedy choices are."""
    import torch

    ids = np.random.default_rng(seed).integers(0, COMMON["vocab_size"], 24)
    margin, greedy = np.inf, [int(i) for i in ids[:START]]
    with torch.no_grad():
        logits = model(torch.tensor(ids)[None], use_cache=False).logits[0].numpy()
        for _ in range(NEW):                              # the whole text again for every token
            last = model(torch.tensor([greedy]), use_cache=False).logits[0, -1].numpy()
            top = np.sort(last)[::-1]
            margin = min(margin, float(top[0] - top[1]))
            greedy.append(int(last.argmax()))
    return ids, logits, np.array(greedy[START:]), margin


def make(name, folder, seed=0):
    """Write the first clear random checkpoint from `seed` on, and expected.npz, to `folder`."""
    import torch

    while True:
        model = random_model(name, seed)
        ids, logits, greedy, margin = expect(model, seed)
        if margin > 0.01 and len(set(greedy)) >= 6:
            break
        seed += 1
    shutil.rmtree(folder, ignore_errors=True)
    model.to(getattr(torch, VARIANTS[name][2])).save_pretrained(folder)
    np.savez(folder / "expected.npz", ids=ids, logits=logits, greedy=greedy)
    return seed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(VARIANTS))
    for name in parser.parse_args().names or VARIANTS:
        print(f"{name:18} seed {make(name, GOLDEN / name)}")


if __name__ == "__main__":
    main()
