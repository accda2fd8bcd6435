"""Decode prompts plainly and speculatively, side by side, and check that the ids agree.

python decode.py                          held-out prompts of the three built-in tasks
python decode.py --prompt "..."           your own text
python decode.py --prompts FILE.jsonl     a "prompt" on every line
python decode.py --model DIR --adapter DIR --prompts FILE.jsonl     an open model
python decode.py --shape full --no-conditional --fused     the paper's form
python decode.py --json                   one JSON object, nothing else

Exit status 0 if every id agrees, 1 if one differs or something is wrong.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")        # small matrices: threads only cost

import argparse
import json
import sys

from tqdm import tqdm

import minispec
from minispec import report, tasks
from minispec.backend import pick
from minispec.compare import compare
from minispec.config import TreeConfig, add_flags, from_flags
from minispec.data import read_jsonl

HERE = os.path.dirname(os.path.abspath(__file__))


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.path.join(HERE, "weights", "tiny"),
                        help="model folder (weights/tiny)")
    parser.add_argument("--adapter", help="folder of an adapter that was trained for the model")
    parser.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    parser.add_argument("--prompts", help='JSON-lines file with "prompt" on every line')
    parser.add_argument("--per-task", type=int, default=2,
                        help="built-in held-out prompts per task (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=80, help="per prompt (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (%(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="0: off (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: off (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the coins (%(default)s)")
    parser.add_argument("--stop", action="append", default=[], help="stop string; may be repeated")
    parser.add_argument("--drafter", default="streams", help="streams or prompt_lookup")
    parser.add_argument("--runs", type=int, default=3, help="timed runs, median (%(default)s)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "gpu", "auto"))
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    add_flags(parser, TreeConfig)
    args = parser.parse_args(argv)
    for name in ("runs", "per_task"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected 1 or more")
    return args


def gather(args):
    """Prompts to decode."""
    prompts = list(args.prompt or [])
    if args.prompts is not None:
        prompts += [e["prompt"] for e in read_jsonl(args.prompts, keys=("prompt",))]
    if not prompts:
        prompts = [e["prompt"] for name in tasks.TASKS
                   for e in tasks.examples(name, "heldout", args.per_task, seed=1)]
    return prompts


def show_pair(number, count, pair, tokenizer, colour):
    """One prompt with its speculative text, marked by how each token came."""
    stats = pair.speculative.stats
    print(report.paint(f"[{number}/{count}]", "head", colour))
    print(report.paint(pair.prompt.rstrip("\n"), "prompt", colour))
    print(report.coloured(pair.speculative, tokenizer, colour))
    print(report.paint(f"{len(pair.speculative.ids)} tokens, "
                       f"{report.number(stats.tokens_per_forward)} per forward\n", "prompt",
                       colour))


def main(argv=None):
    args = parse(argv)
    model = minispec.load(args.model, xp=pick(args.device), adapter=args.adapter)
    prompts, tree = gather(args), from_flags(TreeConfig, args)
    settings = {name: getattr(args, name) for name in
                ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop")}
    with tqdm(total=args.runs * len(prompts), desc="decoding", unit="prompt", leave=False,
              disable=args.json or not sys.stderr.isatty()) as bar:
        result = compare(model, prompts, args.runs, args.drafter, tree, bar.update, **settings)
    if args.json:
        print(json.dumps({**result.as_dict(), "prompts": [
            {"prompt": p.prompt, "text": p.speculative.text, "ids": p.speculative.ids,
             "identical": p.difference is None, "finish_reason": p.speculative.finish_reason,
             "tokens_per_forward": p.speculative.stats.tokens_per_forward}
            for p in result.pairs]}))
        return 0 if result.identical else 1
    colour = report.wants_colour()
    for number, pair in enumerate(result.pairs, 1):
        show_pair(number, len(result.pairs), pair, model.tokenizer, colour)
    print(report.legend(colour) + "\n")
    tokens = sum(len(pair.plain.ids) for pair in result.pairs)
    if result.identical:
        print(f"ids identical to plain decoding: all {tokens} tokens of {len(prompts)} prompts")
    else:
        print("IDS DIFFER from plain decoding; no speed is reported")
        print("\n".join(report.differences(result)))
    print("\n".join(report.figures(result)))
    return 0 if result.identical else 1


if __name__ == "__main__":
    report.run_script(main)
