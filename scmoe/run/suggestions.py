"""Suggests the flag or field that a user meant: by spelling, by its last word, or by another
framework's name for it.

  >>> nearest("lr", ["train.steps", "optimizer.learning_rate"])
  'optimizer.learning_rate'
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

# What PyTorch, Hugging Face, nanoGPT, Megatron and DeepSpeed call a field -> its name here.
OTHER_NAMES = {
  "accumulation_steps": "train.tokens_per_step",
  "activation_checkpointing": "train.remat",
  "batch": "train.batch_size",
  "bf16": "model.dtype",
  "block_size": "data.seq_len",
  "bs": "train.batch_size",
  "capacity": "dispatch.capacity_factor",
  "clip": "optimizer.clip_norm",
  "context_length": "model.context",
  "context_parallel": "mesh.sequence",
  "corpus": "data.path",
  "cp": "mesh.sequence",
  "d_ff": "model.mlp_hidden",
  "d_model": "model.width",
  "dataset": "data.path",
  "decay": "optimizer.weight_decay",
  "depth": "model.num_layers",
  "devices": "mesh.data",
  "dim": "model.width",
  "dp": "mesh.data",
  "embed_dim": "model.width",
  "ep": "mesh.expert",
  "epochs": "train.steps",
  "eval_interval": "train.eval_every",
  "eval_steps": "train.eval_every",
  "expert_parallel": "mesh.expert",
  "experts": "model.num_experts",
  "experts_per_token": "model.top_k",
  "ffn": "model.mlp_hidden",
  "file": "data.path",
  "fp16": "model.dtype",
  "fp32": "model.dtype",
  "global_batch_size": "train.tokens_per_step",
  "gpus": "mesh.data",
  "grad_clip": "optimizer.clip_norm",
  "gradient_accumulation_steps": "train.tokens_per_step",
  "gradient_checkpointing": "train.remat",
  "heads": "model.num_heads",
  "hidden": "model.width",
  "hidden_dim": "model.width",
  "hidden_size": "model.width",
  "intermediate_size": "model.mlp_hidden",
  "iterations": "train.steps",
  "iters": "train.steps",
  "k": "model.top_k",
  "layers": "model.num_layers",
  "log_interval": "train.log_every",
  "logging_steps": "train.log_every",
  "lr": "optimizer.learning_rate",
  "max_grad_norm": "optimizer.clip_norm",
  "max_iters": "train.steps",
  "max_length": "data.seq_len",
  "max_lr": "optimizer.learning_rate",
  "max_position_embeddings": "model.context",
  "max_seq_len": "data.seq_len",
  "max_steps": "train.steps",
  "micro_batch_size": "train.batch_size",
  "moe_intermediate_size": "model.expert_hidden",
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
  "optim": "optimizer.name",
  "optimizer": "optimizer.name",
  "per_device_train_batch_size": "train.batch_size",
  "precision": "model.dtype",
  "save_interval": "checkpoint.every",
  "save_steps": "checkpoint.every",
  "seq": "data.seq_len",
  "seq_length": "data.seq_len",
  "sequence_length": "data.seq_len",
  "sequence_parallel": "mesh.sequence",
  "sp": "mesh.sequence",
  "tensor_parallel": "mesh.tensor",
  "topk": "model.top_k",
  "tp": "mesh.tensor",
  "train_file": "data.path",
  "vocab": "data.vocab_size",
  "warmup": "optimizer.warmup_steps",
  "wd": "optimizer.weight_decay",
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
