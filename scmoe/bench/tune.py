"""python -m scmoe.bench.tune: finds the fastest tilings of a model's grouped products on this GPU.

  python -m scmoe.bench.tune --config olmoe --config.mesh.expert=2
  python -m scmoe.bench.tune --shape 8192,4096,1408,16,8
  python -m scmoe.bench.tune --list

Traces a training step of the configuration, or a SwiGLU layer of the shape T,D,F,E,K (tokens, model
width, expert width, experts and experts per token on one GPU), to learn which products it computes.
For each product it compares the results of all tilings that fit on random operands, then times the
tilings in turns. The fastest is stored in the user's cache folder ($XDG_CACHE_HOME/scmoe/tilings),
for all later runs on this kind of GPU. A stored product is measured again only with --again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from scmoe.base.errors import ConfigError, run_main
from scmoe.bench import layer as bench
from scmoe.kernels.grouped_matmul import get_activation, tiles, tuned
from scmoe.kernels.grouped_matmul.down_backward import down_backward_product
from scmoe.kernels.grouped_matmul.layout import make_layout
from scmoe.kernels.grouped_matmul.pipeline import Tiling
from scmoe.kernels.grouped_matmul.rows_product import rows_product
from scmoe.kernels.grouped_matmul.tuned import Key, Measured
from scmoe.kernels.grouped_matmul.weights_product import weights_product
from scmoe.kernels.launch import has_kernels
from scmoe.parallel.mesh import batch_sharding, expert_shards
from scmoe.run import build
from scmoe.run.command_line import HELP, Flag, check_environment, help_text, parse, run_config
from scmoe.training.step import make_train_step

FLAGS = (
  Flag("config", str, "", "config file (Python, which is run), or the name of one"),
  Flag("shape", str, "", "T,D,F,E,K, or a name that scmoe.bench.layer knows", repeat=True),
  Flag("rounds", int, 7, "how often the fastest tilings are timed"),
  Flag("again", bool, False, "also measure products that were measured before"),
  Flag("list", bool, False, "print the stored tilings for this kind of GPU, then stop"),
  HELP,
)
_SAME = 0.01  # another tiling replaces the shipped one only if it is faster by this share
_FINALISTS = 3  # tilings that are timed with all values of `Tiling.band`

Product = tuple[Callable[..., Any], tuple[Any, ...]]  # (*arguments, tiling) -> results; arguments
Timer = Callable[[dict[str, tuple[Callable[..., Any], Any]], int], dict[str, float]]


def main(argv: list[str]) -> None:
  """Measures the products of the command line's shapes and configuration."""
  values, given = parse(argv, FLAGS, with_fields=True)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"]))
  check_environment()
  device = jax.devices()[0]
  if values["list"]:
    return print(listed(device.device_kind))
  if not values["config"] and not values["shape"]:
    raise ConfigError("give --config NAME or --shape T,D,F,E,K, whose products to measure")
  if not has_kernels(device):
    raise ConfigError(
      f"{device.device_kind} does not run the kernels, so there is nothing to measure; they need a "
      "GPU of compute capability 9.0 (H100, H200)"
    )
  wanted: dict[Key, bench.Shape] = {}
  for text in values["shape"]:
    try:
      shape = bench.parse_shape(text)
    except ValueError as error:
      raise ConfigError(f"--shape: {error}") from None
    wanted |= dict.fromkeys(asked_by_layer(shape), shape)
  if values["config"]:
    other = {"config_json": "", "smoke": False, "allow_config_change": False}
    wanted |= asked_by_config(run_config({**values, **other}, given))
  measure(wanted, values["rounds"], again=values["again"])


def listed(device_kind: str) -> str:
  """One line per product with a stored tiling."""
  found = tuned.table(device_kind)
  if not found:
    return f"no tiling is stored for {device_kind} ({tuned.file_of(device_kind)})"
  lines = [_line(key, own) + f"; {own.when}" for key, own in sorted(found.items())]
  return "\n".join([*lines, f"in {tuned.file_of(device_kind)}"])


# -- what is measured -----------------------------------------------------------------------------


def asked_by_layer(shape: bench.Shape) -> list[Key]:
  """The products of a layer's training step on one GPU."""
  layer = bench.Layer(shape, "mosaic_gpu")
  x = jax.ShapeDtypeStruct((shape.tokens, shape.width), jnp.bfloat16)
  params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), layer.shapes())
  with _recorded() as keys:
    jax.eval_shape(lambda x, params: jax.vjp(layer, x, params)[1](x), x, params)
  return list(keys)


