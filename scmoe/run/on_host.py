"""Options of the state in the host's memory or in files (`mesh.moments_in`, `mesh.experts_in`)."""

from __future__ import annotations

from scmoe.base.errors import ConfigError
from scmoe.run.config import RunConfig
from scmoe.training.streamed_update import OnHost


def on_host(run: RunConfig) -> OnHost | None:
  """How moments in the host's memory or in files are updated; None if they lie on the devices.

  Raises:
    ConfigError: the host cannot compute the run's update, or does not where moments lie in files;
      or experts cannot lie in the host's memory in this run.
  """
  mesh, filed = run.mesh, run.mesh.moments_in == "files"
  if mesh.experts_in == "host" and (refused := experts_refused(run)):
    raise ConfigError(refused)
  if mesh.moments_in == "device":
    return None
  if filed and mesh.moments_update == "device":
    raise ConfigError(
      "mesh.moments_in='files' needs an update by the host, got mesh.moments_update='device'; set "
      "mesh.moments_update=host"
    )
  if filed and not mesh.moments_folder:
    raise ConfigError(
      "mesh.moments_in='files' needs a folder, got mesh.moments_folder=''; name one on a local disk"
    )
  if mesh.moments_update == "host" and run.optimizer.name != "adamw":
    raise ConfigError(
      f"mesh.moments_update='host' computes AdamW, got optimizer.name={run.optimizer.name!r}, "
      "whose products of matrices are for devices; set mesh.moments_update=device"
      + " and mesh.moments_in=host"
      * filed
    )
  computes = mesh.moments_update == "host"
  kept = 0 if computes else mesh.moments_kept
  experts = run.model.dtype if mesh.experts_in == "host" else ""
  return OnHost(mesh.moments_ahead, kept, computes, mesh.moments_folder if filed else "", experts)


def experts_refused(run: RunConfig) -> str:
  """Says which option keeps experts from the host's memory, and a remedy; "" if none does."""
  mesh, model, name = run.mesh, run.model, "mesh.experts_in='host'"
  needs = (
    ("mesh.moments_in", mesh.moments_in, "host", "moments, which are larger, lie there first"),
    ("mesh.moments_update", mesh.moments_update, "device", "the update fetches experts"),
    ("mesh.shard_state", mesh.shard_state, "none", "a rank fetches whole matrices"),
    ("optimizer.ema", run.optimizer.ema, 0.0, "their average would lie on the device"),
  )
  for field, found, wanted, why in needs:
    if found != wanted:
      return f"{name} needs {field}={wanted} ({why}), got {found!r}; set {field}={wanted}"
  if model.reads_images:
    return (
      f"{name} is for language models, got model.architecture={model.architecture!r}; set "
      "mesh.experts_in=device"
    )
  if model.dtype == "float16":
    return (
      f"{name} does not go with the scaled loss of model.dtype='float16'; set model.dtype=bfloat16"
    )
  if run.overlap.unroll > 0:
    return (
      f"{name} writes all pairs out, got overlap.unroll={run.overlap.unroll}; set overlap.unroll=0"
    )
  return ""
