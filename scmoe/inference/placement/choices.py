"""Records which experts the tokens of a text choose, in every gating of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from scmoe.base.errors import ConfigError
from scmoe.inference.listening import Heard, Layout, walk
from scmoe.inference.reading import Reading


class Choices(NamedTuple):
  """The experts that tokens have chosen, in N batches of T tokens and G gatings.

  Attributes:
    expert_NGTK: int32, the experts of each token, in the order of `Routing.expert_TK`; -1 for a
      choice of a token that is padding, and for a choice of a zero expert. Neither sends a row to
      an expert.
    layer_G: index of the MoE layer of each gating, counted among MoE layers from 0, ascending. Two
      gatings share a layer with the wirings `dgmoe` and `dgmoe_repeat`, and four with
      `dgmoe_share`, whose two units have one MoE.
    num_experts: E, experts that compute in each layer.
  """

  expert_NGTK: Int[np.ndarray, "N G T K"]
  layer_G: Int[np.ndarray, " G"]
  num_experts: int

  @property
  def layers(self) -> int:
    """L, number of MoE layers."""
    return int(self.layer_G[-1]) + 1

  def of_batches(self, which: slice) -> Choices:
    """The choices in some of the batches."""
    return self._replace(expert_NGTK=self.expert_NGTK[which])

  def chosen(self, gating: int) -> Int[np.ndarray, "N T E"]:
    """int8 [N, T, E], 1 where a token has chosen an expert in this gating, else 0."""
    expert_NTK = self.expert_NGTK[:, gating]
    shape = (*expert_NTK.shape[:2], self.num_experts + 1)
    found = np.zeros(shape, np.int8)  # column 0 takes the choices that are -1
    np.put_along_axis(found, expert_NTK + 1, 1, axis=-1)
    return found[..., 1:]

  def load_LE(self) -> Int[np.ndarray, "L E"]:
    """int64, number of choices of each expert in each layer, over all batches and gatings."""
    load_LE = np.zeros((self.layers, self.num_experts), np.int64)
    for gating, layer in enumerate(self.layer_G):
      load_LE[layer] += self.chosen(gating).sum((0, 1), dtype=np.int64)
    return load_LE


def record(model: Any, batches: Iterable[Any], reading: Reading) -> Choices:
  """Runs a language model over batches and returns the choices of all its routers.

  The model runs as in evaluation, without gate noise, pair by pair. Choices are recorded before a
  transport drops any.

  Args:
    model: a language model on one device, with routed experts.
    batches: the text, in batches of one shape.
    reading: how the model reads, with the run's router state.

  Raises:
    ConfigError: there are no batches; or see `reading.begin`.
  """
  trunks = reading.trunks(model)
  gatings = len(Layout(trunks).gatings)
  config = trunks[0].config
  layer_G = np.arange(gatings) // (gatings // config.num_pairs)

  def choose(model: Any, batch: Any) -> Any:
    begun, heard = reading.begin(model, batch), Heard()
    walk(reading.trunks(model)[0], begun.h_BSD, begun, begun.router[0], heard)
    rows = [r.computed for r in heard.routings]
    return jnp.stack([jnp.where(r.taken_TK, r.expert_TK, -1) for r in rows])

  run = nnx.jit(choose)
  found = [np.asarray(run(model, batch)) for batch in batches]
  if not found:
    raise ConfigError("the text is empty; give more of it")
  return Choices(np.stack(found), layer_G, config.num_experts)
