"""Claim: every layout of config.json that is around gives the right settings; null means absent; a
family or feature that we lack is refused by name, before any weight is read.

The last part writes: what we write is read back as the same settings, or refused.
"""

import json

import numpy as np
import pytest

import minispec
from golden_folders import GOLDEN, NAMES, changed, expected, family_of
from minispec.config import ModelConfig
from minispec.hf_config import read_config, write_config
from minispec.parameters import init_params
from minispec.weights import read_json

BASE = dict(vocab_size=50, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64)
SMALLEST = {
    **{name: BASE for name in ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "phi")},
    "gpt2": dict(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=64),
    "opt": {**{k: v for k, v in BASE.items() if k != "intermediate_size"}, "ffn_dim": 24}}


def read(name, **settings):
    """ModelConfig of a config.json with the required keys and these."""
    return read_config("c.json", {"model_type": name, **SMALLEST[name], **settings})[0]


def refused(name, **settings):
    with pytest.raises(ValueError) as caught:
        read(name, **settings)
    message = str(caught.value)
    assert message.startswith("c.json: ") and "\n" not in message
    return message


# --- ids ----------------------------------------------------------------------------------------

def test_h13_any_of_several_end_ids_stops(tmp_path):
    """generation_config over config, an int or a list; the file may be absent."""
    ids, _, greedy = expected("llama")
    first, second, never = greedy[2], greedy[5], 2
    assert first not in greedy[:2] and second not in greedy[:5] and never not in greedy

    def run(**files):
        return minispec.generate(minispec.load(changed(tmp_path, "llama", **files)), ids[:6], 20)

    at = greedy.index(second)
    out = run(eos_token_id=never, generation={"eos_token_id": [never, second]})
    assert out.ids == greedy[:at + 1] and out.finish_reason == "stop"
    assert run(eos_token_id=never, generation={"eos_token_id": second}).ids == greedy[:at + 1]
    assert run(eos_token_id=first, generation={"eos_token_id": [never, second]}).ids[-1] == second
    for generation in (False, {}, {"eos_token_id": None}):    # then config.json decides
        assert run(eos_token_id=[never, first], generation=generation).ids == \
            greedy[:greedy.index(first) + 1]
    assert run(eos_token_id=None, generation=False).ids == greedy


