"""The frozen trunk: hidden states at layer L-A, computed once per training text and kept on disk.

Adapters live in the top A layers by default. What lies below never changes, so neither do its
outputs: an epoch that runs them again computes the same numbers again. Here they are computed once
and read from one flat file,

    [ rows of document 0 | rows of document 1 | ... ]           (all input tokens, C)

mapped into memory. float16 halves the file and costs less than the adapters' own noise; where a
state is too large for it, the file is float32. A run that is stopped while the file grows goes on
where it was, and a later one with the same base and the same texts finds it ready.

Read first: objective.py (Pass.trunk), data.py. Proven by: tests/test_trunk.py.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from .backend import to_host
from .data import pad_batch
from .objective import Pass
from .weights import read_json, write_atomically

STATES, NOTE = "trunk.bin", "trunk.json"
SAVE_EVERY = 50                     # batches between two notes of how far the file is
LIMIT = 65504.0                     # largest float16


class Trunk:
    """Hidden states at layer L-A of every document: trunk[i] is (T_i, C), T_i its input tokens.

    model: model.Model with streams, of which only the base below the streams is used. base:
    adapter.base_hash of it. documents: list of data.Document. folder: where the file lies.
    workers: threads. dtype: of the file.
    """

    def __init__(self, model, base, documents, folder, batch=16, workers=2, dtype="float16"):
        self.model, self.documents, self.folder = model, documents, os.fspath(folder)
        self.batch, self.workers, self.dtype = batch, workers, dtype
        sizes = [len(d.ids) - 1 for d in documents]
        self.edges = np.concatenate([[0], np.cumsum(sizes)])      # (documents + 1,)
        self.fingerprint = self.identify(base)
        self.states = self.fill()                         # (rows, C)

    def __getitem__(self, number):
        return self.states[self.edges[number]:self.edges[number + 1]]

    def identify(self, base):
        """A hash of all that the file's content depends on."""
        told = [base, self.model.bottom, self.batch, [d.ids for d in self.documents]]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    @property
    def shape(self):
        return int(self.edges[-1]), self.model.config.width

    def path(self, name):
        return os.path.join(self.folder, name)

    def found(self):
        """(batches done, dtype) of a file for the same base and documents; (0, dtype) if there is
        none."""
        try:
            note = read_json(self.path(NOTE))
            done, dtype = int(note["done"]), np.dtype(note["dtype"])
            whole = os.path.getsize(self.path(STATES)) == np.prod(self.shape) * dtype.itemsize
            usable = note["fingerprint"] == self.fingerprint and whole
        except (OSError, ValueError, KeyError, TypeError):
            usable = False
        # a file that had to become float32 stays so; a wish for a wider one is a new file
        if usable and dtype.itemsize >= np.dtype(self.dtype).itemsize:
            return done, dtype.name
        return 0, self.dtype

    def note(self, done):
        """Write down how many batches the file holds."""
        text = json.dumps({"fingerprint": self.fingerprint, "done": done, "dtype": self.dtype})
        write_atomically(self.path(NOTE), text.encode())

    def fill(self):
        """Compute what the file lacks -> the file as a read-only array (rows, C)."""
        os.makedirs(self.folder, exist_ok=True)
        # like lengths together: short padding. The longest come first: memory is known at once.
        order = np.argsort(np.diff(self.edges), kind="stable")[::-1]      # (documents,)
        batches = [order[at:at + self.batch] for at in range(0, len(order), self.batch)]
        done, self.dtype = self.found()
        states = self.open(new=not done)                  # (rows, C)
        tokens = [int(sum(np.diff(self.edges)[b])) for b in batches]
        with tqdm(total=sum(tokens), initial=sum(tokens[:done]), unit="token", desc="trunk",
                  unit_scale=True, disable=done == len(batches) or None) as bar:
            while done < len(batches):
                if self.compute(states, batches[done]):
                    done += 1
                    bar.update(tokens[done - 1])
                else:                                     # too large for float16: once more, wider
                    done, self.dtype = 0, "float32"
                    states = self.open(new=True)          # (rows, C)
                    bar.reset()
                if done % SAVE_EVERY == 0 or done == len(batches):
                    states.flush()
                    self.note(done)
        return np.memmap(self.path(STATES), self.dtype, "r", shape=self.shape)

    def open(self, new):
        """The file, mapped for writing."""
        return np.memmap(self.path(STATES), self.dtype, "w+" if new else "r+", shape=self.shape)

    def compute(self, states, numbers):
        """Put the states of some documents into the file -> False if they do not fit its dtype."""
        batch = pad_batch([self.documents[i] for i in numbers], 0)

        def work(part):
            return to_host(Pass(self.model, part, {}, None).trunk()[0])   # (b, T, C)

        with ThreadPoolExecutor(self.workers) as pool:
            rows = [x for part in pool.map(work, batch.split(self.workers)) for x in part]
        for i, x in zip(numbers, rows):
            own = x[len(x) - (self.edges[i + 1] - self.edges[i]):]        # (T_i, C)  no padding
            if self.dtype == "float16" and not (abs(own) < LIMIT).all():
                return False
            states[self.edges[i]:self.edges[i + 1]] = own
        return True


def hidden_size(model, documents):
    """Root mean square of a typical hidden state at layer L-A: the median over the rows of a few
    texts, since single rows (the first of a text) may be a thousand times larger."""
    batch = pad_batch(documents[:8], 0)
    x = Pass(model, batch, {}, None).trunk()[0]           # (B, T, C)
    rows = to_host(x).astype("float64")[batch.documents >= 0]     # (rows, C)
    return float(np.median((rows * rows).mean(axis=1) ** 0.5))
