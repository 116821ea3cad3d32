"""Places inside the project."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EMBEDDED_MODEL = REPOSITORY / "checkpoints" / "molmoe_tiny"
