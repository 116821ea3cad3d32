"""What a wheel contains: the packages, and the embedded model as one of them. All else is in pyproject.toml."""

from setuptools import find_packages, setup

EMBEDDED_MODEL = "experiment_core_utils.checkpoints.molmoe_tiny"

setup(
    packages=[*find_packages(include=["experiment_core_utils*", "experiments*", "knob_profiler*"]), EMBEDDED_MODEL],
    package_dir={EMBEDDED_MODEL: "checkpoints/molmoe_tiny"},
)
