"""An objective whose loss also reads what a second model says about the same batch.

The second model runs inside the step, on the same mesh and tokens, without gradients and without
dropping choices: a teacher (`scmoe.models.distillation`), or a reference
(`scmoe.models.preference`).
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

import jax
from flax import nnx

from scmoe.base.batch import Batch
from scmoe.models.gpt import GPT, Output, Pass
from scmoe.models.objective import LanguageModelObjective
from scmoe.moe.options import RouterConfig


class WithSecondModel(LanguageModelObjective):
  """`LanguageModelObjective` beside a second language model.

  Args:
    graph, router, remat: see `RoutedObjective`; those of the model that learns.
    second: the second model's graph definition; None if there is none.

  Attributes:
    role: what the second model is, in traces and errors.
    given: `params` and `router` of the second model, from `taught` on.
  """

  role: ClassVar[str]

  def __init__(
    self,
    graph: nnx.GraphDef,
    router: RouterConfig,
    second: nnx.GraphDef | None,
    *,
    remat: str = "none",
  ):
    super().__init__(graph, router, remat=remat)
    self.second = second
    self.given: Any = None

  def taught(self, given: Any) -> Self:
    """This objective with the second model's arrays; the step calls it.

    Args:
      given: `params` and `router` of that model; in the manual region this device's shares.
    """
    own = copy.copy(self)
    own.given = jax.lax.stop_gradient(given)
    return own

  def shown(self, batch: Batch) -> tuple[GPT, Output]:
    """The second model, and its output for a microbatch; call it in `jax.named_scope(role)`."""
    assert self.second is not None, f"there is no {self.role}"
    assert self.given is not None, f"the step gives the {self.role}'s arrays by `taught`"
    model: GPT = nnx.merge(self.second, self.given["params"])
    mask_BS = batch.segment_ids > 0
    options = {"mask_BS": mask_BS, "router": self.given["router"], "no_drop": True}
    options |= {"hidden": self.hidden}
    return model, model(batch.inputs, Pass(batch.positions, batch.segment_ids, **options))
