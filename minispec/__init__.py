"""minispec: Speculative Streaming in NumPy, the same lines on CuPy, gradients derived by hand.

    model = minispec.load("weights/tiny")
    out = minispec.generate(model, "...", drafter="streams")
    for step in minispec.stream(model, "...", drafter="streams"):
        print(step.text, end="")

Read first: README.md (the reading order), then config.py. Proven by: tests/test_house.py.
"""

from .config import TreeConfig
from .drafters import Drafter
from .generate import Output, generate, stream
from .loading import load
from .stats import DecodeStats, Step

__version__ = "0.1.0"
__all__ = ["load", "generate", "stream", "TreeConfig", "Drafter", "Output", "Step", "DecodeStats"]
