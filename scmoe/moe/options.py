"""Options of routing; `docs/routing.md` says what Tutel and MegaBlocks call each of them."""

from __future__ import annotations

import dataclasses

from scmoe.errors import ConfigError
from scmoe.options import option, section

ORDERS = ("choice", "priority", "token")
BALANCES = ("gshard", "load_importance", "megablocks", "none")
BIAS_RULES = ("none", "sign", "pid")


@dataclasses.dataclass(frozen=True)
class CompatConfig:
  """What Tutel and MegaBlocks can do and few want: to compare with them, or to go on from them."""

  order: str = option(
    "choice",
    "who is served first by a full expert: choice (every first choice before any second, tokens in "
    "order; Tutel), priority (so too, tokens by falling largest probability; Tutel "
    "batch_prioritized_routing), token (in order of tokens over all choices; MegaBlocks)",
    choices=ORDERS,
  )
  weights: str = option(
    "after",
    "combine weights multiply the experts' output (after) or their input (before; Tutel "
    "is_postscore=False)",
    choices=("after", "before"),
  )
  weight_norm: float = option(
    0.0,
    "divide the weights by their p-norm instead of their sum, for any k; 0: off. With k = 1 the "
    "weight is then always 1 and the output gives the gate no gradient (MegaBlocks "
    "moe_normalize_expert_weights)",
    minimum=0,
  )
  jitter: float = option(
    0.0,
    "training: the gate, not the experts, reads x · U[1 - jitter, 1 + jitter], elementwise "
    "(MegaBlocks moe_jitter_eps)",
    minimum=0,
    maximum=1,
  )
  uniform: bool = option(
    False,
    "benchmarks: experts in turn, with the weights of the real choice (MegaBlocks "
    "uniform_expert_assignment)",
  )
  round_to: int = option(
    0,
    "training: round the tokens of every expert to a multiple of this tile (SonicMoE token "
    "rounding); NOT causal, a token's experts then depend on the other tokens; 0: off",
    minimum=0,
  )


@dataclasses.dataclass(frozen=True)
class RouterConfig:
  """How experts are chosen and kept in balance."""

  gate: str = option(
    "linear",
    "what scores the experts: linear, cosine, or a gate of one's own as my_package.module:Name",
    importable=True,
  )
  gates: int = option(
    1,
    "gates over the one set of experts, which train by turns, one in a step; a call says by index "
    "which one it uses, evaluation and generation the first",
    minimum=1,
  )
  cosine_dim: int = option(256, "cosine gate: width of its projection (Tutel proj_dim)", minimum=1)
  fp32_gate: bool = option(
    True, "the gate computes in float32 at least, whatever the model's type (Tutel fp32_gate)"
  )
  normalise: bool = option(
    True,
    "divide the weights of the chosen experts by their sum; only for k > 1 (Tutel normalize_gate)",
  )
  noise: float = option(
    0.0, "training: Gaussian noise of this size / E on the logits (Tutel gate_noise)", minimum=0
  )
  balance: str = option(
    "gshard",
    "the balancing loss; scmoe/moe/losses.py has the formulas; or one's own as "
    "my_package.module:name",
    choices=BALANCES,
    importable=True,
  )
  balance_loss: float = option(
    0.01,
    "coefficient of the balancing loss (Tutel l_aux weight, MegaBlocks moe_loss_weight)",
    minimum=0,
  )
  z_loss: float = option(
    0.0,
    "coefficient of the router z-loss, mean of logsumexp² (MegaBlocks moe_zloss_weight)",
    minimum=0,
  )
  bias: str = option(
    "none",
    "balancing without a loss: a bias on the selection only, moved once per optimizer step by the "
    "rule sign (DeepSeek-V3) or pid (LongCat-Flash)",
    choices=BIAS_RULES,
  )
  bias_rate: float = option(1e-3, "step size of the balancing bias", minimum=0)
  compat: CompatConfig = section(CompatConfig, "for those who come from Tutel or MegaBlocks")

  def check(self) -> None:
    """Checks what depends on more than one field.

    Raises:
      ConfigError: names the fields, what was got and what would do.
    """
    if self.balance == "load_importance" and not self.noise:
      raise ConfigError(
        "router.balance='load_importance' measures the load by the gate noise, got router.noise=0; "
        "set router.noise > 0 (1 is usual) or router.balance='gshard'"
      )
    if self.compat.uniform and self.compat.round_to:
      raise ConfigError(
        f"router.compat.uniform=True and router.compat.round_to={self.compat.round_to} both decide "
        "the experts' loads; use one of them"
      )
