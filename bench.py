"""Measurements as tables.

python bench.py pruning    the paper's pruning ablation: k = 1..6, with and without
python bench.py tasks      how hard the built-in tasks are: loss, and what prompt lookup reaches
python bench.py trees      forms of the draft tree side by side
... --write docs/FILE.md   put the table into a page

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
from minispec import report, tasks
from minispec.backend import device_name
from minispec.compare import compare
from minispec.config import PAPER_TREE, TreeConfig
from minispec.data import encode_examples
from minispec.objective import heldout_metrics
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


def tree_rows(model, prompts, args, bar):
    """Table rows: form of the tree, rows per step, and the four numbers."""
    forms = [("paper: full product k=3, fused", PAPER_TREE.replace(fused=True)),
             ("paper: full product k=3, deferred", PAPER_TREE),
             ("paper's streams, best-first, 8 nodes", TreeConfig(conditional=False)),
             *((f"conditional, {n} nodes", TreeConfig(budget=n)) for n in (3, 5, 8, 12, 16))]
    rows = []
    for name, tree in [*forms, ("prompt lookup", None)]:
        drafter = "streams" if tree else "prompt_lookup"
        result = compare(model, prompts, args.runs, drafter, tree, max_new_tokens=64)
        bar.update()
        if not result.identical:
            raise ValueError(f"{name}: ids differ from plain decoding")
        facts, stats = result.as_dict(), result.speculative
        rows.append([name, f"{stats.drafted / stats.forwards:.1f}"] + [
            number(facts[key]) for key in ("tokens_per_forward", "cost_ratio",
                                           "predicted_speedup", "measured_speedup")])
    return rows


def task_rows(model, prompts, args, bar):
    """Table rows: task, held-out loss, and tokens per forward of lookup and of the streams."""
    rows = []
    for name in tasks.TASKS:
        examples = tasks.examples(name, "heldout", args.per_task, seed=1)
        documents = encode_examples(examples, model.tokenizer, model.config)
        loss = heldout_metrics(model, documents)
        prompts = [e["prompt"] for e in examples]
        row = [name, number(loss.mean_loss("main")), number(loss.accuracy("main"))]
        for drafter, tree in (("prompt_lookup", None), ("streams", PAPER_TREE),
                              ("streams", TreeConfig())):
            result = compare(model, prompts, 1, drafter, tree, max_new_tokens=64)
            bar.update()
            row.append(number(result.as_dict()["tokens_per_forward"])
                       + ("" if result.identical else " (ids differ)"))
        rows.append(row)
    return rows


def table(head, rows):
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " ---: |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


TABLES = {
    # name: (rows, columns, measurements behind the bar, what was run)
    "pruning": (pruning_rows, [
        "k", "drafted", "tokens/forward", "cost ratio", "speedup", "kept",
        "tokens/forward, pruned", "cost ratio, pruned", "speedup, pruned"],
        lambda args: 2 * args.max_k,
        "full product of the paper's streams, {streams}, early-exit threshold {args.threshold}"),
    "trees": (tree_rows, ["tree", "nodes drafted", "tokens/forward", "cost ratio", "predicted",
                          "measured speedup"], lambda args: 9, "G = {G}"),
    "tasks": (task_rows, [
        "task", "loss, nats/token", "accuracy", "lookup, tokens/forward", "paper's streams, k=3",
        "conditional, 8 nodes"], lambda args: 9, "teacher-forced loss on the same examples"),
}


def measure(args):
    """Text of one table, headed by the command and the machine."""
    rows_of, head, steps, what = TABLES[args.what]
    model = minispec.load(args.model)
    prompts = [e["prompt"] for name in tasks.TASKS
               for e in tasks.examples(name, "heldout", args.per_task, seed=1)]
    with tqdm(total=steps(args), unit="setting", disable=not sys.stderr.isatty()) as bar:
        rows = rows_of(model, prompts, args, bar)
    what = what.format(args=args, G=model.streams.count,
                       streams="fused" if args.fused else "deferred")
    return (f"`python bench.py {' '.join(sys.argv[1:])}`\n\n{len(prompts)} held-out prompts, "
            f"greedy, {what}; median of {args.runs} alternating runs; {device_name()}, "
            f"{os.cpu_count()} cores, NumPy {numpy.__version__}, Python "
            f"{platform.python_version()}.\n\n" + table(head, rows))


def page_parts(path):
    """Text of a page before, between and after its two marks."""
    with open(path, encoding="utf-8") as file:
        parts = file.read().split("<!-- table -->")
    if len(parts) != 3:
        raise ValueError(f"{path} needs two <!-- table --> marks to put the table between, found "
                         f"{len(parts) - 1}")
    return parts


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=TABLES)
    parser.add_argument("--model", default=os.path.join(HERE, "weights", "tiny"))
    parser.add_argument("--per-task", type=int, default=8, help="prompts per task (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs (%(default)s)")
    parser.add_argument("--max-k", type=int, default=6, help="largest k (%(default)s)")
    parser.add_argument("--threshold", type=float, default=0.001,
                        help="early-exit probability below which a branch is cut (%(default)s)")
    parser.add_argument("--fused", action="store_true", help="streams in the verifying pass")
    parser.add_argument("--write", metavar="FILE",
                        help="replace the part of FILE between its <!-- table --> marks")
    args = parser.parse_args(argv)
    for name in ("per_task", "runs", "max_k"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected 1 or more")
    parts = page_parts(args.write) if args.write else None        # before minutes are spent
    text = measure(args)
    print(text)
    if parts:
        parts[1] = f"\n{text}\n"
        write_atomically(args.write, "<!-- table -->".join(parts).encode())
    return 0


if __name__ == "__main__":
    report.run_script(main)
