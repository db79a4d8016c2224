"""Runs the gate: the logits and scores of tokens, and the k best experts of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from scmoe.base.errors import ConfigError
from scmoe.base.options import check_array, check_type, check_whole
from scmoe.kernels.top_k import GateOutput, gate_product
from scmoe.moe.gates import check_logits, compute_dtype
from scmoe.moe.options import RouterConfig, check_top_k

Gate = Callable[[Array], Array] | Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
  """The gate's random noise and jitter in training, for the tokens of this device.

  `MoE` draws for the global batch and takes this device's share, so a token gets the same numbers
  on every mesh.

  Attributes:
    noise_TE: float32, standard normal; None without `router.noise`.
    jitter_TD: float32 factors that multiply the gate's input elementwise; None without
      `router.compat.jitter`.
  """

  noise_TE: Float[Array, "T E"] | None = None
  jitter_TD: Float[Array, "T D"] | None = None


@dataclasses.dataclass(frozen=True)
class Scores:
  """A gate's logits for every token, and the scores and choices that follow from them.

  Attributes:
    logits_TE: the gate's logits, at least float32; in training with noise, if `router.noise` > 0.
    clean_TE: the logits without noise.
    mask_T: bool, False for tokens that take no part; None: all take part.
    config: options of the router: how scores are made of logits, and how experts form groups.
    best_TK: int32, the experts with the largest logits, if the gate's `top_k` has found them; None
      otherwise.
    share_TK: the probabilities of `best_TK`, by the softmax over all E logits, if `top_k` has
      computed them too; None otherwise.
  """

  logits_TE: Array
  clean_TE: Array
  mask_T: Array | None
  config: RouterConfig
  best_TK: Array | None = None
  share_TK: Array | None = None

  @property
  def num_experts(self) -> int:
    """E, the number of experts that the gate scores, zero experts included."""
    return self.logits_TE.shape[1]

  @property
  def independent(self) -> bool:
    """Whether a score is the sigmoid of the expert's own logit; then scores need not sum to 1."""
    return self.config.scoring_func == "sigmoid"

  @functools.cached_property
  def scores_TE(self) -> Array:
    """The experts' scores: the softmax of each token's logits, or the sigmoid of each logit.

    `choice_weights` makes the weights of choices from them, or, where these give the same weights,
    from the logits or from `share_TK`.
    """
    return jax.nn.sigmoid(self.logits_TE) if self.independent else jax.nn.softmax(self.logits_TE)

  @functools.cached_property
  def probs_TE(self) -> Array:
    """Each token's scores, sigmoids divided by their sum (`scaled_weights`; DeepSeek-V3, Eq. 19).

    The balancing losses `gshard` and `megablocks`, the statistics of probabilities, token rounding
    and the order `priority` read them, among others.
    """
    scores_TE = self.scores_TE
    return scaled_weights(scores_TE, True) if self.independent else scores_TE

  def best(self, k: int, bias_E: Array | None = None) -> Array:
    """Each token's k best experts by logit, score or score + bias, best first: int32 [T, K].

    They are ordered by the logits; with a balancing bias by score + bias; with groups of experts
    and no bias by the score. Where the logits decide and the
    gate's `top_k` has found the best, these are returned. Otherwise `jax.lax.top_k` orders values:
    0.0 comes before -0.0; of other equal values the one of the expert with the smaller index comes
    first; and NaN counts as the largest value, or as the smallest if its sign bit is set. So the
    experts are valid indices whatever the logits are. With groups (`router.n_group` > 1) a token
    without NaN scores gets only experts of its `router.topk_group` best groups; these groups are
    called open.

    Raises:
      ConfigError: the bias has the wrong shape, or the open groups hold fewer than k experts.
    """
    if bias_E is None and self.config.n_group == 1:
      if self.best_TK is not None:
        return self.best_TK
      score_TE = jax.lax.stop_gradient(self.logits_TE)
    else:
      if bias_E is not None and bias_E.shape != (self.num_experts,):
        raise ConfigError(
          f"the balancing bias has shape {list(bias_E.shape)}, the router chooses from "
          f"{self.num_experts} experts: it needs [{self.num_experts}]"
        )
      score_TE = jax.lax.stop_gradient(self.scores_TE)
      score_TE = score_TE if bias_E is None else score_TE + jax.lax.stop_gradient(bias_E)
      score_TE = _closed_groups_masked(score_TE, self.config, k)
    return jax.lax.top_k(score_TE, k)[1].astype(jnp.int32)


