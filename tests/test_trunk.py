"""Claim: the trunk's file holds the states at layer L-A, and training from it is the same training.

Gradients from a float64 file equal those without one, padded, cut by examples, in slices, in both
modes. The file is found again for the same base and texts only, grows on after a stop, and is
float32 where float16 would overflow.
"""

import numpy as np
import pytest

from minispec import trunk as trunk_module
from minispec.data import Loader, NO_TARGET, pad_batch
from minispec.model import Model
from minispec.objective import Pass
from minispec.parameters import is_base
from minispec.trunk import NOTE, STATES, Trunk, hidden_size
from tiny_models import CONFIG, LAYERNORM, STREAMS, texts, tiny_model

LORA = dict(lora_rank=2, lora_alpha=3.0)
CASES = {
    "shared": (dict(), dict(LORA)),
    "lossless": (dict(), dict(LORA, mode="lossless")),
    "streams only": (dict(), dict(LORA, layers=1, count=3, transition_rank=0)),
    "gpt2, seen": (LAYERNORM, dict(LORA, main_sees_streams=True)),
    "parallel, window": (dict(residual="parallel", sliding_window=4), dict(LORA)),
    "every layer": (dict(), dict(LORA, layers=3)),
}


def frozen(config=(), streams=LORA):
    return tiny_model(CONFIG.replace(**dict(config)), STREAMS.replace(**dict(streams)))


def results(model, batches, segments=1):
    """Gradients of what an adapter trains, and metrics, over some batches."""
    grads = {n: np.zeros_like(a) for n, a in model.params.items() if not is_base(n)}
    counts = sum(b.counts for b in batches)
    weights = {"main": 0.5, "stream": 0.3, "next": 0.2, "counts": counts}
    passes = [Pass(model, b, grads, weights, segments).run() for b in batches]
    return grads, [p.loss for p in passes]


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_without(tmp_path, name, segments):
    model, documents = frozen(*CASES[name]), texts(9)
    trunk = Trunk(model, "base", documents, tmp_path, batch=4, dtype="float64")
    loader = Loader(documents, 4, model.streams.count, 0, trunk=trunk)
    batches = [part for n in range(3) for part in loader[n].split(2)]
    assert all(b.hidden.dtype == "float64" for b in batches)
    got = results(model, batches, segments)
    for b in batches:
        b.hidden = None
    expected = results(model, batches)
    for one, other in zip(got[1], expected[1]):
        assert one == pytest.approx(other, rel=1e-12)
    for n, g in expected[0].items():
        assert np.abs(got[0][n] - g).max() <= 1e-12 * max(1.0, np.abs(g).max()), n


def test_nothing_below_is_run(tmp_path, monkeypatch):
    model, documents = frozen(), texts(5)
    trunk = Trunk(model, "base", documents, tmp_path)
    batch = Loader(documents, 4, 2, 0, trunk=trunk)[0]
    monkeypatch.setattr("minispec.objective.embed_forward", None)
    monkeypatch.setattr("minispec.objective.block_forward", None)
    monkeypatch.setattr("minispec.objective.block_backward", None)
    assert results(model, [batch])[1][0]["main"] > 0


def test_states_of_a_trunk_that_is_trained_are_refused(tmp_path):
    model, documents = frozen(), texts(4)
    batch = Loader(documents, 4, 2, 0, trunk=Trunk(model, "base", documents, tmp_path))[0]
    grads = {"blocks.0.attn.q.w": np.zeros_like(model.params["blocks.0.attn.q.w"])}
    with pytest.raises(ValueError, match="layers below are trained"):
        Pass(model, batch, grads, {"main": 1.0, "counts": batch.counts}).run()


def test_the_states_are_those_of_decoding(tmp_path):
    model, documents = frozen(), texts(6)
    trunk = Trunk(model, "base", documents, tmp_path, batch=4, dtype="float64")
    half = Trunk(model, "base", documents, tmp_path / "half", workers=1)
    for number, document in enumerate(documents):
        cache = model.new_cache()
        hidden = model.prefill(cache, document.ids[:1]).hidden
        rest = [model.prefill(model.new_cache(), document.ids[:t]).hidden[-1]
                for t in range(1, len(document.ids))]
        assert np.abs(trunk[number][0] - hidden[-1]).max() < 1e-12
        assert np.abs(trunk[number] - np.array(rest)).max() < 1e-12
        assert half[number].dtype == "float16" and not half[number].flags.writeable
        assert np.abs(half[number] / trunk[number] - 1).max() < 1e-3
    rows = np.concatenate([trunk[i] for i in range(6)])
    assert hidden_size(model, documents) == pytest.approx(np.median((rows ** 2).mean(1) ** 0.5))


