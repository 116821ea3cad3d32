"""What a wheel contains: the packages that `knobprof` reaches, and the embedded model as one of them.

All else is in pyproject.toml.
"""

from setuptools import find_packages, setup

EMBEDDED_MODEL = "experiment_core_utils.checkpoints.molmoe_tiny"

PACKAGES = find_packages(
    include=["experiment_core_utils*", "experiments*", "knob_profiler*"],
    exclude=["experiments.benchmarks*", "experiments.block_importance.from_checkout*"],
)

setup(
    packages=[*PACKAGES, EMBEDDED_MODEL],
    package_dir={EMBEDDED_MODEL: "checkpoints/molmoe_tiny"},
)
