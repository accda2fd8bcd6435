"""Whatever the cache holds, logits and rows are those of a fresh run over the same ids.

Prefill and steps equal the full forward at every split; logits at a tree node equal those of the
plain chain root..n; `keep(path)` equals a fresh prefill (cases H-04, H-12, H-19, H-39).
"""

import numpy as np
import pytest
import reference
from scripted import Noisy, Scripted
from tiny import ARCHITECTURES, random_ids, random_tree, tiny_model

from minispec import masks
from minispec.cache import KVCache
from minispec.config import TreeConfig
from minispec.generate import generate, start
from minispec.growing import chain
from minispec.tree import Tree

TREES = {
    "root": Tree([-1], [3]),
    "chain": Tree([-1, 0, 1, 2, 3], [3, 4, 4, 5, 3]),
    "star": Tree([-1, 0, 0, 0, 0], [3, 4, 5, 6, 7]),
    "h04": Tree([-1, 0, 0, 2], [3, 4, 5, 6]),
    "duplicates": Tree([-1, 0, 0, 1, 2, 1, 2, 4], [3, 4, 5, 6, 6, 7, 7, 4]),
    "late": Tree([-1, 0, 1, 0, 3, 2, 0, 6], [3, 4, 4, 5, 4, 8, 9, 9]),
}


def fresh_rows(model, ids, prompt):
    """Keys and values (L, 1, Hkv, T, D) of one pass over all ids."""
    cache = model.new_cache(len(ids))
    bundles = len(ids) - prompt + 1 if model.sees_streams else 0
    model.run(cache, np.array(ids), masks.causal(len(ids)), bundles=bundles)
    return cache.keys[:, :, :, :len(ids)], cache.values[:, :, :, :len(ids)]


def check_rows(model, cache, ids, prompt):
    """The settled rows are those of `ids`, and there are as many."""
    assert len(cache) == len(ids)
    for store, fresh in zip((cache.keys, cache.values), fresh_rows(model, ids, prompt)):
        assert np.abs(store[:, :, :, :len(ids)] - fresh).max() < 1e-11


# --- splits -------------------------------------------------------------------------------------

@pytest.mark.parametrize("arch", list(ARCHITECTURES))
@pytest.mark.parametrize("name", [None, "shared_lora"])
def test_h39_prefill_and_steps_equal_the_full_forward_at_every_split(arch, name):
    model = tiny_model(arch, name, seed=1)
    ids = random_ids(np.random.default_rng(1), 8)
    expected = reference.run_text(model.params, model.config, ids, model.streams)[0]
    assert np.abs(model.logits(ids) - expected).max() < 1e-10
    for split in range(1, 9):
        for _ in range(2):                # twice in a row: no state may leak between runs
            cache = model.new_cache()
            rows = [model.prefill(cache, ids[:split]).logits[0]]
            assert len(cache) == split
            for token in ids[split:]:
                rows.append(model.step(cache, chain(token, [])).logits[0])
                cache.keep([0])
            assert np.abs(np.array(rows) - expected[split - 1:]).max() < 1e-10
            check_rows(model, cache, ids, split)
            assert np.abs(model.logits(ids) - expected).max() < 1e-10     # uncached after cached


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_prompt_in_pieces_equals_the_prompt_at_once(arch):
    model = tiny_model(arch, "conditional", seed=2)
    ids = random_ids(np.random.default_rng(2), 9)
    whole = model.prefill(model.new_cache(), ids, streams=True)
    for split in range(1, 9):
        cache = model.new_cache()
        model.prefill(cache, ids[:split])
        out = model.prefill(cache, ids[split:], streams=True)
        assert np.abs(out.logits - whole.logits).max() < 1e-12
        assert np.abs(out.streams - whole.streams).max() < 1e-12
        check_rows(model, cache, ids, len(ids))


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_steps_with_streams_that_main_rows_see(arch):
    """The prompt's last row and every new row have streams, and those before have none."""
    model = tiny_model(arch, "sees", seed=3)
    ids = random_ids(np.random.default_rng(3), 6)
    for split in (1, 3, 6):
        cache = model.new_cache()
        rows = [model.prefill(cache, ids[:split]).logits[0]]
        for token in ids[split:]:
            rows.append(model.step(cache, chain(token, [])).logits[0])
            cache.keep([0])
        expected = reference.run_text(model.params, model.config, ids, model.streams,
                                      range(split - 1, 6))[0]
        assert np.abs(np.array(rows) - expected[split - 1:]).max() < 1e-10
        check_rows(model, cache, ids, split)


