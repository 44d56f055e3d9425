"""`python -m open_clip_zerovl.cli`, which torchrun starts too."""

import sys

from open_clip_zerovl.cli.program import main

if __name__ == "__main__":
    sys.exit(main())
