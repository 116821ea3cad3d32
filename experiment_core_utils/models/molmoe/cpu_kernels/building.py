"""In: a C++ source of this folder and its constants; out: its functions, compiled here.

The compiler is run once a process for each of them, for about a second.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from experiment_core_utils.primitives.errors import ConfigurationError, first_line

FOLDER = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
# OpenMP is not linked: its functions are found in the library that torch has loaded, and so are its threads.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi")


def built(source: str, **constants: int) -> ctypes.CDLL:
    """The library of a source, its constants defined.

    Raises:
        ConfigurationError: there is no compiler, it refuses, or what it made cannot be loaded.
    """
    asked = os.environ.get("CXX")
    compiler = shutil.which(asked) if asked else next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ConfigurationError(f"there is no C++ compiler ({asked or ', '.join(COMPILERS)})")
    defined = [f"-D{name}={value}" for name, value in constants.items()]
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder, "code.o"), Path(folder, "library.so")
        _run([compiler, *FLAGS, *defined, "-c", str(FOLDER / source), "-o", str(code)], source)
        _run([compiler, "-shared", str(code), "-o", str(library)], source)
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            raise ConfigurationError(f"what was made of {source} cannot be loaded: {first_line(error)}") from None


def _run(command: list[str], source: str) -> None:
    """Raises ConfigurationError with what the compiler said first."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise ConfigurationError(f"the C++ compiler cannot be run: {first_line(error)}") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr.splitlines() or ["nothing"])[0]
        raise ConfigurationError(f"the C++ compiler refuses {source}: {said}") from None
