"""`zerovl doctor`: versions against the supported ranges, a step on each device, limits; no check ends another."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import open_clip
import pytest
import torch

from open_clip_zerovl.cli.program import main
from open_clip_zerovl.dga import DecoupledGradientAccumulation
from open_clip_zerovl.plan import doctor


def plant(folder, name: str, version: str) -> None:
    """Metadata of a package of another version, found before the installed one's once the folder leads sys.path."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def of_topic(findings, topic):
    return next(finding for finding in findings if finding.topic == topic)


def test_on_this_machine_doctor_finds_no_unexpected_problem(capsys, tmp_path):
    status = main(["doctor", "--json", "--logs", str(tmp_path / "not" / "yet")])
    findings = json.loads(capsys.readouterr().out)
    problems = [finding for finding in findings if finding["problem"] is not None]
    assert status == int(bool(problems))
    assert {finding["topic"] for finding in problems} <= {
        "disk for --logs",
        "shared memory",
        "open files",
    }
    topics = [finding["topic"] for finding in findings]
    assert {
        "python",
        "open_clip_torch",
        "torch",
        "transformers",
        "timm",
        "webdataset",
        "numpy",
    } <= set(topics)
    assert {"CUDA", "cpu", "gloo", "CPU cores", "open files", "disk for --logs"} <= set(topics)
    assert "pytest" not in topics
    assert not torch.distributed.is_initialized()


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
    assert of_topic(doctor.package_versions(), name).problem is None  # a negative control
    plant(tmp_path, name, version)
    monkeypatch.syspath_prepend(tmp_path)
    assert metadata.version(name) == version
    finding = of_topic(doctor.package_versions(), name)
    assert finding.problem == f"{version} is not supported; pip install {advice}"


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
    monkeypatch.setattr(open_clip, "__version__", version)
    finding = of_topic(doctor.package_versions(), "open_clip_torch")
    assert (
        finding.seen.startswith(f"{version} ")
        and "4.x, tested with main of 27 June 2026 (4.2.0.dev0)" in finding.seen
    )
    if version != metadata.version("open_clip_torch"):  # another one than is installed
        assert f"imported from {Path(open_clip.__file__).parent}" in finding.seen
    assert (finding.problem is None) if problem is None else finding.problem.startswith(problem)


def test_an_open_clip_of_a_wrong_version_is_found_by_the_command(tmp_path):
    """A package in front of the installed one, as a checkout on PYTHONPATH is."""
    package = tmp_path / "open_clip"
    package.mkdir()
    (package / "version.py").write_text('__version__ = "2.30.0"\n')
    (package / "__init__.py").write_text(
        "raise ImportError('no timm')\n"
    )  # or another thing that an older one lacks
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]),
    }
    program = "from open_clip_zerovl.plan.doctor import package_versions, page; print(page(package_versions()))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    seen = "1> open_clip_torch   2.30.0           supported: 3.3.x, tested with 3.3.0; 4.x, tested"
    assert seen in done.stdout, done.stdout + done.stderr
    assert f"imported from {package} in place of the installed" in done.stdout
    assert (
        "1. open_clip_torch: open_clip_torch 2.30.0 is not supported, 3.3.x and 4.x are; pip install"
        in done.stdout
    )


def test_not_installed_at_all(monkeypatch, capsys):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", absent)
    (finding,) = doctor.package_versions()
    assert (
        finding.seen == "not installed"
        and finding.problem is not None
        and "pip install it" in finding.problem
    )


def test_a_wrong_gradient_is_found(monkeypatch):
    error, _ = doctor.dga_error(torch.device("cpu"))
    assert error <= doctor.TOLERANCE
    backward = DecoupledGradientAccumulation.backward

    def slightly_wrong(self, *arguments, **options):
        losses = backward(self, *arguments, **options)
        next(self._inner.parameters()).grad.mul_(1.001)
        return losses

    monkeypatch.setattr(DecoupledGradientAccumulation, "backward", slightly_wrong)
    finding = of_topic(doctor.devices(), "cpu")
    assert finding.problem is not None and "differs from one graph's" in finding.problem


def test_a_check_that_fails_does_not_end_the_other_checks(monkeypatch):
    monkeypatch.setattr(doctor, "dga_error", lambda device: 1 / 0)
    monkeypatch.setattr(doctor, "process_groups", lambda: 1 / 0)
    findings = doctor.examine()
    assert "ZeroDivisionError" in (of_topic(findings, "cpu").problem or "")
    assert "ZeroDivisionError" in (of_topic(findings, "<lambda>").problem or "")
    assert of_topic(findings, "CPU cores").problem is None


@pytest.mark.parametrize("gone", ["packaging", "torch"])
def test_without_a_package_that_it_needs(monkeypatch, capsys, gone):
    """An entry of None in sys.modules makes Python report that the module cannot be found."""
    monkeypatch.setitem(sys.modules, gone, None)
    monkeypatch.setitem(sys.modules, f"{gone}.requirements", None)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert (
        f"{gone} is not installed; pip install open_clip_zerovl again" in out and "CPU cores" in out
    )


def test_a_driver_without_a_gpu_that_torch_sees(monkeypatch, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU that torch sees")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 570.12\necho 570.12\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (finding,) = doctor.graphics_driver()
    assert (
        "driver 570.12" in finding.seen
        and finding.problem is not None
        and "CUDA_VISIBLE_DEVICES" in finding.problem
    )


def test_small_limits_are_reported(monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**30, 2**30, 2**20))
    findings = doctor.limits(tmp_path)
    assert "--shm-size" in (of_topic(findings, "shared memory").problem or "")
    assert "choose another --logs" in (of_topic(findings, "disk for --logs").problem or "")


def test_the_page_numbers_what_is_wrong():
    findings = [
        doctor.Finding("a", "1"),
        doctor.Finding("bc", "2", "mend it"),
        doctor.Finding("d", "3", "and this"),
    ]
    assert doctor.page(findings).splitlines() == [
        "   a   1", "1> bc  2", "2> d   3", "", "1. bc: mend it", "2. d: and this",
    ]  # fmt: skip
    assert doctor.page(findings[:1]).endswith("Nothing is wrong.")
