"""Suggests the flag or field that a user meant: by spelling, by its last word, or by another
framework's name for it.

  >>> nearest("lr", ["train.steps", "optimizer.learning_rate"])
  'optimizer.learning_rate'
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

# What PyTorch, Hugging Face, nanoGPT, Megatron, DeepSpeed, MaxText, torchtitan, MegaBlocks and
# Tutel call a field -> its name here.
OTHER_NAMES = {
  "a2a_ffn_overlap_degree": "dispatch.chunks",
  "accumulation_steps": "train.tokens_per_step",
  "activation_checkpointing": "train.remat",
  "base_emb_dim": "model.width",
  "base_mlp_dim": "model.mlp_hidden",
  "base_moe_mlp_dim": "model.expert_hidden",
  "base_num_decoder_layers": "model.num_layers",
  "base_num_kv_heads": "model.num_kv_heads",
  "base_num_query_heads": "model.num_heads",
  "batch": "train.batch_size",
  "bf16": "model.dtype",
  "block_size": "data.seq_len",
  "bs": "train.batch_size",
  "capacity": "dispatch.capacity_factor",
  "clip": "optimizer.clip_norm",
  "clip_grad": "optimizer.clip_norm",
  "context_length": "model.context",
  "context_parallel": "mesh.sequence",
  "context_parallel_degree": "mesh.sequence",
  "context_parallel_size": "mesh.sequence",
  "corpus": "data.path",
  "cp": "mesh.sequence",
  "d_ff": "model.mlp_hidden",
  "d_model": "model.width",
  "data_parallel_replicate_degree": "mesh.data",
  "data_parallel_shard_degree": "mesh.shard_state",
  "dataset": "data.path",
  "decay": "optimizer.weight_decay",
  "decoder_sparse_step": "model.moe_every",
  "depth": "model.num_layers",
  "devices": "mesh.data",
  "dim": "model.width",
  "dp": "mesh.data",
  "dp_shard": "mesh.shard_state",
  "embed_dim": "model.width",
  "ep": "mesh.expert",
  "epochs": "train.steps",
  "eval_interval": "train.eval_every",
  "eval_steps": "train.eval_every",
  "expert_model_parallel_size": "mesh.expert",
  "expert_parallel": "mesh.expert",
  "expert_parallel_degree": "mesh.expert",
  "experts": "model.num_experts",
  "experts_per_token": "model.top_k",
  "ffn": "model.mlp_hidden",
  "ffn_hidden_size": "model.mlp_hidden",
  "file": "data.path",
  "fp16": "model.dtype",
  "fp32": "model.dtype",
  "fsdp": "mesh.shard_state",
  "global_batch_size": "train.tokens_per_step",
  "gpus": "mesh.data",
  "grad_clip": "optimizer.clip_norm",
  "grad_reduce_in_bf16": "overlap.gradient_dtype",
  "gradient_accumulation_steps": "train.tokens_per_step",
  "gradient_checkpointing": "train.remat",
  "heads": "model.num_heads",
  "hidden": "model.width",
  "hidden_dim": "model.width",
  "hidden_size": "model.width",
  "ici_context_parallelism": "mesh.sequence",
  "ici_data_parallelism": "mesh.data",
  "ici_expert_parallelism": "mesh.expert",
  "ici_fsdp_parallelism": "mesh.shard_state",
  "ici_tensor_parallelism": "mesh.tensor",
  "intermediate_size": "model.mlp_hidden",
  "iterations": "train.steps",
  "iters": "train.steps",
  "k": "model.top_k",
  "layers": "model.num_layers",
  "local_batch_size": "train.batch_size",
  "log_interval": "train.log_every",
  "logging_steps": "train.log_every",
  "lr": "optimizer.learning_rate",
  "lr_warmup_iters": "optimizer.warmup_steps",
  "max_grad_norm": "optimizer.clip_norm",
  "max_iters": "train.steps",
  "max_length": "data.seq_len",
  "max_lr": "optimizer.learning_rate",
  "max_position_embeddings": "model.context",
  "max_seq_len": "data.seq_len",
  "max_steps": "train.steps",
  "max_target_length": "data.seq_len",
  "micro_batch_size": "train.batch_size",
  "mixed_precision_reduce": "overlap.gradient_dtype",
  "moe_aux_loss_coeff": "router.balance_loss",
  "moe_expert_model_parallelism": "mesh.expert",
  "moe_ffn_hidden_size": "model.expert_hidden",
  "moe_intermediate_size": "model.expert_hidden",
  "moe_layer_freq": "model.moe_every",
  "moe_loss_weight": "router.balance_loss",
  "moe_router_topk": "model.top_k",
  "moe_shared_expert_intermediate_size": "model.shared_hidden",
  "moe_token_dispatcher_type": "dispatch.transport",
  "moe_top_k": "model.top_k",
  "moe_z_loss_coeff": "router.z_loss",
  "n_ctx": "model.context",
  "n_embd": "model.width",
  "n_experts": "model.num_experts",
  "n_head": "model.num_heads",
  "n_layer": "model.num_layers",
  "n_routed_experts": "model.num_experts",
  "num_attention_heads": "model.num_heads",
  "num_experts_per_tok": "model.top_k",
  "num_hidden_layers": "model.num_layers",
  "num_key_value_heads": "model.num_kv_heads",
  "num_local_experts": "model.num_experts",
  "offload_optimizer": "mesh.moments_in",
  "optim": "optimizer.name",
  "optimizer": "optimizer.name",
  "optimizer_cpu_offload": "mesh.moments_in",
  "per_device_train_batch_size": "train.batch_size",
  "precision": "model.dtype",
  "recompute_granularity": "train.remat",
  "remat_policy": "train.remat",
  "router_aux_loss_coef": "router.balance_loss",
  "save_interval": "checkpoint.every",
  "save_steps": "checkpoint.every",
  "seq": "data.seq_len",
  "seq_length": "data.seq_len",
  "sequence_length": "data.seq_len",
  "sequence_parallel": "mesh.sequence",
  "sp": "mesh.sequence",
  "tensor_model_parallel_size": "mesh.tensor",
  "tensor_parallel": "mesh.tensor",
  "tensor_parallel_degree": "mesh.tensor",
  "topk": "model.top_k",
  "tp": "mesh.tensor",
  "train_file": "data.path",
  "train_iters": "train.steps",
  "use_2dh": "dispatch.nodes",
  "use_distributed_optimizer": "mesh.shard_state",
  "vocab": "data.vocab_size",
  "warmup": "optimizer.warmup_steps",
  "wd": "optimizer.weight_decay",
  "zero_stage": "mesh.shard_state",
  # flags
  "checkpoint": "workdir",
  "debug": "smoke",
  "dir": "workdir",
  "folder": "workdir",
  "max_tokens": "max_new_tokens",
  "out": "workdir",
  "out_dir": "workdir",
  "output_dir": "workdir",
  "resume": "workdir",
  "run": "workdir",
  "temp": "temperature",
  "text": "prompt",
}


def nearest(typed: str, known: Sequence[str]) -> str | None:
  """The known name that `typed` most likely stands for, or None.

  It tries in this order: another framework's name, a field with the same last word, a similar
  spelling of the whole, a similar last word, a name that contains all typed words.

  Args:
    typed: a flag without dashes, or a field such as "model.experts".
    known: flags and dotted fields.
  """
  section, _, last = typed.replace("-", "_").rpartition(".")
  own = [name for name in known if section and name.startswith(f"{section}.")]
  return (
    _other_name(last.lower(), known)
    or _of_last_word(last, [*own, *known])
    or next(iter(difflib.get_close_matches(typed, known, n=1, cutoff=0.75)), None)
    or _spelt_like(last, [*own, *known])
    or _of_all_words(last, [*own, *known])
  )


def _other_name(last: str, known: Sequence[str]) -> str | None:
  found = OTHER_NAMES.get(last)
  return found if found in known else None


def _of_last_word(last: str, known: Sequence[str]) -> str | None:
  return next((name for name in known if name.rpartition(".")[2] == last), None)


def _spelt_like(last: str, known: Sequence[str]) -> str | None:
  near = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in known], n=1)
  return _of_last_word(near[0], known) if near else None


def _of_all_words(last: str, known: Sequence[str]) -> str | None:
  words = set(filter(None, last.lower().split("_")))
  has_all = lambda name: bool(words) and words <= set(name.rpartition(".")[2].split("_"))
  return next((name for name in known if has_all(name)), None)
