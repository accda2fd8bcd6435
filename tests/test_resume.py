"""A run that is stopped, killed or left, and resumed, ends with the parameters of one that was not.

Claims: bit for bit equal in float32; a checkpoint is never half-written, whenever the process is
killed; a kill loses at most the steps since the last checkpoint and Ctrl-C loses none; a checkpoint
of another run is refused with the settings that differ, and a broken one in one line.
"""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import training_run
from tiny_models import texts

from minispec.data import Loader
from minispec.training import CHECKPOINT
from minispec.weights import read_tensors, write_tensors

TRAIN = training_run.TRAIN.replace(steps=11)


def contents(trainer):
    """All that must be equal: parameters, moments and counts."""
    counts = np.array([trainer.step, trainer.optimizer.updates, trainer.empty])
    return {**trainer.model.params, **trainer.optimizer.state(), "counts": counts}


def assert_same(one, two):
    one, two = contents(one), contents(two)
    assert set(one) == set(two)
    for name, value in one.items():
        assert value.dtype == two[name].dtype
        np.testing.assert_array_equal(value, two[name], err_msg=name)


@pytest.fixture(scope="module")
def straight():
    """A run of 11 steps that nothing disturbed."""
    trainer = training_run.trainer(None, TRAIN)
    list(trainer.run())
    return trainer


# --- in one process -----------------------------------------------------------------------------

def leave(run, count):
    """Take `count` reports and leave the loop, as `break` does."""
    for _ in range(count):
        next(run)
    run.close()


@pytest.mark.parametrize("stops", [(3,), (1, 2, 5), (4, 8), (10,)])
def test_leaving_the_loop_and_resuming_changes_nothing(tmp_path, straight, stops):
    for at in stops:
        trainer = training_run.trainer(tmp_path, TRAIN)
        assert trainer.resume() == (at != stops[0])
        leave(trainer.run(), at - trainer.step)
    trainer = training_run.trainer(tmp_path, TRAIN)
    assert trainer.resume() and trainer.step == stops[-1]
    assert [r.step for r in trainer.run()] == list(range(stops[-1] + 1, 12))
    assert_same(trainer, straight)


def test_stop_ends_the_run_after_the_step_and_saves_it(tmp_path, straight):
    """Wherever the signal comes: between two steps, or inside one."""
    trainer = training_run.trainer(tmp_path, TRAIN)
    for report in trainer.run():
        if report.step == 4:
            trainer.stop()
    trainer = training_run.trainer(tmp_path, TRAIN)
    assert trainer.resume() and trainer.step == 4
    inner = trainer.loader

    class StopsAtSix:
        documents = inner.documents

        def __getitem__(self, number):
            if number == 6:
                trainer.stop()                            # in the middle of step 7
            return inner[number]

    trainer.loader = StopsAtSix()
    assert [r.step for r in trainer.run()] == [5, 6, 7]
    trainer = training_run.trainer(tmp_path, TRAIN)
    assert trainer.resume() and trainer.step == 7
    list(trainer.run())
    assert_same(trainer, straight)


def test_an_exception_inside_a_step_saves_nothing(tmp_path):
    """Parameters and moments may be half-updated then; the checkpoint of step 3 stays."""
    trainer = training_run.trainer(tmp_path, TRAIN)
    run = trainer.run()
    for _ in range(5):
        next(run)
    trainer.optimizer.square.popitem()                    # the update will fail on its way
    with pytest.raises(KeyError):
        next(run)
    after = training_run.trainer(tmp_path, TRAIN)
    assert after.resume() and after.step == 3


def test_a_finished_run_has_nothing_to_do(tmp_path, straight):
    trainer = training_run.trainer(tmp_path, TRAIN)
    assert not trainer.resume()
    list(trainer.run())
    again = training_run.trainer(tmp_path, TRAIN)
    assert again.resume() and list(again.run()) == []
    assert_same(again, straight)


def test_what_decoding_had_packed_is_not_used_after_a_resume(tmp_path, straight):
    """A model from `load` carries a copy of its head; loading other values makes it stale."""
    list(training_run.trainer(tmp_path, TRAIN).run())
    trainer = training_run.trainer(tmp_path, TRAIN)
    trainer.model.pack()
    assert trainer.resume()
    np.testing.assert_array_equal(trainer.model.logits([3, 4]), straight.model.logits([3, 4]))
    trainer = training_run.trainer(None, TRAIN)
    trainer.model.pack()
    list(trainer.run())
    np.testing.assert_array_equal(trainer.model.logits([3, 4]), straight.model.logits([3, 4]))


# --- what is refused ----------------------------------------------------------------------------

def saved(folder):
    trainer = training_run.trainer(folder, TRAIN)
    leave(trainer.run(), 2)
    return folder / CHECKPOINT


