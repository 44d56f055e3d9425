"""What an import loads, and model configs registered in whichever order open_clip and `models` are imported."""

import gc
import subprocess
import sys

import pytest

from open_clip_zerovl.core.releases import uncollected


def output_of(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IMPORTS = [
    "import open_clip_zerovl.models, open_clip",
    "import open_clip, open_clip_zerovl.models",
    "import open_clip_zerovl.checkpoints.loading, open_clip",
    "import open_clip_zerovl.models.configs, open_clip",
    "import open_clip, open_clip_zerovl",  # without the room
]
# Each order of imports in a process of its own, forked from one that has imported open_clip's own requirements.
IN_EACH_ORDER = """
import os, sys, timm, torch, torchvision, transformers
for imports in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        exec(imports)
        print('zerovl-ViT-B-16-BERT-base' in open_clip.list_models(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, imports
"""


def test_configs_are_registered_in_either_order():
    assert output_of(IN_EACH_ORDER, *IMPORTS).split() == ["True"] * (len(IMPORTS) - 1) + ["False"]


@pytest.mark.parametrize(
    "code",
    [
        "import open_clip_zerovl",
        "import open_clip_zerovl.cli",
        "from open_clip_zerovl.cli import command_list; command_list()",
        "import open_clip_zerovl.api, open_clip_zerovl.data, open_clip_zerovl.evaluate, open_clip_zerovl.checkpoints",
    ],
)
def test_what_needs_no_torch_imports_none(code):
    heavy = "[name for name in ('torch', 'timm', 'transformers', 'open_clip', 'pandas', 'numpy') if name in sys.modules]"
    assert output_of(f"import sys; {code}; print({heavy})") == "[]"


def test_garbage_is_collected_again_after_large_imports():
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.unfreeze()
