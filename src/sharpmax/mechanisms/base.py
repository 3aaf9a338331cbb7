"""What a mechanism is: a map from attention logits to attention weights, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from ..core.arrays import (
    Array,
    accumulation_dtype,
    broadcasts,
    device_of,
    dtype_name,
    library_of,
    logit_rows,
    mask_threshold,
    stop_gradient,
)
from ..core.policies import Policy
from ..core.policies.base import Serialisable, from_dict, from_file

SCHEMA = "sharpmax.mechanism/1"


class About(NamedTuple):
    """What there is to say of a mechanism, in a sentence or a formula each.

    =========  ==========================================================================
    title      what it is called in tables
    paper      where it comes from
    equation   weights ``a`` of logits ``s``, a row of ``n``
    training   what it needs when a model is trained with it
    theorem    whether Theorem 2.2 (softmax disperses as ``n`` grows) applies to it, and why
    disperses  whether all weights go to 0 as ``n`` grows, whatever bounds the logits have;
               false if there are bounds at which one weight need not
    =========  ==========================================================================
    """

    title: str
    paper: str
    equation: str
    training: str
    theorem: str
    disperses: bool


class Mechanism(Serialisable, abstract=True):
    """A way to turn attention logits ``[..., queries, keys]`` into weights: a frozen dataclass, saved as JSON.

    A subclass has :attr:`about` and :meth:`formula`; parameters that are learned start from :meth:`initial`.

    Attributes:
      about: title, paper, equation and what else there is to say.
      reads: what weights depend on: ``"row"``, the logits of a query as a set; ``"order"``, also the order of the
        keys; ``"rows"``, also the logits of earlier queries.
      maps: how many maps of logits make one of weights; those of a head follow each other on the axis of heads.
      inference: whether it makes sense to switch it on in a model that was trained with softmax.
      features: ``features(xp, x)``, what queries and keys go through before their product, or ``None``.
      activation: ``activation(xp, x)``, the activation of the feed-forward layer behind attention, or ``None``.
      folds: whether keys can come in chunks: ``fold(xp, carry, logits, visible, value, count, parameters)`` takes one,
        from ``None`` on, and ``finish(xp, carry)`` gives the output; the last chunk comes first if ``last_first``.
      heads: for how many heads parameters are learned, each its own; ``None`` for all heads together.
    """

    schema: ClassVar[str] = SCHEMA
    about: ClassVar[About]
    reads: ClassVar[Literal["row", "order", "rows"]] = "row"
    maps: ClassVar[int] = 1
    inference: ClassVar[bool] = True
    features: ClassVar[Any] = None
    activation: ClassVar[Any] = None
    folds: ClassVar[bool] = False
    last_first: ClassVar[bool] = False

    @property
    def heads(self) -> int | None:
        return None

    @property
    def policy(self) -> Policy | None:
        """The policy that gives the same weights as this, where it is softmax with a temperature."""
        return None

    def initial(self) -> dict[str, float]:
        """The value that each learned parameter starts from; nothing is learned by default."""
        return {}

    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters to start from, float32, of shape ``[heads]`` or ``[]``."""
        shape = () if self.heads is None else (self.heads,)
        return {name: np.full(shape, value, np.float32) for name, value in self.initial().items()}

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        """Weights of ``logits`` (float32 or float64, 0 where masked).

        ``visible`` is boolean and of the logits' shape; what is not visible has no weight, whatever is returned. The
        arrays of ``parameters`` broadcast against the logits.
        """
        raise NotImplementedError

    def fold(
        self, xp: Any, carry: Any, logits: Array, visible: Array, value: Array, count: Array, parameters: Any
    ) -> Any:
        """What is carried after a chunk of keys.

        ``logits`` are as :meth:`formula` gets them; ``value`` is ``[..., keys, columns]``, and ``count [..., queries,
        1]`` how many keys the whole row sees.
        """
        raise NotImplementedError

    def finish(self, xp: Any, carry: Any) -> Array:
        """The output ``[..., queries, columns]``, from what is carried after the last chunk."""
        raise NotImplementedError

    def __call__(
        self, logits: Array, where: Array | None = None, *, parameters: Mapping[str, Array] | None = None
    ) -> Array:
        """The weights of ``logits``, in their type.

        Args:
          logits: ``[..., queries, keys]``, or ``[keys]``; NumPy, PyTorch or JAX. A query stands beside the last key
            that it may see where order matters: the last query beside the last key.
          where: boolean, broadcasts against the logits; keys where it is false have no weight, nor have logits of
            ``-inf`` or of at most half of the type's lowest finite number. A row without any key is all zeros.
          parameters: arrays in the place of those that :meth:`parameters` starts from.
        """
        self.check_shape(tuple(getattr(logits, "shape", (1,))))
        lib, rows, _, mask = logit_rows(logits, -1, where)
        xp = lib.xp
        if logits.shape[-1] == 0:
            return logits if self.maps == 1 else logits[..., :: self.maps, :, :]
        visible = ~(logits < mask_threshold(dtype_name(logits)))
        if mask is not None:
            visible = visible & xp.reshape(mask, rows.shape)
        held = xp.where(visible, xp.astype(logits, accumulation_dtype(lib, logits), copy=False), 0.0)
        weights = self.formula(xp, held, visible, self.broadcast(xp, held, parameters))
        if self.maps == 1:
            weights = xp.where(visible, weights, 0.0)
        return xp.astype(weights, logits.dtype, copy=False)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Refuse logits of a shape that this cannot take."""
        title = self.about.title
        if not shape:
            raise ValueError("expected logits with an axis of keys, got a single number")
        if self.reads == "rows" and len(shape) < 2:
            raise ValueError(
                f"expected logits [..., queries, keys] for {title}, which reads earlier queries, got {shape}"
            )
        if self.maps > 1 and (len(shape) < 3 or shape[-3] % self.maps):
            raise ValueError(
                f"expected logits [..., heads, queries, keys] for {title}, with heads a multiple of {self.maps}, "
                f"got {shape}"
            )
        heads = None if self.heads is None else self.heads * self.maps
        if heads is not None and (len(shape) < 3 or shape[-3] != heads):
            raise ValueError(f"expected logits [..., {heads} heads, queries, keys] for {title}, got {shape}")

    def broadcast(self, xp: Any, logits: Array, parameters: Mapping[str, Array] | None) -> dict[str, Array]:
        """Parameters in the type of the logits; those of heads with axes for queries and keys behind them."""
        names = list(self.initial())
        if parameters is None:
            parameters = {k: xp.asarray(v, device=device_of(logits)) for k, v in self.parameters().items()}
        if sorted(parameters) != sorted(names):
            raise ValueError(
                f"expected parameters {', '.join(names) or 'none'} for {self.about.title}, "
                f"got {', '.join(parameters) or 'none'}"
            )
        return {name: self._fitted(xp, logits, name, array) for name, array in parameters.items()}

    def _fitted(self, xp: Any, logits: Array, name: str, array: Array) -> Array:
        library, given = library_of(logits).name, library_of(array).name
        if given != library and (library, given) != ("jax", "numpy"):
            raise TypeError(f"expected parameter {name} to be a {library} array like the logits, got a {given} array")
        array = xp.astype(array if given == library else xp.asarray(array), logits.dtype, copy=False)
        shape = tuple(array.shape)
        if self.heads is not None:
            if not shape or shape[-1] != self.heads or not broadcasts((*shape[:-1], 1, 1, 1), tuple(logits.shape)):
                raise ValueError(f"expected parameter {name} of shape [..., {self.heads} heads], got {shape}")
            return xp.reshape(array, (*shape, 1, 1))
        if not broadcasts(shape, tuple(logits.shape)):
            raise ValueError(
                f"expected parameter {name} to broadcast against logits of shape {tuple(logits.shape)}, got {shape}"
            )
        return array


def shifted(xp: Any, logits: Array, visible: Array) -> Array:
    """``s - max s`` of every row, which leaves weights that know no offset as they are; 0 where masked."""
    held = xp.where(visible, stop_gradient(logits), -xp.inf)
    highest = xp.max(held, axis=-1, keepdims=True)
    return xp.where(visible, logits - xp.where(xp.isinf(highest), 0.0, highest), 0.0)


def counts(xp: Any, visible: Array, like: Array) -> Array:
    """How many keys every row sees, at least 1, ``[..., queries, 1]`` in the type of ``like``."""
    return xp.maximum(xp.sum(xp.astype(visible, like.dtype), axis=-1, keepdims=True), xp.ones_like(like[..., :1]))


def check_no_mechanism(policy: Any) -> None:
    """Refuse a mechanism, or a module that holds one, in the place of a policy."""
    if isinstance(found := getattr(policy, "structure", policy), Mechanism):
        raise TypeError(f"expected a policy, got the mechanism {found}; give it to attention as mechanism=")


def load_mechanism(path: str | Path) -> Any:
    """Read a mechanism that was saved as JSON. Nothing in the file is executed."""
    return from_file(path, SCHEMA)


def mechanism_from_dict(content: Any) -> Any:
    """The mechanism that ``to_dict`` described."""
    return from_dict(content, SCHEMA)