# --- the file -----------------------------------------------------------------------------------

class Counted(Trunk):
    """A Trunk that counts the batches it computes, and may be stopped after some."""

    computed, limit = 0, 99

    def compute(self, states, numbers):
        if self.computed == self.limit:
            raise KeyboardInterrupt
        self.computed += 1
        return super().compute(states, numbers)


def test_the_file_is_found_again(tmp_path):
    model, documents = frozen(), texts(10)
    first = Counted(model, "base", documents, tmp_path, batch=4)
    assert first.computed == 3
    again = Counted(model, "base", documents, tmp_path, batch=4)
    assert again.computed == 0 and np.array_equal(first.states, again.states)
    fewer_layers = Model(model.config, frozen((), dict(LORA, layers=1)).params,
                         STREAMS.replace(**LORA, layers=1))
    for other in ((model, "another base", documents), (model, "base", texts(10, seed=1)),
                  (fewer_layers, "base", documents)):
        assert Counted(*other, tmp_path, batch=4).computed == 3
    assert Counted(model, "base", documents, tmp_path, batch=4).computed == 3
    assert Counted(model, "base", documents, tmp_path, batch=4, dtype="float64").computed == 3


@pytest.mark.parametrize("spoil", [
    lambda path: (path / NOTE).unlink(), lambda path: (path / NOTE).write_text("{"),
    lambda path: (path / NOTE).write_text('{"done": 1}'), lambda path: (path / STATES).unlink(),
    lambda path: (path / STATES).write_bytes(b"short")])
def test_a_file_that_is_not_whole_is_made_again(tmp_path, spoil):
    model, documents = frozen(), texts(6)
    want = Trunk(model, "base", documents, tmp_path).states.copy()
    spoil(tmp_path)
    again = Counted(model, "base", documents, tmp_path)
    assert again.computed == 1 and np.array_equal(again.states, want)


def test_a_stopped_file_grows_on(tmp_path, monkeypatch):
    monkeypatch.setattr(trunk_module, "SAVE_EVERY", 2)
    model, documents = frozen(), texts(23)
    want = Trunk(model, "base", documents, tmp_path / "straight", batch=4).states
    monkeypatch.setattr(Counted, "limit", 3)
    with pytest.raises(KeyboardInterrupt):
        Counted(model, "base", documents, tmp_path, batch=4)
    monkeypatch.setattr(Counted, "limit", 99)
    rest = Counted(model, "base", documents, tmp_path, batch=4)
    assert rest.computed == 6 - 2 and np.array_equal(rest.states, want)


def test_states_too_large_for_float16(tmp_path):
    model, documents = frozen(), texts(9)
    model.params["embed.tokens"][documents[0].ids[0]] *= 1e6
    trunk = Counted(model, "base", documents, tmp_path, batch=2)
    exact = Trunk(model, "base", documents, tmp_path / "exact", batch=2, dtype="float64")
    assert trunk.dtype == "float32" and np.abs(exact.states).max() > 65504
    assert np.allclose(trunk.states, exact.states, rtol=1e-6)
    again = Counted(model, "base", documents, tmp_path, batch=2)
    assert again.computed == 0 and again.dtype == "float32"


def test_batches_line_the_states_up_with_their_tokens(tmp_path):
    model, documents = frozen(), texts(8)
    trunk = Trunk(model, "base", documents, tmp_path, dtype="float64")
    batch = Loader(documents, 8, 2, 0, trunk=trunk)[0]
    alone = Pass(model, pad_batch(documents, 2), {}, None).trunk()[0]
    rows = {d.ids[0]: x for d, x in zip(documents, alone)}
    for b in range(8):
        used = batch.documents[b] >= 0
        first = batch.ids[b, used][0]
        assert np.abs(batch.hidden[b, used] - rows[first][-used.sum():]).max() < 1e-12
        assert not batch.hidden[b, ~used].any()
    part = batch.split(3)[1]
    assert part.hidden.shape[:2] == part.ids.shape and (part.targets != NO_TARGET).any()
