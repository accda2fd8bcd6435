"""Compares minispec with the transformers that is installed, live (`make parity`).

    python tests/parity.py [FOLDER ...]         needs torch and transformers

Every family: a fresh random checkpoint (not those of tests/golden), its logits and 20 greedy ids,
and the logits of transformers on what minispec saves of it. Every FOLDER, a real model: logits of
a text, cached and uncached, and the greedy text. Ends with an error at a difference over 1e-4 in
the random models, over 1e-4 of the largest logit in real ones, or at any other id or text.
"""

import pathlib
import sys
import tempfile
import time

import numpy as np

import minispec
from make_golden import NEW, START, VARIANTS, make
from minispec.hf import save_hf
from minispec.weights import read_json

PROMPTS = ("Once upon a time, there was a little girl who", "The capital of France is",
           "def fibonacci(n):\n    ")
TOKENS = 60


def transformers_model(folder):
    """The folder in transformers, float32."""
    import torch
    import transformers
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager").eval()


def their_logits(model, ids):
    """ids (T,) -> logits (T, V)."""
    import torch
    with torch.no_grad():
        return model(torch.tensor(np.asarray(ids))[None]).logits[0].numpy()


def cached_logits(model, ids):
    """Logits at every position by decode steps, one id at a time.   ids (T,) -> (T, V)."""
    cache = model.new_cache(len(ids))
    return np.stack([model.prefill(cache, [int(i)]).logits[0] for i in ids])


def far(a, b):
    return float(np.abs(a - b).max())


def random_family(name):
    """(loaded, cached, saved): largest logits differences of one variant."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, again = pathlib.Path(temporary) / "a", pathlib.Path(temporary) / "b"
        make(name, folder, seed=1000)
        expected, model = np.load(folder / "expected.npz"), minispec.load(folder)
        out = minispec.generate(model, expected["ids"][:START], NEW)
        wanted = expected["greedy"].tolist()
        stop = next((n for n, i in enumerate(wanted, 1) if i in model.config.eos_ids), NEW)
        assert out.ids == wanted[:stop], f"{name}: greedy ids differ"
        ours = model.logits(expected["ids"])
        save_hf(again, model, read_json(folder / "config.json")["model_type"])
        back = their_logits(transformers_model(again), expected["ids"])
        return (far(ours, expected["logits"]), far(cached_logits(model, expected["ids"]), ours),
                far(ours, back))


def real_model(folder):
    """Line of figures for a real model; raises AssertionError if a text differs."""
    import transformers

    start = time.perf_counter()
    model, theirs = minispec.load(folder), transformers_model(folder)
    seconds = time.perf_counter() - start
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    uncached = cached = largest = 0.0
    for prompt in PROMPTS:
        out = minispec.generate(model, prompt, TOKENS)
        batch = tokenizer(prompt, return_tensors="pt")
        full = theirs.generate(**batch, max_new_tokens=TOKENS, do_sample=False)[0].tolist()
        start_ids = batch["input_ids"][0].tolist()
        text = tokenizer.decode(full[len(start_ids):], skip_special_tokens=True)
        assert model.tokenizer.encode(prompt) == start_ids, f"{prompt!r}: other prompt ids"
        assert out.ids == full[len(start_ids):], f"{prompt!r}: other ids"
        assert out.text == text, f"{prompt!r}: {out.text!r} instead of {text!r}"
        wanted = their_logits(theirs, full)
        uncached = max(uncached, far(model.logits(full), wanted))
        cached = max(cached, far(cached_logits(model, full), wanted))
        largest = max(largest, float(np.abs(wanted).max()))
    assert max(uncached, cached) <= 1e-4 * largest, f"{uncached} and {cached} of {largest}"
    return (f"logits off by {uncached:.1e} uncached, {cached:.1e} cached (largest {largest:.1f}); "
            f"text of {len(PROMPTS)} prompts equal; both loaded in {seconds:.1f} s")


def main():
    worst = 0.0
    for name in VARIANTS:
        loaded, cached, saved = random_family(name)
        worst = max(worst, loaded, cached, saved)
        print(f"{name:18} largest logits difference: loaded {loaded:.1e}, cached {cached:.1e}, "
              f"saved by us and loaded by transformers {saved:.1e}")
    for folder in sys.argv[1:]:
        print(f"{folder}: {real_model(folder)}")
    if worst > 1e-4:
        sys.exit(f"differences up to {worst:.1e}, expected at most 1e-4")


if __name__ == "__main__":
    main()