# --- trees --------------------------------------------------------------------------------------

def check_tree(model, prompt, tree):
    """Logits at each node, and the rows that `keep` leaves for each path."""
    cache = model.new_cache()
    model.prefill(cache, prompt)
    logits = model.step(cache, tree).logits
    expected = reference.tree_logits(model.params, model.config, prompt, tree.parent.tolist(),
                                     tree.token.tolist(), model.streams)
    assert np.abs(logits - expected).max() < 1e-10
    for path in [tree.path(n) for n in range(len(tree))]:
        model.step(cache, tree)           # again: the pending rows of the last one are replaced
        cache.keep(path)
        check_rows(model, cache, prompt + tree.token[path].tolist(), len(prompt))
        cache.rollback(len(path))


@pytest.mark.parametrize("arch, name", [("llama", "conditional"), ("gpt2", None), ("qwen", "sees"),
                                        ("learned", "sees_lora"), ("mixed", "lossless")])
@pytest.mark.parametrize("shape", list(TREES))
def test_h19_tree_nodes_equal_their_chains(arch, name, shape):
    check_tree(tiny_model(arch, name, seed=4), [5, 6, 7], TREES[shape])


@pytest.mark.parametrize("seed", range(10))
def test_random_tree_nodes_equal_their_chains(seed):
    rng = np.random.default_rng([5, seed])
    arch = list(ARCHITECTURES)[seed % 5]
    model = tiny_model(arch, ["conditional", "sees"][seed % 2], seed=5)
    prompt = random_ids(rng, int(rng.integers(1, 6)))
    check_tree(model, prompt, random_tree(rng, int(rng.integers(2, 11))))


def test_h04_a_rejected_sibling_leaves_no_row():
    """Accepted path 0, 2, 3 of parents -1, 0, 0, 2; the next 20 greedy ids are those of AR."""
    model = tiny_model("llama", None, seed=6)
    prompt = [5, 6, 7]
    answer = generate(model, prompt, 24).ids
    wrong = (answer[1] + 1) % 19
    tree = Tree([-1, 0, 0, 2], [answer[0], wrong, answer[1], answer[2]])
    cache = model.new_cache()
    model.prefill(cache, prompt)
    choice = model.step(cache, tree).logits.argmax(axis=-1)
    assert choice[[0, 2, 3]].tolist() == answer[1:4]
    cache.keep([0, 2, 3])
    check_rows(model, cache, prompt + answer[:3], len(prompt))
    ids = answer[:4]
    while len(ids) < 24:
        ids.append(int(model.step(cache, chain(ids[-1], [])).logits[0].argmax()))
        cache.keep([0])
    assert ids == answer


# --- whole runs ---------------------------------------------------------------------------------

def run_checked(session, model, prompt):
    """All steps, with the cache checked after each."""
    steps, emitted = [], 0
    while session.rules.finish_reason is None:
        steps.append(session.step() if steps else session.prompt_step())
        emitted += steps[-1].emitted
        assert len(session.cache) == len(prompt) + emitted - 1
        check_rows(model, session.cache, session.ids[:-1], len(prompt))
    return steps


def begin(model, prompt, count, drafter, tree=None, temperature=0.0):
    return start(model, prompt, count, drafter, temperature, 0, 1.0, 0, (), tree)


@pytest.mark.parametrize("arch, name", [("llama", None), ("gpt2", "conditional"),
                                        ("qwen", "sees")])
@pytest.mark.parametrize("prompt", [[10], [3, 1, 4, 1, 5]])
def test_h12_every_count_of_accepted_drafts(arch, name, prompt):
    model = tiny_model(arch, name, seed=7)
    counts = [a for a in range(5) for _ in range(3)]      # 0, 0, 0, 1, ... 4: three rounds each
    total = 1 + sum(a + 1 for a in counts)
    answer = generate(model, prompt, total + 5).ids
    drafter = Scripted(prompt, answer, counts + [0] * 9, 4, 19)
    session = begin(model, prompt, total, drafter)
    steps = run_checked(session, model, prompt)
    assert [step.accepted for step in steps[1:]] == counts
    assert session.ids[len(prompt):] == answer[:total]


