"""Runs with random weights for every option that changes a language model's function.

Each leaves as a folder of the family `scmoe`, and tests compare the folder with the run.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from scmoe.blocks.block import ModelAblation
from scmoe.blocks.wiring import WIRINGS
from scmoe.data.config import DataConfig
from scmoe.kernels.grouped_matmul import FFNOptions
from scmoe.layers.rope import RopeConfig
from scmoe.models.config import ModelConfig
from scmoe.moe.options import CompatConfig, RouterConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.run.build import build
from scmoe.run.config import RunConfig
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.description import WEIGHTS_ONLY
from scmoe.training.options import CheckpointConfig

VOCAB = 320  # the tokenizer of bytes has 257 tokens
_SIZES = {"width": 16, "num_heads": 2, "num_layers": 4, "num_experts": 8, "mlp_hidden": 24,
          "expert_hidden": 16, "shared_hidden": 8, "context": 32, "vocab_size": VOCAB}  # fmt: skip
_LLAMA = {"style": "llama"}
_LATENT = _LLAMA | {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
                    "v_head_dim": 10}  # fmt: skip
_YARN = {"scaling": "yarn", "factor": 4.0, "original_context": 8}


def _case(model: dict[str, Any] | None = None, **router: Any) -> tuple[dict, dict]:
  return model or {}, router


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
  **{f"{wiring} {style}": _case({"wiring": wiring, "style": style, "top_k": 2})
     for wiring in WIRINGS for style in ("gpt2", "llama")},
  **{f"{wiring} in every block": _case(_LLAMA | {"wiring": wiring, "moe_every": 1, "top_k": 2})
     for wiring, rule in WIRINGS.items() if rule.taps},
  **{f"{wiring}, dense layers": _case(
       {"wiring": wiring, "moe_every": 1, "dense_layers": "0,2", "num_layers": 5})
     for wiring in ("topk", "scmoe_pos1", "scmoe_pos2", "scmoe_pos3", "dgmoe", "farskip",
                    "farskip_routed")},
  **{f"norm {kind}, {wiring}": _case({"shortcut_norm": kind, "wiring": wiring})
     for kind in ("own", "megatron") for wiring in ("scmoe_pos2", "dgmoe")},
  **{f"norm {kind}, every block": _case(
       _LLAMA | {"shortcut_norm": kind, "moe_every": 1, "dense_layers": "1"})
     for kind in ("own", "megatron")},
  "three blocks": _case({"moe_every": 3, "num_layers": 6, "wiring": "scmoe_pos3"}),
  "direct": _case({"mix": "direct"}),
  "cg2": _case({"mix": "cg2"}),
  "cg1 of the shortcut": _case({"ablation": ModelAblation(mix_input="shortcut")}),
  **{f"norm after, {wiring}": _case(
       {"ablation": ModelAblation(norm_after=True), "wiring": wiring, "top_k": 2})
     for wiring in ("topk", "scmoe_pos2")},
  "head of its own": _case({"tie_embeddings": False}),
  "zero experts": _case({"zero_experts": 4, "top_k": 3, "wiring": "topk"}),
  **{f"activation {kind}": _case(_LLAMA | {"ffn": FFNOptions(activation=kind)})
     for kind in ("geglu", "reglu", "silu")},
  **{f"activation {kind} with biases": _case({"ffn": FFNOptions(activation=kind)})
     for kind in ("swiglu", "gelu_exact", "relu", "relu2")},
  "shared heads": _case(_LLAMA | {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6}),
  "biases of attention": _case(_LLAMA | {"attention_bias": True}),
  "no bias of the output": _case(_LLAMA | {"attention_bias": True, "attention_out_bias": False}),
  "part of a head turns": _case(_LLAMA | {"rope": RopeConfig(share=0.5)}),
  "part of a head turns, interleaved": _case(
    _LLAMA | {"head_dim": 10, "rope": RopeConfig(share=0.5, interleaved=True, **_YARN)}),
  "norm of heads": _case(_LLAMA | {"qk_norm": "head", "norm_eps": 1e-3}),
  "norm of all heads": _case(_LLAMA | {"qk_norm": "all", "num_heads": 4, "num_kv_heads": 2}),
  "multipliers": _case(_LLAMA | {"attention_multiplier": 0.2, "residual_multiplier": 0.3,
                                 "embedding_multiplier": 5.0, "logits_scaling": 3.0}),
  "multipliers, dense layers": _case({"residual_multiplier": 0.5, "moe_every": 1,
                                      "attention_multiplier": 0.1, "dense_layers": "1"}),
  "clipped": _case({"clip_qkv": 0.5}),
  "window": _case(_LLAMA | {"sliding_window": 3}),
  "window of one": _case({"sliding_window": 1}),
  "window of some layers": _case(_LLAMA | {"sliding_window": 3, "full_attention_layers": "1,2"}),
  "window of some layers, dense ones": _case(
    {"sliding_window": 3, "full_attention_layers": "0,3", "moe_every": 1, "dense_layers": "1"}),
  "sinks": _case(_LLAMA | {"attention_sinks": True, "num_heads": 4, "num_kv_heads": 2}),
  "clamped, biases of experts": _case(_LLAMA | {
    "ffn": FFNOptions(activation="clamped_swiglu"), "expert_bias": True}),
  "latent attention": _case(_LATENT | {"q_lora_rank": 6, "mla_scale_q_lora": True,
                                       "mla_scale_kv_lora": True}),
  "latent attention with biases": _case(_LATENT | {"attention_bias": True, "rope": RopeConfig(
    interleaved=True, mscale=0.7, mscale_all_dim=1.0, **_YARN)}),
  "linear rope": _case(_LLAMA | {"rope": RopeConfig(scaling="linear", factor=2.0)}),
  "llama3 rope": _case(_LLAMA | {"rope_theta": 500.0, "rope": RopeConfig(
    scaling="llama3", factor=8.0, original_context=16)}),
  "yarn": _case(_LLAMA | {"rope": RopeConfig(**_YARN)}),
  "yarn, interleaved": _case(_LLAMA | {"rope": RopeConfig(
    interleaved=True, truncate=False, attention_factor=1.3, **_YARN)}),
  "sigmoid": _case({"top_k": 3, "wiring": "topk"}, scoring_func="sigmoid"),
  "balanced by a bias": _case({"top_k": 2, "wiring": "topk"}, scoring_func="sigmoid", bias="sign",
                              routed_scaling_factor=2.5),
  "a controller's bias": _case({"zero_experts": 4, "top_k": 3}, bias="pid", bias_proportional=1.0,
                               normalise=False),
  "groups": _case({"top_k": 2}, n_group=4, topk_group=2, bias="sign"),
  "groups by their best": _case({"top_k": 2}, n_group=4, topk_group=2, group_score="max"),
  "not normalised": _case({"top_k": 2}, normalise=False),
  "affine gate": _case({"top_k": 2}, gate="affine"),
  "cosine gate": _case({"top_k": 2}, gate="cosine", cosine_dim=6),
  "weights before": _case({"top_k": 2, "zero_experts": 2}, compat=CompatConfig(weights="before")),
  "norm of weights": _case({"top_k": 2}, compat=CompatConfig(weight_norm=2.0)),
  "three gates": _case({"top_k": 2}, compat=CompatConfig(gates=3)),
  "noise in training": _case({}, noise=1.0, balance="load_importance",
                             compat=CompatConfig(jitter=0.1, round_to=4, order="priority")),
}  # fmt: skip


def run_of(name: str, mesh: MeshConfig = MeshConfig(data=1, expert=1)) -> RunConfig:
  """The resolved run of a case."""
  model, router = CASES[name]
  run = RunConfig(
    name="leaving",
    model=ModelConfig(**{**_SIZES, "dtype": "float32", **model}),
    router=RouterConfig(**router),
    mesh=mesh,
    data=DataConfig(seq_len=32, document_mask=False),
  )
  return run.resolve(num_devices=mesh.size, vocab_size=VOCAB)


def write_run(run: RunConfig, workdir: Path, step: int = 3, seed: int = 0) -> dict[str, Any]:
  """Stores a run with random values in every parameter and bias; returns its state."""
  built = build(run, jax.devices()[: run.mesh.size])
  draw = np.random.default_rng(seed).normal

  def filled(path: Any, x: Any) -> Any:
    value = draw(size=x.shape) * 0.3
    value += "scale" in str(path[-1]) or str(path[-1]).endswith("_norm']")  # norms are near 1
    return jax.device_put(value.astype(x.dtype), x.sharding)

  state = {"params": built.shapes, "router": built.router_shapes}
  state = jax.tree_util.tree_map_with_path(filled, state)
  meta = {"config": built.config, "data_fingerprint": {}, "mesh": dict(built.mesh.shape),
          "processes": 1, "tokens": 0, WEIGHTS_ONLY: True}  # fmt: skip
  keeper = Checkpointer(workdir, CheckpointConfig(async_save=False))
  keeper.save_now(step, state, {}, meta)
  keeper.close()
  return state


def on_mesh(run: RunConfig, **axes: int) -> RunConfig:
  """The run on another mesh."""
  return dataclasses.replace(run, mesh=MeshConfig(**axes))
