"""Tiny models beside their oracles: building, running, and comparing them leaf by leaf."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import tape
from flax import nnx
from jax.sharding import PartitionSpec as P

from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT, Pass
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.losses import gshard_loss, z_loss
from scmoe.parallel.collectives import total
from scmoe.parallel.gradients import reduce_gradients
from scmoe.parallel.mesh import BATCH_AXES, manual, parameter_specs

VOCAB, LENGTH, BATCH = 11, 6, 2
BALANCE, Z = 0.3, 0.1  # coefficients large enough for their gradients to be seen


def tiny(**fields: Any) -> ModelConfig:
  """A resolved float32 model: D=16, F=24, E=4, two heads."""
  defaults = {
    "num_experts": 4,
    "num_layers": 2 * fields.get("moe_every", 2),
    "width": 16,
    "num_heads": 2,
    "mlp_hidden": 24,
    "vocab_size": VOCAB,
    "context": LENGTH,
    "dtype": "float32",
  }
  if fields.get("style") == "llama":
    defaults |= {"num_kv_heads": 1, "tie_embeddings": False}
  if fields.get("wiring") == "dgmoe_share":
    defaults["num_layers"] *= 2
  return ModelConfig(**(defaults | fields)).resolve()


def parts(config: ModelConfig, seed: int = 0, **model: Any) -> tuple[Any, Any]:
  """Graph and parameters of a model in which no parameter is 0 or 1 and gates tell tokens apart."""
  # Abstract: drawing the initial weights, which are replaced here, would compile for seconds.
  graph, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(params=0), **model)))
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = jax.tree_util.keystr(path)
    std = 1.0 if "router_gate" in name or "tokens" in name else 0.25
    centre = 1.0 if "scale" in name else 0.0
    return jnp.asarray(centre + std * rng.normal(size=leaf.shape), leaf.dtype)

  return graph, jax.tree_util.tree_map_with_path(draw, state)


def filled(config: ModelConfig, seed: int = 0, **model: Any) -> Any:
  """A model with the parameters of `parts`."""
  return nnx.merge(*parts(config, seed, **model))


def tokens(seed: int = 0, batch: int = BATCH, length: int = LENGTH) -> np.ndarray:
  return np.random.default_rng(100 + seed).integers(0, VOCAB, (batch, length), np.int32)


def cotangent(seed: int = 0, batch: int = BATCH, length: int = LENGTH) -> np.ndarray:
  """Fixed coefficients of the logits in the scalar that is differentiated."""
  return np.random.default_rng(200 + seed).normal(size=(batch, length, VOCAB)).astype(np.float32)


def scalar(graph: Any, ids: Any, coefficients: Any, **given: Any):
  """parameters -> (Σ c · logits + routing losses, what the tests look at).

  In the manual region ids and coefficients are a device's own, the scalar is the whole batch's.
  """

  def function(params):
    model = nnx.merge(graph, params)
    out = model(jnp.asarray(ids), Pass(**given))
    logits = model.logits(out.h_BSD)
    value, sums = total(((logits * coefficients).sum(), out.sums), BATCH_AXES, "statistics")
    if sums is not None:
      value += BALANCE * gshard_loss(sums).sum() + Z * z_loss(sums).sum()
    return value, {"hidden": out.h_BSD, "logits": logits, "sums": sums}

  return function


def on_mesh(mesh: Any, graph: Any, params: Any, **given: Any):
  """(params, ids, coefficients) -> ((value, aux), gradients) of the whole batch, on a mesh."""
  specs = parameter_specs(params)

  def local(params, ids, coefficients):
    both = jax.value_and_grad(scalar(graph, ids, coefficients, **given), has_aux=True)
    (value, aux), grads = both(params)
    return (value, aux), reduce_gradients(grads, specs)

  batch = P(BATCH_AXES)
  aux_specs = {"hidden": batch, "logits": batch, "sums": P()}
  return manual(local, mesh, (specs, batch, batch), ((P(), aux_specs), specs))


@dataclasses.dataclass
class Run:
  """A model's results: the scalar, its parts and its gradients by name."""

  value: float
  aux: dict[str, Any]
  gradients: dict[str, np.ndarray]


def run(graph: Any, params: Any, seed: int = 0, **given: Any) -> Run:
  """Values and gradients of a model in one compiled function."""
  function = scalar(graph, tokens(seed), cotangent(seed), **given)
  (value, aux), gradients = jax.jit(jax.value_and_grad(function, has_aux=True))(params)
  return Run(float(value), jax.tree.map(np.asarray, aux), named(gradients))


