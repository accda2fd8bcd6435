"""A small training run as a program, for tests that kill it: python training_run.py FOLDER STEPS.

It prints each finished step. The first Ctrl-C ends it after the step at hand, as in train.py.
"""

import signal
import sys

from tiny_models import CONFIG, STREAMS, texts

from minispec.config import TrainConfig
from minispec.data import Loader
from minispec.model import Model
from minispec.parameters import init_params
from minispec.training import Trainer

TRAIN = TrainConfig(steps=40, batch=4, workers=2, lr=0.01, warmup=5, checkpoint_every=3)


def trainer(folder, train=TRAIN):
    """A Trainer of a fresh model; the same every time."""
    model = Model(CONFIG, init_params(CONFIG, STREAMS, train.seed), STREAMS)
    return Trainer(model, Loader(texts(30), train.batch, STREAMS.count, train.seed), train, folder)


def main(folder, steps):
    run = trainer(folder, TRAIN.replace(steps=int(steps)))
    signal.signal(signal.SIGINT, lambda *_: run.stop())
    print("resumed", run.resume(), run.step, flush=True)
    for report in run.run():
        print("step", report.step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
