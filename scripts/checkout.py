"""Importing this lets a script that is started by its path find the packages of its checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
