"""`zerovl doctor`: a check of this machine for training, on one page to paste into an issue.

It checks the versions of packages against the ranges that this package was installed with, the gradient of a step of decoupled
gradient accumulation against that of one graph on each device (section 4.1), and limits that end runs. A check that fails gives
its finding and a remedy; the remaining checks still run.
"""

from __future__ import annotations

import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from typing import Any

from open_clip_zerovl.core.errors import UserError, kind_and_message
from open_clip_zerovl.core.processes import usable_cores
from open_clip_zerovl.core.releases import line_of, supported, version_here

PACKAGE = "open_clip_zerovl"
GIB = 2**30
LEAST_SHARED_MEMORY_GIB = 1.0  # loader processes pass their batches through it
LEAST_OPEN_FILES = 1024  # a loader process has a few open for each shard, and PyTorch one for each tensor passed on
TOLERANCE = 5e-5  # relative error of a gradient in fp32 (invariant 1)

Seen = tuple[str, "str | None"]  # what a check has seen, and the fault with its remedy
Finding = tuple[str, str, "str | None"]  # the same after its topic


def doctor() -> int:
    """Write one page to paste into an issue: versions, a DGA step on every device, and limits that end runs.

    Exit status 1 where something is wrong.
    """
    print("zerovl doctor: checking packages, devices and limits ...", file=sys.stderr)
    findings = [(topic, *outcome(check)) for topic, check in checks()]
    print(page(findings))
    return int(any(problem is not None for _, _, problem in findings))


def outcome(check: Callable[[], Seen]) -> Seen:
    """Make a check, of which an error is a finding, too."""
    try:
        return check()
    except Exception as error:  # a doctor reports whatever a broken installation raises
        advice = f"{kind_and_message(error)}; install {PACKAGE} again"
        return "could not be checked", advice


def page(findings: Sequence[Finding]) -> str:
    """Format the findings: one line each, then what to do about each problem, by number."""
    width = max(len(topic) for topic, _, _ in findings)
    lines: list[str] = []
    remedies: list[str] = []
    for topic, seen, problem in findings:
        mark = ""
        if problem is not None:
            remedies.append(f"{len(remedies) + 1}. {topic}: {problem}")
            mark = f"{len(remedies)}>"
        lines.append(f"{mark:2} {topic:{width}}  {seen}")
    return "\n".join([*lines, "", *(remedies or ["Nothing is wrong."])])


def checks() -> Iterator[tuple[str, Callable[[], Seen]]]:
    """List topics with their checks: packages, devices, limits."""
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "python", lambda: (f"{system}, {usable_cores()} CPU cores", None)
    yield PACKAGE, lambda: (metadata.version(PACKAGE), None)
    try:
        requirements = metadata.requires(PACKAGE) or ()
    except metadata.PackageNotFoundError:  # which the check before has shown
        requirements = ()
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement)[0]
        if "extra ==" not in requirement:
            of_range = partial(version, requirement)
            yield name, open_clip_version if name == "open_clip_torch" else of_range
    for device in devices():
        yield device, partial(step_on, device)
    yield "shared memory", shared_memory
    yield "open files", open_files


def version(requirement: str) -> Seen:
    """Compare a package with its range."""
    from packaging.requirements import Requirement  # not at the top: it may be missing

    needed = Requirement(requirement)
    here = metadata.version(needed.name)
    inside = needed.specifier.contains(here, prereleases=True)
    problem = f"{here} is not supported; pip install '{needed.name}{needed.specifier}'"
    seen = f"{here:16} supported: {needed.specifier or 'any version'}"
    return seen, None if inside else problem


def open_clip_version() -> Seen:
    """Check the open_clip that is imported here, which may be a checkout on PYTHONPATH in place of the installed one."""
    here = version_here() or "none"
    try:
        problem = line_of(here).untested(here)
    except UserError as error:
        problem = str(error)
    return f"{here:16} supported: {supported()}", problem


def devices() -> list[str]:
    """Name the CPU and every GPU."""
    try:
        import torch
    except ImportError:  # which the check of the CPU shows
        return ["cpu"]
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def step_on(name: str) -> Seen:
    """Compare a DGA step's gradient on a device with one graph's."""
    import torch

    what = (
        f"{torch.get_num_threads()} threads" if name == "cpu" else torch.cuda.get_device_name(name)
    )
    if name == "cpu" and shutil.which("nvidia-smi") and not torch.cuda.is_available():
        return what, (
            f"there is a driver, but torch {torch.__version__} finds no GPU: install a torch whose CUDA the driver supports, "
            "and look at CUDA_VISIBLE_DEVICES"
        )
    error = dga_error(torch.device(name))
    problem = f"DGA's gradient differs from one graph's by {error:.1e}, more than {TOLERANCE:.0e}; report it"
    return f"{what}; DGA step exact to {error:.0e}", None if error <= TOLERANCE else problem


def dga_error(device: Any) -> float:
    """Return the error of a DGA step's gradient against one graph's on a device.

    A small open_clip model in fp32, 4 micro-batches of 4, one graph kept. The error is invariant 1's: the largest over
    parameters of |g - g_ref| / max(|g_ref|, 1e-6 * norm of all gradients).
    """
    import torch
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    from open_clip_zerovl.dga import DecoupledGradientAccumulation
    from open_clip_zerovl.losses import ContrastiveLoss

    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=2, width=64, head_width=32, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=8, vocab_size=64, width=32, heads=2, layers=2)
    model = CLIP(32, vision, text, output_dict=True).to(device)
    images = torch.randn(16, 3, 32, 32).to(device)
    texts = torch.randint(1, 64, (16, 8)).to(device)
    parameters = list(model.parameters())
    loss = ContrastiveLoss()
    expected = torch.autograd.grad(loss(**model(images, texts)), parameters)
    dga = DecoupledGradientAccumulation(model, loss, retain=1)
    dga.backward(list(zip(images.split(4), texts.split(4), strict=True)))
    floor = 1e-6 * torch.stack([gradient.norm() for gradient in expected]).norm()
    return max(
        float((each.grad - gradient).norm() / gradient.norm().maximum(floor))
        for each, gradient in zip(parameters, expected, strict=True)
    )


def shared_memory() -> Seen:
    """Look at /dev/shm."""
    free = shutil.disk_usage("/dev/shm").free / GIB
    advice = "loader processes need more; in a container start it with --shm-size=8g, or give --workers 0"
    return f"{free:.1f} GiB free", advice if free < LEAST_SHARED_MEMORY_GIB else None


def open_files() -> Seen:
    """Look at the limit of open files."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"`ulimit -n {min(most, 65_536) if most > 0 else 65_536}` before the run allows more"
    shown = f"{files:,}" if files > 0 else "unlimited"
    return shown, advice if 0 < files < LEAST_OPEN_FILES else None
