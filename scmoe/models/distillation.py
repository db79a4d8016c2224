"""Distillation: a language model, the student, learns from text and from a teacher's scores.

SE-MoE distils in its second step (arXiv 2205.10034); the loss is that of Hinton et al. (arXiv
1503.02531).

The teacher runs inside the student's step, on the same mesh and tokens, without gradients and
without dropping choices. The scores of both models are computed for a chunk of tokens at a time,
and never stored for all.
"""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scmoe.base.batch import Batch
from scmoe.models.gpt import GPT, Output, Pass
from scmoe.models.objective import LanguageModelObjective, LossSums
from scmoe.moe.options import RouterConfig


class Distillation(LanguageModelObjective):
  """`LanguageModelObjective` with the loss `scmoe.layers.cross_entropy.taught_losses`.

  Args:
    graph, router, remat: see `RoutedObjective`; those of the student.
    teacher: the teacher's graph definition.
    share: weight of the divergence in the loss, 0 to 1.
    temperature: divides the scores that are compared.
  """

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
    super().__init__(graph, router, remat=remat)
    self.teacher, self.share, self.temperature = teacher, share, temperature
    self.given: Any = None

  def taught(self, given: Any) -> Distillation:
    """This objective with the teacher's arrays; the step calls it.

    Args:
      given: `params` and `router` of the teacher; in the manual region this device's shares.
    """
    own = copy.copy(self)
    own.given = jax.lax.stop_gradient(given)
    return own

  def of_text(self, model: GPT, out: Output, batch: Batch) -> dict[str, Array]:
    """Sums as in `LanguageModelObjective.of_text`, with `loss` and `divergence`."""
    assert self.given is not None, "the step gives the teacher's arrays by `taught`"
    with jax.named_scope("teacher"):
      teacher: GPT = nnx.merge(self.teacher, self.given["params"])
      mask_BS = batch.segment_ids > 0
      options = {"mask_BS": mask_BS, "router": self.given["router"], "no_drop": True}
      shown = teacher(batch.inputs, Pass(batch.positions, batch.segment_ids, **options))
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
