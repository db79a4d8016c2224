"""How alike two representations of the same tokens are: cosine, and centred kernel alignment.

The cosine compares a token's two vectors. The alignment (linear CKA) compares how tokens lie to
each other, so it is 1 as well if one representation is the other one turned, scaled or moved. With
a_i and b_i the two vectors of token i,

  CKA(a, b) = HSIC(A, B) / sqrt(HSIC(A, A) · HSIC(B, B)),  A_ij = a_i · a_j,  B_ij = b_i · b_j

The estimate of HSIC is the unbiased one of Song et al. 2012, so that its mean over batches
estimates the HSIC of all tokens (Nguyen et al. 2021). The ratio is taken once at the end, of sums
over batches, in which the number of batches cancels. The estimated alignment of unrelated values
may be below 0.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

SAMPLE = 1024  # most tokens of a batch that `gram` multiplies: memory grows with their square


def cosine(a: Float[Array, "... D"], b: Float[Array, "... D"]) -> Float[Array, ...]:
  """a · b / max(|a| |b|, 1e-12) of two vectors, in float32; so it is 0 where one of them is 0."""
  a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
  return (a * b).sum(-1) / jnp.maximum(norms, 1e-12)


def gram(x_TD: Float[Array, "T D"], mask_T: Float[Array, " T"]) -> Float[Array, "N N"]:
  """The scalar products of every two tokens' vectors, after their mean is subtracted; for `hsic`.

  Of more than `SAMPLE` tokens it takes `SAMPLE` spread evenly over the batch. Subtracting the
  mean changes no HSIC, and keeps float32 exact enough: the mean of a residual stream is often many
  times as large as the differences between tokens.

  Args:
    x_TD: one vector per token.
    mask_T: float32, 1 for tokens that count, else 0.

  Returns:
    [N, N], N = min(T, SAMPLE); 0 on the diagonal, and for tokens that do not count.
  """
  picked = np.linspace(0, len(mask_T) - 1, min(len(mask_T), SAMPLE)).astype(int)
  x, mask = x_TD[picked].astype(jnp.float32), mask_T[picked]
  mean = (x * mask[:, None]).sum(0) / jnp.maximum(mask.sum(), 1)
  x = (x - mean) * mask[:, None]
  products = jnp.einsum("id,jd->ij", x, x, precision="highest")
  return products * (1 - jnp.eye(len(picked)))


def counted(mask_T: Float[Array, " T"]) -> Float[Array, ""]:
  """Number of the tokens that count among those that `gram` takes."""
  picked = np.linspace(0, len(mask_T) - 1, min(len(mask_T), SAMPLE)).astype(int)
  return mask_T[picked].sum()


def hsic(a_NN: Float[Array, "N N"], b_NN: Float[Array, "N N"], n: Array) -> Float[Array, ""]:
  """The unbiased estimate of the Hilbert-Schmidt independence criterion of two Gram matrices.

  Args:
    a_NN, b_NN: from `gram`, of the same tokens.
    n: number of tokens that count (`counted`); with fewer than 4 the estimate is not defined, and
      the result is 0.
  """
  rows_a, rows_b = a_NN.sum(0), b_NN.sum(0)
  enough, n = n >= 4, jnp.maximum(n, 4.0)
  both = rows_a.sum() / (n - 1) * (rows_b.sum() / (n - 2))
  estimate = ((a_NN * b_NN).sum() + both - 2 / (n - 2) * (rows_a @ rows_b)) / (n * (n - 3))
  return jnp.where(enough, estimate, 0.0)
