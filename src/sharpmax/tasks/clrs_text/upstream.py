"""The generator of CLRS-Text as its authors wrote it, without the three gigabytes that its package asks for.

dm-clrs 2.0.1, the release of the paper's time, writes the text: its samplers, algorithms and formatting run here as
they are, from the installed package. What they import is another matter. The package asks for TensorFlow, Haiku,
Optax and more, for its own networks and datasets; the five modules that make text use NumPy and attrs, and of the
others only this:

=================================  ==================================================================================
``jax.tree_util.tree_map``         on lists of ``DataPoint``, to put samples together: written out below
``jax.Array``, ``tf.Tensor``       in ``isinstance``: nothing here is one
``chex.assert_rank``               on what the package's own samplers drew: left out
``jax.numpy.vectorize``            to decorate functions that are not called here: calling one raises
``absl.logging``                   one warning for every sampler: left out
=================================  ==================================================================================

So these modules are executed with an ``__import__`` of their own that answers with stand-ins. Nothing is put into
``sys.modules``: whoever imports jax, TensorFlow or clrs before, after or at the same time gets the real ones.
tests/tasks/clrs_text holds the text against that of the package with its real dependencies.
"""

from __future__ import annotations

import builtins
import functools
import importlib.metadata
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ...extras import require

VERSION = "2.0.1"
"""The release of dm-clrs; later ones print numbers otherwise."""

INSTALL = f"pip install 'sharpmax[clrs]' && pip install --no-deps dm-clrs=={VERSION}"

_LOCK = threading.Lock()


def find() -> Path:
    """The folder of the installed package, or an error that says how to install it."""
    try:
        package = importlib.metadata.distribution("dm-clrs")
    except importlib.metadata.PackageNotFoundError:
        message = f"making samples of CLRS-Text needs dm-clrs {VERSION}, which is not installed: {INSTALL}"
        raise ModuleNotFoundError(message, name="clrs") from None
    if package.version != VERSION:
        raise ValueError(f"expected dm-clrs {VERSION}, the text of the paper's time, got {package.version}: {INSTALL}")
    return Path(str(package.locate_file("clrs")))


def load() -> SimpleNamespace:
    """The modules ``samplers`` and ``clrs_utils`` of dm-clrs, executed once in a process."""
    with _LOCK:
        return _load(find())


@functools.cache
def _load(folder: Path) -> SimpleNamespace:
    require("attr", "clrs", "making samples of CLRS-Text")
    modules = _Modules(folder)
    return SimpleNamespace(
        samplers=modules.get("clrs._src.samplers"), text=modules.get("clrs._src.clrs_text.clrs_utils")
    )


class _Modules:
    """Modules of the package, by name, each executed when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.builtins = {**vars(builtins), "__import__": self.import_}
        self.known: dict[str, Any] = {name: SimpleNamespace() for name in ("clrs", "clrs._src", "clrs._src.clrs_text")}
        self.known |= _stand_ins()

    def get(self, name: str) -> Any:
        if name not in self.known:
            path = self.folder.joinpath(*name.split(".")[1:])
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            self.known[name] = module = ModuleType(name)
            module.__dict__.update(__file__=str(path), __builtins__=self.builtins)
            code: Any = SourceFileLoader(name, str(path)).get_code(name)
            exec(code, module.__dict__)
        return self.known[name]

    def import_(self, name: str, *arguments: Any, **options: Any) -> Any:
        """What ``import`` means in these modules; all of theirs are absolute."""
        top = name.partition(".")[0]
        if top == "clrs":
            names = options.get("fromlist", arguments[2] if len(arguments) > 2 else ()) or ()
            module = self.get(name)
            for part in names:
                if not hasattr(module, part):
                    setattr(module, part, self.get(f"{name}.{part}"))
            return module
        if top in self.known:
            return self.known[top]
        return builtins.__import__(name, *arguments, **options)


def _stand_ins() -> dict[str, Any]:
    class Nothing:
        """A type that nothing has."""

    def vectorize(function: Any, **_: Any) -> Any:
        @functools.wraps(function)
        def refused(*_arguments: Any, **_options: Any) -> Any:
            raise NotImplementedError(f"{function.__name__} of dm-clrs needs JAX, and is not used to make text")

        return refused

    def ignored(*_arguments: Any, **_options: Any) -> None:
        pass

    tree = SimpleNamespace(tree_map=_tree_map, register_pytree_node_class=lambda cls: cls)
    numpy = SimpleNamespace(vectorize=vectorize, ndarray=Nothing)
    return {
        "jax": SimpleNamespace(Array=Nothing, tree_util=tree, numpy=numpy),
        "tensorflow": SimpleNamespace(Tensor=Nothing),
        "chex": SimpleNamespace(assert_rank=ignored),
        "absl": SimpleNamespace(logging=SimpleNamespace(info=ignored, warning=ignored)),
    }


def _tree_map(function: Any, *lists: list[Any]) -> list[Any]:
    """``jax.tree_util.tree_map`` on lists of points, each of which has one array in it."""
    return [
        points[0].tree_unflatten(points[0].tree_flatten()[1], (function(*(point.data for point in points)),))
        for points in zip(*lists, strict=True)
    ]
