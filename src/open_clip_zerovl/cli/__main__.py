"""`python -m open_clip_zerovl.cli`: `zerovl` in a form that torchrun can start."""

import sys

from open_clip_zerovl.cli import main

if __name__ == "__main__":
    sys.exit(main())
