"""What this machine offers, for `make help`: versions, threads, GPU or the reason why not.

Read first: backend.py. Proven by: tests/test_cli.py.
"""

import os
import platform

import numpy

from .backend import device_name, gpu_problem, pick


def main():
    """Print one line per finding."""
    print(f"  found: Python {platform.python_version()} in .venv, NumPy {numpy.__version__}, "
          f"{os.cpu_count()} cores ({device_name()})")
    problem = gpu_problem()
    print(f"  found: {'no GPU: ' + problem if problem else 'GPU ' + device_name(pick('gpu'))}")


if __name__ == "__main__":
    main()
