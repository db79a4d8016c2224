"""Balancing losses, the z-loss, router statistics and balancing biases, computed from `RouterSums`.

`router_sums` makes these sums of a routing. Only the biases have a state, which each optimizer step
hands to the next (`init_bias`).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.base.extensions import construct, is_import_path
from scmoe.base.options import check_choice, check_type
from scmoe.moe.options import BALANCES, RouterConfig
from scmoe.moe.types import RouterSums, Routing


def router_sums(routing: Routing, dropped: Array, rounds: Array) -> RouterSums:
  """The `RouterSums` of this device's tokens; masked tokens count nowhere.

  `shortcut_square` and `main_square` are 0: the block pair sets them. Gradients flow through
  probs_E, z_square, importance_E and soft_load_E only.

  Args:
    routing: the tokens' choices.
    dropped, rounds: see `Dispatched`.
  """
  mask_T = routing.mask_T.astype(jnp.float32)
  # `where`, not a product with the mask: a masked token may hold NaN, and 0 · NaN is NaN.
  masked = lambda a: jnp.where(routing.mask_T.reshape(-1, *[1] * (a.ndim - 1)), a, 0)
  probs_TE = masked(routing.probs_TE)
  logits_TE = jax.lax.stop_gradient(routing.logits_TE)
  num_experts = probs_TE.shape[1]
  first_TE = routing.expert_TK[:, :1] == jnp.arange(num_experts)
  first_E = (first_TE * mask_T[:, None]).sum(0)
  log_z_T = jax.nn.logsumexp(routing.logits_TE, -1)
  shares_TE = jax.lax.stop_gradient(probs_TE)
  log_probs_TE = jnp.log(jnp.where(shares_TE > 0, shares_TE, 1))
  finite_T = jnp.isfinite(logits_TE).all(-1)
  zero, zero_E = jnp.zeros((), jnp.float32), jnp.zeros(num_experts, jnp.float32)
  return RouterSums(
    tokens=mask_T.sum(),
    choices=routing.count_E.sum().astype(jnp.float32),
    dropped=dropped.astype(jnp.float32),
    rounds=rounds.astype(jnp.float32),
    shards=jnp.ones((), jnp.float32),
    load_E=routing.count_E.astype(jnp.float32),
    first_E=first_E,
    probs_E=probs_TE.sum(0),
    z_square=masked(log_z_T**2).sum(),
    entropy=-(shares_TE * log_probs_TE).sum(),
    confidence=jax.lax.stop_gradient(probs_TE.max(-1)).sum(),
    logit_square=masked((logits_TE**2).mean(-1)).sum(),
    importance_E=zero_E if routing.importance_E is None else routing.importance_E,
    soft_load_E=zero_E if routing.soft_load_E is None else routing.soft_load_E,
    nonfinite=(mask_T * ~finite_T).sum(),
    shortcut_square=zero,
    main_square=zero,
    zero_experts=routing.zero_experts,
  )


def computing(sums: RouterSums) -> RouterSums:
  """`RouterSums` in which `choices` and the sums per expert leave out the zero experts.

  `probs_E` and `first_E` are scaled so that each again adds up to the number of tokens (if only
  zeros are left, they stay 0); the sums without an expert dimension, but for `choices`, stay as
  they are. The losses balance the computing experts with each other; the balancing bias controls
  the share of zero experts (`update_bias`). Example: 100 tokens, K = 2, and zero experts have 50 of
  the 200 choices and 0.3 of the probability. Then `choices` becomes 150, the computing experts'
  probabilities are divided by 0.7, and the numbers of their first choices are scaled up to a sum of
  100.
  """
  if not sums.zero_experts:
    return sums
  real = slice(sums.load_E.shape[-1] - sums.zero_experts)
  left = {name: getattr(sums, name)[..., real] for name in _BY_EXPERT}
  part = jax.lax.stop_gradient(left["probs_E"].sum(-1)) / jnp.maximum(sums.tokens, 1)
  left["probs_E"] = left["probs_E"] / jnp.maximum(part, 1e-30)[..., None]
  first = left["first_E"].sum(-1)
  scale = jnp.where(first > 0, sums.tokens / jnp.maximum(first, 1), 0)
  left["first_E"] = left["first_E"] * scale[..., None]
  return dataclasses.replace(sums, choices=left["load_E"].sum(-1), zero_experts=0, **left)


_BY_EXPERT = ("load_E", "first_E", "probs_E", "importance_E", "soft_load_E")


def gshard_loss(sums: RouterSums) -> Array:
  """GShard's balancing loss E · Σ_e mean_t(probs_te) · (share of tokens whose first choice is e).

  Only first choices count, also those that the transport drops; the gradient flows through the
  probabilities only. The loss is 1 for a uniform router and 0 without tokens. Sums of shape
  [..., E] give losses of shape [...], one per layer.
  """
  tokens = jnp.maximum(sums.tokens, 1)[..., None]
  first_E = jax.lax.stop_gradient(sums.first_E)
  return sums.probs_E.shape[-1] * (sums.probs_E / tokens * (first_E / tokens)).sum(-1)


def load_importance_loss(sums: RouterSums) -> Array:
  """Load-importance loss of each layer, ½ (cv²(importance) + cv²(soft load)) over the experts.

  The importance is Σ_t p_t, with p the softmax of the logits without noise. The soft load is Σ_t
  Φ((p_t − θ_t) / (noise / E)), with θ_t the k-th largest logit with noise; see
  `scmoe.moe.route.soft_load`. Both have an entry for each expert, and over these entries cv²(v) =
  var(v) / (mean(v)² + 1e-10) with the unbiased variance (Tutel load_importance_loss). The loss is 0
  for one expert, and without tokens. With another `router.balance` than load_importance the sums,
  and so the loss, are 0.
  """
  return (_variation(sums.importance_E) + _variation(sums.soft_load_E)) / 2


def _variation(v_E: Array) -> Array:
  """Squared coefficient of variation over experts, unbiased var / (mean² + 1e-10); 0 for one."""
  if v_E.shape[-1] == 1:
    return jnp.zeros(v_E.shape[:-1], v_E.dtype)
  return v_E.var(-1, ddof=1) / (v_E.mean(-1) ** 2 + 1e-10)


def megablocks_loss(sums: RouterSums) -> Array:
  """MegaBlocks' balancing loss per layer, E · Σ_e (share of choices for e) · mean_t(probs_te).

  All taken choices in `sums` count, also those that the transport drops: K of a token, but for
  token rounding and zero experts (`computing`). The gradient flows through the probabilities only.
  The loss is 1 for a uniform router and 0 without tokens; for K = 1 without token rounding it is
  the GShard loss. With `counts`, each expert's choices, and T tokens, the mean over L layers is
  MegaBlocks' global loss E / (L·T·K) · Σ_layers ⟨counts, mean_t probs_t⟩, without its coefficient
  (moe_loss_weight).
  """
  share_E = jax.lax.stop_gradient(sums.load_E) / jnp.maximum(sums.choices, 1)[..., None]
  mean_E = sums.probs_E / jnp.maximum(sums.tokens, 1)[..., None]
  return sums.probs_E.shape[-1] * (share_E * mean_E).sum(-1)


def layer_balance(sums: RouterSums, kind: str) -> Array:
  """The balancing loss `kind` of `router.balance`, one per layer; 0 for `none`.

  The loss gets the sums without zero experts (`computing`). A user's own loss is a function from
  `RouterSums` with leaves [..., E] or [...] to losses [...], differentiable with respect to
  `probs_E`.

  Args:
    sums: of all devices, for one layer or with leading dimensions for several.
    kind: a word of `router.balance`, or an import path.

  Raises:
    ConfigError: `kind` is unknown, or the user's loss cannot be imported, fails or returns another
      shape.
  """
  check_choice("router.balance", kind, BALANCES, importable=True)
  if kind == "none":
    return jnp.zeros_like(sums.tokens)
  sums = computing(sums)
  if is_import_path(kind):
    loss = construct(kind, "router.balance", sums)
    if jnp.shape(loss) != sums.tokens.shape:
      raise ConfigError(
        f"router.balance={kind!r} gave a loss of shape {list(jnp.shape(loss))}; one per layer is "
        f"needed, {list(sums.tokens.shape)}"
      )
    return loss
  losses = {
    "gshard": gshard_loss,
    "load_importance": load_importance_loss,
    "megablocks": megablocks_loss,
  }
  return losses[kind](sums)


def balance_loss(sums: RouterSums, kind: str) -> Array:
  """The sum of the layers' balancing losses, for `megablocks` their mean; without a coefficient.

  The result is a scalar. In Tutel, too, each layer adds its loss (l_aux). The caller decides which
  tokens `sums` holds: those of a microbatch on all devices; or with `router.balance_over=step` all
  of a step's (`balance_part`).

  Raises:
    ConfigError: `sums` is no `RouterSums`; or see `layer_balance`.
  """
  check_type("sums", sums, RouterSums)
  loss = layer_balance(sums, kind)
  return loss.mean() if kind == "megablocks" else loss.sum()


def balance_part(sums: RouterSums, step: RouterSums, kind: str) -> Array:
  """A microbatch's part of its step's balancing loss, a scalar: all parts add up to that loss.

  The loss L is not linear in the sums, so the losses that the microbatches have by themselves do
  not add up to the step's. The step's gradient does split, by the chain rule: with S = Σ_m S_m over
  microbatches m, and parameters θ,

    dL/dθ = Σ_m ⟨∂L/∂S, dS_m/dθ⟩

  The part of microbatch m has the gradient ⟨∂L/∂S, dS_m/dθ⟩, for a user's own loss too, and the
  value L(S) times the microbatch's share of the step's tokens.

  Args:
    sums: S_m, of this microbatch.
    step: S, of all the step's microbatches, which an earlier forward pass has made; a constant for
      the gradient.
    kind: the word or import path of `router.balance`.

  Raises:
    ConfigError: see `balance_loss`.
  """
  step = jax.lax.stop_gradient(step)
  slope = jax.grad(balance_loss)(step, kind)
  products = jax.tree.map(lambda a, b: (a * b).sum(), slope, sums)
  part = sum(jax.tree.leaves(products))
  share = jax.lax.stop_gradient(sums.tokens.sum()) / jnp.maximum(step.tokens.sum(), 1)
  return balance_loss(step, kind) * share + part - jax.lax.stop_gradient(part)


def init_bias(layers: int, experts: int, config: RouterConfig) -> dict[str, Array]:
  """Balancing biases, and their controller's errors, before the first step: all 0.

  Args:
    layers: number of layers with a router.
    experts: E, zero experts included.
    config: the router's options.

  Returns:
    `bias`, float32 [layers, E]. If the controller has a proportional or derivative gain, also
    `error` and `error_before` of the same shape: the errors (`update_bias`) of the last step and
    the one before. {} if `router.bias` is `none`.
  """
  if config.bias == "none":
    return {}
  names = ["bias"]
  if config.bias_proportional or config.bias_derivative:
    names += ["error", "error_before"]
  return {name: jnp.zeros((layers, experts), jnp.float32) for name in names}


def update_bias(
  state: dict[str, Array], sums: RouterSums, config: RouterConfig
) -> dict[str, Array]:
  """Balancing biases after an optimizer step, from the experts' loads in that step.

  The aim: a token chooses R computing experts on average, and each of the E computing experts is
  chosen equally often. R is `router.real_experts`, K_e in LongCat-Flash's report; if that is 0,
  K · E / (E + number of zero experts). Without zero experts R = K. Let f_i be the share of the
  choices that went to expert i, also those that the transport dropped. The error of this expert is
  e_i = R/K · 1/E − f_i, and its bias b_i changes by the rule of `router.bias`:

    sign  b_i += rate · sign(e_i)                              DeepSeek-V3's loss-free balancing
    pid   b_i += rate · e_i + P · Δe_i + D · Δ²e_i             LongCat-Flash's controller

  Here rate, P and D are `router.bias_rate`, `router.bias_proportional` and
  `router.bias_derivative`; Δe and Δ²e are the error's first and second difference from step to
  step. LongCat-Flash's report states the first term, in its letters
  μ (K_e/K · 1/N − T_i / (K·T)): the bias is then the sum of such terms, the integral part of a
  controller. The other two terms are the increments of its proportional and its derivative part.
  The biases of zero experts stay 0: once all computing experts have their share, the rest goes to
  zero experts. A layer without a taken choice keeps its biases and its errors.

  Args:
    state: see `init_bias`.
    sums: of every layer, added up over devices and microbatches.
    config: the router's options; `config.bias` is the rule.

  Returns:
    The state after the step, with the keys of `state`.
  """
  choices_L1 = sums.choices[..., None]
  total, zero = sums.load_E.shape[-1], sums.zero_experts
  real = total - zero
  target = 1 / total
  if zero and config.real_experts:  # R/K · 1/E, with K = choices / tokens
    target = config.real_experts * sums.tokens[..., None] / jnp.maximum(choices_L1, 1) / real
  seen_L1, computes_E = choices_L1 > 0, jnp.arange(total) < real
  moved = lambda delta_LE: jnp.where(seen_L1 & computes_E, delta_LE, 0)
  error_LE = target - sums.load_E / jnp.maximum(choices_L1, 1)
  if config.bias == "sign":
    # Without zero experts, choices and E · load are integers in float32, exact up to 2^24. Up to
    # there their difference is exactly 0 for an expert with its fair share, whose bias then stays.
    exact_LE = choices_L1 - real * sums.load_E if not zero else error_LE
    return {**state, "bias": state["bias"] + config.bias_rate * moved(jnp.sign(exact_LE))}
  delta_LE = config.bias_rate * error_LE
  new = dict(state)
  if "error" in state:
    last_LE, before_LE = state["error"], state["error_before"]
    delta_LE += config.bias_proportional * (error_LE - last_LE)
    delta_LE += config.bias_derivative * (error_LE - 2 * last_LE + before_LE)
    new["error"] = jnp.where(seen_L1, error_LE, last_LE)
    new["error_before"] = jnp.where(seen_L1, last_LE, before_LE)
  return {**new, "bias": state["bias"] + moved(delta_LE)}


def z_loss(sums: RouterSums) -> Array:
  """Router z-loss, mean_t logsumexp(logits_t)² (MegaBlocks moe_zloss_weight), one per layer."""
  return sums.z_square / jnp.maximum(sums.tokens, 1)


def statistics(sums: RouterSums, bias_range: Array | None = None) -> dict[str, Array]:
  """Statistics of each layer's routing, over all tokens in `sums`.

  Args:
    sums: of every layer, or of one.
    bias_range: largest minus smallest balancing bias of each layer; None: left out of the result.

  Returns:
    Arrays of the sums' types, with the leading (layer) shape of `sums`:
      load: f_e [.., E], each expert's share of the choices, zero experts included.
      drop: share of the choices that the transport dropped.
      rounds: mean `Dispatched.rounds` over devices, microbatches and gatings.
      entropy: mean entropy of a token's probabilities, divided by ln E, zero experts included.
      mutual_information: between token and expert, nats.
      confidence: mean largest probability of a token.
      logit_rms: root mean square of the logits.
      nonfinite: share of the tokens with a NaN or infinite logit.
      shortcut_ratio: |routed output| / |main path|, each the norm over all tokens; 0 where a layer
        ran without its pair.
      bias_range: as given.
      max_violation: max_e(E f_e) - 1; dead: share of experts without a choice; diversity:
        exp(H(f)) / E, H the entropy. In all three E counts computing experts only, and f_e is the
        expert's share of the choices that went to computing experts.
      zero_share: zero experts' share of the choices; real_experts: mean number of computing experts
        that a token chooses. Both only with zero experts.

  Raises:
    ConfigError: `sums` is no `RouterSums`.
  """
  check_type("sums", sums, RouterSums)
  tokens = jnp.maximum(sums.tokens, 1)
  choices = jnp.maximum(sums.choices, 1)
  real = computing(sums)
  num_experts = real.load_E.shape[-1]
  load_E = real.load_E / jnp.maximum(real.choices, 1)[..., None]
  mean_E = sums.probs_E / tokens[..., None]
  entropy = sums.entropy / tokens
  given = {} if bias_range is None else {"bias_range": bias_range}
  if sums.zero_experts:
    given |= {
      "zero_share": 1 - real.choices / choices,
      "real_experts": real.choices / tokens,
    }
  return given | {
    "load": sums.load_E / choices[..., None],
    "max_violation": num_experts * load_E.max(-1) - 1,
    "dead": (real.load_E == 0).mean(-1),
    "diversity": jnp.exp(_entropy(load_E)) / num_experts,
    "entropy": entropy / max(math.log(sums.load_E.shape[-1]), 1e-9),
    "mutual_information": _entropy(mean_E) - entropy,
    "drop": sums.dropped / choices,
    "rounds": sums.rounds / jnp.maximum(sums.shards, 1),
    "confidence": sums.confidence / tokens,
    "logit_rms": jnp.sqrt(sums.logit_square / tokens),
    "nonfinite": sums.nonfinite / tokens,
    "shortcut_ratio": jnp.sqrt(sums.shortcut_square / jnp.maximum(sums.main_square, 1e-30)),
  }


def _entropy(p_E: Array) -> Array:
  """Entropy in nats of distributions in the last dimension; 0 ln 0 = 0."""
  return -(p_E * jnp.log(jnp.where(p_E > 0, p_E, 1))).sum(-1)
