"""The weighted sum of shared and routed output (paper §5.2, Eq. 14-17)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scmoe.kernels.wide_sums import weighed

MIXES = ("direct", "cg1", "cg2")


class Mix(nnx.Module):
  """shared + routed; in cg1 and cg2 with coefficients that are computed from an input x.

  direct: shared + routed
  cg1:    sigmoid(w·x) · shared + routed                     w in R^{1 x D}
  cg2:    softmax(W·x)[0] · shared + softmax(W·x)[1] · routed   W in R^{2 x D}

  Args:
    kind: one of `MIXES`.
    width: D.
    init_std: standard deviation of the initial w or W.
    rngs: stream `params` for the initial weights.
  """

  def __init__(self, kind: str, width: int, *, init_std: float, rngs: nnx.Rngs):
    self.kind = kind
    outputs = {"direct": 0, "cg1": 1, "cg2": 2}[kind]
    self.weight = (
      nnx.Param(
        init_std * jax.random.normal(rngs.params(), (width, outputs), jnp.float32),
        axes=("embed", None),
      )
      if outputs
      else None
    )

  def __call__(self, shared_BSD: Array, routed_BSD: Array, x_BSD: Array) -> Array:
    """Shared plus routed output; coefficients (cg1, cg2) are computed in float32 at least."""
    if self.weight is None:
      return shared_BSD + routed_BSD
    wide = jnp.promote_types(x_BSD.dtype, jnp.float32)
    x_BSD, weight = x_BSD.astype(wide), self.weight[...].astype(wide)
    if self.kind == "cg1":
      # For one token this is a product of two vectors. XLA's GPU compiler must turn such a product
      # into a sum, and decoding disables that pass. So it is written as a sum.
      score_BS1 = jnp.sum(x_BSD * weight[:, 0], axis=-1, keepdims=True)
      return weighed(jax.nn.sigmoid(score_BS1), shared_BSD) + routed_BSD
    share_BS2 = jax.nn.softmax(x_BSD @ weight)
    return weighed(share_BS2[..., :1], shared_BSD) + weighed(share_BS2[..., 1:], routed_BSD)
