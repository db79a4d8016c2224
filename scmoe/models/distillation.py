"""Distillation: a language model, the student, learns from text and from a teacher's scores.

It can also learn from the teacher's hidden states, pair by pair (`hidden_distance`).

SE-MoE distils in its second step (arXiv 2205.10034); the loss is that of Hinton et al. (arXiv
1503.02531).

The teacher runs inside the student's step (`scmoe.models.second_model`). The scores of both models
are computed for a chunk of tokens at a time, and never stored for all.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from scmoe.base.batch import Batch
from scmoe.models.gpt import GPT, Output
from scmoe.models.objective import LossSums
from scmoe.models.second_model import WithSecondModel
from scmoe.moe.options import RouterConfig


class Distillation(WithSecondModel):
  """`LanguageModelObjective` with the loss `scmoe.layers.cross_entropy.taught_losses`.

  Args:
    graph, router, remat: see `RoutedObjective`; those of the student.
    teacher: the teacher's graph definition.
    share: weight of the divergence in the loss, 0 to 1.
    temperature: divides the scores that are compared.
    hidden_share: factor on the mean `hidden_distance`, which is added to the loss; with 0 no hidden
      states are kept.
  """

  role = "teacher"

  def __init__(
    self,
    graph: nnx.GraphDef,
    router: RouterConfig,
    teacher: nnx.GraphDef,
    *,
    share: float,
    temperature: float,
    hidden_share: float = 0.0,
    remat: str = "none",
  ):
    super().__init__(graph, router, teacher, remat=remat)
    self.share, self.temperature = share, temperature
    self.hidden_share, self.hidden = hidden_share, hidden_share > 0

  def of_text(self, model: GPT, out: Output, batch: Batch) -> dict[str, Array]:
    """Sums as in `LanguageModelObjective.of_text`, with `loss`, `divergence` and any `distance`."""
    with jax.named_scope(self.role):
      teacher, shown = self.shown(batch)
    found = model.embedding.taught_losses(
      out.h_BSD,
      teacher.embedding,
      shown.h_BSD,
      batch.targets,
      batch.weights,
      share=self.share,
      temperature=self.temperature,
    )
    sums: dict[str, Array] = dict(zip(("loss", "nats", "correct", "divergence"), found))
    if self.hidden:
      blocks = model.config.moe_every * model.config.wiring_rule.units_per_moe
      apart_BS = hidden_distance(out.hidden_LBSD, shown.hidden_LBSD, blocks)
      sums["distance"] = (apart_BS * batch.weights).sum()
      sums["loss"] = sums["loss"] + self.hidden_share * sums["distance"]
    return sums

  def metrics(self, aux: LossSums) -> tuple[dict[str, Array], dict[str, Array]]:
    """The metrics of `RoutedObjective`, with `divergence`: the mean of KL(teacher | student).

    It is in nats per token, with the scores of both over the temperature. `hidden_distance` is the
    mean over the tokens, where hidden states are compared.
    """
    scalars, arrays = super().metrics(aux)
    sums = {"divergence": aux.divergence, "hidden_distance": aux.distance}
    weight = jnp.maximum(aux.weight, 1)
    return scalars | {n: total / weight for n, total in sums.items() if total is not None}, arrays


def hidden_distance(student_LBSD: Any, teacher_LBSD: Any, blocks: int) -> Float[Array, "B S"]:
  """How far a student's residual stream is from its teacher's: the mean over the student's pairs.

  For one token and pair it is |s - t|² / |t|², with s and t the student's and the teacher's stream
  after the pair's last block: 0 if they agree, 1 if s is zero. The division by |t|² keeps the deep
  layers, whose streams are long, from outweighing the first ones.

  Args:
    student_LBSD, teacher_LBSD: the streams after each of the same number of blocks.
    blocks: number of blocks of one of the student's pairs.
  """
  ends = slice(blocks - 1, None, blocks)
  s, t = (x[ends].astype(jnp.float32) for x in (student_LBSD, teacher_LBSD))
  length_LBS = jnp.maximum(jnp.square(t).sum(-1), jnp.finfo(jnp.float32).tiny)
  return (jnp.square(s - t).sum(-1) / length_LBS).mean(0)
