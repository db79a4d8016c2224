"""The paper's equations as loops over tokens, in NumPy float64: what the model must equal.

Written from the equations (paper Eq. 1-10, 14-17, 23; Tutel's gate, capacity and loss), not from
the code: no batching, no sort, no buffers, no stacked layers. A token is a vector, a sequence is a
list of them, a batch a list of sequences. `tape.Var` carries gradients along; discrete choices look
at `.value`. Parameters are nested dictionaries of Vars, one per block.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import tape
from tape import Var, exp, lift, log, stack, tanh

# -- sublayers ------------------------------------------------------------------------------------


def norm(x: Var, p: dict, kind: str, eps: float) -> Var:
  """LayerNorm or RMSNorm of one token."""
  width = len(x)
  if kind == "layernorm":
    mean = x.sum() / width
    variance = ((x - mean) ** 2).sum() / width
    return (x - mean) / (variance + eps) ** 0.5 * p["scale"] + p["bias"]
  mean_square = (x * x).sum() / width
  return x / (mean_square + eps) ** 0.5 * p["scale"]


def sigmoid(x: Var) -> Var:
  return 1.0 / (1.0 + exp(-lift(x)))


def gelu(x: Var) -> Var:
  """The tanh form, as GPT-2 has it."""
  return 0.5 * x * (1.0 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(scores: Var) -> Var:
  shifted = exp(scores - scores.value.max())
  return shifted / shifted.sum()


def feed_forward(x: Var, p: dict, activation: str) -> Var:
  """down(gelu(up(x))), or down(silu(gate(x)) · up(x)) for SwiGLU; biases where there are any."""
  up = x @ p["up"] + p.get("up_bias", 0.0)
  if activation == "swiglu":
    gate = x @ p["gate"]
    hidden = gate * sigmoid(gate) * up
  else:
    hidden = {"gelu": gelu}[activation](up)
  return hidden @ p["down"] + p.get("down_bias", 0.0)


def rotate(x: Var, position: int, theta: float) -> Var:
  """RoPE of one head: the pair (i, i + N/2) turns by position · theta^(-2i/N)."""
  width = len(x)
  half = width // 2
  first, second = [], []
  for i in range(half):
    angle = position * theta ** (-2 * i / width)
    sin, cos = math.sin(angle), math.cos(angle)
    first.append(x[i] * cos - x[i + half] * sin)
    second.append(x[i + half] * cos + x[i] * sin)
  return stack(first + second)


def attention(
  x: list[Var], p: dict, theta: float = 0.0, positions: Any = None, documents: Any = None
) -> list[Var]:
  """Causal attention over one sequence; head h reads key-value head h // (H / H_kv)."""
  heads, kv_heads, width = p["query"].shape[1], p["key"].shape[1], p["query"].shape[2]
  positions = range(len(x)) if positions is None else positions
  documents = [0] * len(x) if documents is None else documents
  turn = lambda v, t: rotate(v, int(positions[t]), theta) if theta else v
  bias = lambda name, head: p[name][head] if name in p else 0.0
  keys = [[turn(v @ p["key"][:, g], t) for g in range(kv_heads)] for t, v in enumerate(x)]
  values = [[v @ p["value"][:, g] + bias("value_bias", g) for g in range(kv_heads)] for v in x]
  out = []
  for t in range(len(x)):
    y = lift(p.get("out_bias", 0.0))
    for head in range(heads):
      group = head // (heads // kv_heads)
      query = turn(x[t] @ p["query"][:, head] + bias("query_bias", head), t)
      seen = [s for s in range(t + 1) if documents[s] == documents[t]]
      share = softmax(stack([query @ keys[s][group] for s in seen]) / math.sqrt(width))
      y = y + (share @ stack([values[s][group] for s in seen])) @ p["out"][head]
    out.append(y)
  return out


# -- the gate, the queues, the experts ------------------------------------------------------------


@dataclasses.dataclass
class Gated:
  """One token at the gate: its scores, probabilities, chosen experts (best first) and weights."""

  logits: Var
  probs: Var
  experts: list[int]
  weights: list[Var]


def ranking(probs: Var) -> list[int]:
  """Experts from the most to the least probable; equal ones in the order of their numbers."""
  return sorted(range(len(probs)), key=lambda e: (-probs.value[e], e))


def gate(
  x: Var, gate_DE: Any, k: int, *, normalise: bool = True, noise: Any = 0.0, avoid: int = -1
) -> Gated:
  """Softmax over all experts, then top-k, then division by the sum if k > 1.

  `avoid`: the expert that a top-1 choice must not take (DGMoE); then the second best it is.
  `noise`: what is added to the scores.
  """
  logits = x @ gate_DE + noise
  probs = softmax(logits)
  experts = [e for e in ranking(probs) if e != avoid][:k]
  weights = [probs[e] for e in experts]
  if normalise and k > 1:
    total = sum(weights[1:], weights[0])
    weights = [w / total for w in weights]
  return Gated(logits, probs, experts, weights)


