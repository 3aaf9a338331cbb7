"""The network of Appendix A.3 as printed: the reference of tests of the folded one, and the peer of its speed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from sharpmax.tasks.max_retrieval.data import CLASSES, Batch


class Model(nn.Module):
    n_classes: int = 10
    n_feats: int = 128
    activation: Callable = nn.gelu

    @nn.compact
    def __call__(self, x: jax.Array, q: jax.Array) -> jax.Array:
        x = nn.Dense(features=self.n_feats)(x)
        x = self.activation(x)
        x = nn.Dense(features=self.n_feats)(x)
        x = self.activation(x)
        q = nn.Dense(features=self.n_feats)(q)
        q = self.activation(q)
        q = nn.Dense(features=self.n_feats)(q)
        x = nn.MultiHeadDotProductAttention(num_heads=1, qkv_features=self.n_feats)(inputs_q=q, inputs_kv=x)
        x = nn.Dense(features=self.n_feats)(jnp.squeeze(x, -2))
        x = self.activation(x)
        return nn.Dense(features=self.n_classes)(x)


def features(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """``rho_i || onehot(kappa_i)`` ``[sets, n, 11]`` and the query ``[sets, 1, 1]``, as the listing takes them."""
    onehot = jax.nn.one_hot(batch.category, CLASSES, dtype=batch.priority.dtype)
    return jnp.concatenate([batch.priority[..., None], onehot], axis=-1), batch.query[:, None, :]
