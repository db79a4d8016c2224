"""Direct preference optimisation: a model learns to prefer one answer to another.

The loss is that of Rafailov et al. (arXiv 2305.18290). Let p be the model and r the reference, a
model that does not learn. An answer's reward is β · (ln p(answer) - ln r(answer)), and a pair's
loss is -ln σ(reward of the chosen answer - reward of the rejected one).

A row of tokens holds pairs, each as two segments that do not attend to each other: pair 0 has the
segments 1 (chosen) and 2 (rejected), pair 1 the segments 3 and 4. Each segment is a prompt and an
answer; the weights of a batch are 0 for targets in the prompt. The reference runs inside the step
(`scmoe.models.second_model`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scmoe.base.batch import Batch
from scmoe.models.gpt import GPT, Output
from scmoe.models.objective import LossSums
from scmoe.models.second_model import WithSecondModel
from scmoe.moe.options import RouterConfig


class Preference(WithSecondModel):
  """The preference loss over pairs of answers, and the losses of the routers.

  Args:
    graph, router, remat: see `RoutedObjective`; those of the model that learns.
    reference: the reference's graph definition. None: there is no reference, and an answer's reward
      is β · ln p(answer).
    beta: β.
  """

  term = "pairs"
  role = "reference"

  def __init__(
    self,
    graph: nnx.GraphDef,
    router: RouterConfig,
    reference: nnx.GraphDef | None,
    *,
    beta: float,
    remat: str = "none",
  ):
    super().__init__(graph, router, reference, remat=remat)
    self.beta = beta

  def of_batch(self, model: GPT, out: Output, batch: Batch) -> dict[str, Any]:
    """This device's sums over a microbatch, by the names of `LossSums`, and `loss`.

    `loss` and `preference` are sums over pairs; `nats`, `correct` and `weight` are sums over the
    tokens of chosen answers.
    """
    nats_BS, correct_BS = model.embedding.token_losses(out.h_BSD, batch.targets)
    weights_BS = batch.weights.astype(jnp.float32)
    chosen_BS = weights_BS * (batch.segment_ids % 2)
    reward_B2P = self.beta * _of_answers(self._gain(nats_BS, batch) * weights_BS, batch)
    chosen_BP, rejected_BP = reward_B2P[:, 0], reward_B2P[:, 1]
    margin_BP = chosen_BP - rejected_BP
    there_BP = jnp.arange(margin_BP.shape[1]) < _pairs(batch)[:, None]
    over_pairs = lambda x_BP: jnp.where(there_BP, x_BP, 0.0).sum()
    return {
      "loss": over_pairs(-jax.nn.log_sigmoid(margin_BP)),
      "nats": (nats_BS * chosen_BS).sum(),
      "correct": (correct_BS * chosen_BS).sum(),
      "weight": chosen_BS.sum(),
      "preference": {
        "pairs": over_pairs(jnp.ones_like(margin_BP)),
        "reward_chosen": over_pairs(chosen_BP),
        "reward_rejected": over_pairs(rejected_BP),
        "reward_margin": over_pairs(margin_BP),
        "reward_accuracy": over_pairs((margin_BP > 0).astype(jnp.float32)),
      },
    }

  def _gain(self, nats_BS: Array, batch: Batch) -> Array:
    """ln p - ln r of every target, or ln p without a reference: float32 [B, S]."""
    if self.second is None:
      return -nats_BS
    with jax.named_scope(self.role):
      reference, shown = self.shown(batch)
      before_BS, _ = reference.embedding.token_losses(shown.h_BSD, batch.targets)
    return jax.lax.stop_gradient(before_BS) - nats_BS

  def counted(self, batch: Batch) -> tuple[Array, Array]:
    """The number of pairs of each row, and which tokens are no padding."""
    return _pairs(batch), batch.segment_ids > 0

  def metrics(self, aux: LossSums) -> tuple[dict[str, Array], dict[str, Array]]:
    """Metrics with the means over pairs of rewards and margin, and the share of margins above 0.

    `cross_entropy` and `accuracy` are those of the chosen answers' tokens.
    """
    scalars, arrays = super().metrics(aux)
    assert aux.preference is not None
    sums = dict(aux.preference)
    pairs = jnp.maximum(sums.pop("pairs"), 1)
    return scalars | {name: value / pairs for name, value in sums.items()}, arrays


def _pairs(batch: Batch) -> Array:
  """Number of pairs in each row, int32 [..., B]."""
  return batch.segment_ids.max(-1) // 2


def _of_answers(values_BS: Array, batch: Batch) -> Array:
  """Sums of each answer's values, float32 [B, 2, P]: for chosen (0) and rejected (1) of each pair.

  P = max(S // 4, 1) is the most pairs that a row can hold. An answer has at least one token, and
  one before it, so a pair has at least four tokens.
  """
  rows, size = values_BS.shape
  most = max(size // 4, 1)
  pair_BS, second_BS = (batch.segment_ids + 1) // 2 - 1, (batch.segment_ids + 1) % 2
  number_BS = (jnp.arange(rows)[:, None] * 2 + second_BS) * most + pair_BS
  everything = rows * 2 * most
  # Padding is added to one more sum, which is left out of the result.
  number_BS = jnp.where(batch.segment_ids > 0, number_BS, everything)
  sums = jax.ops.segment_sum(values_BS.reshape(-1), number_BS.reshape(-1), everything + 1)
  return sums[:everything].reshape(rows, 2, most)
