"""The oracles' own differentiation, against finite differences."""

import numpy as np
import pytest
import tape

A = np.random.default_rng(0).uniform(0.5, 1.5, (3, 3))

FUNCTIONS = {
  "add_mul": lambda a: ((a + 2.0) * a + A * a - a[0]).sum(),
  "broadcast": lambda a: (a * a[0] + a[:, :1] / (a[1] + 3.0)).sum(),
  "power": lambda a: (a**3 + 1.0 / a + a**0.5).sum(),
  "elementwise": lambda a: (tape.exp(a) * tape.tanh(a) - tape.log(a)).sum(),
  "products": lambda a: a[0] @ a[1] + ((a[0] @ a) * (a @ a[2])).sum(),
  "stack": lambda a: (tape.stack([a[0], a[2] * a[2], a[0]]) @ a[1]).sum(),
  "reused": lambda a: (lambda s: s * s * a.sum())(a[1] @ a[1]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_finite_differences(name):
  function = FUNCTIONS[name]
  x = tape.Var(np.random.default_rng(1).uniform(0.5, 1.5, (3, 3)))
  (got,) = tape.gradients(function(x), [x])
  expected = np.zeros((3, 3))
  for index in np.ndindex(3, 3):
    step = np.zeros((3, 3))
    step[index] = 1e-5
    high, low = function(tape.Var(x.value + step)), function(tape.Var(x.value - step))
    expected[index] = (high.value - low.value) / 2e-5
  np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-8)