@pytest.mark.parametrize("seed", range(8))
def test_rows_after_every_step_of_any_run(seed):
    rng = np.random.default_rng([8, seed])
    arch, name = list(ARCHITECTURES)[seed % 5], ["conditional", "sees", "lossless"][seed % 3]
    model = tiny_model(arch, name, seed=8)
    prompt, temperature = random_ids(rng, 1 + seed % 4), [0.0, 0.5][seed % 2]
    answer = generate(model, prompt, 20, temperature=temperature).ids
    tree = TreeConfig(fused=seed % 2 == 0, budget=6, prune_budget=[0, 3][seed // 4])
    for drafter in ("streams", Noisy(prompt, answer, rng, 19)):
        session = begin(model, prompt, 16, drafter, tree, temperature)
        run_checked(session, model, prompt)
        assert session.ids[len(prompt):] == answer[:16]


# --- the cache itself ---------------------------------------------------------------------------

def filled(capacity=6, rows=4):
    """A cache of 3 layers with `rows` pending rows: row r of layer l holds 10 l + r, and keys
    differ from values by their sign."""
    config = tiny_model("llama").config
    cache = KVCache(np, config, "float64", capacity)
    shape = (1, config.kv_heads, rows, config.head_dim)
    for layer in range(3):
        rising = np.broadcast_to(10 * layer + np.arange(rows)[:, None], shape)
        cache.append(layer, rising, -rising)
    return cache


def held(cache, layer, count):
    keys = cache.keys[layer, 0, 0, :count, 0]
    assert np.array_equal(cache.values[layer, 0, 0, :count, 0], -keys)
    return (keys - 10 * layer).tolist()


def test_keep_moves_a_path_together():
    cache = filled()
    cache.keep([0, 2, 3])
    assert len(cache) == 3
    assert [held(cache, layer, 3) for layer in range(3)] == [[0, 2, 3]] * 3


def test_prune_compacts_the_lower_layers_alone():
    cache = filled()
    cache.prune([0, 2], layers=1)
    assert len(cache) == 0
    assert held(cache, 0, 2) == [0, 2]
    assert held(cache, 1, 4) == held(cache, 2, 4) == [0, 1, 2, 3]


def test_append_replaces_what_is_pending_and_reads_with_no_rows():
    cache = filled()
    cache.keep([0, 1])
    k, v = cache.append(0, np.full((1, 2, 1, 4), 7.0), np.full((1, 2, 1, 4), -7.0))
    assert k.shape == v.shape == (1, 2, 3, 4)
    k, _ = cache.append(0, np.zeros((1, 2, 0, 4)), np.zeros((1, 2, 0, 4)))
    assert k.shape == (1, 2, 2, 4)
    assert held(cache, 0, 3) == [0, 1, 7]


def test_grow_keeps_every_row():
    cache = filled(capacity=4)
    cache.keep([0, 1])
    cache.append(0, np.full((1, 2, 5, 4), 7.0), np.full((1, 2, 5, 4), -7.0))
    assert cache.capacity >= 7
    assert held(cache, 0, 7) == [0, 1, 7, 7, 7, 7, 7]
    assert held(cache, 2, 4) == [0, 1, 2, 3]      # grown with its pending rows


def test_rollback_forgets_the_last_rows():
    cache = filled()
    cache.keep([0, 1, 2])
    cache.rollback(0)
    cache.rollback(2)
    assert len(cache) == 1
    for bad in (2, -1):
        with pytest.raises(ValueError, match=f"roll back {bad} of 1"):
            cache.rollback(bad)


def test_a_rolled_back_cache_goes_on_like_a_fresh_one():
    model = tiny_model("gpt2", None, seed=9)
    cache, ids = model.new_cache(), [4, 5, 6, 7]
    model.prefill(cache, ids)
    cache.rollback(2)
    out = model.prefill(cache, [8, 9])
    assert np.abs(out.logits[0] - model.logits([4, 5, 8, 9])[-1]).max() < 1e-12
    check_rows(model, cache, [4, 5, 8, 9], 4)


def test_a_wide_tree_grows_a_small_cache():
    model = tiny_model("llama", None, seed=10)
    cache = model.new_cache(3)
    model.prefill(cache, [1, 2, 3])
    tree = TREES["duplicates"]
    logits = model.step(cache, tree).logits
    roomy = model.new_cache(64)
    model.prefill(roomy, [1, 2, 3])
    assert np.array_equal(logits, model.step(roomy, tree).logits)
