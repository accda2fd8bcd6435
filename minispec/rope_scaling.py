"""Longer contexts: rotary frequencies stretched after pre-training.

A model trained on short texts has never seen the angles of far positions. Turning more slowly
brings far positions back to known angles. "linear" slows every channel pair. "llama3" slows only
the pairs that turn so slowly that the old context held less than a few turns; fast pairs tell
neighbours apart and stay as they are, and in between the two are mixed.

Read first: attention.py (rope_table). Proven by: tests/test_families_layers.py (case H-20).
"""

from functools import partial
from math import pi


def linear_stretch(frequency, factor):
    """All frequencies / factor: positions interpolated.   Chen et al. 2023.   (D/2,) -> (D/2,)."""
    return frequency / factor                             # (D/2,)


def llama3_stretch(frequency, factor, low, high, original):
    """Frequencies f with less than `low` turns in the `original` context: f / factor; with more
    than `high`: f; between them a mixture.   Llama 3.1 model card.   (D/2,) -> (D/2,)."""
    turns = frequency * (original / (2 * pi))             # (D/2,)
    keep = ((turns - low) / (high - low)).clip(0.0, 1.0)  # (D/2,)
    return keep * frequency + (1.0 - keep) * (frequency / factor)         # (D/2,)


def rope_stretch(config):
    """The function of the frequencies that a ModelConfig asks for, or None."""
    if config.rope_scaling == "linear":
        return partial(linear_stretch, factor=config.rope_factor)
    if config.rope_scaling == "llama3":
        return partial(llama3_stretch, factor=config.rope_factor, low=config.rope_low,
                       high=config.rope_high, original=config.rope_original)
    return None
