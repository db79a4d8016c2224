"""The storage and the update of the state where ranks share it (`mesh.shard_state`).

A rank updates its shares of the parameters with its shares of the moments and of the gradients.
With `moments` it then gathers the updated shares. For parameters that are stored in halves
(`scmoe.training.masters`), only the bfloat16 halves are gathered, 2 bytes a parameter: the other
halves lie with the moments, because no model reads them.

Bytes a rank stores for each parameter that N ranks divide, with AdamW's float32 moments (8 bytes)
and no average; the last two columns are the sums, with parameters in halves:

| mesh.shard_state | parameters                       | moments | N = 2 | N = 8 |
|------------------|----------------------------------|---------|-------|-------|
| none             | 4                                | 8       | 12    | 12    |
| moments          | 2 + 2/N in halves, else 4        | 8/N     | 7     | 3.25  |
| parameters       | 4/N                              | 8/N     | 6     | 1.5   |
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from scmoe.parallel.shares import StateShares
from scmoe.training.masters import Halves, is_halves, readable

PyTree = Any


def stored_shardings(params: PyTree, shares: StateShares | None) -> tuple[PyTree, PyTree]:
  """Two trees of shardings: of the stored parameters, and of moments and other arrays beside them.

  The other arrays are the average of the weights and every `Halves.low`.

  Args:
    params: NamedShardings of whole parameters.
    shares: None: the state is not shared, and both are `params`.
  """
  if shares is None:
    return params, params
  place = lambda old, spec: NamedSharding(old.mesh, spec)
  divided = jax.tree.map(place, params, shares.share_specs)
  return (divided if shares.parameters else params), divided


def own_shares(params: PyTree, shares: StateShares | None) -> PyTree:
  """This rank's shares of the stored parameters, arrays or `Halves`.

  Parameters that ranks do not divide stay whole. If `shares` is None, or if the state stores shares
  of the parameters already, it returns `params` unchanged.
  """
  if shares is None or shares.parameters:
    return params
  high = shares.own(readable(params))
  join = lambda x, cut: Halves(cut, x.low) if is_halves(x) else cut
  return jax.tree.map(join, params, high, is_leaf=is_halves)


def gathered_again(new: PyTree, shares: StateShares | None) -> PyTree:
  """Updated shares as the state stores them: gathered if the state stores whole parameters.

  With `mesh.shard_state=moments` a rank stores whole arrays, or `Halves` with a whole `high` and
  the rank's share of `low`. With `parameters` it stores its shares.

  Args:
    new: this rank's updated shares, arrays or `Halves`.
    shares: None: `new` are whole parameters.
  """
  if shares is None or shares.parameters:
    return new
  high = shares.whole(readable(new))
  join = lambda x, whole: Halves(whole, x.low) if is_halves(x) else whole
  return jax.tree.map(join, new, high, is_leaf=is_halves)
