"""Scripts run as `python SCRIPT` would run them, but in this process, for the tests of the command
line: a second saved per run, and the tests can replace parts of the library."""

import contextlib
import io
import json
import pathlib
import runpy
import sys

ROOT = pathlib.Path(__file__).parents[1]
SMALL = ("--width 16 --layers 2 --heads 2 --kv-heads 1 --head-dim 8 --mlp-width 16 "
         "--vocab-size 400 --max-positions 400 --stream-layers 1 --transition-rank 4 --batch 2 "
         "--workers 1 --examples 40 --heldout 1").split()


def run(script, *args):
    """`python SCRIPT ARGS` in this process -> (status, stdout, stderr)."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = [str(ROOT / script), *map(str, args)]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code
        finally:
            sys.argv = argv
    if isinstance(status, str):                           # what the interpreter does with it
        return 1, out.getvalue(), err.getvalue() + status + "\n"
    return status or 0, out.getvalue(), err.getvalue()


def jsonl(path, *lines):
    """A file of JSON lines; a str is written as it is."""
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n"
                            for line in lines))
    return path
