"""`zerovl doctor`: a check of this machine for training, on one page to paste into an issue.

It checks the versions of packages against the ranges that this package was installed with; on each device the gradient of a
step of decoupled gradient accumulation against that of one graph (section 4.1); process groups; memory, shared memory, disk and
file limits. A check that fails gives its finding and a remedy; the remaining checks still run.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import free_space
from open_clip_zerovl.core.lazy import load_open_clip
from open_clip_zerovl.core.releases import INSTALL, line_of, supported, version_here

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PACKAGE = "open_clip_zerovl"
HOST = "open_clip_torch"
GIB = 2**30
LEAST_SHARED_MEMORY_GIB = 1.0  # loader processes pass their batches through it
LEAST_OPEN_FILES = 1024  # a loader process has a few open for each shard, and PyTorch one for each tensor passed on
LEAST_DISK_GIB = 10.0  # four checkpoints of the paper's model
# extras that users install; the rest is for work on the project itself
USERS_EXTRAS = ("demo", "data")
TOLERANCE = 5e-5  # relative error of a gradient in fp32 (invariant 1)


@dataclass(frozen=True)
class Finding:
    """One line of the page.

    Attributes:
        topic: subject of the check.
        seen: its finding.
        problem: the fault and its remedy, or None.
    """

    topic: str
    seen: str
    problem: str | None = None


def examine(logs: str | Path = "logs") -> list[Finding]:
    """Run all checks; a failing one does not stop the next.

    Args:
        logs: the runs' folder, whose free disk is checked.
    """
    checks: list[Callable[[], Iterable[Finding]]] = [
        python_version,
        package_versions,
        graphics_driver,
        devices,
        process_groups,
        lambda: limits(Path(logs)),
    ]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings.extend(check())
        except Exception as error:  # a doctor reports whatever a broken installation raises
            name = getattr(check, "__name__", "limits").replace("_", " ")
            findings.append(Finding(name, "could not be checked", in_a_sentence(error)))
    return findings


def in_a_sentence(error: Exception) -> str:
    """An error as a sentence, with a remedy if a package is missing."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name.partition('.')[0]} is not installed; pip install {PACKAGE} again, which brings it"
    return f"{type(error).__name__}: {error}"


def page(findings: Iterable[Finding]) -> str:
    """The findings as text: one line each, then what to do about each problem, by number."""
    findings = list(findings)
    width = max((len(finding.topic) for finding in findings), default=0)
    lines, problems = [], []
    for finding in findings:
        mark = "  "
        if finding.problem is not None:
            problems.append(finding)
            mark = f"{len(problems)}>"
        lines.append(f"{mark} {finding.topic:{width}}  {finding.seen}")
    remedies = [
        f"{number}. {finding.topic}: {finding.problem}"
        for number, finding in enumerate(problems, 1)
    ]
    return "\n".join([*lines, "", *(remedies or ["Nothing is wrong."])])


# ---------------------------------------------------------------------------------------------------------------------
# Versions
# ---------------------------------------------------------------------------------------------------------------------


def python_version() -> list[Finding]:
    """This interpreter and machine."""
    seen = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return [Finding("python", seen)]


