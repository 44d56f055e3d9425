"""Started by tests: many trainings one after the other that share one start of Python, torch and this package.

Reads a JSON list of arguments a line and runs `training.main` with them as a program of its own, in a forked process; answers
with the exit status a line. What a training prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys

from training.main import run_as_program


def main() -> int:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)
            sys.argv = ["training.main", *json.loads(line)]
            run_as_program()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
