"""Distillation: a language model, the student, learns from text and from a teacher's scores.

SE-MoE distils in its second step (arXiv 2205.10034); the loss is that of Hinton et al. (arXiv
1503.02531).

The teacher runs inside the student's step (`scmoe.models.second_model`). The scores of both models
are computed for a chunk of tokens at a time, and never stored for all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

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
    remat: str = "none",
  ):
    super().__init__(graph, router, teacher, remat=remat)
    self.share, self.temperature = share, temperature

  def of_text(self, model: GPT, out: Output, batch: Batch) -> dict[str, Array]:
    """Sums as in `LanguageModelObjective.of_text`, with `loss` and `divergence`."""
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
    return dict(zip(("loss", "nats", "correct", "divergence"), found))

  def metrics(self, aux: LossSums) -> tuple[dict[str, Array], dict[str, Array]]:
    """The metrics of `RoutedObjective`, with `divergence`: the mean of KL(teacher | student).

    It is in nats per token, with the scores of both over the temperature.
    """
    scalars, arrays = super().metrics(aux)
    assert aux.divergence is not None
    return scalars | {"divergence": aux.divergence / jnp.maximum(aux.weight, 1)}, arrays
