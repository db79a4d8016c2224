"""Measures the kernels on this machine's GPU.

  python -m scmoe.bench.layer --layer --shape T,D,F,E,K [--shape ...] [--bf16_gate]
                                [--turns_only] --json OUT
  python -m scmoe.bench.layer --layer --devices 2 --shape T,D,F,E,K [--transport packed]
                                [--overflow repeat] --json OUT
  python -m scmoe.bench.layer --kernels --shape T,D,F,E,K [--skew 8] --json OUT
  python -m scmoe.bench.layer --fp8 --shape T,D,F,E,K --json OUT

    T  tokens      D  model width      F  expert width      E  experts      K  experts per token

The layer is the model's, `scmoe.moe.layer.MoE` on one device, router included. Every result is
compared with float32 before it is timed. Inputs are fresh and random. A time is the median over
rounds in which all contenders take turns, so that a change of the GPU's clock affects all of them.
The bound is XLA's batched dense product of the same FLOPs on equal groups, without router, gather,
activation and weighted sum, timed in the same rounds.

With --devices the experts are spread over several devices of T tokens each, and the layer is timed
in turns with the same without its exchanges, and with its exchanges alone (`scmoe.bench.parallel`).
"""

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scmoe.base.errors import ConfigError, StorageError, run_main
from scmoe.base.stored import write_json, write_probe
from scmoe.bench.parallel import bench_parallel, print_parallel
from scmoe.bench.sizes import (
  MODELS,
  SHAPES,
  TOLERANCE,
  Layer,
  Shape,
  normal_arrays,
  parse_shape,
  relative_error,
)
from scmoe.kernels.grouped_matmul import (
  FFNConfig,
  FFNWeights,
  choices_layout,
  expert_ffn,
  fp8,
  tiles,
  xla,
)
from scmoe.kernels.grouped_matmul.layout import make_layout, pad_rows
from scmoe.moe.experts import FFNExperts
from scmoe.profiling.timer import alone, calls_in, half_range, interleave, repeated
from scmoe.run.command_line import check_environment, json_file

# For fp8 by the kernels: how much nearer to the network without fp8, or farther from it, they may
# be than fp8 by XLA. Sums in another order round an activation to the next fp8 number now and then.
# That moves the result by up to 0.018 (so `APART`), but no farther from the network without fp8.
TOLERANCE_FP8, APART = 2e-2, 3e-2
_SAMPLE_SECONDS = 0.04  # so many seconds of calls are timed together, which hides the host's work


def interleaved(
  contenders: dict[str, tuple[Callable[..., Any], Sequence[Any]]], rounds: int = 7
) -> dict[str, float]:
  """Median milliseconds of each contender: name -> (jitted function, arguments)."""
  arms = {name: repeated(run, *arguments) for name, (run, arguments) in contenders.items()}
  calls = {name: calls_in(arm, _SAMPLE_SECONDS) for name, arm in arms.items()}
  timings = interleave(arms, rounds=rounds, calls=calls)
  return {name: 1e3 * timing.median for name, timing in timings.items()}


def check_layer(shape: Shape, seed: int, backend: str) -> dict[str, float]:
  """Relative errors of the experts' output and all gradients against float32.

  Both use the same routing, since routers of different precision may choose different experts where
  two scores nearly tie.
  """
  layer = Layer(shape, backend)
  x, params = layer.inputs(seed)
  dy = normal_arrays(seed + 2)(*x.shape)
  moe = nnx.merge(layer.graph, params)
  routing = jax.jit(lambda x: moe.route(x).routing)(x)
  layout = choices_layout(routing.expert_TK, routing.weight_TK, shape.experts)

  def run(backend, x, weight_TK, weights):
    config = FFNConfig(backend=backend)
    ffn = lambda x, weight_TK, weights: expert_ffn(
      x, weights, dataclasses.replace(layout, weight_MK=weight_TK), config
    )
    y, vjp = jax.vjp(ffn, x, weight_TK, weights)
    dx, dweight_TK, dweights = vjp(dy.astype(y.dtype))
    return y, dx, dweight_TK, dweights.gate_GDF, dweights.up_GDF, dweights.down_GFD

  # XLA's search for the fastest float32 products would take longer than the reference's single run.
  on_gpu = jax.devices()[0].platform == "gpu"
  options = {"xla_gpu_autotune_level": 0} if on_gpu else {}
  assert isinstance(moe.experts, FFNExperts)
  weights = moe.experts.weights()
  got = jax.jit(functools.partial(run, backend))(x, routing.weight_TK, weights)
  wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, routing.weight_TK, weights))
  want = jax.jit(functools.partial(run, "xla"), compiler_options=options)(*wide)
  names = ("y", "dx", "dweight", "dgate", "dup", "ddown")
  return {name: relative_error(a, b) for name, a, b in zip(names, got, want)}