def asked_by_config(run: Any) -> dict[Key, bench.Shape]:
  """The products of a configuration's training step, each with the layer's shape on one GPU.

  Raises:
    ConfigError: the configuration does not fit the devices, or none of its products uses a kernel.
  """
  ffn = dataclasses.replace(run.model.ffn, backend="mosaic_gpu")
  model = dataclasses.replace(run.model, ffn=ffn)
  run = dataclasses.replace(run, model=model)
  vocab = build.vocab_size(run.data)
  built = build.build(run.resolve(num_devices=jax.device_count(), vocab_size=vocab))
  run, abstract = built.run, built.abstract_state()
  place = batch_sharding(built.mesh, leading=1)
  of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
  step = make_train_step(built.objective, built.optimizer, abstract)
  with _recorded() as keys:
    try:
      step.trace(abstract, jax.tree.map(of, built.random_batch()))
    except ValueError as error:
      raise ConfigError(f"--config={run.name!r}: {error}") from None
  if not keys:
    raise ConfigError(f"--config={run.name!r}: its wiring {run.model.wiring!r} has no experts")
  model, mesh = run.model, run.mesh
  shards = expert_shards(mesh.expert, model.num_experts)
  shape = bench.Shape(
    tokens=run.train.batch_size * run.data.seq_len // mesh.token_shards,
    width=model.width,
    hidden=model.expert_hidden // (shards * mesh.tensor),
    experts=max(model.num_experts // mesh.expert, 1),
    top_k=model.wiring_rule.routed_per_gating(model.top_k),
  )
  return dict.fromkeys(keys, shape)


@contextlib.contextmanager
def _recorded() -> Any:
  """Collects the products whose tilings are looked up while the block traces a program."""
  jax.clear_caches()  # a program traced before would not be traced again, and look up nothing
  with tiles.recorded() as keys:
    yield keys


def product(key: Key, shape: bench.Shape, seed: int, sizes_G: jax.Array | None = None) -> Product:
  """A product as a layer computes it, with random operands.

  Args:
    key: kind and widths of the product.
    shape: gives tokens, experts and experts per token.
    seed: seed of the operands.
    sizes_G: int32, rows of each group, T·K in all; None: equal groups.
  """
  kind, width, n, gathered = key
  rows, experts = shape.tokens * shape.top_k, shape.experts
  if sizes_G is None:
    sizes = bench.group_sizes(shape, None, seed)
    sizes_G = sizes.at[0].add(rows - sizes.sum())
  layout = jax.jit(make_layout, static_argnums=(1, 2))(sizes_G, rows, tiles.ROW_TILE)
  index = jax.random.randint(jax.random.key(seed), (layout.num_rows,), 0, shape.tokens)
  index_R = index if gathered else None
  normal = bench.normal_arrays(seed)
  gathers = lambda columns: normal(shape.tokens if gathered else layout.num_rows, columns)
  plain = lambda columns: normal(layout.num_rows, columns)
  weights = lambda m, n, k: normal(experts, m, n, scale=k**-0.5)
  bf16 = {"out_dtype": jnp.bfloat16}

  def forward(*given: Any, activation: str = "") -> Any:
    x, *w, layout, index_R, tiling = given
    kind = get_activation(activation) if activation else None
    return rows_product(
      (x,), (tuple(w),), layout, tiling, transpose_rhs=False, activation=kind, index_R=index_R,
      **bf16,
    )  # fmt: skip

  def transposed(a: Any, b: Any, v: Any, w: Any, layout: Any, tiling: Tiling) -> Any:
    return rows_product((a, b), ((v,), (w,)), layout, tiling, transpose_rhs=True, **bf16)

  def to_weights(lhs: Any, *given: Any, side: str) -> Any:
    *rhs, layout, index_R, tiling = given
    return weights_product(lhs, tuple(rhs), layout, tiling, **{side: index_R}, **bf16)

  def backward(dy: Any, down: Any, gate: Any, up: Any, s: Any, *given: Any) -> Any:
    layout, index_R, tiling = given
    swiglu = get_activation("swiglu")
    return down_backward_product(
      dy, down, (gate, up), s, layout, swiglu, tiling, index_R=index_R
    )  # fmt: skip

  tail = (layout, index_R)
  if kind == "up":
    weight = lambda: weights(width, n, width)
    run = functools.partial(forward, activation="swiglu")
    return run, (gathers(width), weight(), weight(), *tail)
  if kind == "activated":
    run = functools.partial(forward, activation="gelu")
    return run, (gathers(width), weights(width, n, width), *tail)
  if kind == "rows":
    return forward, (gathers(width), weights(width, n, width), *tail)
  if kind == "dx":
    weight = lambda: weights(n, width, width)
    return transposed, (plain(width), plain(width), weight(), weight(), layout)
  if kind == "down_backward":
    s_R = normal(layout.num_rows).astype(jnp.float32)
    return backward, (gathers(width), weights(n, width, n), plain(n), plain(n), s_R, *tail)
  if kind == "weights_pair":
    run = functools.partial(to_weights, side="lhs_index_R")
    return run, (gathers(width), plain(n), plain(n), *tail)
  # The weights' gradient of the down projection gathers its right operand, the rows' gradient.
  if n == shape.width:
    return functools.partial(to_weights, side="rhs_index_R"), (plain(width), gathers(n), *tail)
  return functools.partial(to_weights, side="lhs_index_R"), (gathers(width), plain(n), *tail)


# -- measuring ------------------------------------------------------------------------------------


def measure(
  wanted: dict[Key, bench.Shape],
  rounds: int,
  *,
  again: bool = False,
  timer: Timer = bench.interleaved,
  make: Callable[[Key, bench.Shape, int], Product] = product,
) -> None:
  """Measures products; stores and prints the result of each before the next.

  Args:
    wanted: product -> shape of its layer.
    rounds: how often the fastest tilings are timed.
    again: whether to measure products that have a result.
    timer: times named functions with their arguments.
    make: makes a product from its key.

  Raises:
    StorageError: a result cannot be written.
  """
  device_kind = jax.devices()[0].device_kind
  known = {} if again else tuned.table(device_kind)
  file = tuned.file_of(device_kind)
  for key, shape in wanted.items():
    if key in known:
      print(f"{_line(key, known[key])}; measured before, {known[key].when}", flush=True)
      continue
    function, arguments = make(key, shape, time.time_ns() % 2**31)
    found = fastest(key, function, arguments, rounds, timer)
    if found is None:
      continue
    file = tuned.keep(device_kind, {key: found})
    print(_line(key, found), flush=True)
  print(f"stored in {file}")


def fastest(
  key: Key, function: Callable[..., Any], arguments: tuple[Any, ...], rounds: int, timer: Timer
) -> Measured | None:
  """The fastest tiling of a product.

  It first times all tilings with one value of `Tiling.band`, then the best `_FINALISTS` with all
  values. A tiling whose results differ from the shipped tiling's is left out. None if the shipped
  tiling does not compile.
  """
  kind, width, n, gathered = key
  offered = tiles.variants(kind, width, n, gathered=gathered)
  base, compiled = tiles.shipped(kind, width, n, gathered=gathered), {}

  def add(tilings: Iterable[Tiling]) -> list[Tiling]:
    for tiling in tilings:
      if tiling not in compiled and (made := _compiled(function, arguments, tiling)):
        compiled[tiling] = made
    return [tiling for tiling in tilings if tiling in compiled]

  def times(tilings: list[Tiling], rounds: int) -> dict[Tiling, float]:
    named = {str(i): (compiled[tiling], arguments) for i, tiling in enumerate(tilings)}
    return {tilings[int(name)]: ms for name, ms in timer(named, rounds).items()}

  if not add([base]):
    return None
  want = compiled[base](*arguments)
  good = lambda tiling: error_of(compiled[tiling](*arguments), want, arguments) <= bench.TOLERANCE
  forms = dict.fromkeys([base, *(t for t in offered if t.band == tiles.BANDS[0])])
  coarse = times([t for t in add(forms) if good(t)], 3)
  best = sorted(coarse, key=lambda tiling: coarse[tiling])[:_FINALISTS]
  banded = [t for t in offered if any(dataclasses.replace(t, band=b.band) == b for b in best)]
  last = list(dict.fromkeys([base, *(t for t in add(banded) if good(t))]))
  fine = times(last, rounds)
  winner = min(fine, key=lambda tiling: fine[tiling])
  if fine[winner] > (1 - _SAME) * fine[base]:
    winner = base
  when = f"{time.strftime('%Y-%m-%d')}, jax {jax.__version__}"
  return Measured(winner, fine[winner], fine[base], when)


def _compiled(function: Callable[..., Any], arguments: tuple[Any, ...], tiling: Tiling) -> Any:
  """The compiled program of a tiling; None, with a printed line, if it does not compile."""
  try:
    run = jax.jit(lambda *given: function(*given, tiling))
    return run.lower(*arguments).compile()
  except Exception as error:  # the compiler raises errors of many kinds; the others go on
    print(f"  {_spelled(tiling)} is left out: {' '.join(str(error).split())[:100]}", flush=True)
    return None


def error_of(got: Any, want: Any, arguments: tuple[Any, ...]) -> float:
  """The largest relative error of the results, without rows that are not in use; NaN counts as
  infinite."""
  layout = next((a for a in arguments if hasattr(a, "num_tiles")), None)

  def used(x: jax.Array) -> jax.Array:
    if layout is None or x.shape[0] != layout.num_rows:
      return x
    inside = jnp.arange(x.shape[0]) < layout.num_tiles[0] * layout.tile
    return jnp.where(inside.reshape(-1, *[1] * (x.ndim - 1)), x, 0)

  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  errors = [bench.relative_error(used(a), used(b)) for a, b in pairs]
  return max(float("inf") if math.isnan(error) else error for error in errors)


def _line(key: Key, own: Measured) -> str:
  kind, width, n, gathered = key
  what = f"{kind:13s} {width:>6d} x {n:<6d}{' gathered' if gathered else '         '}"
  beside = "as shipped" if own.ms == own.shipped_ms else f"{own.shipped_ms:.3f} ms as shipped"
  return f"{what} {own.ms:8.3f} ms, {beside}: {_spelled(own.tiling)}"


def _spelled(t: Tiling) -> str:
  words = [f"{t.rows} x {t.cols}", f"{t.stages} stages", f"bands of {t.band}"]
  words += ["ping-pong"] * t.pingpong + [f"pairs of {t.pair}"] * bool(t.pair)
  return ", ".join(words)


if __name__ == "__main__":
  run_main(main)
