"""Single files of a large package, imported from where it lies without running the package's own start-up.

`import_sources` reads modules from a checkout or an installed package. Folders become plain namespaces, so that no
`__init__` runs, and modules that would bring in the rest of the package are replaced by the stand-ins the caller gives.
Afterwards `sys.modules` is as it was: the stand-ins are seen by the imported files alone.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location, spec_from_loader
from pathlib import Path
from typing import Any

StandIns = Mapping[str, Mapping[str, Any]]  # module name -> its attributes


def package_folder(package: str, path: Path | None) -> Path | None:
    """The folder of a package, installed where `path` is None, else in `path`, in `path`/python, or `path` itself."""
    if path is None:
        spec = find_spec(package)
        return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None  # fmt: skip
    places = (path / package, path / "python" / package, path)
    return next((place for place in places if place.name == package and place.is_dir()), None)


def first_module(folder: Path, names: Sequence[str]) -> str | None:
    """The first of some dotted names whose file is in the package: a module moves from release to release."""
    return next((name for name in names if _file(folder, name).is_file()), None)


def import_sources(folder: Path, names: Sequence[str], stand_ins: StandIns) -> list[types.ModuleType]:  # fmt: skip
    """The modules with these dotted names. Raises ImportError, which names a module that has no stand-in."""
    with _only(folder, stand_ins):
        return [import_module(name) for name in names]


def accepted(function: Callable[..., Any], **keywords: Any) -> dict[str, Any]:
    """Those keywords that a function takes: arguments with a neutral value come and go between releases."""
    taken = inspect.signature(function).parameters
    return {name: value for name, value in keywords.items() if name in taken}


def _file(folder: Path, name: str) -> Path:
    return folder.joinpath(*name.split(".")[1:]).with_suffix(".py")


class _StandIn(Loader):
    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._attributes = attributes

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(self._attributes)


class _Finder(MetaPathFinder):
    def __init__(self, folder: Path, stand_ins: StandIns) -> None:
        self._folder, self._stand_ins = folder, stand_ins

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self._folder.name:
            return None
        if fullname in self._stand_ins:
            return spec_from_loader(fullname, _StandIn(self._stand_ins[fullname]), is_package=True)
        file = _file(self._folder, fullname)
        if file.is_file():
            return spec_from_file_location(fullname, file)
        if file.with_suffix("").is_dir():
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [str(file.with_suffix(""))]
            return spec
        raise ModuleNotFoundError(f"{fullname} is not in {self._folder}", name=fullname)


@contextmanager
def _only(folder: Path, stand_ins: StandIns) -> Iterator[None]:
    def names() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == folder.name]

    kept = {name: sys.modules.pop(name) for name in names()}
    finder = _Finder(folder, stand_ins)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in names():
            del sys.modules[name]
        sys.modules.update(kept)