def _bound(shape: Shape, seed: int) -> dict[str, tuple[Callable[..., Any], Sequence[Any]]]:
  """Batched dense products of the layer's FLOPs, forward and backward."""
  normal = normal_arrays(seed)
  rows = shape.tokens * shape.top_k // shape.experts
  e, d, f = shape.experts, shape.width, shape.hidden
  x, h, a = normal(e, rows, d), normal(e, rows, 2 * f), normal(e, rows, f)
  up, down = normal(e, d, 2 * f), normal(e, f, d)
  forward = jax.jit(
    lambda x, a, up, down: (
      jnp.einsum("erd,edf->erf", x, up),
      jnp.einsum("erf,efd->erd", a, down),
    )
  )
  backward = jax.jit(
    lambda x, h, a, up, down: (
      jnp.einsum("erd,efd->erf", x, down),
      jnp.einsum("erf,edf->erd", h, up),
      jnp.einsum("erd,erf->edf", x, h),
      jnp.einsum("erf,erd->efd", a, x),
    )
  )
  return {
    "bound forward": (forward, (x, a, up, down)),
    "bound backward": (backward, (x, h, a, up, down)),
  }


def training_functions(layer: Layer) -> tuple[Any, Any]:
  """Two jitted functions of a layer: its forward pass, which returns residuals as in training, and
  its forward and backward pass."""

  def forward(x, params):
    y, vjp = jax.vjp(layer, x, params)
    # The residuals include the caller's own arrays, which XLA would copy to return them.
    given = {id(a) for a in jax.tree.leaves((x, params))}
    return y, [a for a in jax.tree.leaves(vjp) if id(a) not in given]

  def both(dy, x, params):
    y, vjp = jax.vjp(layer, x, params)
    # A loss would compute dy from y. The barrier has the same effect: XLA cannot start the backward
    # pass before the forward pass has ended.
    y, dy = jax.lax.optimization_barrier((y, dy))
    return y, vjp(dy)

  return jax.jit(forward), jax.jit(both)


def bench_layer(
  shape: Shape,
  seed: int,
  backend: str,
  rounds: int,
  *,
  fp32_gate: bool = True,
  turns_only: bool = False,
) -> dict[str, Any]:
  """Checks and times one layer, router included.

  Args:
    shape, seed, backend, fp32_gate: see `Layer`.
    rounds: how often each function is timed.
    turns_only: time it in turns with the bound only, not by itself too.

  Raises:
    ValueError: an error exceeds `TOLERANCE`.
  """
  errors = check_layer(shape, seed, backend)
  worst = max(errors.values())
  if not worst <= TOLERANCE:
    raise ValueError(f"{shape.name}: errors {errors} exceed {TOLERANCE}: not timed")
  layer = Layer(shape, backend, fp32_gate=fp32_gate)
  arguments = layer.inputs(seed)
  dy = normal_arrays(seed + 2)(*arguments[0].shape)
  forward_function, both_function = training_functions(layer)
  kept = jax.eval_shape(forward_function, *arguments)[1]
  kept_bytes = sum(math.prod(a.shape) * a.dtype.itemsize for a in kept)
  forward = forward_function.lower(*arguments).compile()
  both = both_function.lower(dy, *arguments).compile()
  memory = both.memory_analysis()
  ours = {"forward": (forward, arguments), "forward+backward": (both, (dy, *arguments))}
  # Timed in three ways, since a GPU at its power limit slows down: with pauses, as other projects
  # time theirs; back to back; and in turns with the bound.
  as_peers: dict[str, float | None] = {}
  sustained = {}
  if not turns_only:
    as_peers = {
      name: by_itself(function, *given, rounds=rounds) for name, (function, given) in ours.items()
    }
    sustained = {name: interleaved({name: run}, rounds)[name] for name, run in ours.items()}
  times = interleaved({**ours, **_bound(shape, seed + 3)}, rounds)
  bound = {
    "forward": times["bound forward"],
    "forward+backward": times["bound forward"] + times["bound backward"],
  }
  result: dict[str, Any] = {
    "shape": dataclasses.asdict(shape),
    "name": shape.name,
    "fp32_gate": fp32_gate,
    "errors": errors,
    # x is a residual too, but `kept` leaves out the caller's arrays.
    "kept_bytes": kept_bytes + arguments[0].nbytes,
    "contract_bytes": 2 * shape.tokens * (shape.width + 2 * shape.top_k * shape.hidden),
    "temporary_bytes": memory.temp_size_in_bytes,
    "argument_bytes": memory.argument_size_in_bytes,
    "output_bytes": memory.output_size_in_bytes,
    "peak_bytes_of_process": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
  }
  for key, factor in (("forward", 1), ("forward+backward", 3)):
    result[key] = {
      "ms": as_peers.get(key),
      "too_short": key in as_peers and as_peers[key] is None,
      "tflops": factor * shape.flops / (as_peers.get(key) or times[key]) / 1e9,
      "ms_sustained": sustained.get(key),
      "ms_interleaved": times[key],
      "bound_ms_interleaved": bound[key],
      "percent_of_bound": 100 * bound[key] / times[key],
    }
  return result


