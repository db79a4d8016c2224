"""Checks this project against recorded results: `python -m tests.conformance DIR`.

DIR, and every folder below it, may hold cases of two kinds. A folder with a config.json and an
`io.npz` is a released model (`tests/released.py`). A folder with a `settings.json` and one `.npz`
per case holds layers: inputs, weights, routing integers, output and gradients of one MoE layer on
one device. The folder's own README defines every array and formula.
Each of these runs through the public stages, route -> dispatch -> experts -> combine. Prints one
line per case with its worst errors; the exit code is 1 if any case fails. Eight simulated devices,
unless XLA_FLAGS says otherwise.

Recorded results of an upstream defect are listed in `do_not_match`; in their place the case is held
to what `correct` says: the right integers, and output and gradients of another case.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

if "jax" not in sys.modules:  # eight devices have to be asked for, with threads for all of them
  os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
  os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np

from scmoe.kernels.grouped_matmul import FFNConfig, FFNWeights, expert_ffn
from scmoe.moe.dispatch import Capacity, capacity, exact_capacity, queue_positions
from scmoe.moe.gates import cosine_logits
from scmoe.moe.losses import balance_loss, router_sums
from scmoe.moe.options import CompatConfig, RouterConfig
from scmoe.moe.route import route
from tests import released

VALUE_TOLERANCE = 1e-6  # output, auxiliary loss, combine weights, gradient of the input
WEIGHT_TOLERANCE = 3e-6  # gradients of weights
INTEGERS = ("expert_ids", "places", "capacity", "tokens_per_expert")

# Every case is another program and runs once: compiling it well takes longer than running it.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@dataclasses.dataclass(frozen=True)
class Report:
  """Outcome of one case.

  Attributes:
    name: of the case.
    failures: what is wrong, empty if it passes.
    errors: relative error of every array compared, by its name.
  """

  name: str
  failures: list[str]
  errors: dict[str, float]

  def __str__(self) -> str:
    gradients = {n: e for n, e in self.errors.items() if n.startswith("grad_")}
    weights = {n: e for n, e in gradients.items() if n != "grad_input_tokens"}
    worst = max(weights, key=weights.__getitem__, default="")
    parts = [f"{short} {self.errors.get(name, 0):.1e}" for short, name in SHORT.items()]
    parts.append(f"weights' gradients {weights.get(worst, 0):.1e} ({worst.removeprefix('grad_')})")
    verdict = "FAIL " + "; ".join(self.failures) if self.failures else "ok"
    return f"{self.name}: {', '.join(parts)}: {verdict}"


SHORT = {
  "output": "output",
  "loss": "auxiliary_loss",
  "combine weights": "combine_weights",
  "input gradient": "grad_input_tokens",
}


def check_folder(folder: Path) -> list[Report]:
  """Runs every case of a folder."""
  settings = json.loads((folder / "settings.json").read_text())
  return [check_case(folder, settings, name) for name in settings]


def check_case(folder: Path, settings: dict[str, Any], name: str) -> Report:
  """Runs one case and compares everything that is recorded of it."""
  case = settings[name]
  recorded = _load(folder / case["file"])
  want = {n: a for n, a in recorded.items() if n not in case["do_not_match"]}
  correct = dict(case["correct"] or {})
  twin = correct.pop("same_output_and_gradients_as", None)
  if twin is not None:
    same = _load(folder / settings[twin]["file"])
    want |= {n: a for n, a in same.items() if n == "output" or n.startswith("grad_")}
  want |= {n: np.asarray(a) for n, a in correct.items()}
  dropped = correct.get("choices_dropped", case["choices_dropped"])
  with jax.enable_x64(case["dtype"] == "float64"), jax.default_matmul_precision("highest"):
    got = run_case(case, recorded)
  return compare(name, got, want | {"choices_dropped": np.asarray(dropped)})


def compare(name: str, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> Report:
  """Integers exactly, all else by max|a − b| / max|b|."""
  failures, errors = [], {}
  for key, array in want.items():
    if key in INTEGERS or key == "choices_dropped":
      if not np.array_equal(got[key], array):
        failures.append(f"{key} differs")
    elif key in got:
      errors[key] = float(np.abs(got[key] - array).max() / max(np.abs(array).max(), 1e-300))
      is_weight = key.startswith("grad_") and key != "grad_input_tokens"
      limit = WEIGHT_TOLERANCE if is_weight else VALUE_TOLERANCE
      if not errors[key] <= limit:  # NaN fails too
        failures.append(f"{key} {errors[key]:.1e} > {limit:.0e}")
  return Report(name, failures, errors)


def run_case(case: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """One layer forward and backward; results under the names of the recorded arrays."""
  given = {n: jnp.asarray(a) for n, a in arrays.items() if f"grad_{n}" in arrays}
  cotangent_TO = jnp.asarray(arrays["output_cotangent"])

  rows = rows_per_expert(case, given)

  @compiled
  @functools.partial(jax.value_and_grad, has_aux=True)
  def objective(given):
    y_TO, loss, facts = layer(case, given, rows)
    scale = case["auxiliary_loss_coefficient_in_gradient"]
    return (y_TO * cotangent_TO).sum() + scale * loss, (y_TO, loss, facts)

  (_, (y_TO, loss, facts)), gradients = objective(given)
  got = facts | {"output": y_TO, "auxiliary_loss": loss, "capacity": rows}
  got |= {f"grad_{n}": g for n, g in gradients.items()}
  return {n: np.asarray(a) for n, a in got.items()}


def route_case(case: dict[str, Any], given: dict[str, Any]) -> Any:
  """The first stage: the case's gate and choices."""
  k, _ = overridden(case)
  config = RouterConfig(
    gate=case["gate"]["kind"],
    normalise=case["normalise_weights"],
    balance=case["auxiliary_loss"],
    noise=case["gate_noise"],
    compat=CompatConfig(
      weights="before" if case["weight_applied"] == "before_experts" else "after"
    ),
  )
  gate, num_experts = gate_of(case, given), case["experts"]
  return route(given["input_tokens"], gate, config, k=k, num_experts=num_experts)