def oracle_run(
  config: ModelConfig,
  params: Any,
  transport: DispatchConfig | None,
  seed: int = 0,
  live: Any = None,
) -> Run:
  """The same from the oracle; `transport` None drops nothing."""
  pure = nnx.to_pure_dict(params)
  leaves = {name: tape.Var(value) for name, value in named(pure).items() if "stages" not in name}
  for name, value in named(pure).items():
    if "stages" in name:  # one Var per layer of the stack
      leaves |= {f"{name}@{i}": tape.Var(layer) for i, layer in enumerate(value)}
  ids = tokens(seed)
  groups = 1 if transport is None else max(transport.groups, 1)
  rows = None
  if transport is not None:
    size = ids.size // groups
    rows = lambda k: oracles.capacity(transport.capacity_factor, size, config.num_experts, k)
  result = oracles.model(
    oracle_parameters(leaves, config), ids, config, rows=rows, groups=groups, live=live
  )
  c = cotangent(seed)
  value = tape.lift(0.0)
  for b in range(ids.shape[0]):
    for s in range(ids.shape[1]):
      value = value + (result.logits[b][s] * c[b, s]).sum()
  for sums in result.sums:
    value = value + BALANCE * sums.gshard() + Z * sums.z_loss()
  flat = dict(zip(leaves, tape.gradients(value, list(leaves.values())), strict=True))
  gradients = {name: bar for name, bar in flat.items() if "@" not in name}
  for name in named(pure):
    if "stages" in name:
      layers = [bar for key, bar in flat.items() if key.split("@")[0] == name]
      gradients[name] = np.stack(layers)
  aux = {
    "hidden": oracles.values(result.hidden),
    "logits": oracles.values(result.logits),
    "sums": result.sums,
  }
  return Run(float(value.value), aux, gradients)


def named(tree: Any) -> dict[str, np.ndarray]:
  """Leaves by their dotted path."""
  tree = tree if isinstance(tree, dict) else nnx.to_pure_dict(tree)
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {".".join(str(k.key) for k in path): np.asarray(leaf) for path, leaf in flat}


def oracle_parameters(leaves: dict[str, tape.Var], config: ModelConfig) -> dict[str, Any]:
  """Block by block, as the paper counts them."""

  def below(prefix: str, layer: int | None = None) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, leaf in leaves.items():
      path, _, index = name.partition("@")
      if path.startswith(prefix + ".") and (not index or int(index) == layer):
        *inner, last = path[len(prefix) + 1 :].split(".")
        node = out
        for key in inner:
          node = node.setdefault(key, {})
        node[last] = leaf
    return out

  p: dict[str, Any] = below("embedding") | {"norm": below("norm"), "blocks": [], "moes": []}
  units = config.wiring_rule.units_per_moe
  for stage in range(config.num_layers // (config.moe_every * units)):
    for unit in range(units):
      own = below(f"stages.units.{unit}", stage)
      blocks = own.pop("blocks")
      p["blocks"] += [blocks[str(i)] for i in range(config.moe_every)]
      p["blocks"][-1] |= own  # own_norm, post_norm, mix
    if config.wiring != "dense":
      moe = below("stages.moe", stage)
      p["moes"].append(moe | moe.pop("experts"))
  return p


def assert_close(got: Any, expected: Any, rtol: float, what: str = "") -> None:
  """|got - expected| <= rtol · max |expected|, for one leaf; both must be finite and not all 0."""
  got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
  assert got.shape == expected.shape, (what, got.shape, expected.shape)
  assert np.isfinite(got).all(), f"{what} is not finite"
  scale = np.abs(expected).max()
  error = np.abs(got - expected).max()
  assert error <= rtol * scale, f"{what}: {error:.3g} off, of {scale:.3g} ({error / scale:.3g})"


def assert_same(got: Run, expected: Run, rtol: float = 1e-5) -> None:
  """Values, routing sums and every gradient."""
  assert_close(got.aux["hidden"], expected.aux["hidden"], rtol, "hidden")
  assert_close(got.aux["logits"], expected.aux["logits"], rtol, "logits")
  assert got.gradients.keys() == expected.gradients.keys()
  for name, gradient in expected.gradients.items():
    assert_close(got.gradients[name], gradient, rtol, f"d {name}")


def assert_counts(got: Run, sums: list[oracles.Sums]) -> None:
  """Tokens, choices, drops and loads exactly as counted by the oracle, one entry per MoE."""
  for layer, expected in enumerate(sums):
    for name in ("tokens", "choices", "dropped", "load"):
      counted = np.asarray(getattr(got.aux["sums"], {"load": "load_E"}.get(name, name)))[layer]
      np.testing.assert_array_equal(counted, getattr(expected, name), err_msg=name)
    np.testing.assert_array_equal(got.aux["sums"].first_E[layer], expected.first, err_msg="first")


def sharded(params: Any, mesh: Any) -> Any:
  """Parameters laid out as the table of logical axes says."""
  place = lambda value, spec: jax.device_put(value, jax.sharding.NamedSharding(mesh, spec))
  return jax.tree.map(place, params, parameter_specs(params))
