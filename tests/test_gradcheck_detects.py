"""Claim: the gradient checks can fail. Each bug below is planted in a backward, and must be found.

A bug is one edit of the source: the function is compiled again with `old` replaced by `new`, and
put wherever the package (or a test) holds the original. The check of a single pair must find it,
and so must three random directions through a whole model. Several of these bugs pass the usual
check, an absolute tolerance of 2e-2 on a fresh model. Without a bug every check used here passes.
"""

import importlib
import inspect
import sys
import textwrap

import pytest

import test_model_grad
from gradcheck import Problem, check_pair
from minispec.layers import ACTIVATIONS
from test_model_grad import CONFIGS
from test_ops_grad import CASES

DEFAULT = "default: rms, rope, gated, tied, grouped heads, conditional"
SEEN = "rotation, low-rank insertion, seen"

# name: (function, old, new, the checks that must find it)
BUGS = {
    "gelu: cubic term not differentiated":
        ("layers.gelu_backward", "3.0 * GELU_CUBIC", "GELU_CUBIC", ["gelu", "gpt2"]),
    "silu: derivative of the sigmoid":
        ("layers.silu_backward", "(1.0 + x * (1.0 - sig))", "(1.0 - sig)", ["silu", DEFAULT]),
    "bias: no gradient":
        ("layers.linear_backward", "db = rows_dy.sum(axis=0)", "db = 0.0 * rows_dy.sum(axis=0)",
         ["linear", "project", "all biases with rope"]),
    "embedding: repeated ids counted once":
        ("transformer.embed_backward", 'scatter_add(grads["embed.tokens"], ids, dx)',
         'grads["embed.tokens"][ids] += dx', ["embed", DEFAULT]),
    "layer norm: mean term":
        ("layers.layernorm_backward", "dxhat - m1 - xhat * m2", "dxhat - xhat * m2",
         ["layernorm", "norm/layer", "gpt2"]),
    "layer norm: projection term":
        ("layers.layernorm_backward", "dxhat - m1 - xhat * m2", "dxhat - m1",
         ["layernorm", "norm/layer", "gpt2"]),
    "rms norm: projection term":
        ("layers.rmsnorm_backward", "(dxhat - xhat * m2)", "dxhat",
         ["rmsnorm", "norm/rms", DEFAULT]),
    "cross-entropy: weight of the target":
        ("layers.cross_entropy_backward", "-= dloss", "-= 1.0",
         ["cross_entropy", "head_loss/tied"]),
    "softmax: sum term":
        ("attention.softmax_backward", "(dprobs - (dprobs * probs).sum(axis=-1, keepdims=True))",
         "dprobs", ["softmax", "attention", "bundle", DEFAULT]),
    "attention: scale forgotten":
        ("attention.attention_backward", "dscores *= width ** -0.5", "pass",
         ["attention", "multi_stream", DEFAULT]),
    "attention: scale forgotten in bundles":
        ("attention.bundle_backward", "dqs * width ** -0.5", "dqs", ["bundle", DEFAULT]),
    "attention: dk not transposed":
        ("attention.attention_backward", "dscores.transpose(0, 1, 3, 2) @ qg", "dscores @ qg",
         ["attention/as many keys as rows", "gpt2"]),
    "attention: heads grouped 0,1,0,1":
        ("attention.attention_backward", "dyg = group(dy, kv_heads)",
         "dyg = group(dy.reshape(dy.shape[0], -1, kv_heads, *dy.shape[2:]).swapaxes(1, 2)"
         ".reshape(dy.shape), kv_heads)", ["attention", DEFAULT]),
    "bundle: keys of streams serve one head only":
        ("attention.bundle_backward", "(d_own.swapaxes(-1, -2) @ qs).sum(axis=2)",
         "(d_own.swapaxes(-1, -2) @ qs)[:, :, 0]", ["bundle", DEFAULT]),
    "bundle: own mask off by one":
        ("attention.bundle_backward", "d_own = dscores[..., keys:]",
         "d_own = dscores[..., keys:] * xp.tri(*probs[..., keys:].shape[-2:], -1)",
         ["bundle", "multi_stream", DEFAULT]),
    "multi-stream: keys that serve plain rows and streams":
        ("attention.multi_stream_backward", "dk, dv = dk + dk_plain, dv + dv_plain",
         "dk, dv = dk_plain, dv_plain", ["multi_stream", "multi_stream/sees own, plain rows",
                                         DEFAULT]),
    "rope: sign":
        ("attention.rotate_backward", "-sin", "sin", ["rotate", "attend", DEFAULT]),
    "value rotation not inverted":
        ("transformer.attend_backward", "rotate_backward(dv[:, :, turned], call.turn)",
         "rotate_forward(dv[:, :, turned], *call.turn)[0]", ["attend/value rotation", "rotation"]),
    "qkv: a branch overwritten":
        ("transformer.attend_backward", "dx += project_backward(merge_heads(dk)",
         "dx = project_backward(merge_heads(dk)", ["attend", "block", DEFAULT]),
    "residual dropped":
        ("transformer.block_backward", "dx = dx + norm_backward", "dx = norm_backward",
         ["block", "top", DEFAULT]),
    "gate: other factor forgotten":
        ("transformer.mlp_backward", "activate(dhidden * up, ca)", "activate(dhidden, ca)",
         ["mlp/gated", "block", DEFAULT]),
    "tied head counted once":
        ("transformer.add_head_gradient", ', dhead.T', ', 0.0 * dhead.T',
         ["head_loss/tied", DEFAULT, "tied"]),
    "head: gradient overwritten":
        ("transformer.add_head_gradient", "grads[name] += dvalue", "grads[name][...] = dvalue",
         [DEFAULT, "micro-batches"]),
    "lora: scale squared":
        ("lora.project_backward", "dy[:, first:] * scale", "dy[:, first:] * scale * scale",
         ["project/adapter", "project/adapter, stream rows", "lora"]),
    "lora: nothing back to x":
        ("lora.project_backward", "dx[:, first:] += da_x", "pass",
         ["project/adapter", "block", "lora"]),
    "frozen base trained in lossless mode":
        ("parameters.trainable_names", 'streams.mode == "lossless"', "False", ["no adapters"]),
    "frozen base trained beside adapters":
        ("parameters.trainable_names", "not (frozen_base and is_base(n))", "True",
         ["frozen", "frozen, shared"]),
    "insertion: one stream instead of the sum":
        ("streams.insert_backward", "dbase = ds.sum(axis=2)", "dbase = ds[:, :, 0]",
         ["insert", "insert/copies", "top", DEFAULT]),
    "insertion: low-rank map skipped":
        ("streams.insert_backward", 'dlow @ params["streams.insert.down"].T', "dbase",
         ["insert/low rank", "low-rank insertion"]),
    "insertion: scatter to position t+g dropped":
        ("streams.insert_backward",
         "ds.shape[:3]), ds)", "ds.shape[:3]), 0.0 * ds)",
         ["insert/ahead", "insert/ahead, one row for all", "gpt2"]),
    "insertion: position t not subtracted":
        ("streams.insert_backward", "-ds.sum(axis=2))", "ds.sum(axis=2))",
         ["insert/ahead", "gpt2"]),
    "insertion: at the first rows instead of the last":
        ("streams.top_backward", "dmain[:, view.main - view.bundles:] +=",
         "dmain[:, :view.bundles] +=", ["top", DEFAULT]),
    "segments: keys lose what later segments sent":
        ("streams.Segments.backward", "if layer in self.grads:", "if False:", ["segments"]),
    "segments: values lose what later segments sent":
        ("streams.Segments.backward", "dv = dv + self.grads[layer][1][:, :, :end]", "pass",
         ["segments"]),
    "transition: nothing back through the map":
        ("transitions.transition_backward", "return dz + dn", "return dz", ["transition", DEFAULT]),
    "transition: nothing back to the streams":
        ("objective.Pass.transition_loss", "dnormed[span] += dn", "pass", [DEFAULT]),
    "transition: detach ignored":
        ("objective.Pass.transition_loss", 'if not self.weights.get("detach")', "if True",
         ["detached conditional streams"]),
    "early exit: norm skipped":
        ("pruning.exit_backward", 'norm_backward(dy, c3, config, {}, "norm")', "dy",
         ["exit/rms", "exit/layer", DEFAULT]),
    "early exit: trains the final norm":
        ("pruning.exit_backward", '{}, "norm")', 'grads, "norm")', [DEFAULT]),
    "early exit: trains the head":
        ("pruning.exit_loss", "head_loss(params, {}, y", "head_loss(params, grads, y", [DEFAULT]),
    "loss: weight of streams forgotten":
        ("objective.Pass.ngram_loss", '+ ["stream"] * count', '+ ["main"] * count',
         [DEFAULT, "lossless"]),
    "loss: all streams averaged over the main row's targets":
        ("objective.Pass.row_weights", 'np.maximum(self.weights["counts"], 1)',
         'self.weights["counts"][0]', [DEFAULT]),
    "loss: final norm skipped":
        ("objective.Pass.losses", "dy[row] = norm_backward(", "dy[row] = dnormed; norm_backward(",
         [DEFAULT]),
    "exact gelu: density forgotten":
        ("layers.gelu_exact_backward", "(phi + x * density)", "phi", ["gelu_exact", "gpt-neox"]),
    "parallel blocks: a shared norm hears attention only":
        ("transformer.parallel_block_backward", "dh = dh + dm", "dh = dh",
         ["parallel_block/shared norm", "phi"]),
    "norms after the sums: residual dropped":
        ("transformer.post_block_backward", "dx = dx + mlp_backward", "dx = mlp_backward",
         ["post_block", "opt, norms after, projected"]),
    "key norm: the query's statistics":
        ("transformer.attend_backward", "norm_backward(dk, ckn", "norm_backward(dk, ckn and cqn",
         ["query and key norms, window, packed"]),
    "head bias: averaged":
        ("loss.head_loss", "dlogits.sum(axis=0)", "dlogits.mean(axis=0)",
         ["head_loss/bias", "phi"]),
    "head projection: no gradient":
        ("loss.head_loss", 'grads["head.project.w"] += dw', "pass",
         ["head_loss/projected", "opt, norms after, projected"]),
    "embedding projection: passed by":
        ("transformer.embed_backward", 'grads["embed.project.w"] += dw', "pass",
         ["embed/projected", "opt, norms after, projected"]),
    "step: mean of means":
        ("training.Trainer.one_step", "sum(b.counts for b in batches)", "batches[0].counts",
         ["accumulation"]),
}