@pytest.mark.parametrize("part, changes, words", [
    ("train", {"lr": 0.5}, ["train.lr: 0.01 there, 0.5 here"]),
    ("train", {"seed": 7, "batch": 5}, ["train.seed: 0 there", "train.batch: 4 there, 5 here"]),
    ("model", {"norm_eps": 1e-6}, ["model.norm_eps"]),
    ("streams", {"main_sees_streams": True}, ["streams.main_sees_streams: False there, True here"]),
    ("streams", None, ["streams.count: 2 there, None here"]),
    ("documents", 31, ["training documents: 30 there, 31 here"])])
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, part, changes, words):
    path = saved(tmp_path)
    trainer = training_run.trainer(tmp_path, TRAIN)
    if part == "train":
        trainer.train = TRAIN.replace(**changes)
    elif part == "model":
        trainer.model.config = trainer.model.config.replace(**changes)
    elif part == "streams":
        trainer.model.streams = changes and trainer.model.streams.replace(**changes)
    else:
        trainer.loader = Loader(texts(changes), 4, 2, 0)
    before = {n: a.copy() for n, a in contents(trainer).items()}
    with pytest.raises(ValueError) as caught:
        trainer.resume()
    message = str(caught.value)
    assert str(path) in message and all(w in message for w in words) and "\n" not in message
    for name, value in contents(trainer).items():         # nothing was loaded
        np.testing.assert_array_equal(value, before[name])


def test_streams_where_the_checkpoint_has_none(tmp_path):
    path = saved(tmp_path)
    tensors = read_tensors(path)
    settings = tensors["settings"].tobytes().replace(b'"streams": {', b'"was": {')
    tensors["settings"] = np.frombuffer(settings, np.uint8)
    write_tensors(path, tensors)
    with pytest.raises(ValueError, match="streams.count: None there, 2 here"):
        training_run.trainer(tmp_path, TRAIN).resume()


@pytest.mark.parametrize("break_it, words", [
    (lambda path: path.write_bytes(path.read_bytes()[:-4]), "not a readable safetensors"),
    (lambda path: path.write_bytes(b""), "not a readable safetensors"),
    (lambda path: write_tensors(path, {"a": np.ones(2)}), "missing: settings"),
    (lambda path: write_tensors(path, {**read_tensors(path), "settings": np.ones(3)}),
     "not a training checkpoint"),
    (lambda path: write_tensors(path, {**read_tensors(path), "step": np.ones(7)}),
     "not a training checkpoint"),
    (lambda path: write_tensors(path, {n: a for n, a in read_tensors(path).items()
                                       if n != "mean.norm.gain"}), "missing: mean.norm.gain"),
    (lambda path: write_tensors(path, {**read_tensors(path), "param.norm.gain": np.ones(5)}),
     "wrong shape: param.norm.gain")])
def test_a_broken_checkpoint_is_one_line(tmp_path, break_it, words):
    path = saved(tmp_path)
    break_it(path)
    trainer = training_run.trainer(tmp_path, TRAIN)
    with pytest.raises(ValueError) as caught:
        trainer.resume()
    assert str(path) in str(caught.value) and words in str(caught.value)
    assert "\n" not in str(caught.value) and trainer.step == 0


# --- real processes, really killed --------------------------------------------------------------

STEPS = 3000


def launch(folder):
    command = [sys.executable, training_run.__file__, str(folder), str(STEPS)]
    paths = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True)


def interrupt(process, signal_number, count, delay):
    """Signal the process `delay` seconds after its `count`th step -> (resumed from, last step)."""
    lines = [process.stdout.readline() for _ in range(1 + count)]
    time.sleep(delay)
    process.send_signal(signal_number)
    lines += process.communicate(timeout=60)[0].splitlines(keepends=True)
    whole = [line.split() for line in lines if line.endswith("\n")]
    return int(whole[0][2]), int(whole[-1][1])


def checkpoint_step(folder):
    """The step that the file on disk holds; reading it raises unless it is whole."""
    return int(read_tensors(folder / CHECKPOINT)["step"][0])


def test_killed_at_random_moments(tmp_path):
    """Every kill leaves a whole file, and loses at most the steps since the last checkpoint."""
    moments, at = random.Random(5), 0
    for _ in range(4):
        process = launch(tmp_path)
        start, last = interrupt(process, signal.SIGKILL, moments.randint(4, 12),
                                moments.uniform(0, 0.02))
        assert process.returncode == -signal.SIGKILL and start == at
        at = checkpoint_step(tmp_path)
        assert at in (last - last % 3, last + 1)          # saved, but not yet printed
    reference = training_run.trainer(None, training_run.TRAIN.replace(steps=STEPS))
    leave(reference.run(), at)
    resumed = training_run.trainer(tmp_path, training_run.TRAIN.replace(steps=STEPS))
    assert resumed.resume()
    assert_same(resumed, reference)


def test_ctrl_c_loses_no_step(tmp_path):
    process = launch(tmp_path)
    start, last = interrupt(process, signal.SIGINT, 7, 0.01)
    assert start == 0 and process.returncode == 0 and last < STEPS
    assert checkpoint_step(tmp_path) == last          # every finished step, a multiple of 3 or not
    assert [p.name for p in tmp_path.iterdir()] == [CHECKPOINT]   # no temporary file stays behind
    reference = training_run.trainer(None, training_run.TRAIN.replace(steps=STEPS))
    leave(reference.run(), last)
    resumed = training_run.trainer(tmp_path, training_run.TRAIN.replace(steps=STEPS))
    assert resumed.resume()
    assert_same(resumed, reference)
