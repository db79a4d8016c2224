"""Starts one architecture from the weights of another: `scmoe.convert --upcycle`.

From a top-k model to a shortcut model. Attention keeps its weights. Under Pos-2 with a MoE in every
block, the experts of layer i read the output of layer i - 1's attention, which in the source the
experts of layer i - 1 read. So every MoE moves to the next layer: its input stays the same, and its
output is added one attention later. The source's last MoE is dropped. Layer 0 keeps a copy of its
own MoE whose down projection is zero, so that it adds nothing at first. Under other wirings, or if
the source has a shared expert or zero experts, each MoE stays in its layer and reads another value
than in the source: zero experts return their input, which no down projection silences. The norm of
the shortcut starts as a copy of the norm before the source's experts. A shared expert that the
source does not have starts with a down projection of zeros, and its output is added with
`model.mix=direct`. A source's own shared expert, with its mix, stays as it is. If the source has
the wiring already, every parameter is a copy. `farskip_routed` has the parameters of a top-k model,
and each of them is a copy, too.

From a dense model to a MoE (sparse upcycling, arXiv 2212.05055). Every expert starts as a copy of
its layer's MLP. Under `topk` with weights that add up to 1, the new model computes the same
function as the source. If the wiring has a shared expert, the MLP becomes the shared expert, and
the routed experts start with down projections of zeros.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.blocks.wiring import WIRINGS, Tap, is_handed_over
from scmoe.models.config import ModelConfig
from scmoe.moe.options import RouterConfig
from scmoe.pretrained.requests import parsed

_KEYS = ("wiring", "experts", "top_k")
_UNIT, _MOE = "params.stages.units.0.", "params.stages.moe."
_EXPERTS = _MOE + "experts."


class Upcycling(NamedTuple):
  """A checked request of `--upcycle`.

  Attributes:
    model, router: options of the new model.
    from_dense: whether the source is a dense model.
    moves: whether every MoE moves to the next layer, where it reads the same value as in the
      source.
    norm: name in a unit of the norm that the new `own_norm` copies.
    norm_of_layer_before: whether it is that of the layer before.
    first_norm: name of the norm of the first unit that its `own_norm` copies instead; "": none.
  """

  model: ModelConfig
  router: RouterConfig
  from_dense: bool
  moves: bool = False
  norm: str = ""
  norm_of_layer_before: bool = False
  first_norm: str = ""


def plan(text: str, model: ModelConfig, router: RouterConfig) -> Upcycling:
  """Parses the flag, e.g. `wiring=scmoe_pos2` or `experts=8,top_k=2`, and checks it.

  Args:
    text: the flag's value.
    model, router: options of the source.

  Raises:
    ConfigError: the text has another form, or does not fit the source.
  """
  given = parsed("upcycle", text, _KEYS, "wiring=scmoe_pos2 or experts=8,top_k=2")
  numbers = {}
  for name in ("experts", "top_k"):
    if name in given:
      if not re.fullmatch("[1-9][0-9]{0,6}", given[name]):
        raise ConfigError(f"--upcycle: {name}={given[name][:40]!r} is not a number of experts")
      numbers[name] = int(given[name])
  wiring = given.get("wiring", "topk" if "experts" in given else "")
  if wiring not in WIRINGS or not WIRINGS[wiring].taps or WIRINGS[wiring].units_per_moe > 1:
    names = ", ".join(n for n, w in WIRINGS.items() if w.taps and w.units_per_moe == 1)
    raise ConfigError(f"--upcycle: wiring={wiring!r} is not supported; one of: {names}")
  if wiring == model.wiring and not numbers:
    return Upcycling(model, router, from_dense=False)
  old = model.wiring_rule
  from_dense = not old.taps
  if from_dense != ("experts" in given):
    need = "has no experts: add experts=N" if from_dense else "has experts already: leave experts"
    raise ConfigError(f"--upcycle={text!r}: the source {need}")
  if len(old.taps) > 1 or old.units_per_moe > 1:
    raise ConfigError(
      f"--upcycle={text!r}: the source has model.wiring={model.wiring!r}, whose experts serve "
      "several gatings or units; give a source with one gating a layer, e.g. topk"
    )
  if old.shared_expert and not WIRINGS[wiring].shared_expert:
    raise ConfigError(
      f"--upcycle: wiring={wiring!r} has no place for the shared expert of the source; use "
      "scmoe_pos1, scmoe_pos2, scmoe_pos3 or farskip"
    )
  new, changes = model.with_wiring(wiring), dict[str, Any]()
  if not old.shared_expert:
    changes["mix"] = "direct"
  rule = new.wiring_rule
  free = rule.is_shortcut and not rule.norm_mlp_feeds_experts  # to have a norm of its own
  if free and (not old.is_shortcut or model.shortcut_norm == "shared"):
    changes["shortcut_norm"] = "own"
  if from_dense and model.zero_experts:
    raise ConfigError(
      f"--upcycle={text!r}: the source has model.zero_experts={model.zero_experts}, which would "
      "add their input to the MLP's output; give a dense source with model.zero_experts=0"
    )
  if from_dense:
    hidden = model.mlp_hidden
    changes["num_experts"] = numbers["experts"]
    changes |= {"expert_hidden": hidden, "shared_hidden": hidden}
    changes["top_k"] = numbers.get("top_k", min(2, numbers["experts"]))
    k = WIRINGS[wiring].routed_per_gating(changes["top_k"])
    router = dataclasses.replace(router, normalise=k > 1, balance="gshard", balance_loss=0.01)
  else:
    changes["top_k"] = numbers.get("top_k", old.routed_per_gating(model.top_k))
  if not from_dense and not old.shared_expert:
    changes["shared_hidden"] = model.expert_hidden
  new = dataclasses.replace(new, **changes).resolve()
  plain = old.taps == (Tap.CURRENT,)
  handed = rule.taps == (Tap.ATTENTION,) and is_handed_over(Tap.ATTENTION, new.moe_every)
  # A source's shared expert stays in its layer, so the routed experts beside it stay too. Zero
  # experts return their input, so that a first layer with them would not be silent.
  moves = plain and handed and not old.shared_expert and new.num_pairs > 1
  moves = moves and not new.dense_indices and not new.zero_experts
  norm, older = _norm_before_experts(model)
  first = _norm_of_first_unit(model)
  return Upcycling(new, router, from_dense, moves, norm, older or moves, first)


def _norm_before_experts(model: ModelConfig) -> tuple[str, bool]:
  """The norm through which a model's experts, or a dense model's last MLPs, read their input.

  Only for models without `own_norm`.

  Returns:
    its name in a unit, e.g. "blocks.1.norm_mlp", and whether it is the one of the layer before.
  """
  last, rule = model.moe_every - 1, model.wiring_rule
  tap = rule.taps[0] if rule.taps else Tap.CURRENT
  if tap is Tap.CURRENT or rule.skips:
    return f"blocks.{last}.norm_mlp", False
  if tap is Tap.BLOCK_OUTPUT:
    return f"blocks.{last}.norm_attention", False
  name = "norm_mlp" if tap is Tap.ATTENTION else "norm_attention"
  return f"blocks.{max(last - 1, 0)}.{name}", is_handed_over(tap, model.moe_every)


def _norm_of_first_unit(model: ModelConfig) -> str:
  """The norm through which the experts of the first unit read, if it differs from the others'.

  Only for models without `own_norm`. "": the first unit's experts read as the others do, or the
  model begins with a dense layer.
  """
  last, rule = model.moe_every - 1, model.wiring_rule
  if 0 in model.dense_indices:
    return ""
  handed = rule.taps == (Tap.ATTENTION,) and is_handed_over(Tap.ATTENTION, model.moe_every)
  # Nothing is handed over to the first unit: its experts read its input, as its attention does.
  return f"blocks.{last}.norm_attention" if handed or model.opens_apart else ""


def fill(
  source: Mapping[str, Array], shapes: Mapping[str, Any], fresh: Callable[[], Any], of: Upcycling
) -> tuple[dict[str, Array], dict[str, str]]:
  """Makes the new model's parameters.

  Args:
    source: parameters and router state of the source by dotted name, on the same mesh.
    shapes: `jax.ShapeDtypeStruct` with sharding of each parameter of the new model, by name.
    fresh: returns random initial values of all new parameters, by name; called under jit.
    of: the request.

  Returns:
    parameters and router state by name; and, for each parameter that is not a plain copy, a phrase
    for the user that says where its values come from.
  """
  found: dict[str, Array] = {}
  begun: dict[str, str] = {}
  drawn: list[str] = []
  shared, last = of.model.wiring_rule.shared_expert, of.model.moe_every - 1
  mlp, own_norm = f"{_UNIT}blocks.{last}.mlp.", f"{_UNIT}own_norm."
  for name, shape in shapes.items():
    of_layers = name.startswith(_MOE) or (name.startswith("router.") and shape.ndim > 1)
    if of.moves and of_layers and name in source:
      silent = name.startswith(_EXPERTS + "down")
      found[name] = _moved(source[name], shape, 0.0 if silent else 1.0)
      first = "zeros" if silent else "its own"
      begun[name] = f"from the layer before; in the first layer {first}"
    elif _same(source.get(name), shape):
      found[name] = source[name]
    elif (
      of.from_dense
      and name.startswith(_EXPERTS)
      and (mlp + name.removeprefix(_EXPERTS) not in source)
    ):
      found[name], begun[name] = _zeros(shape), "zeros: the layer's MLP has no such bias"
    elif of.from_dense and name.startswith(_EXPERTS):
      origin = source[mlp + name.removeprefix(_EXPERTS)]
      silent = shared and name.startswith(_EXPERTS + "down")
      found[name] = _repeated(origin, shape, 0.0 if silent else 1.0)
      begun[name] = "zeros" if silent else "the layer's MLP, copied to every expert"
    elif name == mlp + "down":
      found[name], begun[name] = _zeros(shape), "zeros, so that it adds nothing at first"
    elif name.startswith(own_norm):
      part = name.removeprefix(own_norm)
      origin = source[f"{_UNIT}{of.norm}.{part}"]
      found[name] = _moved(origin, shape, 1.0) if of.norm_of_layer_before else origin
      if of.first_norm:
        found[name] = _begins_as(found[name], source[f"{_UNIT}{of.first_norm}.{part}"], shape)
      where = " of the layer before" if of.norm_of_layer_before else ""
      begun[name] = f"the norm before the experts{where}"
    elif name.startswith("router."):
      found[name], begun[name] = _zeros(shape), "zeros"
    else:
      drawn.append(name)
      begun[name] = "random"
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
  """Moves slice i of [L, ...] to i + 1 and drops the last; slice 0 becomes `first` times itself."""
  make = lambda x: jnp.concatenate([first * x[:1], x[:-1]]).astype(x.dtype)
  return jax.jit(make, out_shardings=shape.sharding)(origin)


def _begins_as(origin: Array, other: Array, shape: Any) -> Array:
  """[L, ...] with slice 0 of another array of that shape."""
  make = lambda x, y: jnp.concatenate([y[:1], x[1:]]).astype(x.dtype)
  return jax.jit(make, out_shardings=shape.sharding)(origin, other)


def _repeated(origin: Array, shape: Any, factor: float) -> Array:
  """[L, ...] to [L, E, ...]: each of E experts gets `factor` times the same values."""
  make = lambda x: factor * jnp.broadcast_to(x[:, None], shape.shape).astype(x.dtype)
  return jax.jit(make, out_shardings=shape.sharding)(origin)
