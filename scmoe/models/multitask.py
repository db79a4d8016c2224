"""Several tasks in one model: shared experts, a gate for each task, and each task's loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scmoe.base.batch import Batch
from scmoe.models.gpt import GPT, Output
from scmoe.models.objective import LanguageModelObjective, LossSums
from scmoe.moe.options import RouterConfig


class Multitask(LanguageModelObjective):
  """Cross-entropy over the rows of all tasks, and the losses of the routers.

  SE-MoE trains its model UFO so (arXiv 2205.10034).

  `Batch.domain` is the task of each row, which decides the row's gate. A step's loss is that of a
  run of one task: a sum over all counted tokens, divided once by their number. So a task counts by
  its tokens, and shared parameters get gradients from all rows. A gate gets gradients from the rows
  of its task; on devices that have none, its addend to the sum over devices is zero. The balancing
  loss and the z-loss are taken over all tasks together, because the experts are shared.

  Args:
    graph, router, remat: see `RoutedObjective`.
    tasks: names of the tasks, in the order of their indices.
  """

  def __init__(
    self, graph: nnx.GraphDef, router: RouterConfig, tasks: Sequence[str], *, remat: str = "none"
  ):
    super().__init__(graph, router, remat=remat)
    self.tasks = tuple(tasks)

  def of_text(self, model: GPT, out: Output, batch: Batch) -> dict[str, Any]:
    """This device's sums over a microbatch, those of each task among them (`LossSums.tasks`)."""
    summed = model.embedding.summed_and_each(out.h_BSD, batch.targets, batch.weights)
    nats, correct, nats_BS = summed
    weights_BS = batch.weights.astype(jnp.float32)
    of_tasks = lambda values_BS: jax.ops.segment_sum(
      values_BS.sum(1), batch.domain, num_segments=len(self.tasks)
    )
    each = {"nats": of_tasks(nats_BS * weights_BS), "weight": of_tasks(weights_BS)}
    return {"nats": nats, "correct": correct, "tasks": each}

  def metrics(self, aux: LossSums) -> tuple[dict[str, Array], dict[str, Array]]:
    """Metrics with `cross_entropy/NAME` and `counted_tokens/NAME` of each task.

    The first is the task's mean over its own counted tokens of the step, in nats; the second is the
    number of these tokens.
    """
    scalars, arrays = super().metrics(aux)
    assert aux.tasks is not None
    nats_T, weight_T = aux.tasks["nats"], aux.tasks["weight"]
    mean_T = nats_T / jnp.maximum(weight_T, 1)
    for task, name in enumerate(self.tasks):
      scalars[f"cross_entropy/{name}"] = mean_T[task]
      scalars[f"counted_tokens/{name}"] = weight_T[task]
    return scalars, arrays
