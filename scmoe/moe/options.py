"""Options of routing; `docs/routing.md` gives the names that Tutel and MegaBlocks have for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from scmoe.base.errors import ConfigError
from scmoe.base.options import Options, option, section

ORDERS = ("choice", "priority", "token")
BALANCES = ("gshard", "load_importance", "megablocks", "none")
BALANCED_OVER = ("microbatch", "step")
BIAS_RULES = ("none", "sign", "pid")
SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("top2", "max")

# Each word of `router.gate`: where its gate is imported from, or the gate's class itself. A gate
# follows the protocol `scmoe.moe.gates.Gate`.
GATES: dict[str, Any] = {
  "linear": "scmoe.moe.gates:LinearGate",
  "affine": "scmoe.moe.gates:AffineGate",
  "cosine": "scmoe.moe.gates:CosineGate",
}


@dataclasses.dataclass(frozen=True)
class CompatConfig(Options, path="router.compat"):
  """Routing options that few runs need; all but token rounding come from Tutel or MegaBlocks.

  The options of these two systems serve to compare with them, or to go on training a model that
  was trained in one of them. Two of them also describe released models: Llama-4 has
  `weights=before`, and families that normalise the weight of a single expert have `weight_norm=1`.
  """

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
  gates: int = option(
    1,
    "gates over the one set of experts (Tutel's list of gates): training steps use them in turn, "
    "evaluation and generation use the first, and a call names one by its index (Tutel gate_index)",
    minimum=1,
  )
  fp32_gate: bool = option(
    True, "the gate computes in float32 at least, whatever the model's type is (Tutel fp32_gate)"
  )
  round_to: int = option(
    0,
    "training: round the tokens of every expert to a multiple of this tile (SonicMoE token "
    "rounding); NOT causal, a token's experts then depend on the other tokens; 0: off",
    minimum=0,
  )


def check_top_k(k: int, num_experts: int) -> None:
  """Checks that a token's experts are not more than there are.

  Raises:
    ConfigError: they are.
  """
  if k > num_experts:
    raise ConfigError(f"model.top_k={k} is larger than model.num_experts={num_experts}")


@dataclasses.dataclass(frozen=True)
class RouterConfig(Options, path="router"):
  """Options of routing: how tokens choose experts, and what balances the experts' loads."""

  gate: str = option(
    "linear",
    "what scores the experts: linear (the paper's W · x, Eq. 1; Tutel top), affine (W · x + b; "
    "GPT-OSS), cosine (Tutel cosine_top), or a gate of your own as my_package.module:Name",
    choices=GATES,
    importable=True,
  )
  cosine_dim: int = option(256, "cosine gate: width of its projection (Tutel proj_dim)", minimum=1)
  scoring_func: str = option(
    "softmax",
    "an expert's score from the logits: softmax over all experts (paper Eq. 1), or sigmoid of its "
    "own logit (DeepSeek-V3 scoring_func)",
    choices=SCORES,
  )
  normalise: bool = option(
    True,
    "divide the weights of the chosen experts by their sum; only for k > 1 (Tutel normalize_gate, "
    "norm_topk_prob)",
  )
  routed_scaling_factor: float = option(
    1.0,
    "multiplies the weights of the chosen experts, zero experts included (DeepSeek-V2 option of "
    "this name)",
    minimum=0,
  )
  n_group: int = option(
    1,
    "groups of equal size that the experts form; a token visits experts of its topk_group best "
    "groups only (DeepSeek-V2, -V3 n_group); 1: all experts are candidates",
    minimum=1,
  )
  topk_group: int = option(
    1, "groups that are open to a token, at most n_group (DeepSeek-V2, -V3 topk_group)", minimum=1
  )
  group_score: str = option(
    "top2",
    "a group's score: top2 (the sum of its two best experts' scores; DeepSeek-V3) or max (its best "
    "expert's; DeepSeek-V2)",
    choices=GROUP_SCORES,
  )
  noise: float = option(
    0.0,
    "training: Gaussian noise on the logits, of standard deviation noise / E (Tutel gate_noise)",
    minimum=0,
  )
  balance: str = option(
    "gshard",
    "balancing loss: gshard (GShard; Tutel is_gshard_loss), load_importance (Tutel, Swin-MoE), "
    "megablocks, none, or your own as my_package.module:name; formulas: scmoe/moe/losses.py",
    choices=BALANCES,
    importable=True,
  )
  balance_loss: float = option(
    0.01,
    "coefficient of the balancing loss (Tutel l_aux weight, MegaBlocks moe_loss_weight); 0.01 is "
    "Switch Transformer's",
    minimum=0,
  )
  balance_over: str = option(
    "microbatch",
    "over which tokens the balancing loss is taken: microbatch (each microbatch's on all devices, "
    "and the mean of these losses; GShard, Tutel, MegaBlocks), step (all of the step's, however "
    "split; arXiv 2501.11873; with several microbatches it costs another forward pass)",
    choices=BALANCED_OVER,
  )
  z_loss: float = option(
    0.0,
    "coefficient of the router z-loss, mean of logsumexp² (MegaBlocks moe_zloss_weight)",
    minimum=0,
  )
  bias: str = option(
    "none",
    "balancing without a loss: a bias that is added to the scores for the choice alone and updated "
    "once per optimizer step, by the rule sign (DeepSeek-V3) or pid (LongCat-Flash's controller)",
    choices=BIAS_RULES,
  )
  bias_rate: float = option(
    1e-3,
    "change of the balancing bias in one step (DeepSeek-V3's gamma, 0.001); for pid the integral "
    "gain (LongCat-Flash's mu), for which 0.001 is too slow beside zero experts: 0.5 with "
    "bias_proportional=3 held their share in longcat_flash_small",
    minimum=0,
  )
  bias_proportional: float = option(
    0.0, "pid: proportional gain of the bias's controller", minimum=0
  )
  bias_derivative: float = option(0.0, "pid: derivative gain of the bias's controller", minimum=0)
  real_experts: float = option(
    0.0,
    "with model.zero_experts: mean number of computing experts per token that the balancing bias "
    "aims at (LongCat-Flash K_e); 0: top_k · E / (E + zero experts)",
    minimum=0,
  )
  tasks: int = option(
    0,
    "number of tasks, each with a gate of its own over the experts, which all share; the batch "
    "says which task a row belongs to. A run takes it from multitask.names; 0: no tasks",
    minimum=0,
  )
  compat: CompatConfig = section(
    CompatConfig, "options that few runs need, most of them Tutel's or MegaBlocks'"
  )

  @property
  def num_gates(self) -> int:
    """Number of a layer's gates: one per task, or those that take turns (`router.compat.gates`)."""
    return self.tasks or self.compat.gates

  def looks_ahead(self, microbatches: int) -> bool:
    """Whether a step of so many microbatches begins with a forward pass for their `RouterSums`.

    For models with experts. The gradient of a balancing loss of the whole step needs the sums of
    all microbatches.
    """
    has_loss = self.balance != "none" and bool(self.balance_loss)
    return microbatches > 1 and self.balance_over == "step" and has_loss

  def real_share(self, k: int, num_experts: int, zero_experts: int) -> float:
    """The share of the choices that computing experts, not zero experts, are meant to get.

    It is K_e / K with K_e = `real_experts`, the mean number of computing experts per token. If
    `real_experts` is 0, it is E / (E + zero_experts), and without zero experts it is 1.

    Args:
      k: K, choices per token.
      num_experts: E, number of computing experts.
      zero_experts: number of zero experts.
    """
    if not zero_experts:
      return 1.0
    return (
      self.real_experts / k if self.real_experts else num_experts / (num_experts + zero_experts)
    )

  def check_experts(self, k: int, num_experts: int, zero_experts: int) -> None:
    """Checks the options whose limits depend on k, the number of experts or that of zero experts.

    Args:
      k, num_experts, zero_experts: see `real_share`.

    Raises:
      ConfigError: k is larger than the number of experts, zero experts included; the groups do not
        have equal sizes, or are too small for `group_score` or k; `real_experts` is larger than k
        or given without zero experts; or zero experts meet uniform choices or token rounding.
    """
    total = num_experts + zero_experts
    if k > total:
      raise ConfigError(
        f"top_k={k} is larger than the number of experts, {total} (num_experts={num_experts}"
        + (f", zero_experts={zero_experts}" if zero_experts else "")
        + f"); use at most {total}"
      )
    if self.n_group > 1:
      size, need = total // self.n_group, 2 if self.group_score == "top2" else 1
      if total % self.n_group or size < need or size * self.topk_group < k:
        raise ConfigError(
          f"router.n_group={self.n_group} with router.topk_group={self.topk_group} does not fit "
          f"{total} experts and {k} per token; use groups of equal size, of {need} experts at "
          f"least, of which the open ones hold {k}"
        )
    if self.real_experts > k or (self.real_experts and not zero_experts):
      raise ConfigError(
        f"router.real_experts={self.real_experts} is a mean number of {k} experts per token, with "
        f"model.zero_experts={zero_experts}; use at most {k}, or 0"
      )
    if zero_experts and (self.compat.uniform or self.compat.round_to):
      raise ConfigError(
        f"model.zero_experts={zero_experts} does not go with router.compat.uniform or round_to"
      )

  def check(self) -> None:
    """Checks that the fields fit each other, whatever the numbers of experts are.

    Raises:
      ConfigError: load_importance without noise; more open groups than groups; a proportional or
        derivative gain without `bias=pid`; gates of tasks with gates that take turns; or uniform
        choices with token rounding. It names the fields.
    """
    if self.balance == "load_importance" and not self.noise:
      raise ConfigError(
        "router.balance='load_importance' measures the load by the gate noise, got router.noise=0; "
        "set router.noise > 0 (1 is usual) or router.balance='gshard'"
      )
    if self.topk_group > self.n_group:
      raise ConfigError(
        f"router.topk_group={self.topk_group} is larger than router.n_group={self.n_group}; use at "
        "most all groups"
      )
    gains = {n: getattr(self, n) for n in ("bias_proportional", "bias_derivative")}
    if any(gains.values()) and self.bias != "pid":
      name = next(n for n, gain in gains.items() if gain)
      raise ConfigError(
        f"router.{name}={gains[name]} is a gain of router.bias='pid', got {self.bias!r}"
      )
    if self.tasks and self.compat.gates > 1:
      raise ConfigError(
        f"router.compat.gates={self.compat.gates} take turns, got router.tasks={self.tasks}, whose "
        "gates are chosen by the rows; use one of them"
      )
    if self.compat.uniform and self.compat.round_to:
      raise ConfigError(
        f"router.compat.uniform=True and router.compat.round_to={self.compat.round_to} both decide "
        "the experts' loads; use one of them"
      )
