"""Train a model with streams, and show what the streams gain.

python train.py                      a demo: minutes, no arguments, ends in plain against streams
python train.py --preset tiny        the model in weights/tiny
python train.py --data FILE.jsonl    your own {"prompt", "completion"} lines
python train.py --model DIR --data FILE.jsonl --out DIR     an adapter for an open model
python train.py --help               every setting of config.py as a flag

A run that was stopped goes on where its last checkpoint was; --fresh starts over.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")        # our own threads share the work

import argparse

from minispec import report, tasks
from minispec.adapter import merged, save_adapter
from minispec.compare import compare
from minispec.config import (PAPER_TREE, ModelConfig, StreamConfig, TrainConfig, TreeConfig,
                             add_flags, from_flags)
from minispec.data import Loader, encode_examples, read_jsonl
from minispec.draft_vocab import choose_draft_ids
from minispec.fine_tune import prepare
from minispec.loading import load
from minispec.model import Model
from minispec.parameters import init_params
from minispec.presets import PRESETS
from minispec.text import Tokenizer
from minispec.training import Trainer, with_progress
from minispec.weights import save_model

# fields of StreamConfig whose names ModelConfig uses too, or that say too little as a flag
STREAM_FLAGS = {"count": "streams", "layers": "stream_layers", "positions": "stream_positions",
                "kind": "stream_kind"}

TEMPERATURE = 0.7                   # of the comparison before and after training


def parse(argv):
    """Arguments; a preset gives the defaults of all other flags."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)   # --mode is no --model
    first.add_argument("--preset", choices=PRESETS, help="default settings (demo, or adapter)")
    first.add_argument("--model", help="model folder or hub id to train an adapter for")
    known = first.parse_known_args(argv)[0]
    preset = PRESETS[known.preset or ("adapter" if known.model else "demo")]
    parser = argparse.ArgumentParser(parents=[first], description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(preset.tasks),
                        help="built-in tasks to train on (%(default)s)")
    parser.add_argument("--examples", type=int, default=preset.examples,
                        help="examples per task (%(default)s)")
    parser.add_argument("--data", help="JSON lines with prompt and completion, instead of tasks")
    parser.add_argument("--lines", type=int, default=0,
                        help="use this many lines of --data; 0: all (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=512, help="with --model: cut texts here "
                        "and leave out longer prompts; 0: the context (%(default)s)")
    parser.add_argument("--out", help="folder of the checkpoint and the model (out/PRESET)")
    parser.add_argument("--fresh", action="store_true", help="ignore an earlier checkpoint")
    parser.add_argument("--float16", action="store_true", help="write the model as float16")
    parser.add_argument("--heldout", type=int, default=8,
                        help="held-out prompts per task for the comparison; 0: none (%(default)s)")
    if not known.model:
        add_flags(parser, ModelConfig, skip=("bos_id", "eos_ids"), defaults=preset.model)
    add_flags(parser, StreamConfig, skip=("embed_scale",) if known.model else (),
              defaults=preset.streams, rename=STREAM_FLAGS)
    add_flags(parser, TrainConfig, defaults=preset.train)
    args = parser.parse_args(argv)
    for name, low in (("examples", 1), ("heldout", 0), ("lines", 0), ("max_tokens", 0)):
        if getattr(args, name) < low:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected {low} or "
                         "more")
    if bool(args.model) != (preset.model is None):
        parser.error("--preset adapter needs --model, and --model no other preset")
    args.out = args.out or os.path.join("out", args.preset or ("adapter" if args.model else "demo"))
    return args


def load_data(args):
    """Training examples and held-out prompts."""
    if args.data is not None:
        examples = read_jsonl(args.data)[:args.lines or None]
        # the last few lines are not trained on; the comparison at the end uses their prompts
        edge = len(examples) - min(args.heldout, len(examples) // 5)
        return examples[:edge], [e["prompt"] for e in examples[edge:]]
    names = args.tasks.split(",")
    parts = [tasks.examples(name, "train", args.examples, args.seed) for name in names]
    heldout = [e["prompt"] for name in names
               for e in tasks.examples(name, "heldout", args.heldout, args.seed)]
    return [e for group in zip(*parts) for e in group], heldout


def build(args, examples):
    """A Trainer of a fresh model with a tokenizer trained on the examples."""
    tokenizer = Tokenizer.train((e["prompt"] + e["completion"] for e in examples[:6000]),
                                args.vocab_size)
    config = from_flags(ModelConfig, args, vocab_size=tokenizer.vocab_size,
                        bos_id=tokenizer.bos_id, eos_ids=(tokenizer.eos_id,))
    streams = from_flags(StreamConfig, args, rename=STREAM_FLAGS)
    if streams.lora_rank or streams.mode == "lossless":
        raise ValueError("LoRA and lossless mode leave the base model as it is, and here it is "
                         "untrained; give a trained one with --model")
    train, draft_ids = from_flags(TrainConfig, args), None
    documents = encode_examples(examples, tokenizer, config)
    if streams.draft_vocab:
        draft_ids = choose_draft_ids(documents, streams.draft_vocab, config.eos_ids)
    model = Model(config, init_params(config, streams, args.seed), streams, tokenizer, draft_ids)
    loader = Loader(documents, train.batch, streams.count, train.seed, model.draft_index)
    os.makedirs(args.out, exist_ok=True)                  # if that fails, then before the work
    return Trainer(model, loader, train, args.out)


def build_adapter(args, examples):
    """A Trainer of a fresh adapter for the model in --model."""
    streams = from_flags(StreamConfig, args, rename=STREAM_FLAGS)
    train = from_flags(TrainConfig, args)
    os.makedirs(args.out, exist_ok=True)                  # if that fails, then before the work
    made = prepare(load(args.model), examples, streams, train, args.out, args.max_tokens)
    if made.skipped or made.cut:
        print(f"texts of at most {args.max_tokens} tokens: {made.skipped} longer prompts left out, "
              f"{made.cut} completions cut")
    return made.trainer


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


def main(argv=None):
    args = parse(argv)
    examples, heldout = load_data(args)
    trainer = build_adapter(args, examples) if args.model else build(args, examples)
    model, train = trainer.model, trainer.train
    size = sum(model.params[n].size for n in trainer.names)
    print(f"{size / 1e6:.2f} million parameters to train, {len(trainer.loader.documents)} "
          f"examples, {train.steps} steps; checkpoints in {args.out}")
    if not args.fresh and trainer.resume():
        print(f"{'going on from' if trainer.step < train.steps else 'finished before, at'} step "
              f"{trainer.step} (--fresh starts over)")
    elif heldout and not args.model:
        show(model, heldout, "before training")
    if trainer.step < train.steps:
        print("", flush=True)
        with_progress(trainer)
        if trainer.step < train.steps:
            print(f"stopped at step {trainer.step}, which is saved; the same command goes on"
                  if trainer.step else "stopped before the first step; nothing is saved")
            return 130
    if args.model:
        save_adapter(args.out, model, args.model)
        model = merged(model).pack()                      # as decode.py will load it
    else:
        save_model(args.out, model, "float16" if args.float16 else "float32")
    if heldout:
        show(model, heldout, "after training", runs=3)
    flags = f"--model {args.model} --adapter {args.out}" if args.model else f"--model {args.out}"
    print(f"\n{'adapter' if args.model else 'model'} saved in {args.out}; decode with it: python "
          f"decode.py {flags}")
    return 0


if __name__ == "__main__":
    report.run_script(main, "stopped; the same command goes on from the last checkpoint")
