"""`dga` and `losses` in a process that can import torch, NumPy and their dependencies, and nothing else."""

import subprocess
import sys

# Imports nothing but the standard library, torch, NumPy, what these two require, and this package.
PROGRAM = """
import importlib.abc, importlib.metadata, re, sys

def plain(name):
    return name.lower().replace("_", "-")

def required(name, found):
    if plain(name) not in found:
        found.add(plain(name))
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            lines = []
        for line in lines:
            if "extra ==" not in line:
                required(re.match(r"[\\w.-]+", line)[0], found)
    return found

def files_of(name):
    try:
        return importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []

allowed = required("torch", set()) | required("numpy", set())
tops = {path.parts[0].removesuffix(".py") for name in allowed for path in files_of(name)}
tops |= {"open_clip_zerovl", *sys.stdlib_module_names}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in tops:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in ("open_clip", "timm", "transformers", "torchvision", "PIL", "safetensors", "pandas"):
    assert name not in tops, name
import torch
from open_clip_zerovl.dga import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss

class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = torch.nn.Linear(6, 4), torch.nn.Linear(5, 4)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
    def forward(self, images, texts):
        normal = torch.nn.functional.normalize
        features = {"image_features": normal(self.image(images)), "text_features": normal(self.text(texts))}
        return {**features, "logit_scale": self.scale.exp()}

torch.manual_seed(0)
model = Towers().double()
batch = torch.randn(8, 6).double(), torch.randn(8, 5).double()
ContrastiveLoss()(**model(*batch)).backward()
wanted = [p.grad.clone() for p in model.parameters()]
micro_batches = list(zip(*(part.split(3) for part in batch)))
for deferred in (False, True):
    model.zero_grad()
    step = DecoupledGradientAccumulation(model, ContrastiveLoss(chunk_size=3), retain=1)
    step.loss(micro_batches).backward() if deferred else step.backward(micro_batches)
    assert all((p.grad - g).norm() <= 1e-10 * g.norm() for p, g in zip(model.parameters(), wanted))
try:
    import open_clip
except ModuleNotFoundError:
    print("exact without open_clip")
"""


def test_a_step_works_where_torch_is_the_only_package():
    """`pip install --no-deps open_clip_zerovl` in the environment of another trainer."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "exact without open_clip"