def package_versions() -> list[Finding]:
    """Required packages, and optional ones that are installed, against the ranges in this package's metadata."""
    # not at the top: it may be missing
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        findings = [Finding(PACKAGE, metadata.version(PACKAGE))]
        needed = [Requirement(text) for text in metadata.requires(PACKAGE) or ()]
    except (metadata.PackageNotFoundError, InvalidRequirement) as error:
        advice = f"{error}; pip install it, so that the versions it needs are known here"
        return [Finding(PACKAGE, "not installed", advice)]
    required = [
        requirement
        for requirement in needed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    extras = {}
    for requirement in needed:
        marker = requirement.marker
        if requirement in required or marker is None:
            continue
        if any(marker.evaluate({"extra": extra}) for extra in USERS_EXTRAS):
            extras[requirement.name.lower()] = requirement
    for requirement in required:
        findings += (
            [open_clip_release()]
            if requirement.name.replace("-", "_") == HOST
            else _package(requirement, optional=False)
        )
    for requirement in extras.values():
        findings += _package(requirement, optional=True)
    return findings


def open_clip_release() -> Finding:
    """The open_clip that is imported here, which may be another than the installed one: a checkout on PYTHONPATH."""
    wanted = f"supported: {supported()}"
    try:
        installed: str | None = metadata.version(HOST)
    except metadata.PackageNotFoundError:
        installed = None
    version, problem = version_here(), None
    if version is None:
        return Finding(HOST, f"not installed; {wanted}", INSTALL)
    try:
        load_open_clip()
        import open_clip

        version = open_clip.__version__
    except ImportError as error:
        problem = f"it cannot be imported ({error}); {INSTALL}"
    seen = f"{version:16} {wanted}"
    if version != installed:
        instead = f" in place of the installed {installed}" if installed else ""
        place = importlib.util.find_spec("open_clip").origin  # type: ignore[union-attr]
        seen += f"; imported from {Path(place).parent}{instead}"  # type: ignore[arg-type]
    try:
        problem = line_of(version).untested(version) or problem
    except UserError as error:
        problem = str(error)
    return Finding(HOST, seen, problem)


def _package(needed: Requirement, *, optional: bool) -> list[Finding]:
    wanted = f"supported: {needed.specifier}" if str(needed.specifier) else "any version"
    if optional:
        wanted += ", optional"
    quoted = f"'{needed.name}{needed.specifier}'"
    try:
        seen = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return (
            []
            if optional
            else [Finding(needed.name, f"not installed; {wanted}", f"pip install {quoted}")]
        )
    inside = needed.specifier.contains(seen, prereleases=True)
    problem = None if inside else f"{seen} is not supported; pip install {quoted}"
    return [Finding(needed.name, f"{seen:16} {wanted}", problem)]


# ---------------------------------------------------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------------------------------------------------


def graphics_driver() -> list[Finding]:
    """The CUDA version that torch was built for, and the installed driver."""
    import torch

    built = torch.version.cuda
    seen = f"torch is built for CUDA {built}" if built else "torch is built without CUDA"
    program = shutil.which("nvidia-smi")
    if program is None:
        return [Finding("CUDA", f"{seen}; no NVIDIA driver here")]
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    drivers = sorted(set(done.stdout.split())) if done.returncode == 0 else []
    seen += f"; driver {', '.join(drivers) or 'unknown'}"
    problem = None
    if not torch.cuda.is_available():
        problem = (
            "there is a driver, but torch finds no GPU: install a torch whose CUDA the driver supports, and check "
            f"CUDA_VISIBLE_DEVICES ({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
        )
    return [Finding("CUDA", seen, problem)]


def devices() -> list[Finding]:
    """A forward pass and a DGA step on the CPU and on every GPU."""
    import torch

    from open_clip_zerovl.core.memory import available_bytes

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    findings = []
    for name in ("cpu", *(f"cuda:{index}" for index in range(gpus))):
        device = torch.device(name)
        free = (available_bytes(device) or 0) / GIB
        what = (
            f"{torch.get_num_threads()} threads"
            if name == "cpu"
            else torch.cuda.get_device_name(device)
        )
        if name != "cpu":
            what += f", {torch.cuda.get_device_properties(device).total_memory / GIB:.1f} GiB"
            what += ", bf16" if torch.cuda.is_bf16_supported() else ", no bf16"
        seen = f"{what}, {free:.1f} GiB free"
        threads = torch.get_num_threads()
        # on a busy machine a second one waits 100 times longer than so small a model computes
        torch.set_num_threads(1)
        try:
            error, seconds = dga_error(device)
        except Exception as reason:  # as above: whatever the device raises is the finding
            findings.append(Finding(name, seen, f"a training step fails: {in_a_sentence(reason)}"))
            continue
        finally:
            torch.set_num_threads(threads)
        problem = None
        if not error <= TOLERANCE:
            problem = f"DGA's gradient differs from one graph's by {error:.1e}, more than {TOLERANCE:.0e}; report it"
        findings.append(
            Finding(name, f"{seen}; DGA step exact to {error:.0e}, {seconds:.1f} s", problem)
        )
    return findings


def dga_error(device) -> tuple[float, float]:
    """The error of a DGA step's gradient against one graph's on a device, and seconds of both.

    A small open_clip model in fp32, 4 micro-batches of 4, one graph kept. The error is invariant 1's: the largest over
    parameters of |g - g_ref| / max(|g_ref|, 1e-6 * norm of all gradients).
    """
    import torch
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    from open_clip_zerovl.core.randomness import preserved
    from open_clip_zerovl.dga import DecoupledGradientAccumulation
    from open_clip_zerovl.losses import ContrastiveLoss

    begun = time.perf_counter()
    with preserved():
        torch.manual_seed(0)
        vision = CLIPVisionCfg(layers=2, width=64, head_width=32, patch_size=8, image_size=32)
        text = CLIPTextCfg(context_length=8, vocab_size=64, width=32, heads=2, layers=2)
        model = CLIP(32, vision, text, output_dict=True)
        images, texts = torch.randn(16, 3, 32, 32), torch.randint(1, 64, (16, 8))
    model = model.to(device)
    images = images.to(device)
    texts = texts.to(device)
    loss = ContrastiveLoss()

    loss(**model(images, texts)).backward()
    expected = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    model.zero_grad()
    dga = DecoupledGradientAccumulation(model, loss, retain=1)
    dga.backward(list(zip(images.split(4), texts.split(4), strict=True)))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    floor = 1e-6 * float(torch.stack([gradient.norm() for gradient in expected]).norm())
    errors = [
        float((a - b).norm()) / max(float(b.norm()), floor)
        for a, b in zip(gradients, expected, strict=True)
    ]
    return max(errors), time.perf_counter() - begun


# ---------------------------------------------------------------------------------------------------------------------
# The rest of the machine
# ---------------------------------------------------------------------------------------------------------------------


def process_groups() -> Iterator[Finding]:
    """gloo, and NCCL if there are GPUs: a group of one process sums a tensor."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding(
            "process groups",
            "none",
            "torch is built without torch.distributed; several ranks cannot train",
        )
        return
    if dist.is_initialized():
        yield Finding("process groups", f"{dist.get_backend()} is running")
        return
    for backend, device in (
        ("gloo", "cpu"),
        *((("nccl", "cuda"),) if torch.cuda.is_available() else ()),
    ):
        try:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            dist.all_reduce(torch.ones(1, device=device))
            yield Finding(backend, "starts and sums")
        except (RuntimeError, ValueError) as error:
            yield Finding(backend, "does not start", str(error).splitlines()[0])
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def limits(logs: Path) -> list[Finding]:
    """Cores, shared memory, open files, disk."""
    import resource

    from open_clip_zerovl.core.processes import usable_cores

    findings = [Finding("CPU cores", str(usable_cores()))]
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / GIB
        small = free < LEAST_SHARED_MEMORY_GIB
        advice = "loader processes need more; in a container start it with --shm-size=8g, or give --workers 0"
        findings.append(Finding("shared memory", f"{free:.1f} GiB free", advice if small else None))
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = f"`ulimit -n {min(most, 65_536) if most > 0 else 65_536}` before the run allows more"
    findings.append(
        Finding("open files", f"{files:,}", few if 0 < files < LEAST_OPEN_FILES else None)
    )
    folder, free_bytes = free_space(logs)
    free = free_bytes / GIB
    advice = "a checkpoint of the paper's model takes 2.2 GiB; choose another --logs"
    findings.append(
        Finding(
            "disk for --logs", f"{free:.1f} GiB free", advice if free < LEAST_DISK_GIB else None
        )
    )
    if not os.access(folder, os.W_OK):
        findings.append(
            Finding("--logs", str(logs), f"{folder} cannot be written; choose another folder")
        )
    return findings