def test_h13_a_left_over_temperature_is_not_sampled_with(tmp_path):
    ids, _, greedy = expected("llama")
    model = minispec.load(changed(tmp_path, "llama", generation={
        "do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}))
    assert minispec.generate(model, ids[:6], 20).ids == greedy
    assert minispec.generate(model, ids[:6], 20, temperature=5.0).ids != greedy


def test_end_ids_beyond_the_vocabulary_are_left_out_and_odd_ones_refused():
    assert read("gpt2", eos_token_id=50256).eos_ids == ()
    assert read("gpt2", eos_token_id=[3, 50256, 3]).eos_ids == (3,)
    assert "eos_token_id is 'x'" in refused("gpt2", eos_token_id="x")
    assert read("llama", bos_token_id=7).bos_id == 7
    assert read("llama").bos_id == -1


# --- defaults and null --------------------------------------------------------------------------

def test_h15_each_family_has_its_own_default_for_tying():
    tied = {name: read(name).tied for name in SMALLEST}
    assert tied == {"gpt2": True, "opt": True, "llama": False, "mistral": False, "qwen2": False,
                    "qwen3": False, "gpt_neox": False, "phi": False}
    for name in SMALLEST:
        for value in (True, False):
            assert read(name, tie_word_embeddings=value).tied == value


def test_other_defaults_are_those_of_transformers():
    """What a config.json written by transformers may leave out."""
    assert {read(n).norm_eps for n in ("llama", "mistral", "qwen2", "qwen3")} == {1e-6}
    assert {read(n).norm_eps for n in ("gpt2", "gpt_neox", "opt", "phi")} == {1e-5}
    assert {n: read(n).activation for n in SMALLEST} == {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "silu"), "gpt2": "gelu",
        "phi": "gelu", "gpt_neox": "gelu_exact", "opt": "relu"}
    assert {n: read(n).residual for n in SMALLEST} == {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gpt2", "opt"), "chained"),
        "gpt_neox": "parallel", "phi": "shared"}
    biased = {n: (read(n).qkv_bias, read(n).out_bias, read(n).mlp_bias) for n in SMALLEST}
    assert biased == {**dict.fromkeys(("llama", "mistral", "qwen3"), (False, False, False)),
                      "qwen2": (True, False, False),
                      **dict.fromkeys(("gpt2", "gpt_neox", "opt", "phi"), (True, True, True))}
    assert read("gpt2").mlp_width == 64 and read("opt").final_norm
    assert {n for n in SMALLEST if read(n).head_bias} == {"phi"}


NULLS = ["num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "sliding_window",
         "attention_bias", "mlp_bias", "rope_theta", "quantization_config", "layer_types",
         "tie_word_embeddings", "rms_norm_eps", "hidden_act", "n_inner", "word_embed_proj_dim"]


@pytest.mark.parametrize("name", SMALLEST)
def test_h23_null_is_absent(name):
    assert read(name, **dict.fromkeys(NULLS)) == read(name)
    config = read(name)
    assert config.kv_heads == config.heads and config.head_dim * config.heads == config.width
    assert (config.sliding_window, config.rope_scaling, config.embed_width) == (0, "none", 0)


def test_h23_null_and_absent_keys_give_equal_logits(tmp_path):
    ids, *_ = expected("phi")
    keys = ["num_key_value_heads", "rope_scaling", "sliding_window", "head_dim"]
    null = minispec.load(changed(tmp_path / "a", "phi", **dict.fromkeys(keys)))
    absent = minispec.load(changed(tmp_path / "b", "phi", drop=keys))
    assert np.array_equal(null.logits(ids), absent.logits(ids))


@pytest.mark.parametrize("name", SMALLEST)
def test_a_missing_key_and_a_wrong_value_are_named(name):
    for key, value in SMALLEST[name].items():
        assert f"{key} is missing" in refused(name, **{key: None})
        for wrong in ("64", -1, 1.5, [], True):
            assert f"{key} is {wrong!r}" in refused(name, **{key: wrong}), (key, wrong)


# --- layouts ------------------------------------------------------------------------------------

def test_the_rotary_base_may_stand_in_three_places():
    for name in ("llama", "mistral", "qwen2", "qwen3", "phi"):
        assert read(name).rope_theta == 10000.0
        assert read(name, rope_theta=5e5).rope_theta == 5e5
        assert read(name, rope_parameters=dict(rope_theta=5e5, rope_type="default")
                    ).rope_theta == 5e5
    assert read("gpt_neox", rotary_emb_base=500).rope_theta == 500
    assert read("gpt_neox", rope_parameters=dict(rope_theta=500)).rope_theta == 500


def test_the_rotary_share_may_stand_in_two_places():
    assert read("gpt_neox").rotary_dim == 2
    assert read("gpt_neox", rotary_pct=1.0).rotary_dim == 0
    assert read("gpt_neox", rope_parameters=dict(partial_rotary_factor=0.5)).rotary_dim == 4
    assert read("phi").rotary_dim == 4
    assert read("phi", partial_rotary_factor=0.75).rotary_dim == 6
    assert "partial_rotary_factor is 0.5" in refused("llama", partial_rotary_factor=0.5)
    for wrong in (0, 1.5, "x", True, 0.1):                # 0.1 of 8 channels is no pair
        assert "rotary share" in refused("phi", partial_rotary_factor=wrong)


LLAMA3 = dict(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)


def test_h20_rope_type_and_its_alias():
    configs = [read("llama", **{place: {alias: "llama3", **LLAMA3}})
               for place in ("rope_scaling", "rope_parameters") for alias in ("type", "rope_type")]
    assert all(c == configs[0] for c in configs)
    assert (configs[0].rope_scaling, configs[0].rope_factor) == ("llama3", 32.0)
    assert read("llama", rope_scaling=dict(type="linear", factor=2)).rope_factor == 2
    assert read("llama", rope_scaling=dict(type="default")) == read("llama")


@pytest.mark.parametrize("rope, names", [
    (dict(rope_type="yarn", factor=4.0), "'yarn'"), (dict(type="dynamic", factor=4.0), "'dynamic'"),
    (dict(rope_type=["llama3"]), "llama3"), (dict(rope_type="linear"), "lack factor"),
    (dict(rope_type="llama3", factor=8.0), "low_freq_factor, high_freq_factor"),
    (dict(rope_type="linear", factor=2.0, attention_factor=1.0), "attention_factor"),
    (dict(rope_type="default", mrope_section=[1, 1]), "mrope_section"),
    (dict(full_attention=dict(rope_type="default")), "full_attention"),
    (dict(rope_type="linear", factor=0), "rope_factor is 0"),
    (dict(rope_type="linear", factor="2"), "rope_factor is '2'")])
def test_h20_an_unknown_rope_is_an_error(rope, names):
    for place in ("rope_scaling", "rope_parameters"):
        assert names in refused("llama", **{place: rope})


def test_layers_must_attend_alike():
    full, sliding = ["full_attention"] * 2, ["sliding_attention"] * 2
    assert read("qwen3", layer_types=full) == read("qwen3", sliding_window=9) == read("qwen3")
    assert read("mistral", layer_types=sliding, sliding_window=9).sliding_window == 9
    for name, kinds in (("qwen3", sliding), ("qwen3", [full[0], sliding[0]]), ("mistral", sliding),
                        ("llama", "full")):
        assert "layer_types" in refused(name, layer_types=kinds)


# --- what is refused ----------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["gemma2", "phi3", "gptj", "", None, 5, ["llama"]])
def test_another_family_is_refused_by_name(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **BASE}))
    with pytest.raises(ValueError) as caught:             # and no weight file is even there
        minispec.load(tmp_path)
    assert repr(name) in str(caught.value) and "gpt2, llama" in str(caught.value)