def capacity(factor: float, tokens: int, num_experts: int, k: int) -> int:
  """Tutel: k · int(factor · ceil(tokens / E))."""
  return k * int(factor * math.ceil(tokens / num_experts))


def queue_places(
  experts_TK: Any, num_experts: int, groups: int = 1, live: Any = None
) -> tuple[list[list[int]], np.ndarray]:
  """Place of every choice in the queue of its (group, expert), and the lengths of the queues.

  All first choices of a group, in the order of its tokens, then all second choices, ... Tokens that
  are not live take no place (-1).
  """
  tokens, k = len(experts_TK), len(experts_TK[0])
  places = [[-1] * k for _ in range(tokens)]
  lengths = np.zeros((groups, num_experts), int)
  for group in range(groups):
    members = range(group * tokens // groups, (group + 1) * tokens // groups)
    for choice in range(k):
      for t in members:
        if live is None or live[t]:
          expert = int(experts_TK[t][choice])
          places[t][choice] = int(lengths[group, expert])
          lengths[group, expert] += 1
  return places, lengths


@dataclasses.dataclass
class Sums:
  """Sums of one MoE's gatings, over all their tokens."""

  tokens: int = 0
  choices: int = 0
  dropped: int = 0
  load: Any = 0
  first: Any = 0
  probs: Any = 0
  z_square: Any = 0.0

  def gshard(self) -> Var:
    """E · Σ_e mean_t p_te · mean_t 1[first choice of t is e]."""
    return len(self.first) * (self.probs / self.tokens * (self.first / self.tokens)).sum()

  def z_loss(self) -> Var:
    """mean_t (log Σ_e exp logit_te)²."""
    return self.z_square / self.tokens


@dataclasses.dataclass(frozen=True)
class Router:
  """How tokens are routed. `rows`: the capacity of a group's queue; None drops nothing."""

  k: int
  rows: int | None = None
  groups: int = 1
  normalise: bool = True
  activation: str = "gelu"


def routed(
  x: list[Var],
  p: dict,
  router: Router,
  sums: Sums,
  *,
  avoid: list[int] | None = None,
  live: Any = None,
) -> tuple[list[Var], list[int]]:
  """Σ_i G(x)_i E_i(x) of every token over its kept choices; and every token's first choice."""
  gate_DE = p["router_gate"]["0"]["weight"]
  num_experts = gate_DE.shape[1]
  gated = [
    gate(v, gate_DE, router.k, normalise=router.normalise, avoid=avoid[t] if avoid else -1)
    for t, v in enumerate(x)
  ]
  places, lengths = queue_places([g.experts for g in gated], num_experts, router.groups, live)
  out = []
  for t, v in enumerate(x):
    y = lift(np.zeros(len(v)))
    if live is None or live[t]:
      for expert, weight, place in zip(gated[t].experts, gated[t].weights, places[t], strict=True):
        if router.rows is not None and place >= router.rows:
          sums.dropped += 1
        else:
          one = {name: p[name][expert] for name in p if name != "router_gate"}
          y = y + weight * feed_forward(v, one, router.activation)
      first = np.zeros(num_experts)
      first[gated[t].experts[0]] = 1
      z = log(exp(gated[t].logits).sum())
      sums.tokens, sums.choices = sums.tokens + 1, sums.choices + router.k
      sums.first = sums.first + first
      sums.probs = sums.probs + gated[t].probs
      sums.z_square = sums.z_square + z * z
    out.append(y)
  sums.load = sums.load + lengths.sum(0)
  return out, [g.experts[0] for g in gated]


def mix(kind: str, shared: Var, routed_: Var, x: Var, weight: Any) -> Var:
  """Paper §5.2: direct addition; CG-1 scales the shared expert; CG-2 shares 1 between both."""
  if kind == "direct":
    return shared + routed_
  scores = x @ weight
  if kind == "cg1":
    return sigmoid(scores[0]) * shared + routed_
  coefficients = softmax(scores)
  return coefficients[0] * shared + coefficients[1] * routed_


# -- the model ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Past:
  """The preceding block l: its input, H_l^MH, and its parameters."""

  input: list[Var]
  mh: list[Var]
  p: dict


@dataclasses.dataclass(frozen=True)
class Result:
  """The oracle's results for a batch."""

  hidden: list[list[Var]]
  logits: list[list[Var]]
  sums: list[Sums]  # one per MoE


def model(
  p: dict, tokens: np.ndarray, config: Any, *, rows: Any = None, groups: int = 1, live: Any = None
) -> Result:
  """A whole model, block after block.

  Args:
    p: `tokens`, `positions` (GPT-2), `head` (untied), `norm`, `blocks` (one dictionary per block),
      `moes` (one dictionary per MoE). A block with an MoE also has what its unit has: `own_norm`,
      `post_norm`, `mix`.
    tokens: [B, S].
    config: fields style, wiring, moe_every, top_k, mix, ablation, shortcut_norm, ffn,
      norm_eps, rope_theta.
    rows: k -> capacity of a queue; None drops nothing.
    groups: capacity groups of the batch.
    live: [B, S], tokens that are not padding.
  """
  kind = {"gpt2": "layernorm", "llama": "rmsnorm"}[config.style]
  theta = config.rope_theta if config.style == "llama" else 0.0
  batch, length = tokens.shape
  sums = [Sums() for _ in p["moes"]]
  alive = None if live is None else live.reshape(-1)
  every = config.moe_every
  shares = 2 if config.wiring == "dgmoe_share" else 1  # pairs that share one MoE

  def normed(h, q):
    return [norm(v, q, kind, config.norm_eps) for v in h]

  def attend(x, q):
    return [y for b in range(batch) for y in attention(x[b * length : (b + 1) * length], q, theta)]

  def feed(x, q):
    return [feed_forward(v, q, config.ffn.activation) for v in x]

  def add(*parts):
    return [sum(vs[1:], vs[0]) for vs in zip(*parts, strict=True)]

  h = [p["tokens"][int(tokens[b, s])] for b in range(batch) for s in range(length)]
  if config.style == "gpt2":
    h = [v + p["positions"][t % length] for t, v in enumerate(h)]

  past: Past | None = None
  skips, unrouted = (
    config.wiring in ("farskip", "farskip_routed"),
    h,
  )  # the stream without the last routed experts
  for layer, q in enumerate(p["blocks"]):
    h_input = h
    mh = add(h, attend(normed(unrouted if skips else h, q["norm_attention"]), q["attention"]))
    if (layer + 1) % every or config.wiring == "dense":
      h = add(mh, feed(normed(h_input if skips else mh, q["norm_mlp"]), q["mlp"]))
      unrouted = h
      past = Past(h_input, mh, q)
      continue

    which = layer // every // shares
    current = normed(h_input if skips else mh, q["norm_mlp"])

    def moe(x, k, avoid=None, which=which):
      limit = None if rows is None else rows(k)
      router = Router(k, limit, groups, activation=config.ffn.activation)
      return routed(x, p["moes"][which], router, sums[which], avoid=avoid, live=alive)

    def shortcut(older, norm_of_reader, q=q):
      """The older value, through the norm of the sublayer that reads it too, or through its own."""
      own = config.shortcut_norm != "shared"
      return normed(older, q["own_norm"] if own else norm_of_reader)

    def preceding(position, h_input=h_input, past=past, q=q, layer=layer):
      """The value that the routed experts read, by the paper's table of shortcut positions."""
      first = config.wiring == "scmoe_pos2_l0" and layer < every
      if position == 1 or past is None or first:  # nothing precedes the first block: L0 Pos-1
        return shortcut(h_input, q["norm_attention"])
      if position == 2:
        return shortcut(past.mh, past.p["norm_mlp"])
      return shortcut(past.input, past.p["norm_attention"])

    word = config.wiring
    if word in ("top1", "top2", "topk"):
      total = moe(current, {"top1": 1, "top2": 2, "topk": config.top_k}[word])[0]
    elif word in ("dgmoe", "dgmoe_share", "dgmoe_repeat"):
      older, chosen = moe(preceding(2), 1)
      newer, _ = moe(current, 1, avoid=None if word == "dgmoe_repeat" else chosen)
      total = add(newer, older)  # Eq. 23
    elif word == "farskip_routed":
      total, unrouted = moe(current, config.top_k)[0], mh
    else:
      k = 2 if word == "scmoe2" else config.top_k
      position = {"scmoe_pos1": 1, "scmoe_pos2": 2, "scmoe_pos3": 3, "scmoe2": 2}
      position["scmoe_pos2_l0"] = 2
      if word == "farskip":  # the shared expert reads the same value
        x = shortcut(h_input, q["norm_mlp"])
      else:
        x = current if word == "shared_expert" else preceding(position[word])
      y = moe(x, k)[0]
      reads = x if config.ablation.mix_input == "shortcut" else current
      shared = feed(current, q["mlp"])
      weight = q["mix"]["weight"] if config.mix != "direct" else None
      total = [mix(config.mix, *vs, weight) for vs in zip(shared, y, reads, strict=True)]
      nothing = [0.0 * v for v in y]
      alone = [mix(config.mix, *vs, weight) for vs in zip(shared, nothing, reads, strict=True)]
      unrouted = add(mh, alone)
    if "post_norm" in q:
      total = normed(total, q["post_norm"])
    h = add(mh, total)
    past = Past(h_input, mh, q)

  hidden = normed(h, p["norm"])
  if "head" in p:
    logits = [v @ p["head"] for v in hidden]
  else:
    logits = [p["tokens"] @ v for v in hidden]
  rows_of = lambda flat: [flat[b * length : (b + 1) * length] for b in range(batch)]
  return Result(rows_of(hidden), rows_of(logits), sums)


def values(x: Any) -> np.ndarray:
  """Nested lists of Vars as one array."""
  return x.value if isinstance(x, tape.Var) else np.array([values(v) for v in x])
