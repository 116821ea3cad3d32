"""Profiles inference under run-time knobs, in steps named by letters; `pipeline.py` has them in order."""

__version__ = "0.2.0"
