"""`zerovl doctor`: versions against the supported ranges, a step on each device, limits; no check ends another."""

import re
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from open_clip_zerovl import doctor
from open_clip_zerovl.cli import main
from open_clip_zerovl.dga import DecoupledGradientAccumulation


def plant(folder, name: str, version: str) -> None:
    """Metadata of a package of another version, found before the installed one's once the folder leads sys.path."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def problem_of(topic):
    """The fault that a check finds."""
    check = dict(doctor.checks())[topic]
    return check()[1]


def test_on_this_machine_doctor_finds_no_unexpected_problem(capsys):
    status = main(["doctor"])
    out = capsys.readouterr().out
    problems = re.findall(r"^\d+> (.*?)  ", out, re.M)
    assert status == int(bool(problems))
    assert {*problems} <= {"shared memory", "open files"}
    for topic in ("python", "open_clip_torch", "torch", "webdataset", "cpu"):
        assert re.search(rf"^(   |\d+> ){topic} ", out, re.M), topic
    assert "pytest" not in out and not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("name", "version", "advice"),
    [
        ("torchvision", "0.9.2", "'torchvision>=0.21'"),
        ("webdataset", "1.0.2", "'webdataset<0.2.87,>=0.2.86'"),
    ],
)
def test_a_package_of_another_version_is_named_with_what_to_install(
    monkeypatch, tmp_path, name, version, advice
):
    assert problem_of(name) is None  # a negative control
    plant(tmp_path, name, version)
    monkeypatch.syspath_prepend(tmp_path)
    assert metadata.version(name) == version
    assert problem_of(name) == f"{version} is not supported; pip install {advice}"


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("3.3.0", None),
        ("4.2.0.dev0", None),
        ("4.2.1", "not tested with open_clip_torch 4.2.1: tested with 3.3.0 and main of 27 June"),
        (
            "2.30.0",
            "open_clip_torch 2.30.0 is not supported, 3.3.x and 4.x are; pip install 'open_clip_torch>=3.3,<3.4'",
        ),
        ("5.0.0", "open_clip_torch 5.0.0 is not supported"),
    ],
)
def test_the_open_clip_that_is_imported_counts(monkeypatch, version, problem):
    monkeypatch.setattr(doctor, "version_here", lambda: version)
    seen, problem_here = doctor.open_clip_version()
    assert seen.startswith(f"{version} ")
    assert "4.x, tested with main of 27 June 2026 (4.2.0.dev0)" in seen
    assert (problem_here is None) if problem is None else problem_here.startswith(problem)


def test_a_wrong_gradient_is_found(monkeypatch):
    assert doctor.dga_error(torch.device("cpu")) <= doctor.TOLERANCE
    backward = DecoupledGradientAccumulation.backward

    def slightly_wrong(self, *arguments, **options):
        losses = backward(self, *arguments, **options)
        next(self._inner.parameters()).grad.mul_(1.001)
        return losses

    monkeypatch.setattr(DecoupledGradientAccumulation, "backward", slightly_wrong)
    assert "differs from one graph's" in (problem_of("cpu") or "")


@pytest.mark.parametrize("gone", ["packaging", "torch"])
def test_without_a_package_that_it_needs(monkeypatch, capsys, gone):
    """An entry of None in sys.modules makes Python report that the module cannot be found."""
    monkeypatch.setitem(sys.modules, gone, None)
    monkeypatch.setitem(sys.modules, f"{gone}.requirements", None)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert f"import of {gone}" in out and "install open_clip_zerovl again" in out
    assert "open files" in out  # a check that fails does not end the others


FREE = SimpleNamespace(free=2**20)
FAULTS = [  # topic, what is not as it should be, words of the remedy
    (
        "cpu",
        {"torch.cuda.is_available": False, "shutil.which": "nvidia-smi"},
        "CUDA_VISIBLE_DEVICES",
    ),
    ("shared memory", {"shutil.disk_usage": FREE}, "--shm-size"),
    ("open files", {"resource.getrlimit": (256, 4096)}, "`ulimit -n 4096`"),
]


@pytest.mark.parametrize(("topic", "here", "words"), FAULTS)
def test_a_fault_of_the_machine_has_its_remedy(monkeypatch, topic, here, words):
    for name, result in here.items():
        monkeypatch.setattr(name, lambda *_, result=result: result)
    assert words in (problem_of(topic) or "")
