"""Two ways to compute one function: a fast one, and one that can also give its gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def without_gradient(fast: Callable[..., Any], plain: Callable[..., Any], *operands: Any) -> Any:
  """fast(*operands); where a gradient is asked for, plain(*operands) instead, and its gradient.

  Args:
    fast, plain: two ways to compute the same result, or partial sums with the same total; neither
      closes over traced values.
    *operands: pytrees of arrays.
  """
  return fast(*operands)


without_gradient.defvjp(
  lambda fast, plain, *operands: jax.vjp(plain, *operands),
  lambda fast, plain, pull, cotangents: pull(cotangents),
)
