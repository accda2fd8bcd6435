"""Measurements as tables. So far: the paper's pruning ablation.

python bench.py pruning                          k = 1..6, with and without pruning
python bench.py pruning --write docs/pruning.md  the same, as a page

Every figure comes from runs that alternate with plain decoding and agree with it in every id.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")        # small matrices: threads only cost

import argparse
import platform
import sys

import numpy
from tqdm import tqdm

import minispec
from minispec import tasks
from minispec.backend import device_name
from minispec.compare import compare
from minispec.config import PAPER_TREE
from minispec.report import number
from minispec.weights import write_atomically

HERE = os.path.dirname(os.path.abspath(__file__))


def pruning_rows(model, prompts, args, bar):
    """Table rows: k, nodes, then nodes kept, tokens per forward and speedup without and with."""
    rows = []
    for k in range(1, args.max_k + 1):
        row = [str(k), str(sum(k ** d for d in range(1, model.streams.count + 1)))]
        for threshold in (0.0, args.threshold):
            tree = PAPER_TREE.replace(k=k, prune_threshold=threshold, fused=args.fused)
            result = compare(model, prompts, args.runs, tree=tree, max_new_tokens=64)
            bar.update()
            if not result.identical:
                raise ValueError(f"k={k}, threshold {threshold}: ids differ from plain decoding")
            steps = [s for pair in result.pairs for s in pair.speculative.steps if not s.prompt]
            kept = sum(len(s.tree) - 1 for s in steps) / len(steps)
            facts = result.as_dict()
            row += [f"{kept:.1f}"] if threshold else []
            row += [number(facts[name]) for name in
                    ("tokens_per_forward", "cost_ratio", "measured_speedup")]
        rows.append(row)
    return rows


def table(head, rows):
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " ---: |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def pruning(args):
    """Text of the ablation."""
    model = minispec.load(args.model)
    prompts = [e["prompt"] for name in tasks.TASKS
               for e in tasks.examples(name, "heldout", args.per_task, seed=1)]
    with tqdm(total=2 * args.max_k, unit="setting", disable=not sys.stderr.isatty()) as bar:
        rows = pruning_rows(model, prompts, args, bar)
    head = ["k", "drafted", "tokens/forward", "cost ratio", "speedup",
            "kept", "tokens/forward, pruned", "cost ratio, pruned", "speedup, pruned"]
    command = "python bench.py " + " ".join(sys.argv[1:])
    return (f"`{command}`\n\n{len(prompts)} held-out prompts, greedy, full product of the paper's "
            f"{model.streams.count} streams, {'fused' if args.fused else 'deferred'}, threshold "
            f"{args.threshold}; median of {args.runs} alternating runs; {device_name()}, NumPy "
            f"{numpy.__version__}, Python {platform.python_version()}.\n\n" + table(head, rows))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pruning",))
    parser.add_argument("--model", default=os.path.join(HERE, "weights", "tiny"))
    parser.add_argument("--per-task", type=int, default=8, help="prompts per task (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs (%(default)s)")
    parser.add_argument("--max-k", type=int, default=6, help="largest k (%(default)s)")
    parser.add_argument("--threshold", type=float, default=0.01,
                        help="early-exit probability below which a branch is cut (%(default)s)")
    parser.add_argument("--fused", action="store_true", help="streams in the verifying pass")
    parser.add_argument("--write", metavar="FILE",
                        help="replace the part of FILE between its <!-- table --> marks")
    args = parser.parse_args(argv)
    text = pruning(args)
    print(text)
    if args.write:
        with open(args.write, encoding="utf-8") as file:
            parts = file.read().split("<!-- table -->")
        if len(parts) != 3:
            raise ValueError(f"{args.write} needs two <!-- table --> marks to put the table "
                             f"between, found {len(parts) - 1}")
        parts[1] = f"\n{text}\n"
        write_atomically(args.write, "<!-- table -->".join(parts).encode())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"bench.py: {error}")
