"""Balance: losses and statistics, all functions of the additive `RouterSums`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.moe.types import RouterSums, Routing


def router_sums(routing: Routing, dropped: Array) -> RouterSums:
  """The sums over this device's tokens; see `RouterSums`."""
  live_T = routing.live_T.astype(jnp.float32)
  probs_TE = routing.probs_TE * live_T[:, None]
  k = routing.expert_TK.shape[1]
  num_experts = routing.probs_TE.shape[1]
  first_E = jnp.zeros(num_experts, jnp.float32).at[routing.expert_TK[:, 0]].add(live_T)
  log_z_T = jax.nn.logsumexp(routing.logits_TE, -1)
  log_probs_TE = jax.nn.log_softmax(jax.lax.stop_gradient(routing.logits_TE))
  zero = jnp.zeros((), jnp.float32)
  return RouterSums(
    tokens=live_T.sum(),
    choices=live_T.sum() * k,
    dropped=dropped.astype(jnp.float32),
    load_E=routing.count_GE.sum(0).astype(jnp.float32),
    first_E=first_E,
    probs_E=probs_TE.sum(0),
    z_square=(live_T * log_z_T**2).sum(),
    entropy=-(jax.lax.stop_gradient(probs_TE) * log_probs_TE).sum(),
    confidence=jax.lax.stop_gradient(probs_TE.max(-1)).sum(),
    logit_square=(live_T * jax.lax.stop_gradient(routing.logits_TE**2).mean(-1)).sum(),
    soft_load_E=jnp.zeros(num_experts, jnp.float32),
    shortcut_square=zero,
    main_square=zero,
  )


def gshard_loss(sums: RouterSums) -> Array:
  """GShard's balancing loss E · Σ_e mean_t(probs_te) · mean_t(first choice of t is e).

  Counts are of first choices, before dropping; the gradient flows through the probabilities only.
  1 for a uniform router. Sums of shape [..., E] give losses of shape [...], one per layer. No
  tokens: 0.
  """
  tokens = jnp.maximum(sums.tokens, 1)[..., None]
  first_E = jax.lax.stop_gradient(sums.first_E)
  return sums.probs_E.shape[-1] * (sums.probs_E / tokens * (first_E / tokens)).sum(-1)


def z_loss(sums: RouterSums) -> Array:
  """Router z-loss, mean_t logsumexp(logits_t)² (MegaBlocks moe_zloss_weight), one per layer."""
  return sums.z_square / jnp.maximum(sums.tokens, 1)


def statistics(sums: RouterSums) -> dict[str, Array]:
  """Router health per layer, over everything that was summed.

  Returns float32 arrays with the leading (layer) shape of `sums`: `load` f_e [.., E] (share of
  the choices), `max_violation` max_e(E f_e) - 1, `dead` share of experts without a choice,
  `diversity` exp(H(f)) / E, `entropy` of a token's probabilities over ln E, `mutual_information`
  between token and expert in nats, `drop` share of choices dropped, `confidence` mean top-1
  probability, `logit_rms`, `shortcut_ratio` |routed| / |main path| (0 where not measured).
  """
  num_experts = sums.load_E.shape[-1]
  tokens = jnp.maximum(sums.tokens, 1)
  choices = jnp.maximum(sums.choices, 1)
  load_E = sums.load_E / choices[..., None]
  mean_E = sums.probs_E / tokens[..., None]
  entropy = sums.entropy / tokens
  return {
    "load": load_E,
    "max_violation": num_experts * load_E.max(-1) - 1,
    "dead": (sums.load_E == 0).mean(-1),
    "diversity": jnp.exp(_entropy(load_E)) / num_experts,
    "entropy": entropy / max(jnp.log(num_experts), 1e-9),
    "mutual_information": _entropy(mean_E) - entropy,
    "drop": sums.dropped / choices,
    "confidence": sums.confidence / tokens,
    "logit_rms": jnp.sqrt(sums.logit_square / tokens),
    "shortcut_ratio": jnp.sqrt(sums.shortcut_square / jnp.maximum(sums.main_square, 1e-30)),
  }


def _entropy(p_E: Array) -> Array:
  """Entropy in nats of distributions in the last dimension; 0 ln 0 = 0."""
  return -(p_E * jnp.log(jnp.where(p_E > 0, p_E, 1))).sum(-1)
