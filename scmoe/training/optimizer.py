"""AdamW or Muon with clipping, a decay mask and schedules that follow the step of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from scmoe.parallel.shares import StateShares
from scmoe.training.average import Average
from scmoe.training.loss_scale import LossScaling
from scmoe.training.moments import narrow
from scmoe.training.muon import muon_or
from scmoe.training.options import OptimizerConfig
from scmoe.training.spikes import Spikes
from scmoe.training.streamed_update import OnHost

# A parameter does not decay if one of its path's last two names contains one of these words.
UNDECAYED = ("bias", "scale", "norm", "gain", "sinks")


class Optimizer(NamedTuple):
  """An optax transformation and what the step does around it.

  That is: schedule, loss scaling, spike test, division over ranks, average of the weights, and
  moments outside the devices' memory.

  `tx.update` takes `step=`, the step of the run, and `norm=`, the global norm of the gradients: the
  transformation may see one device's share of the gradients and could not compute their norm. It
  takes `layer=`, too: if it sees one layer at a time (`on_host`), the layer's number in its stack.

  Attributes:
    tx: the optax transformation.
    schedule: step -> learning rate.
    scaling: how the loss is scaled; None: not at all.
    spikes: the test for spikes; None: there is none.
    shares: which rank updates which parameters and moments; None: each updates all it holds.
    average: how the average of the weights is kept; None: there is none.
    on_host: how arrays in the host's memory or in files are updated: moments, and maybe lower
      halves and experts' parameters; None: all arrays lie in the devices' memory.
  """

  tx: optax.GradientTransformationExtraArgs
  schedule: Callable[[Any], Any]
  scaling: LossScaling | None = None
  spikes: Spikes | None = None
  shares: StateShares | None = None
  average: Average | None = None
  on_host: OnHost | None = None


def make_schedule(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
  """A function from the optimizer step n, 0 <= n < `steps`, to its learning rate.

  Warm-up of w = min(warmup_steps, steps // 2) steps gives (n + 1) / (w + 1) of the peak: the first
  step already learns, and a run made short for a trial still reaches the peak. After the warm-up
  `cosine` falls from the peak towards min_lr_ratio of it, `constant` stays at the peak, and `wsd`
  stays there until the last decay_fraction of all steps (at most those after the warm-up), in which
  it falls linearly towards min_lr_ratio of the peak. Before step 0 the rate is 0: a step that is
  timed as step -1 changes no parameter (`scmoe.training.measured`).
  """
  peak, warmup = cfg.learning_rate, min(cfg.warmup_steps, steps // 2)
  decay = min(round(cfg.decay_fraction * steps), steps - warmup)
  parts = [(-1, optax.constant_schedule(0.0))]
  parts += [(0, optax.linear_schedule(peak / (warmup + 1), peak, warmup))] if warmup else []
  if cfg.schedule == "cosine":
    parts += [(warmup, optax.cosine_decay_schedule(peak, steps - warmup, cfg.min_lr_ratio))]
  elif cfg.schedule == "constant" or not decay:
    parts += [(warmup, optax.constant_schedule(peak))]
  else:
    parts += [
      (warmup, optax.constant_schedule(peak)),
      (steps - decay, optax.linear_schedule(peak, peak * cfg.min_lr_ratio, decay)),
    ]
  return optax.join_schedules([rule for _, rule in parts], [start for start, _ in parts[1:]])


def decay_mask(params: Any) -> Any:
  """A bool for each parameter, in a tree like `params`: True if weight decay applies to it.

  It applies to arrays of two dimensions or more, but to no bias, scale, norm, gain or sinks. The
  last two names of a parameter's path say whether it is one of these (`UNDECAYED`), because a stack
  of layers turns a vector into a matrix.
  """

  def decays(path: tuple, leaf: Any) -> bool:
    names = jax.tree_util.keystr(path, simple=True, separator="/").lower().split("/")
    return leaf.ndim >= 2 and not any(part in name for name in names[-2:] for part in UNDECAYED)

  return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(
  cfg: OptimizerConfig,
  steps: int,
  mask: Any | Callable[[Any], Any] = decay_mask,
  *,
  half: bool = False,
  spike_sigma: float = 0.0,
  specs: Any = None,
  shares: StateShares | None = None,
  on_host: OnHost | None = None,
) -> Optimizer:
  """Makes the optimizer that a configuration describes.

  It applies Adam or Muon and multiplies by the learning rate. Where the options ask for it, it also
  clips gradients, decays weights by mask, keeps the moments in bfloat16, scales the loss, skips
  steps whose loss or gradient norm spikes, and averages the parameters.

  Args:
    cfg: see `OptimizerConfig`.
    steps: length of the schedule, train.steps.
    mask: which parameters decay: a pytree of bool like the parameters, or a function from them to
      such a pytree.
    half: whether gradients are computed in float16. Then the loss is scaled; in other types only if
      `cfg.loss_scale` is not 0.
    spike_sigma: see `TrainConfig`; 0: no spike test.
    specs: PartitionSpecs like the parameters; Muon needs them if `update` runs in the manual region
      without `shares`, which have specs of their own.
    shares: the shares that each rank updates; None: each rank updates all that it holds.
    on_host: moments, but for those of `OnHost.kept` layers, lie in the host's memory or in files,
      and the update goes layer by layer; None: all lie in the devices' memory, and all layers are
      updated at once. Needs parameters in nested dictionaries and, if weights decay, a function as
      `mask`.
  """
  schedule = make_schedule(cfg, steps)
  specs = specs if shares is None else shares.share_specs
  rule = optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.eps)
  if cfg.name == "muon":
    rule = muon_or(rule, beta=cfg.muon_beta, rms=cfg.muon_rms, specs=specs)
  if cfg.moments == "bfloat16":
    rule = narrow(rule)
  tx = optax.chain(
    clip_by_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity(),
    rule,
    optax.add_decayed_weights(cfg.weight_decay, mask) if cfg.weight_decay else optax.identity(),
    scale_by_step(schedule),
  )
  scaling = LossScaling(cfg.loss_scale, cfg.loss_scale_window) if half or cfg.loss_scale else None
  spikes = Spikes(spike_sigma) if spike_sigma else None
  average = Average(cfg.ema) if cfg.ema else None
  return Optimizer(
    optax.with_extra_args_support(tx), schedule, scaling, spikes, shares, average, on_host
  )


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
  """Like `optax.clip_by_global_norm`, but takes the norm as an argument of `update` (`norm=`)."""

  def init(params: Any) -> optax.EmptyState:
    del params
    return optax.EmptyState()

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    del params
    norm = extra["norm"]
    clip = lambda u: jnp.where(norm < limit, u, (u / norm.astype(u.dtype)) * limit)
    return jax.tree.map(clip, updates), state

  return optax.GradientTransformationExtraArgs(init, update)


def scale_by_step(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
  """Multiplies updates by -schedule(step), with `step` as an argument of `update`.

  Optax's own counter is in the optimizer state, which a skipped step leaves unchanged. The schedule
  has to go on nevertheless.
  """

  def init(params: Any) -> optax.EmptyState:
    del params
    return optax.EmptyState()

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    del params
    rate = -jnp.asarray(schedule(extra["step"]), jnp.float32)
    return jax.tree.map(lambda u: (rate * u).astype(u.dtype), updates), state

  return optax.GradientTransformationExtraArgs(init, update)
