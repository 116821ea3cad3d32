"""Source files that are imported with a piece of their text changed, while the files stay as they are."""

import importlib.machinery
import json
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

REPOSITORY = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.json")


@dataclass(frozen=True)
class Mutant:
    """A wrong change of a source file, and the test that fails with it.

    Attributes:
        file: from the repository's root.
        old, new: the piece of text that is there once, and what replaces it.
        test: the id of the killing test for pytest.
        why: what is wrong with the change.
    """

    file: str
    old: str
    new: str
    test: str
    why: str

    def source(self) -> str:
        """The changed text of the file; raises ValueError where `old` is not there exactly once."""
        text = (REPOSITORY / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times {self.old!r}, not once")
        return text.replace(self.old, self.new)

    def import_changed(self) -> None:
        """From now on this process imports the changed file; it must not have been imported yet."""
        path, source = str(REPOSITORY / self.file), self.source()
        as_it_is = importlib.machinery.SourceFileLoader.get_code

        def get_code(loader: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
            if loader.get_filename(fullname) != path:
                return as_it_is(loader, fullname)
            return compile(source, path, "exec", dont_inherit=True)

        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def listed_mutants() -> list[Mutant]:
    """The mutants of `mutants.json`, in its order."""
    return [Mutant(**each) for each in json.loads(LIST.read_text())]
