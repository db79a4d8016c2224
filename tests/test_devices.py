"""Which implementation a GPU gets by its compute capability: a T4, as on Colab, has XLA's path."""

import os
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import scmoe
from scmoe.base import determinism
from scmoe.kernels.grouped_matmul import resolve_backend
from scmoe.kernels.top_k.api import has_kernel
from scmoe.layers import dot_product
from scmoe.layers.mlp import MLP, MLPConfig

WIDTHS = (128, 256)


@pytest.fixture
def on(monkeypatch):
  """Makes the first device look like another one; arrays stay where they are."""

  def pretend(platform, capability):
    device = types.SimpleNamespace(
      platform=platform, compute_capability=capability, device_kind=f"a {platform} {capability}"
    )
    monkeypatch.setattr(jax, "devices", lambda *_: [device])

  return pretend


@pytest.mark.parametrize(
  ("platform", "capability", "kernels", "fused"),
  [
    ("gpu", "7.5", False, False),  # T4
    ("gpu", "8.0", False, True),  # A100
    ("gpu", "8.9", False, True),  # L4
    ("gpu", "9.0", True, True),  # H100
    ("gpu", "10.0", False, True),  # B200
    ("cpu", None, False, False),
  ],
)
def test_kernels_where_there_is_a_hopper_and_cudnn_from_ampere_on(
  on, platform, capability, kernels, fused
):
  on(platform, capability)
  x_TD = jnp.zeros((256, 128), jnp.bfloat16)
  assert resolve_backend("auto", jnp.bfloat16, *WIDTHS) == ("mosaic_gpu" if kernels else "xla")
  assert has_kernel(x_TD, 8, 2, False, "auto") == kernels
  mlp = MLP(MLPConfig(width=128, hidden=256), rngs=nnx.Rngs(0))
  assert mlp._has_kernels(x_TD[None]) == kernels
  q_BSHN = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
  assert (dot_product._implementation(q_BSHN, masked=False) == "cudnn") == fused
  masked = fused and capability != "10.0"
  assert (dot_product._implementation(q_BSHN, masked=True) == "cudnn") == masked
  assert dot_product._implementation(q_BSHN, masked=True, window=4) is None
  assert (dot_product._implementation(q_BSHN, masked=False, window=4) == "cudnn") == fused
  assert dot_product._implementation(q_BSHN[:, :7], masked=True) is None
  assert (dot_product._implementation(q_BSHN[:, :7], masked=False) == "cudnn") == fused
  assert dot_product._implementation(q_BSHN.astype(jnp.float32), masked=False) is None


@pytest.mark.parametrize("yes", ["", "=true", "=1"])
@pytest.mark.parametrize("flag", determinism.FLAGS)
def test_deterministic_runs_take_no_cudnn(on, monkeypatch, flag, yes):
  """Its program cannot be run then (jax 0.11.2)."""
  on("gpu", "9.0")
  q_BSHN = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
  monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {flag}=false")
  assert dot_product._implementation(q_BSHN, masked=False) == "cudnn"
  monkeypatch.setenv("XLA_FLAGS", f"{flag}{yes}")
  assert dot_product._implementation(q_BSHN, masked=False) is None


def test_a_layer_on_a_t4_has_no_kernel_in_its_program(on):
  on("gpu", "7.5")
  config = scmoe.MoEConfig(width=128, hidden=256, num_experts=8, top_k=2)
  layer = scmoe.MoE(config, rngs=nnx.Rngs(0))
  x_BSD = jnp.zeros((2, 128, 128), jnp.bfloat16)
  program = str(jax.make_jaxpr(lambda x: layer(x)[0])(x_BSD))
  assert "pallas_call" not in program
  assert "dot_general" in program