def order_of(case: dict[str, Any]) -> str:
  """The order in which choices are served."""
  return "priority" if case["batch_prioritised"] else "choice"


def overridden(case: dict[str, Any]) -> tuple[int, float]:
  """Choices per token and capacity factor, those of the call before those of the gate."""
  override = case["runtime_overrides"]
  k = min(override.get("top_k", case["top_k"]), case["experts"])
  return k, override.get("capacity_factor", case["capacity_factor"])


def rows_per_expert(case: dict[str, Any], given: dict[str, Any]) -> int:
  """The capacity, exact where the rule asks for the exact need."""
  k, factor = overridden(case)
  need = None
  if factor <= 0:
    counts = compiled(lambda given: route_case(case, given).count_E)(given)
    need = exact_capacity(counts)
  return capacity(
    factor,
    tokens=case["tokens"],
    num_experts=case["experts"],
    k=k,
    need=need,
    align=case["overlap_degree"],
  )


def layer(case: dict[str, Any], given: dict[str, Any], rows: int) -> tuple[Any, Any, dict]:
  """route -> dispatch -> experts -> combine of one case: output, auxiliary loss, integers."""
  routing = route_case(case, given)
  transport = Capacity(rows, order=order_of(case))
  sent = transport.dispatch(given["input_tokens"], routing)
  weights, activation = experts_of(case, given)
  config = FFNConfig(activation)
  computed = expert_ffn(sent.rows[0], weights, sent.layouts[0], config)
  y_TO = transport.combine(dataclasses.replace(sent, rows=(computed,)))
  sums = router_sums(routing, sent.dropped, sent.rounds)
  used = routing.weight_TK if routing.input_weight_TK is None else routing.input_weight_TK
  position_TK, _ = queue_positions(
    routing.expert_TK,
    routing.num_experts,
    order=order_of(case),
    priority_T=routing.probs_TE.max(-1),
  )
  facts = {
    "expert_ids": routing.expert_TK.T,
    "places": position_TK.T,
    "combine_weights": used.T,
    "tokens_per_expert": routing.count_E,
    "choices_dropped": sent.dropped,
  }
  return y_TO, balance_loss(sums, case["auxiliary_loss"]), facts


def gate_of(case: dict[str, Any], given: dict[str, Any]) -> Any:
  """The case's gate with its recorded weights."""
  if case["gate"]["kind"] == "linear":
    return given["gate_weight"].T
  return lambda x_TD: cosine_logits(
    x_TD,
    given["cosine_projection_weight"].T,
    given["cosine_projection_bias"],
    given["cosine_expert_directions"],
    given["cosine_log_scale"],
  )


def experts_of(case: dict[str, Any], given: dict[str, Any]) -> tuple[FFNWeights, str]:
  """The case's experts with their recorded weights, and their activation."""
  down_EFO = given["expert_down_weight"]
  if case["expert"]["kind"] == "gated_without_bias":
    up, gate = given["expert_linear_weight"], given["expert_activated_weight"]
    return FFNWeights(up, down_EFO, gate), "swiglu"
  up_EDF = jnp.swapaxes(given["expert_up_weight"], 1, 2)
  biases = given["expert_up_bias"], given["expert_down_bias"]
  return FFNWeights(up_EDF, down_EFO, None, *biases), case["expert"]["activation"]


def _load(path: Path) -> dict[str, np.ndarray]:
  with np.load(path, allow_pickle=False) as arrays:
    return {name: arrays[name] for name in arrays.files}


def main(arguments: list[str]) -> int:
  """Prints one line per case; 0 if all pass, 1 if any fails, 2 if there is none."""
  folder = Path(arguments[0]) if len(arguments) == 1 else None
  here = [] if folder is None else [folder, *(p for p in sorted(folder.rglob("*")) if p.is_dir())]
  reports: list[Report | released.Outcome] = []
  for place in here:
    found: list[Any] = []
    if released.is_case(place):
      found = [released.check_case(place)]
    elif (place / "settings.json").is_file():
      found = check_folder(place)
    for report in found:
      print(report, flush=True)
    reports += found
  if not reports:
    print(
      "usage: python -m tests.conformance DIR   (a folder with settings.json, or with config.json "
      "and io.npz, or with such folders in it)",
      file=sys.stderr,
    )
    return 2
  failed = sum(bool(report.failures) for report in reports)
  worst = max((e for r in reports for e in r.errors.values()), default=math.nan)
  print(f"{len(reports) - failed} of {len(reports)} cases pass; worst error {worst:.1e}")
  return int(failed > 0)


if __name__ == "__main__":
  raise SystemExit(main(sys.argv[1:]))