def by_itself(function: Callable[..., Any], *arguments: Any, rounds: int) -> float | None:
  """Milliseconds of a call that `alone` times; None if they are too few to tell.

  The time of zeroing the cache is subtracted. Where zeroing takes much longer than the call, as on
  a CPU, the difference can be noise, even below 0: it counts only if it exceeds its own spread.
  Fewer than three rounds have no spread, so that every time above 0 counts.
  """
  timing = alone(function, *arguments, rounds=rounds)
  return 1e3 * timing.median if timing.median > half_range(timing.seconds) else None


def print_layer(result: dict[str, Any]) -> None:
  """Prints one layer's line."""
  cells = [f"{result['name']:16s}"]
  for key in ("forward", "forward+backward"):
    r = result[key]
    alone_ms = r["ms"] and f" (back to back {r['ms_sustained']:.3f} ms)"
    if r["too_short"]:
      alone_ms = " in turns (by itself too short to tell from the zeroing of the cache)"
    cells.append(
      f"{key} {r['ms'] or r['ms_interleaved']:8.3f} ms {r['tflops']:6.1f} TFLOP/s"
      f"{alone_ms or ''}, {r['percent_of_bound']:.1f} % of bound"
    )
  cells.append(f"kept {result['kept_bytes'] / 2**20:.0f} MiB")
  cells.append(f"temporary {result['temporary_bytes'] / 2**20:.0f} MiB")
  cells.append(f"worst error {max(result['errors'].values()):.1e}")
  print(" | ".join(cells), flush=True)


