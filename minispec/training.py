"""The training loop: steps, checkpoints, and a resume that changes nothing.

A checkpoint is one safetensors file with the trained parameters, their moments and the step
count, written atomically. Data order and learning rate depend on (seed, step) alone. So a run that
is killed and resumed gives, bit for bit, the parameters of a run that never stopped.

Read first: objective.py, optim.py, data.py. Proven by: tests/test_training.py,
tests/test_resume.py.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from .backend import synchronize
from .loss import Metrics
from .objective import Pass
from .optim import AdamW, clip, learning_rate
from .parameters import trainable_names
from .report import number
from .weights import check_shapes, read_tensors, write_tensors

CHECKPOINT = "checkpoint.safetensors"


@dataclass
class Report:
    """One optimiser step: its metrics, learning rate, gradient norm before clipping, input tokens
    and seconds."""

    step: int
    metrics: Metrics
    lr: float
    norm: float
    tokens: int
    seconds: float


class Trainer:
    """Trains `model` on batches from `loader[0], loader[1], ...` (data.Loader).

    base: adapter.base_hash of the model below an adapter, which a resumed run must have too.
    """

    def __init__(self, model, loader, train, folder=None, base=None):
        self.model, self.loader, self.train, self.folder = model, loader, train, folder
        self.base = base
        if train.epochs:
            steps = train.epochs * len(loader) // train.accumulate
            self.train = train = train.replace(steps=max(1, steps))
        self.step, self.empty, self.stopping = 0, 0, False
        self.names = trainable_names(model.params, model.streams)
        self.optimizer = AdamW(self.names, model.params, train)
        # NumPy lets go of the interpreter lock while it computes, so threads that each take some
        # of the examples use all cores, and need no BLAS threads of their own. Each has its own
        # gradients; they are summed in a fixed order, so timing never changes a result.
        self.workers = train.workers if model.xp is np else 1
        self.grads = [{n: model.xp.zeros_like(model.params[n]) for n in self.names}
                      for _ in range(self.workers)]

    def weights(self, counts):
        """Loss weights of one step; `counts` (1+G,) are its trained targets."""
        main = self.train.main_weight
        if self.model.streams is not None and self.model.streams.mode == "lossless":
            main = 0.0                                    # the base is frozen: nothing to learn
        return {"main": main, "stream": self.train.stream_weight,
                "next": self.train.transition_weight, "counts": counts}

    def one_step(self):
        """One optimiser step over `accumulate` micro-batches -> Report.

        Losses are divided by the targets of the whole step, so that the result does not depend on
        how it is cut into micro-batches (case H-10). A step without any target updates nothing.
        """
        start, first = time.perf_counter(), self.step * self.train.accumulate
        self.model.unpack()                               # decoding's copies would go stale
        batches = [self.loader[first + i] for i in range(self.train.accumulate)]
        weights = self.weights(sum(b.counts for b in batches))
        metrics, grads = self.gradients(batches, weights)
        lr, norm = learning_rate(self.step, self.train), 0.0
        if weights["counts"][0]:
            norm = clip(grads, self.train.clip)
            if not np.isfinite(norm):
                raise FloatingPointError(self.not_finite(grads))
            self.optimizer.step(self.model.params, grads, lr)
        else:
            self.empty += 1
        self.step += 1
        synchronize(self.model.xp)
        return Report(self.step, metrics, lr, norm, sum(b.tokens for b in batches),
                      time.perf_counter() - start)

    def gradients(self, batches, weights):
        """Metrics and summed gradients of some micro-batches."""
        def work(job):
            part, grads = job
            return Pass(self.model, part, grads, weights, self.train.segments).run()

        for grads in self.grads:
            for g in grads.values():
                g.fill(0)
        metrics = Metrics()
        with ThreadPoolExecutor(self.workers) as pool:
            for batch in batches:
                for part in pool.map(work, zip(batch.split(self.workers), self.grads)):
                    metrics.merge(part)
        total, *others = self.grads
        for grads in others:
            for name, g in grads.items():
                total[name] += g
        return metrics, total

    def not_finite(self, grads):
        """Which gradient is the first that is not finite."""
        names = [n for n, g in grads.items() if not np.isfinite(float(abs(g).sum()))]
        return (f"step {self.step + 1}: the gradient of {names[0] if names else 'the model'} is "
                "not finite; the last checkpoint is untouched")

    def run(self):
        """Steps until `train.steps` or `stop`, a Report each; checkpoints on the way and at the
        end, also when the caller leaves the loop early.

        An exception out of a step (Ctrl-C, a gradient that is not finite) may leave parameters and
        moments half-updated, so nothing is saved after it: the last checkpoint stays.
        """
        saved = self.step
        while self.step < self.train.steps and not self.stopping:
            report = self.one_step()
            if self.folder and self.step % self.train.checkpoint_every == 0:
                self.save()
                saved = self.step
            try:
                yield report
            except GeneratorExit:                         # the caller leaves the loop
                break
        if self.folder and saved != self.step:
            self.save()

    def stop(self):
        """Let `run` finish the step at hand, save, and end. Safe to call from a signal handler."""
        self.stopping = True

    # --- checkpoints ----------------------------------------------------------------------------

    def settings(self):
        """What a checkpoint must agree on for a resume to make sense."""
        return {"model": self.model.config.as_dict(),
                "streams": self.model.streams.as_dict() if self.model.streams else None,
                "train": self.train.as_dict(), "documents": len(self.loader.documents),
                "base": self.base}

    def save(self):
        """Write the checkpoint of this step: what is trained; a frozen base has its own file."""
        tensors = {f"param.{n}": self.model.params[n] for n in self.names}
        tensors.update(self.optimizer.state())
        tensors["step"] = np.array([self.step, self.optimizer.updates, self.empty])
        settings = json.dumps(self.settings(), sort_keys=True)
        tensors["settings"] = np.frombuffer(settings.encode(), dtype=np.uint8)
        write_tensors(os.path.join(self.folder, CHECKPOINT), tensors)

    def resume(self):
        """Load the folder's checkpoint -> True, or False if there is none.

        Raises ValueError if it was made with other settings (it says which) or is broken.
        """
        path = os.path.join(self.folder, CHECKPOINT)
        if not os.path.exists(path):
            return False
        tensors = read_tensors(path)
        for name in ("settings", "step"):
            if name not in tensors:
                raise ValueError(f"{path}: missing: {name}; not a training checkpoint")
        try:
            settings = dict(json.loads(tensors.pop("settings").tobytes()))
            step, updates, empty = (int(i) for i in tensors.pop("step"))
        except (ValueError, TypeError):
            raise ValueError(f"{path}: not a training checkpoint") from None
        self.compare(path, settings)
        params, moments = self.model.params, self.optimizer.state()
        shapes = {f"param.{n}": params[n].shape for n in self.names}
        shapes.update({n: a.shape for n, a in moments.items()})
        check_shapes(path, tensors, shapes)
        for name, value in tensors.items():
            target = moments[name] if name in moments else params[name[len("param."):]]
            target[...] = self.model.xp.asarray(value)
        self.model.unpack()
        self.step, self.optimizer.updates, self.empty = step, updates, empty
        return True

    def compare(self, path, settings):
        """Raise ValueError naming the settings in which a checkpoint differs from this run."""
        here = json.loads(json.dumps(self.settings()))
        differ = []
        for part in ("model", "streams", "train"):
            there, mine = settings.get(part) or {}, here[part] or {}
            differ += [f"{part}.{key}: {there.get(key)} there, {mine.get(key)} here"
                       for key in {**there, **mine} if there.get(key) != mine.get(key)]
        for key, name in (("documents", "training documents"), ("base", "base model")):
            if settings.get(key) != here[key]:
                differ.append(f"{name}: {settings.get(key)} there, {here[key]} here")
        if differ:
            raise ValueError(f"{path} was made with other settings ({'; '.join(differ)}); use "
                             "another folder, or the same settings")


def with_progress(trainer):
    """Run the steps under a bar with loss, accuracy per stream and tokens/s.

    The first Ctrl-C finishes the step at hand and saves it; a second one stops at once.
    """
    def interrupt(signal_number, frame):
        trainer.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, interrupt)
    bar = tqdm(total=trainer.train.steps, initial=trainer.step, unit="step", dynamic_ncols=True,
               mininterval=0.2 if sys.stderr.isatty() else 30)
    for step in trainer.run():
        bar.update()
        if step.step % 10 == 0:
            m = step.metrics
            hits = " ".join(f"{m.accuracy(k):.2f}" for k in m.count if k.startswith("stream"))
            bar.set_postfix_str(f"loss {number(m.mean_loss('main'))} "
                                f"acc {number(m.accuracy('main'))} | streams {hits} | "
                                f"{step.tokens / step.seconds:.0f} tok/s")
    bar.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
