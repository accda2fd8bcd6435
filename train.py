"""Train a model with streams, and show what the streams gain.

python train.py                      a demo: minutes, no arguments, ends in plain against streams
python train.py --preset tiny        the model in weights/tiny
python train.py --data FILE.jsonl    your own {"prompt", "completion"} lines
python train.py --help               every setting of config.py as a flag

A run that was stopped goes on where its last checkpoint was; --fresh starts over.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")        # our own threads share the work

import argparse
import signal
import sys

from tqdm import tqdm

from minispec import report, tasks
from minispec.compare import compare
from minispec.config import (PAPER_TREE, PRESETS, ModelConfig, StreamConfig, TrainConfig,
                             TreeConfig, add_flags, from_flags)
from minispec.data import Loader, encode_examples, read_jsonl
from minispec.model import Model
from minispec.parameters import init_params
from minispec.text import Tokenizer
from minispec.training import Trainer
from minispec.weights import save_model

# fields of StreamConfig whose names ModelConfig uses too, or that say too little as a flag
STREAM_FLAGS = {"count": "streams", "layers": "stream_layers", "positions": "stream_positions",
                "kind": "stream_kind"}

TEMPERATURE = 0.7                   # of the comparison before and after training


def parse(argv):
    """Arguments; a preset gives the defaults of all other flags."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--preset", choices=PRESETS, default="demo", help="default settings")
    preset = PRESETS[first.parse_known_args(argv)[0].preset]
    parser = argparse.ArgumentParser(parents=[first], description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(preset.tasks),
                        help="built-in tasks to train on (%(default)s)")
    parser.add_argument("--examples", type=int, default=preset.examples,
                        help="examples per task (%(default)s)")
    parser.add_argument("--data", help="JSON lines with prompt and completion, instead of tasks")
    parser.add_argument("--out", help="folder of the checkpoint and the model (out/PRESET)")
    parser.add_argument("--fresh", action="store_true", help="ignore an earlier checkpoint")
    parser.add_argument("--float16", action="store_true", help="write the model as float16")
    parser.add_argument("--heldout", type=int, default=8,
                        help="held-out prompts per task for the comparison; 0: none (%(default)s)")
    add_flags(parser, ModelConfig, skip=("bos_id", "eos_ids"), defaults=preset.model)
    add_flags(parser, StreamConfig, defaults=preset.streams, rename=STREAM_FLAGS)
    add_flags(parser, TrainConfig, defaults=preset.train)
    args = parser.parse_args(argv)
    for name, low in (("examples", 1), ("heldout", 0)):
        if getattr(args, name) < low:
            parser.error(f"--{name} is {getattr(args, name)}, expected {low} or more")
    args.out = args.out or os.path.join("out", args.preset)
    return args


def load_data(args):
    """Training examples and held-out prompts."""
    if args.data is not None:
        examples = read_jsonl(args.data)
        # the last few lines are not trained on; the comparison at the end uses their prompts
        edge = len(examples) - min(args.heldout, len(examples) // 5)
        return examples[:edge], [e["prompt"] for e in examples[edge:]]
    names = args.tasks.split(",")
    parts = [tasks.examples(name, "train", args.examples, args.seed) for name in names]
    heldout = [e["prompt"] for name in names
               for e in tasks.examples(name, "heldout", args.heldout, args.seed)]
    return [e for group in zip(*parts) for e in group], heldout


def build(args, examples):
    """A fresh model with a tokenizer trained on the examples."""
    tokenizer = Tokenizer.train((e["prompt"] + e["completion"] for e in examples[:6000]),
                                args.vocab_size)
    config = from_flags(ModelConfig, args, vocab_size=tokenizer.vocab_size,
                        bos_id=tokenizer.bos_id, eos_ids=(tokenizer.eos_id,))
    streams = from_flags(StreamConfig, args, rename=STREAM_FLAGS)
    return Model(config, init_params(config, streams, args.seed), streams, tokenizer)


def show(model, prompts, title, runs=1):
    """Plain against streams on held-out prompts, both kinds of tree.

    Sampled, not greedy: an untrained model that decodes greedily repeats one token for ever, and
    that is easy to draft.
    """
    print(f"\n{title}: {len(prompts)} held-out prompts, temperature {TEMPERATURE}")
    for name, tree in (("paper's streams, full product k=3", PAPER_TREE),
                       ("conditional streams, 8 nodes", TreeConfig())):
        result = compare(model, prompts, runs=runs, tree=tree, max_new_tokens=64,
                         temperature=TEMPERATURE)
        facts = result.as_dict()
        print(f"  {name:34s} tokens per forward {report.number(facts['tokens_per_forward'])}, "
              f"measured speedup {report.number(facts['measured_speedup'])}, ids "
              f"{'identical' if result.identical else 'DIFFER'}")
        for line in report.differences(result):
            print("   ", line)
    return result


def progress(trainer, train):
    """Run the steps under a bar with loss, accuracy per stream and tokens/s.

    The first Ctrl-C finishes the step at hand and saves it; a second one stops at once.
    """
    def interrupt(signal_number, frame):
        trainer.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, interrupt)
    bar = tqdm(total=train.steps, initial=trainer.step, unit="step", dynamic_ncols=True,
               mininterval=0.2 if sys.stderr.isatty() else 30)
    for step in trainer.run():
        bar.update()
        if step.step % 10 == 0:
            m = step.metrics
            hits = " ".join(f"{m.accuracy(k):.2f}" for k in m.count if k.startswith("stream"))
            bar.set_postfix_str(f"loss {report.number(m.mean_loss('main'))} "
                                f"acc {report.number(m.accuracy('main'))} | streams {hits} | "
                                f"{step.tokens / step.seconds:.0f} tok/s")
    bar.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main(argv=None):
    args = parse(argv)
    train = from_flags(TrainConfig, args)
    examples, heldout = load_data(args)
    model = build(args, examples)
    documents = encode_examples(examples, model.tokenizer, model.config)
    loader = Loader(documents, train.batch, model.streams.count, train.seed)
    os.makedirs(args.out, exist_ok=True)                  # if that fails, then before the work
    trainer = Trainer(model, loader, train, args.out)
    size = sum(p.size for p in model.params.values())
    print(f"{size / 1e6:.2f} million parameters, {len(documents)} examples, {train.steps} steps; "
          f"checkpoints in {args.out}")
    if not args.fresh and trainer.resume():
        print(f"{'going on from' if trainer.step < train.steps else 'finished before, at'} step "
              f"{trainer.step} (--fresh starts over)")
    elif heldout:
        show(model, heldout, "before training")
    if trainer.step < train.steps:
        print("", flush=True)
        progress(trainer, train)
        if trainer.step < train.steps:
            print(f"stopped at step {trainer.step}, which is saved; the same command goes on"
                  if trainer.step else "stopped before the first step; nothing is saved")
            return 130
    save_model(args.out, model, "float16" if args.float16 else "float32")
    if heldout:
        show(model, heldout, "after training", runs=3)
    print(f"\nmodel saved in {args.out}; decode with it: python decode.py --model {args.out}")
    return 0


if __name__ == "__main__":
    report.run_script(main, "stopped; the same command goes on from the last checkpoint")