@pytest.mark.parametrize("name, key, value", [
    ("gpt2", "scale_attn_by_inverse_layer_idx", True), ("gpt2", "scale_attn_weights", False),
    ("gpt2", "add_cross_attention", True), ("llama", "quantization_config", {"bits": 4}),
    ("qwen2", "use_sliding_window", True), ("qwen3", "use_sliding_window", True),
    ("opt", "layer_norm_elementwise_affine", False), ("opt", "_remove_final_layer_norm", True),
    ("phi", "qk_layernorm", True), ("llama", "hidden_act", "gelu_10"),
    ("gpt2", "activation_function", "tanh"), ("gpt_neox", "use_parallel_residual", "yes"),
    ("mistral", "is_encoder_decoder", True), ("llama", "hidden_act", ["silu"]),
    ("llama", "attention_bias", "no"), ("llama", "num_key_value_heads", 0),
    ("llama", "hidden_size", 30), ("llama", "rope_theta", -1.0), ("llama", "rms_norm_eps", 0),
    ("mistral", "sliding_window", -4)])
def test_a_feature_that_we_lack_is_refused_by_name(name, key, value):
    message = refused(name, **{key: value})
    assert f"{key} is {value!r}" in message and f"{name}: " in message


# --- written ------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_written_settings_are_read_back(name):
    family = family_of(name)
    config, _ = read_config("c.json", read_json(GOLDEN / name / "config.json"))
    settings = json.loads(json.dumps(write_config(family, config)))
    assert read_config("c.json", settings)[0] == config
    # the layout that readers of any age know: the base at top level
    assert "rope_parameters" not in settings
    assert family == "gpt2" or family == "opt" or config.rope_theta in settings.values()


def test_what_a_family_cannot_express_is_refused():
    llama = read("llama")
    for changes in (dict(norm="layer"), dict(sliding_window=5), dict(qkv_bias=True),
                    dict(residual="parallel"), dict(gated=False), dict(head_bias=True)):
        with pytest.raises(ValueError, match="cannot express .*" + next(iter(changes))):
            write_config("llama", llama.replace(**changes))
    with pytest.raises(ValueError, match="cannot express"):
        write_config("gpt2", read("gpt2").replace(head_dim=6))
    with pytest.raises(ValueError, match="family is 'bert'"):
        write_config("bert", llama)


def test_our_own_models_can_be_written_as_llama():
    config = ModelConfig(vocab_size=50, width=12, layers=1, mlp_width=8)
    settings = write_config("llama", config)
    assert read_config("c.json", settings)[0] == config
    assert init_params(config).keys() == init_params(read_config("c.json", settings)[0]).keys()