def group_sizes(shape: Shape, skew: float | None, seed: int) -> jax.Array:
  """Equal groups, or sizes drawn from Dirichlet(skew), summing to T·K."""
  rows, experts = shape.tokens * shape.top_k, shape.experts
  if skew is None:
    return jnp.full((experts,), rows // experts, jnp.int32)
  shares = np.random.default_rng(seed).dirichlet(np.full(experts, skew))
  return jnp.asarray(np.random.default_rng(seed + 1).multinomial(rows, shares), jnp.int32)


def bench_kernels(shape: Shape, skews: Sequence[float | None], seed: int, rounds: int):
  """Forward, input gradient and weight gradient of the gate-and-up and the down projection."""
  from scmoe.kernels.grouped_matmul import mosaic_gpu as kernels

  s, results = shape, []
  rows = s.tokens * s.top_k
  for label, k, n in (("up", s.width, 2 * s.hidden), ("down", s.hidden, s.width)):
    contenders: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {}
    normal = normal_arrays(seed)
    lhs, dout, rhs = normal(rows, k), normal(rows, n), normal(s.experts, k, n, scale=k**-0.5)
    equal = lambda a, experts=s.experts: a.reshape(experts, -1, a.shape[1])
    for name, expression, operands in (
      ("forward", "erk,ekn->ern", (equal(lhs), rhs)),
      ("dgrad", "ern,ekn->erk", (equal(dout), rhs)),
      ("wgrad", "erk,ern->ekn", (equal(lhs), equal(dout))),
    ):
      contenders[f"{name} dense"] = (
        jax.jit(functools.partial(jnp.einsum, expression)),
        operands,
      )
    for skew in skews:
      sizes = group_sizes(s, skew, seed)
      layout = jax.jit(make_layout, static_argnums=(1, 2))(sizes, rows, tiles.ROW_TILE)
      lhs_R, dout_R = jax.jit(pad_rows)(lhs, layout), jax.jit(pad_rows)(dout, layout)
      bf16 = {"out_dtype": jnp.bfloat16}
      forward = jax.jit(functools.partial(kernels.grouped_rows, **bf16))
      dgrad = jax.jit(functools.partial(kernels.grouped_rows, transpose_rhs=True, **bf16))
      wgrad = jax.jit(functools.partial(kernels.grouped_weights, **bf16))
      runs = {
        "forward": (forward, (lhs_R, rhs, layout)),
        "dgrad": (dgrad, (dout_R, rhs, layout)),
        "wgrad": (wgrad, (lhs_R, dout_R, layout)),
      }
      used = (jnp.arange(layout.num_rows) < layout.num_tiles[0] * layout.tile)[:, None]
      wide = [a.astype(jnp.float32) for a in (lhs_R, dout_R, rhs)]
      want = {
        "forward": xla.grouped_rows(wide[0], wide[2], layout, precision="highest"),
        "dgrad": xla.grouped_rows(
          wide[1], wide[2], layout, transpose_rhs=True, precision="highest"
        ),
        "wgrad": xla.grouped_weights(wide[0], wide[1], layout, precision="highest"),
      }
      for name, (function, arguments) in runs.items():
        got = function(*arguments)
        if name != "wgrad":
          got = jnp.where(used, got, 0)
        error = relative_error(got, want[name] if name == "wgrad" else want[name] * used)
        if not error <= TOLERANCE:
          raise ValueError(f"{s.name} {label} {name}: error {error} exceeds {TOLERANCE}: not timed")
        contenders[f"{name} {'balanced' if skew is None else f'dirichlet({skew:g})'}"] = (
          function,
          arguments,
        )
      del want, wide
    times = interleaved(contenders, rounds)
    flops = 2.0 * rows * k * n
    for name, ms in times.items():
      dense = times[f"{name.split()[0]} dense"]
      results.append(
        {
          "name": s.name,
          "projection": label,
          "product": name,
          "ms": ms,
          "tflops": flops / ms / 1e9,
          "percent_of_dense": 100 * dense / ms,
        }
      )
      print(
        f"{s.name:10s} {label:4s} {name:24s} {ms:8.3f} ms {flops / ms / 1e9:6.1f} TFLOP/s"
        f" {100 * dense / ms:6.1f} % of dense",
        flush=True,
      )
  return results


def bench_fp8(shape: Shape, seed: int, rounds: int) -> dict[str, Any]:
  """Times the experts' forward pass in bfloat16 and in fp8, and fp8's roundings by themselves.

  Experts are chosen at random, without a router. No residuals for a backward pass are kept.
  """
  s, normal = shape, normal_arrays(seed)
  x_TD, a_RF = normal(s.tokens, s.width), normal(s.tokens * s.top_k, s.hidden)
  up = lambda: normal(s.experts, s.width, s.hidden, scale=s.width**-0.5)
  weights = FFNWeights(up(), normal(s.experts, s.hidden, s.width, scale=s.hidden**-0.5), up())
  scores_TE = normal(s.tokens, s.experts)
  expert_TK = jax.lax.top_k(scores_TE, s.top_k)[1].astype(jnp.int32)
  given = x_TD, weights, expert_TK, jax.nn.softmax(normal(s.tokens, s.top_k))

  def forward(backend: str, fp8: bool) -> Callable[..., Any]:
    def run(x_TD, weights, expert_TK, weight_TK):
      layout = choices_layout(expert_TK, weight_TK, s.experts)
      return expert_ffn(x_TD, weights, layout, FFNConfig(backend=backend, fp8=fp8))

    return jax.jit(run)

  plain, by_xla = forward("xla", False)(*given), forward("xla", True)(*given)
  found = forward("auto", True)(*given)
  error, of_xla = relative_error(found, plain), relative_error(by_xla, plain)
  apart = relative_error(found, by_xla)
  if not (abs(error - of_xla) <= TOLERANCE_FP8 * of_xla and apart <= APART):
    raise ValueError(
      f"{s.name} fp8: {error} from the network without fp8, {of_xla} by XLA, {apart} apart: "
      "not timed"
    )
  rows = jax.jit(fp8.quantised_rows)

  @jax.jit
  def matrices(weights):
    both = map(fp8.quantised_matrices, (*weights.up_weights, weights.down_GFD))
    return [(jnp.swapaxes(q, 1, 2), scale) for q, scale in both]

  times = interleaved(
    {
      "bfloat16": (forward("auto", False), given),
      "fp8": (forward("auto", True), given),
      "rounding rows": (rows, (x_TD,)),
      "rounding activations": (rows, (a_RF,)),
      "rounding matrices": (matrices, (weights,)),
    },
    rounds,
  )
  cells = (f"{name} {ms:.3f} ms" for name, ms in times.items())
  print(f"{s.name:16s} {' | '.join(cells)} | error {error:.4f}, by XLA {of_xla:.4f}", flush=True)
  errors = {"error": error, "error_by_xla": of_xla}
  return {"shape": dataclasses.asdict(s), "name": s.name, **errors, "ms": times}


def writable(text: str | None) -> Path | None:
  """The file of --json, which takes bytes on its disk before minutes of measuring; None without.

  Raises:
    ConfigError: as `json_file`, or it is a pipe or a device.
    StorageError: no file can be written in its folder.
  """
  out = json_file(text or "")
  if out is None:
    return None
  if out.exists() and not out.is_file():
    raise ConfigError(f"--json={text!r} is no regular file; give a file")
  try:
    write_probe(out.parent)
  except OSError as error:
    raise _unwritten(out, error) from None
  return out


def _unwritten(out: Path, error: OSError) -> StorageError:
  return StorageError(f"{out} cannot be written: {error.strerror}; give another --json")


def main(argv: list[str]) -> None:
  """Runs the benchmark; see the module's docstring.

  Raises:
    ConfigError: a shape is neither sizes nor known, --json is no file in a folder that exists, or
      `bench_parallel` refuses what was asked for.
    StorageError: the file of --json cannot be written.
    ValueError: an error exceeds its limit.
  """
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
  parser.add_argument("--layer", action="store_true", help="the whole MoE layer")
  parser.add_argument("--kernels", action="store_true", help="each product alone")
  parser.add_argument("--fp8", action="store_true", help="experts in fp8 and in bfloat16")
  parser.add_argument(
    "--shape", action="append", default=[], help="T,D,F,E,K, a known name, or models for all"
  )
  parser.add_argument("--skew", type=float, default=8.0, help="Dirichlet parameter for --kernels")
  parser.add_argument("--backend", default="auto", help="backend of --layer")
  parser.add_argument("--bf16_gate", action="store_true", help="router.compat.fp32_gate=False")
  parser.add_argument(
    "--turns_only", action="store_true", help="time --layer only in turns with the bound"
  )
  parser.add_argument("--devices", type=int, default=1, help="of --layer: experts spread over them")
  parser.add_argument(
    "--transport",
    default="dropless",
    help="of --devices: dispatch.transport, as dropless, per_rank, packed or put",
  )
  parser.add_argument(
    "--overflow", default="loop", choices=("loop", "repeat"), help="of --devices: dispatch.overflow"
  )
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--json", help="where results are written")
  options = parser.parse_args(argv)
  named = [MODELS if text == "models" else [text] for text in options.shape or SHAPES]
  try:
    shapes = [parse_shape(text) for names in named for text in names]
  except ValueError as error:
    raise ConfigError(f"--shape: {error}") from None
  out = writable(options.json)
  check_environment()
  if not (options.layer or options.kernels or options.fp8):
    options.layer = True
  device = jax.devices()[0]
  seed = time.time_ns() % 2**31
  report: dict[str, Any] = {
    "date": time.strftime("%Y-%m-%d"),
    "device": device.device_kind,
    "jax": jax.__version__,
    "command": "python -m scmoe.bench.layer " + " ".join(argv),
    "seed": seed,
  }
  print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
  for shape in shapes:
    if options.layer and options.devices > 1:
      result = bench_parallel(
        shape,
        seed,
        options.backend,
        options.rounds,
        devices=options.devices,
        transport=options.transport,
        overflow=options.overflow,
        fp32_gate=not options.bf16_gate,
      )
      report.setdefault("parallel", []).append(result)
      print_parallel(result)
    elif options.layer:
      result = bench_layer(
        shape,
        seed,
        options.backend,
        options.rounds,
        fp32_gate=not options.bf16_gate,
        turns_only=options.turns_only,
      )
      report.setdefault("layer", []).append(result)
      print_layer(result)
    if options.kernels:
      report.setdefault("kernels", []).extend(
        bench_kernels(shape, (None, options.skew), seed, options.rounds)
      )
    if options.fp8:
      report.setdefault("fp8", []).append(bench_fp8(shape, seed, options.rounds))
    if out is not None:
      try:
        write_json(out, report)
      except OSError as error:
        raise _unwritten(out, error) from None


if __name__ == "__main__":
  run_main(main)
