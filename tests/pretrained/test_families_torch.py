"""Tiny random models of every released family against transformers: logits whole and cached.

torch and transformers are no requirement of this project, and tests/golden holds what they computed
for one model of most families. Where they are installed, these tests compare the version that is.
"""

import jax
import numpy as np
import pytest
import released
from peers import torch_and_transformers

torch, transformers = torch_and_transformers(5, "the fields below are those of transformers 5")
TOLERANCE = 1e-4  # absolute, of float32 logits and hidden states of size 1 to 10
ROWS, LENGTH, VOCAB = 2, 12, 128

_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64,
          "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8,
           "qk_rope_head_dim": 4, "v_head_dim": 10, "num_hidden_layers": 3}  # fmt: skip
_SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 2,
           "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
         "original_max_position_embeddings": 16, "rope_theta": 10000.0}  # fmt: skip
_GLM = _SHARED | {"num_hidden_layers": 3, "head_dim": 8, "use_qk_norm": True}
_GRANITE = {"num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True,
            "attention_multiplier": 0.2, "embedding_multiplier": 5.0, "residual_multiplier": 0.3,
            "logits_scaling": 3.0}  # fmt: skip
_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 4}
_LLAMA4 = {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 8, "num_hidden_layers": 4,
           "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2, "attention_chunk_size": 5,
           "attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.1}  # fmt: skip

CASES = {
  "GPT-OSS": ("gpt_oss", _OSS),
  "GPT-OSS with YaRN": ("gpt_oss", _OSS | {"rope_parameters": _YARN | {"truncate": False}}),
  "Llama-4": ("llama4_text", _LLAMA4),
  "Llama-4, experts in every layer": ("llama4_text", _LLAMA4 | {
    "interleave_moe_layer_step": 1, "use_qk_norm": False, "attn_temperature_tuning": False}),
  "GLM-4.5": ("glm4_moe", _GLM | {"rope_parameters": {
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
  "GLM-4.5 with biases": ("glm4_moe", _GLM | {
    "attention_bias": True, "use_qk_norm": False, "routed_scaling_factor": 2.5, "rope_parameters": {
      "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
  "Granite-MoE": ("granitemoe", _GRANITE),
  "Granite-MoE with a head of its own": ("granitemoe", _GRANITE | {"tie_word_embeddings": False}),
  "OLMoE": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
  "Mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 5}),
  "Qwen3-MoE": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 12,
                              "moe_intermediate_size": 16, "mlp_only_layers": [1]}),
  "DeepSeek-V2": ("deepseek_v2", _LATENT | _SHARED | {
    "topk_method": "group_limited_greedy", "norm_topk_prob": False}),
  "DeepSeek-V3": ("deepseek_v3", _LATENT | _SHARED | {"rope_parameters": _YARN}),
  "Llama": ("llama", {"head_dim": 12}),
  "Mistral": ("mistral", {"sliding_window": 5, "head_dim": 8}),
  "Qwen3": ("qwen3", {"head_dim": 12}),
}  # fmt: skip


@torch.no_grad()
def written(name, folder):
  """A model with random values in every parameter, saved; tokens, and what it computes of them."""
  family, fields = CASES[name]
  config = transformers.AutoConfig.for_model(family, **_SIZES | fields)
  torch.manual_seed(3)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
  model = model.float().eval()
  for which, value in [*model.named_parameters(), *model.named_buffers()]:
    if "inv_freq" in which:
      continue
    random = torch.randn_like(value)
    value.copy_(1 + 0.1 * random if "norm" in which else 0.15 * random)
  model.save_pretrained(folder)
  tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
  out = model(torch.tensor(tokens), use_cache=False, output_hidden_states=True)
  return tokens, out.logits.numpy(), torch.stack(out.hidden_states).numpy()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_hidden_states_are_those_of_transformers(name, tmp_path):
  tokens, logits, hidden = written(name, tmp_path / "model")
  with jax.default_matmul_precision("highest"):
    ours = released.run(tmp_path / "model", "data=1", tokens)
  np.testing.assert_allclose(ours["logits"], logits, atol=TOLERANCE, rtol=0)
  np.testing.assert_allclose(ours["decoded"], logits, atol=TOLERANCE, rtol=0)
  np.testing.assert_allclose(ours["hidden"], hidden, atol=TOLERANCE, rtol=0)
  assert np.abs(logits).max() > 0.5


def test_no_family_is_left_out():
  from scmoe.pretrained import own
  from scmoe.pretrained.families import FAMILIES

  others = {own.FAMILY, "llama4", "longcat_flash"}  # images; a recorded model, tests/golden
  assert {family for family, _ in CASES.values()} == set(FAMILIES) - others
