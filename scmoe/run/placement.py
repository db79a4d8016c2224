"""A resolved run on another mesh than that of its training; the model stays the same.

A mesh also decides how many capacity groups there are, and these which tokens experts drop.
"""

from __future__ import annotations

import dataclasses

import jax

from scmoe.base.errors import ConfigError
from scmoe.parallel.mesh import MeshConfig
from scmoe.run.config import RunConfig


def on_mesh(run: RunConfig, text: str = "") -> RunConfig:
  """A stored run on the devices of this machine; each data rank reads the whole embedding.

  Args:
    run: resolved configuration.
    text: axes such as "data=2,expert=2"; the others are 1. Empty: training's mesh where there are
      devices for it, else one device.

  Raises:
    ConfigError: the text names no axes, or there are too few devices.
  """
  if not text:
    if run.mesh.size > jax.device_count():
      return single_device(run)
    return dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, embedding="whole"))
  axes = {"data": 1, "expert": 1, "tensor": 1, "sequence": 1}
  for part in text.split(","):
    name, _, value = part.strip().partition("=")
    if name not in axes or not value.isdecimal() or not int(value):
      raise ConfigError(
        f"--mesh={text!r}: {part.strip()!r} is not of the form AXIS=N with an AXIS of: "
        f"{', '.join(axes)}; e.g. --mesh=data=2,expert=2"
      )
    axes[name] = int(value)
  mesh = dataclasses.replace(run.mesh, **axes).resolve(jax.device_count())
  return _on(run, mesh)


def single_device(run: RunConfig) -> RunConfig:
  """The same run on a mesh of one device."""
  return _on(run, dataclasses.replace(run.mesh, data=1, expert=1, tensor=1, sequence=1))


def _on(run: RunConfig, mesh: MeshConfig) -> RunConfig:
  """The run on another mesh.

  Capacity groups decide which tokens are dropped, so they stay if they divide over the new mesh;
  else each device has its own.
  """
  groups = run.dispatch.groups
  groups = 0 if groups % mesh.token_shards else groups
  mesh = dataclasses.replace(mesh, embedding="whole")
  return dataclasses.replace(
    run, mesh=mesh, dispatch=dataclasses.replace(run.dispatch, groups=groups)
  )


def with_capacity_groups_of(run: RunConfig, trained: RunConfig) -> RunConfig:
  """The run with as many capacity groups as in training, so that experts drop the same choices.

  With `dispatch.groups=0` every device has buffers of its own. One device that evaluates a model
  trained on eight would otherwise have one buffer for all tokens, and drop fewer choices. A run
  whose groups are set, or cannot be divided so, stays as it is.

  Args:
    run: resolved, on the mesh where it is evaluated.
    trained: resolved, on the mesh where it was trained.
  """
  groups, shards = trained.mesh.token_shards, run.mesh.token_shards
  tokens = run.train.batch_size * run.data.seq_len
  if run.dispatch.groups or groups % shards or tokens % groups:
    return run
  return dataclasses.replace(run, dispatch=dataclasses.replace(run.dispatch, groups=groups))
