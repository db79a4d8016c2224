"""The MoE layer with its experts spread over devices, and what its exchanges cost by the clock.

`python -m scmoe.bench.layer --layer --devices 2` calls it. Every device has T tokens and E / W of
the experts. Nothing stands beside the exchanges but what one layer has: chunks of the transport,
and in the backward pass the gradients of weights. So most of them are paid
(`scmoe.profiling.clock`); of a ScMoE block pair, which `scmoe.profile` measures, fewer are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.bench.sizes import TOLERANCE, Layer, Shape, normal_arrays, relative_error
from scmoe.moe.dispatch import TRANSPORTS, DispatchConfig
from scmoe.moe.dispatch.options import DispatchAblation
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual, parameter_specs
from scmoe.profiling.clock import Paid
from scmoe.profiling.timer import Arm, calls_in, interleave, repeated
from scmoe.run.controls import exchanges_alone

_SAMPLE_SECONDS = 0.04  # so many seconds of calls are timed together, which hides the host's work
PASSES = ("forward", "forward+backward")


class ParallelLayer:
  """The layer's two passes over a mesh.

  Args:
    layer: the layer.
    mesh: with the expert axis.

  Attributes:
    passes: jitted functions of (x, parameters) and of (dy, x, parameters), by `PASSES`.
  """

  def __init__(self, layer: Layer, mesh: Any):
    self.layer, self.mesh = layer, mesh
    self.rows, self.specs = rows, specs = P(BATCH_AXES), parameter_specs(layer.shapes())

    def forward(x, params):
      y, vjp = jax.vjp(layer, x, params)
      given = {id(a) for a in jax.tree.leaves((x, params))}  # the caller's own: no copy returned
      return y, [a for a in jax.tree.leaves(vjp) if id(a) not in given and a.ndim]

    def both(dy, x, params):
      y, vjp = jax.vjp(layer, x, params)
      # A loss would compute dy from y: the backward pass begins when the forward pass has ended.
      y, dy = jax.lax.optimization_barrier((y, dy))
      return y, vjp(dy)

    self.passes = {
      "forward": jax.jit(manual(forward, mesh, (rows, specs), rows)),
      "forward+backward": jax.jit(manual(both, mesh, (rows, rows, specs), (rows, (rows, specs)))),
    }

  def inputs(self, seed: int) -> tuple[Any, Any, Any]:
    """(dy, x, parameters), each device's share made on it; x and dy have all devices' tokens."""
    place = lambda specs: jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
    shape = self.mesh.size * self.layer.shape.tokens, self.layer.shape.width
    draw = lambda at: jax.jit(lambda: normal_arrays(at)(*shape), out_shardings=place(self.rows))()
    params = jax.jit(lambda: self.layer.params(seed), out_shardings=place(self.specs))()
    return draw(seed + 2), draw(seed + 1), params

  def error(self, whole: Layer, x: Any, params: Any) -> float:
    """Relative error of the forward pass against the layer with all experts on one device.

    Args:
      whole: that layer, with the tokens of all devices.
      x, params: of `inputs`.
    """
    one = jax.sharding.SingleDeviceSharding(self.mesh.devices.flat[0])
    want = jax.jit(whole)(*jax.device_put((x, params), one))
    return relative_error(jax.device_put(self.passes["forward"](x, params)[0], one), want)


def bench_parallel(
  shape: Shape,
  seed: int,
  backend: str,
  rounds: int,
  *,
  devices: int,
  transport: str = "dropless",
  overflow: str = "loop",
  fp32_gate: bool = True,
) -> dict[str, Any]:
  """Checks and times one layer over several devices, router included; JSON-able.

  Args:
    shape: sizes; the tokens are those of one device.
    seed, backend, fp32_gate: see `Layer`.
    rounds: how often each program is timed.
    devices: W; the experts must divide over them.
    transport: `dispatch.transport`.
    overflow: `dispatch.overflow`; `repeat` times the layer without a loop of overflow rounds, as a
      training step runs it whose rows all fit.

  Raises:
    ConfigError: there are fewer devices, they do not divide the experts, or `overflow` is repeat
      with a transport that drops choices, whose error would not show rows that are left over.
    ValueError: the error exceeds `TOLERANCE`.
  """
  if devices > jax.device_count() or shape.experts % devices:
    raise ConfigError(
      f"--devices={devices} must be at most the {jax.device_count()} devices here and divide the "
      f"{shape.experts} experts"
    )
  # A transport that drops choices drops others on one device.
  kind = TRANSPORTS.get(transport)
  comparable = kind is not None and not kind.drops
  if overflow == "repeat" and not comparable:
    raise ConfigError(f"--overflow=repeat needs --transport=dropless or per_rank, got {transport}")
  mesh = make_mesh(MeshConfig(data=1, expert=devices), jax.devices()[:devices])
  cut = DispatchAblation(first_round=overflow == "repeat")
  usual = DispatchConfig(transport=transport, ablation=cut)
  silent = dataclasses.replace(usual, ablation=dataclasses.replace(cut, silent=True))
  make = lambda shape, dispatch: Layer(shape, backend, fp32_gate=fp32_gate, dispatch=dispatch)
  layer = ParallelLayer(make(shape, usual), mesh)
  without = ParallelLayer(make(shape, silent), mesh)
  dy, x, params = layer.inputs(seed)
  every = dataclasses.replace(shape, tokens=devices * shape.tokens)
  error = layer.error(make(every, usual), x, params) if comparable else None
  if error is not None and not error <= TOLERANCE:
    over = ", perhaps because rows were left over" if cut.first_round else ""
    raise ValueError(f"{shape.name}: error {error} exceeds {TOLERANCE}{over}: not timed")
  arms: dict[str, Arm] = {}
  for name, given in zip(PASSES, ((x, params), (dy, x, params)), strict=True):
    run, quiet = layer.passes[name], without.passes[name]
    alone = exchanges_alone(run.trace(*given).jaxpr, mesh)
    assert alone is not None, "several devices exchange rows"
    arms |= {name: repeated(run, *given), f"{name} without": repeated(quiet, *given)}
    arms[f"{name} alone"] = alone
  calls = {name: calls_in(arm, _SAMPLE_SECONDS) for name, arm in arms.items()}
  timings = interleave(arms, rounds=rounds, calls=calls)
  result: dict[str, Any] = {
    "shape": dataclasses.asdict(shape),
    "name": shape.name,
    "devices": devices,
    "transport": transport,
    "overflow": overflow,
    "error": error,
  }
  for name in PASSES:
    program, quiet, alone = (timings[name + kind] for kind in ("", " without", " alone"))
    paid = Paid(program, quiet, alone)
    result[name] = program.as_json() | {"exchanges": paid.as_json(), "told": str(paid)}
  times = {name: timings[name].median for name in PASSES}
  backward = times["forward+backward"] - times["forward"]
  result["tflops_a_device"] = {
    "forward": shape.flops / times["forward"] / 1e12,
    "backward": 2 * shape.flops / backward / 1e12 if backward > 0 else None,
  }
  return result


def print_parallel(result: dict[str, Any]) -> None:
  """Prints one layer's lines."""
  rates = result["tflops_a_device"]
  told = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items() if rate is not None)
  loops = ", no overflow rounds" if result["overflow"] == "repeat" else ""
  where = f"{result['devices']} devices, {result['transport']}{loops}"
  error = "not compared" if result["error"] is None else f"{result['error']:.1e}"
  print(f"{result['name']:16s} {where} | TFLOP/s a device: {told} | error {error}")
  for name in PASSES:
    print(f"  {name:16s} {result[name]['ms']:8.3f} ms; {result[name]['told']}", flush=True)
