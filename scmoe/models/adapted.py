"""An objective whose parameters are the adapters of a frozen model (`scmoe.models.low_rank`).

The loss is differentiated with respect to the adapters alone. The frozen parameters come with the
arrays that no step changes (`scmoe.training.step.TrainState.teacher`): a step returns no gradients
for them, and the optimizer keeps no state for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

from jax import Array

from scmoe.models.gradient_totals import added
from scmoe.models.low_rank import Adapters
from scmoe.models.objective import LossSums, RoutedObjective, cast_params
from scmoe.models.second_model import WithSecondModel
from scmoe.models.trunk import Output, Route
from scmoe.moe.types import RouterSums


class Adapted(RoutedObjective):
  """Another objective, `inner`, as a function of adapters instead of the model's parameters.

  Args:
    inner: the objective of the whole model. If it reads a second model and `taught` is given none,
      the second model is the frozen one without adapters.
    adapters: which parameters of the model have adapters.
    dtype: the compute type, to which `cast` casts.

  Attributes:
    base: the frozen parameters; None until `taught` has given them.
  """

  def __init__(self, inner: RoutedObjective, adapters: Adapters, dtype: str):
    super().__init__(inner.graph, inner.router, remat=inner.remat)
    self.inner, self.adapters, self.dtype = inner, adapters, dtype
    self.term = inner.term
    self.base: Any = None

  def taught(self, given: Any) -> Self:
    """This objective with the frozen model's arrays; the step calls it.

    Args:
      given: under "base" the `params` and `router` of the frozen model; under "second" those of a
        second model, unless that is the frozen one. In the manual region this device's shares.
    """
    own = copy.copy(self)
    own.base = given["base"]["params"]
    if isinstance(own.inner, WithSecondModel) and own.inner.second is not None:
      own.inner = own.inner.taught(given.get("second", given["base"]))
    return own

  def cast(self, params: Any) -> Any:
    """Adapters, or the model's parameters, in the types of `RoutedObjective.cast`."""
    return cast_params(params, self.dtype)

  def losses(
    self,
    params: Sequence[Any],
    totals: Any = None,
    *,
    router: Any,
    batches: Sequence[Any],
    rngs: Sequence[Array | None],
    ahead: RouterSums | None = None,
  ) -> tuple[list[dict[str, Array]], list[LossSums]]:
    """See `RoutedObjective.losses`; `params` and `totals` are those of the adapters.

    All adapters' gradients are added, and summed over devices, in one place: they are small.
    """
    models = list(map(self._applied, added(params, totals)))
    given = {"router": router, "batches": batches, "rngs": rngs, "ahead": ahead}
    return self.inner.losses(models, None, **given)

  def look_ahead(
    self, params: Any, router: Any, batch: Any, key_of: Callable[[Any], Array]
  ) -> RouterSums | None:
    """See `RoutedObjective.look_ahead`."""
    return self.inner.look_ahead(self._applied(params), router, batch, key_of)

  def _applied(self, own: Any) -> Any:
    assert self.base is not None, "the step gives the frozen model's arrays by `taught`"
    return self.adapters.applied(self.base, own)

  def lay_out_totals(self, zeros: Any) -> Any:
    """The zeros as they are: adapters' gradients have no large layers."""
    return zeros

  # -- the rest is the inner objective's ----------------------------------------------------------

  def route(self, models, batches, router, rngs, totals=None, total_of_rows=None) -> Route:
    """See `RoutedObjective.route`."""
    return self.inner.route(models, batches, router, rngs, totals, total_of_rows)

  def of_batch(self, model: Any, out: Output, batch: Any) -> dict[str, Array]:
    """See `RoutedObjective.of_batch`."""
    return self.inner.of_batch(model, out, batch)

  def counted(self, batch: Any) -> tuple[Array, Array]:
    """See `RoutedObjective.counted`."""
    return self.inner.counted(batch)

  def tokens_of_each(self, model: Any) -> Array | float:
    """See `RoutedObjective.tokens_of_each`."""
    return self.inner.tokens_of_each(model)

  def metrics(self, aux: LossSums) -> tuple[dict[str, Array], dict[str, Array]]:
    """See `RoutedObjective.metrics`."""
    return self.inner.metrics(aux)
