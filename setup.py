"""The package is described in pyproject.toml; this file serves tools that ask for a setup.py."""

from setuptools import setup

setup()
