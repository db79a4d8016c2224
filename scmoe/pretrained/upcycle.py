"""Starting one architecture from the weights of another: `scmoe.convert --upcycle`.

From a top-k model to a shortcut model. Attention stays as it is. Under Pos-2 with a MoE in every
block, the experts of layer i read the value between attention and MoE of layer i - 1. The source's
experts of layer i - 1 read that same value. So every MoE moves one layer on: it reads what it has
always read, and its result comes one attention later. Layer 0 has no MoE to take over and begins
silent, with a last layer of zeros. The source's last MoE has no place. For other wirings experts
and router stay in their layer and read another value. The norm of the shortcut starts as that of
the experts' block. A shared expert that the source does not have begins with a last layer of zeros,
so that it adds nothing at first.

From a dense model to a MoE (sparse upcycling, arXiv 2212.05055). Every expert starts as the MLP of
its layer. Under `topk` with weights that add up to 1 that is the same function. Where a wiring has
a shared expert, the MLP becomes it, and the routed experts begin with a last layer of
zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.blocks.wiring import WIRINGS, Tap, is_handed_over
from scmoe.models.config import ModelConfig
from scmoe.moe.options import RouterConfig

_KEYS = ("wiring", "experts", "top_k")
_MLP, _MOE = "params.stages.units.0.blocks.0.mlp.", "params.stages.moe."
_EXPERTS = _MOE + "experts."


class Upcycling(NamedTuple):
  """A checked request of `--upcycle`.

  Attributes:
    model, router: options of the new model.
    from_dense: whether the source has no experts.
    moves: whether every MoE goes to the next layer, where it reads the same value as in the source.
  """

  model: ModelConfig
  router: RouterConfig
  from_dense: bool
  moves: bool = False


def plan(text: str, model: ModelConfig, router: RouterConfig) -> Upcycling:
  """Reads `wiring=scmoe_pos2` or `experts=8,top_k=2` for a source of this architecture.

  Args:
    text: value of the flag.
    model, router: options of the source.

  Raises:
    ConfigError: the text cannot be read, or does not fit the source.
  """
  parts = [part.partition("=") for part in text.split(",")]
  given = {key.strip(): value.strip() for key, _, value in parts}
  unknown = next((name for name in given if name not in _KEYS), None)
  if unknown is not None or not all(given.values()):
    raise ConfigError(
      f"--upcycle={text!r} has {unknown or 'a key without a value'}; write wiring=WIRING, "
      "experts=N, top_k=K, or several of them with commas"
    )
  numbers = {}
  for name in ("experts", "top_k"):
    if name in given:
      if not given[name].isdecimal() or not int(given[name]):
        raise ConfigError(f"--upcycle: {name}={given[name]!r} is not a number of experts")
      numbers[name] = int(given[name])
  wiring = given.get("wiring", "topk" if "experts" in given else "")
  if wiring not in WIRINGS or not WIRINGS[wiring].taps or WIRINGS[wiring].units_per_moe > 1:
    names = ", ".join(n for n, w in WIRINGS.items() if w.taps and w.units_per_moe == 1)
    raise ConfigError(f"--upcycle: wiring={wiring!r} cannot be started so; one of: {names}")
  from_dense = not model.wiring_rule.taps
  if from_dense != ("experts" in given):
    need = "has no experts: add experts=N" if from_dense else "has experts already: leave experts"
    raise ConfigError(f"--upcycle={text!r}: the source {need}")
  if model.wiring_rule.shared_expert and not WIRINGS[wiring].shared_expert:
    raise ConfigError(
      f"--upcycle: wiring={wiring!r} has no place for the shared expert of the source; use "
      "scmoe_pos1, scmoe_pos2 or scmoe_pos3"
    )
  changes: dict[str, Any] = {"wiring": wiring, "mix": "direct"}
  if WIRINGS[wiring].is_shortcut:
    changes["shortcut_norm"] = "own"
  if from_dense:
    hidden = model.mlp_hidden
    changes |= {"num_experts": numbers["experts"], "moe_every": 1}
    changes |= {"expert_hidden": hidden, "shared_hidden": hidden}
    changes["top_k"] = numbers.get("top_k", min(2, numbers["experts"]))
    k = WIRINGS[wiring].routed_per_gating(changes["top_k"])
    router = dataclasses.replace(router, normalise=k > 1, balance="gshard", balance_loss=0.01)
  elif "top_k" in numbers:
    changes["top_k"] = numbers["top_k"]
  if not from_dense and not model.wiring_rule.shared_expert:
    changes["shared_hidden"] = model.expert_hidden
  new = dataclasses.replace(model, **changes).resolve()
  rule, plain = new.wiring_rule, model.wiring_rule.taps == (Tap.CURRENT,)
  handed = rule.taps == (Tap.ATTENTION,) and is_handed_over(Tap.ATTENTION, new.moe_every)
  # A shared expert stays in its layer; routed experts beside it then stay too.
  moves = plain and handed and not model.wiring_rule.shared_expert and new.num_pairs > 1
  return Upcycling(new, router, from_dense, moves and not new.dense_indices)


def fill(
  source: Mapping[str, Array], shapes: Mapping[str, Any], fresh: Callable[[], Any], of: Upcycling
) -> tuple[dict[str, Array], dict[str, str]]:
  """Makes the new model's parameters.

  Args:
    source: parameters and router state of the source by dotted name, on the same mesh.
    shapes: of the new model's parameters, each a `jax.ShapeDtypeStruct` with its sharding.
    fresh: makes initial values of all new parameters, by name; called under jit.
    of: the request.

  Returns:
    parameters and router state by name; and, for each parameter that the source does not have as it
    is, how it begins.
  """
  found: dict[str, Array] = {}
  begun: dict[str, str] = {}
  drawn: list[str] = []
  shared, last = of.model.wiring_rule.shared_expert, of.model.moe_every - 1
  shared_down = f"params.stages.units.0.blocks.{last}.mlp.down"
  for name, shape in shapes.items():
    if of.moves and name.startswith(_MOE):
      silent = name.startswith(_EXPERTS + "down")
      found[name] = _moved(source[name], shape, 0.0 if silent else 1.0)
      begun[name] = "of the layer before; in the first layer " + ("zeros" if silent else "its own")
    elif _same(source.get(name), shape):
      found[name] = source[name]
    elif of.from_dense and name.startswith(_EXPERTS):
      origin = source[_MLP + name.removeprefix(_EXPERTS)]
      silent = shared and name.endswith(".down")
      found[name] = _repeated(origin, shape, 0.0 if silent else 1.0)
      begun[name] = "zeros" if silent else "the layer's MLP, for every expert"
    elif name == shared_down:
      found[name], begun[name] = _zeros(shape), "zeros: adds nothing yet"
    elif name.endswith("own_norm.scale"):
      block = f"blocks.{last}.norm_mlp.scale"
      origin = source[name.replace("own_norm.scale", block)]
      found[name] = _moved(origin, shape, 1.0) if of.moves else origin
      begun[name] = "the norm of the experts' block" + (", the layer before" if of.moves else "")
    elif name.startswith("router."):
      found[name], begun[name] = _zeros(shape), "zeros"
    else:
      drawn.append(name)
      begun[name] = "drawn"
  if drawn:
    places = {name: shapes[name].sharding for name in drawn}
    take = lambda: (lambda all_: {name: all_[name] for name in drawn})(fresh())
    found |= jax.jit(take, out_shardings=places)()
  return {name: found[name] for name in shapes}, begun


def _same(leaf: Array | None, shape: Any) -> bool:
  return leaf is not None and leaf.shape == shape.shape


def _zeros(shape: Any) -> Array:
  return jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=shape.sharding)()


def _moved(origin: Array, shape: Any, first: float) -> Array:
  """[L, ...] with layer i's slice at i + 1; slice 0 is `first` times the source's own."""
  make = lambda x: jnp.concatenate([first * x[:1], x[:-1]]).astype(x.dtype)
  return jax.jit(make, out_shardings=shape.sharding)(origin)


def _repeated(origin: Array, shape: Any, factor: float) -> Array:
  """[L, ...] to [L, E, ...]: `factor` times the same values for each expert."""
  make = lambda x: factor * jnp.broadcast_to(x[:, None], shape.shape).astype(x.dtype)
  return jax.jit(make, out_shardings=shape.sharding)(origin)
