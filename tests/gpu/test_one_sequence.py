"""Decoding one sequence on a GPU, by kernels that take a single token, against whole passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.inference.decode import decode_step, prefill
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import Pass
from scmoe.parallel.mesh import MeshConfig
from scmoe.run import build
from scmoe.run.benchmark import random_model
from scmoe.run.config import RunConfig

pytestmark = pytest.mark.gpu

PROMPT, LENGTH, ROOM = 16, 80, 256  # of the cache, so that several CTAs attend


@pytest.mark.parametrize(
  "options",
  [
    {"style": "llama", "wiring": "topk", "moe_every": 1},
    {"style": "llama", "wiring": "topk", "moe_every": 1, "num_kv_heads": 2, "sliding_window": 33},
    {"style": "llama", "wiring": "scmoe_pos2", "qk_norm": "head"},
    {"style": "gpt2", "wiring": "scmoe_pos2"},
  ],
  ids=["finished in the kernel", "shared keys, window", "norms of queries", "biases"],
)
def test_each_token_has_the_logits_of_the_whole(options):
  """In bfloat16; where two experts are as good as equal, one of the two ways may take the other."""
  config = ModelConfig(
    width=512, num_heads=4, num_layers=2, num_experts=8, top_k=2, context=256, dtype="bfloat16",
    init_std=0.05, **options,
  )  # fmt: skip
  run = dataclasses.replace(RunConfig(), model=config, mesh=MeshConfig(1))
  built = build.build(run.resolve(num_devices=1, vocab_size=512), jax.devices()[:1])
  model = random_model(built)
  text_1S = np.random.default_rng(0).integers(0, 512, (1, LENGTH)).astype(np.int32)
  whole = jax.jit(lambda tokens: model.logits(model(tokens, Pass(no_drop=True)).h_BSD))
  want_SV = np.asarray(whole(text_1S), np.float64)[0]
  lengths = jnp.asarray([PROMPT], jnp.int32)
  first = jax.jit(lambda t: prefill(model, t, lengths, model.init_caches(1, ROOM)))
  step = jax.jit(lambda token, position, caches: decode_step(model, token, position, caches))
  _, caches = first(text_1S[:, :PROMPT])
  errors = []
  for position in range(PROMPT, LENGTH):
    here = jnp.asarray([position], jnp.int32)
    got_1V, caches = step(text_1S[:, position], here, caches)
    difference = np.asarray(got_1V, np.float64)[0] - want_SV[position]
    errors.append(np.linalg.norm(difference) / np.linalg.norm(want_SV[position]))
  assert np.median(errors) < 2e-2, errors
  assert np.mean(np.asarray(errors) < 5e-2) > 0.8, errors