OTHER_CHECKS = {
    "segments": lambda: test_model_grad.test_segments_change_nothing("default", 4),
    "tied": test_model_grad.test_the_tied_matrix_gets_the_sum_of_both_uses,
    "frozen": test_model_grad.test_lossless_training_leaves_the_base_alone,
    "no adapters": lambda: test_model_grad.check_frozen_base(mode="lossless"),
    "frozen, shared": test_model_grad.test_adapters_stand_in_for_the_base_in_shared_mode,
    "micro-batches": lambda: test_model_grad.test_micro_batches_of_unequal_weight_add_up([(0, 1),
                                                                                         (1, 6)]),
    "accumulation": test_model_grad.test_a_step_of_two_micro_batches_is_a_step_of_their_union,
}


def check(name):
    """Run one check: a pair of test_ops_grad, a configuration of test_model_grad, or another."""
    if name in CASES:
        check_pair(*CASES[name]())
    elif name in CONFIGS:
        Problem(**CONFIGS[name]).check(per_parameter=False)
    else:
        OTHER_CHECKS[name]()


def plant(monkeypatch, where, old, new):
    """Replace the function or method `where` ("module.name" or "module.Class.name") by itself with
    one edit, in every module that holds it by name. Raises AssertionError if the edit is stale."""
    module, *path = where.split(".")
    module = importlib.import_module(f"minispec.{module}")
    owner = getattr(module, path[0]) if len(path) == 2 else module
    original = getattr(owner, path[-1])
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1, f"{where} changed: {old!r} is there {source.count(old)} times"
    made = {}
    exec(compile(source.replace(old, new), f"<bug in {where}>", "exec"), vars(module), made)
    bug = made[path[-1]]
    if owner is not module:
        monkeypatch.setattr(owner, path[-1], bug)
        return
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith(("minispec", "gradcheck", "test_")):
            for name, value in list(vars(other).items()):
                if value is original:
                    monkeypatch.setattr(other, name, bug)
    for kind, functions in ACTIVATIONS.items():
        swapped = tuple(bug if f is original else f for f in functions)
        monkeypatch.setitem(ACTIVATIONS, kind, swapped)


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_found(name, monkeypatch):
    where, old, new, checks = BUGS[name]
    plant(monkeypatch, where, old, new)
    for each in checks:
        with pytest.raises(AssertionError) as found:
            check(each)
        assert "has shape" not in str(found.value)        # a wrong number, not a wrong shape


@pytest.mark.parametrize("name", sorted({c for *_, checks in BUGS.values() for c in checks}))
def test_without_a_bug_the_check_passes(name):
    check(name)


def test_a_planted_bug_is_gone_afterwards():
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, *BUGS["gelu: cubic term not differentiated"][:3])
        with pytest.raises(AssertionError):
            check("gelu")
    check("gelu")
