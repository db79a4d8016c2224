"""Checks released models against the recorded results of transformers.

A case is a folder with a model in the published layout (config.json, safetensors) and an `io.npz`:
`input_ids`, `logits`, and perhaps `hidden_states`. The model is read by `scmoe.convert` and run on
one device and on eight with the experts 2-, 4- and 8-way, whole and with a cache; then it goes
through a run and out again, which has to give the same tensors bit for bit.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ScmoeError
from scmoe.models.gpt import GPT, Pass
from scmoe.parallel.mesh import BATCH_AXES, manual, parameter_specs
from scmoe.pretrained.folder import Folder
from scmoe.pretrained.imported import import_model
from scmoe.pretrained.released import open_released
from scmoe.pretrained.stream import nested
from scmoe.run.exported import export_model

LOGITS, HIDDEN = 2e-5, 5e-5  # absolute, float32 parameters and products in full precision
MESHES = ("data=1", "data=4,expert=2", "data=2,expert=4", "expert=8")
PREFILL = 5  # tokens of a prompt that are run at once; the others follow one by one


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of one case.

  Attributes:
    name: of the case.
    failures: what is wrong, empty if it passes.
    errors: largest absolute error of logits and hidden states, by what was run.
  """

  name: str
  failures: list[str]
  errors: dict[str, float]

  def __str__(self) -> str:
    runs = sorted({what.partition(" ")[0] for what in self.errors})
    shown = []
    for kind in ("logits", "decode", "hidden"):
      worst = [error for what, error in self.errors.items() if what.endswith(kind)]
      shown += [f"{kind} {max(worst):.1e}"] if worst else []
    verdict = "FAIL " + "; ".join(self.failures) if self.failures else "ok"
    return f"{self.name}: {', '.join(shown)} on {len(runs)} meshes: {verdict}"


def is_case(folder: Path) -> bool:
  """Whether this folder is such a case."""
  return (folder / "io.npz").is_file() and (folder / "config.json").is_file()


def check_case(folder: Path, meshes: Sequence[str] = MESHES, *, round_trip: bool = True) -> Outcome:
  """Runs a case on those of the meshes for which there are devices."""
  with np.load(folder / "io.npz", allow_pickle=False) as arrays:
    recorded = {name: arrays[name] for name in arrays.files}
  failures: list[str] = []
  errors: dict[str, float] = {}

  def compare(what: str, got: Any, want: np.ndarray, limit: float) -> None:
    error = errors[what] = float(np.abs(np.asarray(got) - want).max())
    if not error <= limit:  # NaN fails too
      failures.append(f"{what} {error:.1e} > {limit:.0e}")

  for mesh in meshes:
    if int(np.prod([int(part.partition("=")[2]) for part in mesh.split(",")])) > jax.device_count():
      continue
    try:
      with jax.default_matmul_precision("highest"):
        got = run(folder, mesh, recorded["input_ids"])
    except ScmoeError as error:
      failures.append(f"{mesh}: {error}")
      continue
    compare(f"{mesh} logits", got["logits"], recorded["logits"], LOGITS)
    compare(f"{mesh} decode", got["decoded"], recorded["logits"], LOGITS)
    if "hidden_states" in recorded:
      compare(f"{mesh} hidden", got["hidden"], recorded["hidden_states"], HIDDEN)
  if round_trip and errors:  # what could not be read was said above
    failures += there_and_back(folder)
  return Outcome(folder.name, failures, errors)


def run(folder: Path, mesh: str, tokens: np.ndarray) -> dict[str, np.ndarray]:
  """Logits, hidden states and the logits of prefill and cached decode, on one mesh."""
  released = open_released(str(folder), mesh=mesh, dtype="float32")
  built, leaves = released.built, dict(released.leaves())
  params = nested(leaves, {"params": built.shapes})["params"]
  router = nested(leaves, {"router": built.router_shapes})["router"] if built.router_shapes else {}
  params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  rows, length = tokens.shape
  copies = -(-built.mesh.size // rows)
  whole = np.tile(tokens, (copies, 1))
  model: GPT = nnx.merge(built.graph, params)
  blocks = 2 if released.family == "longcat_flash" else 1  # of a layer

  def local(params, router, tokens_BS):
    model: GPT = nnx.merge(built.graph, params)
    given = Pass(no_drop=True, router=router)
    out = model(tokens_BS, dataclasses.replace(given, hidden=True))
    positions_BS = jnp.broadcast_to(jnp.arange(length), tokens_BS.shape)
    first = model.embedding(tokens_BS, positions_BS, jnp.dtype(jnp.float32))
    first = first * model.config.embedding_multiplier
    layers = out.hidden_LBSD[blocks - 1 :: blocks]
    last = out.h_BSD * model.config.logits_scaling  # transformers divides the logits
    hidden = jnp.concatenate([first[None], layers[:-1], last[None]])
    caches = model.init_caches(tokens_BS.shape[0], length + 3)  # three positions more than are read
    start = dataclasses.replace(given, caches=caches, positions_BS=positions_BS[:, :PREFILL])
    prompt = model(tokens_BS[:, :PREFILL], start)

    def step(caches, at):
      token_B1 = jax.lax.dynamic_slice_in_dim(tokens_BS, at, 1, 1)
      here = jnp.full_like(token_B1, at)
      out = model(token_B1, dataclasses.replace(given, caches=caches, positions_BS=here))
      return out.caches, out.h_BSD[:, 0]

    _, rest = jax.lax.scan(step, prompt.caches, jnp.arange(PREFILL, length))
    decoded = jnp.concatenate([prompt.h_BSD, rest.swapaxes(0, 1)], 1)
    return model.logits(out.h_BSD), model.logits(decoded), hidden

  specs = (parameter_specs(params_of(model)), P(), P(BATCH_AXES))
  out_specs = (P(BATCH_AXES), P(BATCH_AXES), P(None, BATCH_AXES))
  function = jax.jit(manual(local, built.mesh, specs, out_specs))
  logits, decoded, hidden = function(params_of(model), router, whole)
  return {
    "logits": np.asarray(logits)[:rows],
    "decoded": np.asarray(decoded)[:rows],
    "hidden": np.asarray(hidden)[:, :rows],
  }


def params_of(model: GPT) -> Any:
  """The model's parameters, with their logical dimensions."""
  return nnx.split(model)[1]


def there_and_back(folder: Path) -> list[str]:
  """Lists the differences after the folder has become a run and a folder again."""
  with tempfile.TemporaryDirectory() as scratch:
    workdir, out = Path(scratch) / "run", Path(scratch) / "out"
    import_model(str(folder), workdir)
    export_model(workdir, out)
    before, after = Folder(folder), Folder(out)
    if set(before.entries) != set(after.entries):
      return [f"names differ after a round trip: {set(before.entries) ^ set(after.entries)}"]
    same = lambda name: (
      before.entries[name].dtype == after.entries[name].dtype
      and before.read(name).tobytes() == after.read(name).tobytes()
    )
    wrong = [f"{name} differs after a round trip" for name in before.entries if not same(name)]
    kept = {name: value for name, value in before.config.items() if value is not None}
    lost = [name for name, value in kept.items() if after.config.get(name) != value]
    return wrong + [f"config.json: {name} differs after a round trip" for name in lost]
