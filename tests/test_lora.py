"""Claim: an adapter changes exactly the rows that it is meant for, and folds into its matrix.

Lossless mode: adapters reach stream rows only, so main rows are equal to the bit, whatever the
adapters hold. Shared mode: they reach all rows, and merging them changes nothing. At the start
they change nothing at all. (Gradients: test_ops_grad.py, test_model_grad.py.)
"""

import numpy as np
import pytest

from gradcheck import Problem
from minispec import masks
from minispec.lora import adapter_names, merge, project_forward
from minispec.model import Model
from minispec.parameters import init_params, is_base

IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6])
ADAPTERS = (".lora_a", ".lora_b")


def run(problem, params=None, streams=None):
    """Logits (T, V) and stream states (S, G, C) of a text of which all rows have streams."""
    model = Model(problem.config, params or problem.params, streams or problem.streams)
    out = model.run(model.new_cache(), IDS, masks.causal(len(IDS)), bundles=len(IDS))
    return out.logits, out.streams


def without_adapters(problem):
    """The same model before adapters: no LoRA in its config, none in its parameters."""
    params = {n: p for n, p in problem.params.items() if not n.endswith(ADAPTERS)}
    return params, problem.streams.replace(lora_rank=0)


# --- one projection -----------------------------------------------------------------------------

def test_a_projection_adapts_rows_from_first_on():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 4))
    params = {"f.w": rng.normal(size=(4, 3)), "f.b": rng.normal(size=3),
              "f.lora_a": rng.normal(size=(4, 2)), "f.lora_b": rng.normal(size=(2, 3))}
    plain, _ = project_forward({n: p for n, p in params.items() if not n.endswith(ADAPTERS)},
                               "f", x, (0.6, 0))
    for first in range(6):
        y, _ = project_forward(params, "f", x, (0.6, first))
        assert y[:, :first].tobytes() == plain[:, :first].tobytes()
        expected = plain + 0.6 * (x @ params["f.lora_a"] @ params["f.lora_b"])
        assert np.abs(y[:, first:] - expected[:, first:]).max(initial=0.0) < 1e-14


# --- lossless mode ------------------------------------------------------------------------------

def test_lossless_main_rows_do_not_move_by_a_bit():
    problem = Problem(streams=dict(mode="lossless", lora_rank=3))
    main, streams = run(problem)
    for size in (0.0, 1.0, 1e6):
        garbage = {n: size * p if n.endswith(ADAPTERS) else p for n, p in problem.params.items()}
        main_, streams_ = run(problem, garbage)
        assert main_.tobytes() == main.tobytes()
        assert np.array_equal(streams_, streams) == (size == 1.0)


def test_lossless_logits_are_those_of_the_base_model():
    problem = Problem(streams=dict(mode="lossless", lora_rank=3))
    base = Model(problem.config, {n: p for n, p in problem.params.items() if is_base(n)})
    assert np.array_equal(problem.model.logits(IDS), base.logits(IDS))
    assert np.abs(run(problem)[0] - base.logits(IDS)).max() < 1e-11


def test_shared_adapters_do_move_main_rows():
    """The control: what the tests above compare can differ."""
    problem = Problem(streams=dict(lora_rank=3))
    assert np.abs(run(problem)[0] - run(problem, *without_adapters(problem))[0]).max() > 0.01


# --- shared mode --------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [
    dict(lora_rank=3), dict(lora_rank=3, lora_all_layers=True),
    dict(lora_rank=2, lora_targets=("attn.q", "mlp.down"), main_sees_streams=True)])
def test_merged_equals_unmerged(options):
    problem = Problem(streams=options)
    before = {n: p.copy() for n, p in problem.params.items()}
    merged = merge(problem.params, problem.streams.lora_alpha / problem.streams.lora_rank)
    assert all(np.array_equal(problem.params[n], p) for n, p in before.items())
    assert not any(n.endswith(ADAPTERS) for n in merged)
    for got, expected in zip(run(problem, merged, problem.streams.replace(lora_rank=0)),
                             run(problem)):
        assert np.abs(got - expected).max() < 1e-10


def test_merging_is_wrong_in_lossless_mode():
    """A merged matrix serves all rows, so the base model would no longer be what it was."""
    problem = Problem(streams=dict(mode="lossless", lora_rank=3))
    merged = merge(problem.params, 0.5)
    assert np.abs(run(problem, merged, problem.streams.replace(lora_rank=0))[0]
                  - run(problem)[0]).max() > 0.01


def test_the_scale_is_alpha_over_rank():
    """Twice the rank with zeros in the new half needs twice alpha for the same function."""
    narrow = Problem(streams=dict(lora_rank=3, lora_alpha=1.5))
    wide = narrow.streams.replace(lora_rank=6, lora_alpha=3.0)
    params = {}
    for name, p in narrow.params.items():
        axis = {"a": 1, "b": 0}.get(name[-1]) if name.endswith(ADAPTERS) else None
        params[name] = p if axis is None else np.concatenate([p, np.zeros_like(p)], axis=axis)
    assert np.abs(run(narrow, params, wide)[0] - run(narrow)[0]).max() < 1e-11
    halved = wide.replace(lora_alpha=1.5)
    assert np.abs(run(narrow, params, halved)[0] - run(narrow)[0]).max() > 0.01


# --- start and names ----------------------------------------------------------------------------

@pytest.mark.parametrize("options", [dict(), dict(mode="lossless"), dict(lora_all_layers=True)])
def test_adapters_start_as_no_ops(options):
    problem = Problem(streams=dict(lora_rank=3, **options))
    problem.params = init_params(problem.config, problem.streams, dtype="float64")
    assert any(p.any() for n, p in problem.params.items() if n.endswith(".lora_a"))
    for got, expected in zip(run(problem), run(problem, *without_adapters(problem))):
        assert np.array_equal(got, expected)


def test_adapter_names():
    problem = Problem(streams=dict(lora_rank=3, lora_targets=("attn.q", "mlp.gate")))
    streams = problem.streams
    top = ["blocks.1.attn.q", "blocks.1.mlp.gate", "blocks.2.attn.q", "blocks.2.mlp.gate"]
    assert adapter_names(problem.config, streams) == top
    assert adapter_names(problem.config, streams.replace(lora_all_layers=True)) == [
        "blocks.0.attn.q", "blocks.0.mlp.gate", *top]
    plain = problem.config.replace(gated=False)           # there is no gate to adapt
    assert adapter_names(plain, streams) == ["blocks.1.attn.q", "blocks.2.attn.q"]
    assert adapter_names(problem.config, streams.replace(lora_rank=0)) == []
