"""The modelled times of a run's block pair: its sizes on one device, over a machine's rates."""

from __future__ import annotations

from scmoe.blocks.timeline import Times, unit_times
from scmoe.layers.mlp import is_gated
from scmoe.models.flops import head_widths, projection_weights
from scmoe.moe.dispatch.per_rank import reached_share
from scmoe.parallel.mesh import expert_shards
from scmoe.profiling.roofline import Sizes, machine, model_times
from scmoe.run.config import RunConfig


def modelled_times(run: RunConfig, modelled_on: str) -> Times | None:
  """Modelled times of a unit's steps on `modelled_on`, in ms; None for a model without experts."""
  wiring = run.model.wiring_rule
  if not wiring.taps:
    return None
  found = model_times(pair_sizes(run), machine(modelled_on))
  return unit_times(wiring, run.model.moe_every, found.milliseconds())


def pair_sizes(run: RunConfig) -> Sizes:
  """The sizes of a resolved run's block pair, as one device of the mesh computes it.

  The tensor axis divides heads and hidden widths. The latents of latent attention it does not
  divide; they count as if it did. Bytes are those of a 16-bit type, as the rates of
  `scmoe.profiling.roofline` are, whatever `model.dtype` is.
  """
  model, wiring, mesh = run.model, run.model.wiring_rule, run.mesh
  k, tensor = wiring.routed_per_gating(model.top_k), run.mesh.tensor
  query_width, value_width = head_widths(model)
  shards = expert_shards(mesh.expert, model.num_experts) if wiring.taps else 1
  return Sizes(
    tokens=run.train.batch_size * run.data.seq_len // mesh.token_shards,
    seq=run.data.seq_len,
    width=model.width,
    mlp=model.mlp_hidden // tensor,
    expert=model.expert_hidden // (tensor * shards),
    shared=model.shared_hidden // tensor,
    head_width=query_width // tensor,
    kv_width=max(model.num_kv_heads * model.head_dim // tensor, 1),
    experts=model.num_experts,
    k=k * run.router.real_share(k, model.num_experts, model.zero_experts),
    capacity_factor=_rows_over_share(run),
    devices=mesh.expert,
    matrices=3 if is_gated(model.ffn.activation) else 2,
    inward=projection_weights(model)[0] // tensor,
    value_width=value_width // tensor,
    sent=sent_per_rank(run) if run.dispatch.transport == "per_rank" and wiring.taps else 0.0,
  )


def sent_per_rank(run: RunConfig) -> float:
  """Rows for each token in the send buffers that `dispatch.transport=per_rank` has for this run."""
  ranks, room = _room_per_rank(run)
  return ranks * min(1.0, room)


def may_overflow(run: RunConfig) -> bool:
  """Whether rows may be left over in the first round of an exchange of this run's training step.

  False for `dispatch.transport=per_rank` if each rank's queue has room for all tokens, whatever
  their number is: the program then has no overflow rounds. Callers ask only where
  rows are exchanged in rounds.
  """
  return run.dispatch.transport != "per_rank" or _room_per_rank(run)[1] < 1


def _room_per_rank(run: RunConfig) -> tuple[int, float]:
  """W, and the room of each of a device's W queues of `per_rank`, as a multiple of T.

  A room of more than 1 is one for all T tokens.
  """
  model, expert = run.model, run.mesh.expert
  k, ranks = model.wiring_rule.routed_per_gating(model.top_k), expert
  ranks //= expert_shards(expert, model.num_experts)
  return ranks, run.dispatch.slack * reached_share(ranks, model.num_experts, k)


def _rows_over_share(run: RunConfig) -> float:
  """Rows that the exchange's buffers hold, relative to the k choices of every token."""
  dispatch = run.dispatch
  return abs(dispatch.capacity_factor) if dispatch.fixed_buffers else dispatch.slack