def _closed_groups_masked(score_TE: Array, config: RouterConfig, k: int) -> Array:
  """Scores with -inf for experts outside each token's open groups (DeepSeek-V2, -V3).

  A token's open groups are its `router.topk_group` best; `router.group_score` says how a group's
  score is made. With one group the scores stay as they are. Worked example, four experts in two
  groups of which one is open, `group_score="max"`: the biased scores -1.2 -1.4 | -1.1 -1.5 open the
  second group and become -inf -inf | -1.1 -1.5. A finite fill such as 0 would win against every
  negative score.

  Raises:
    ConfigError: k is larger than the number of experts in the open groups.
  """
  groups, size = config.n_group, score_TE.shape[1] // config.n_group
  if groups == 1:
    return score_TE
  if k > size * config.topk_group:
    raise ConfigError(
      f"{k} experts per token are more than the {size * config.topk_group} of the open groups: "
      f"router.topk_group={config.topk_group} of router.n_group={groups}, {size} experts each; "
      "raise router.topk_group, or choose fewer experts"
    )
  score_TGE = score_TE.reshape(score_TE.shape[0], groups, size)
  best = jax.lax.top_k(score_TGE, {"top2": 2, "max": 1}[config.group_score])[0]
  open_TK = jax.lax.top_k(best.sum(-1), config.topk_group)[1]
  open_TG = (open_TK[:, :, None] == jnp.arange(groups)).any(1)
  return jnp.where(open_TG[:, :, None], score_TGE, -jnp.inf).reshape(score_TE.shape)


def scaled_weights(weight_TK: Array, normalise: bool, weight_norm: float = 0.0) -> Array:
  """Each token's weights, divided by their p-norm, by their sum or not at all.

  With `weight_norm` = p > 0 they are divided by their p-norm, (max(Σ w^p, smallest normal
  number))^(1/p); else, if `normalise`, by max(their sum, machine epsilon); else they are unchanged.
  """
  eps = jnp.finfo(weight_TK.dtype).eps
  if weight_norm:
    power = (weight_TK**weight_norm).sum(-1, keepdims=True)
    return weight_TK / jnp.maximum(power, jnp.finfo(weight_TK.dtype).tiny) ** (1 / weight_norm)
  if normalise:
    return weight_TK / jnp.maximum(weight_TK.sum(-1, keepdims=True), eps)
  return weight_TK


def score(
  x_TD: Array,
  gate: Gate,
  config: RouterConfig,
  k: int,
  num_experts: int | None,
  mask_T: Array | None,
  training: Draws | None,
) -> Scores:
  """Runs the gate on the tokens; applies jitter and noise, each if `config` and `training` have it.

  Jitter multiplies the tokens that the gate reads; noise is added to the gate's logits. A gate with
  a method `top_k` also finds the k best experts, unless noise is added. The gate reads zeros for
  masked tokens. Arguments are those of `scmoe.moe.route.route`, which lists the errors, too.
  """
  draws = training or Draws()
  _check_arguments(x_TD, gate, config, k, num_experts, mask_T)
  if mask_T is not None:
    # Masked tokens may hold anything. The gate's gradient multiplies them by zero, and zero times
    # NaN is NaN, so they are set to zero here.
    x_TD = jnp.where(mask_T[:, None], x_TD, 0)
  if draws.jitter_TD is not None and config.compat.jitter:
    dtype = compute_dtype(x_TD, config.compat.fp32_gate)
    x_TD = x_TD.astype(dtype) * draws.jitter_TD.astype(dtype)
  noise_TE = draws.noise_TE if config.noise else None
  best_TK = share_TK = None
  if noise_TE is None and hasattr(gate, "top_k"):
    found: Any = gate.top_k(x_TD, k)  # pyright: ignore[reportAttributeAccessIssue]
    clean_TE, best_TK, share_TK = GateOutput(*found)
  elif callable(gate):
    clean_TE = gate(x_TD)
  else:
    clean_TE = gate_product(x_TD, gate, fp32=config.compat.fp32_gate)
  check_logits(clean_TE, x_TD.shape[0], num_experts)
  check_top_k(k, clean_TE.shape[1])
  clean_TE = clean_TE.astype(jnp.promote_types(clean_TE.dtype, jnp.float32))
  logits_TE = clean_TE
  if noise_TE is not None:
    size = config.noise / clean_TE.shape[1]
    logits_TE = clean_TE + size * noise_TE.astype(clean_TE.dtype)
  return Scores(logits_TE, clean_TE, mask_T, config, best_TK, share_TK)


def _check_arguments(
  x_TD: Array, gate: Gate, config: RouterConfig, k: int, num_experts: int | None, mask_T: Any
) -> None:
  """Checks these arguments of `score`; a ConfigError names the wrong type, shape or k."""
  check_type("config", config, RouterConfig)
  for name, value in (("the array of tokens", x_TD), ("the mask", mask_T), ("the gate", gate)):
    if value is not None and not (value is gate and callable(gate)):
      check_array(name, value)
  check_whole("model.top_k", k, 1)
  if x_TD.ndim != 2:
    raise ConfigError(f"routing reads tokens [tokens, width], got shape {list(x_TD.shape)}")
  tokens, width = x_TD.shape
  if not callable(gate) and (gate.ndim != 2 or gate.shape[0] != width):
    raise ConfigError(
      f"the gate's weights have shape {list(gate.shape)}, tokens of width {width} need "
      f"[{width}, experts]"
    )
  if mask_T is not None and (mask_T.shape != (tokens,) or mask_T.dtype != bool):
    raise ConfigError(
      f"the mask has shape {list(mask_T.shape)} and type {mask_T.dtype}; {tokens} tokens need "
      f"[{tokens}] and bool"
    )
  if num_experts is not None:
    check_top_k(k, num_experts)
