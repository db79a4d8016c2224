"""Refuses fields of the command line that would change nothing, with the reason and a remedy.

Fields of a config file are not checked: a file may set `model.top_k`, which the wiring `topk`
reads, and still be run with `--config.model.wiring=top2`, which does not read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from scmoe.base.errors import ConfigError
from scmoe.base.renamed import RENAMED
from scmoe.blocks.schedule import make_schedule
from scmoe.models.gradient_sums import group_size
from scmoe.models.row_gradients import rows_are_fewer
from scmoe.run.bounds import check_excess
from scmoe.training.options import tuned_values


@dataclasses.dataclass(frozen=True)
class _Rule:
  """When some fields have no effect, why, and the remedy.

  Attributes:
    fields: dotted names; one that ends in '.' is a section.
    idle: whether the fields have no effect in a run.
    why: reason; a format string that is given the run.
    remedy: what to set instead.
  """

  fields: tuple[str, ...]
  idle: Callable[[Any], bool]
  why: str
  remedy: str


def _kinds(run: Any) -> set[str]:
  return {part.kind for part in run.data.parts()} if _can_be_read(run) else set()


def _can_be_read(run: Any) -> bool:
  """Whether `data.mixture` can be read; `DataConfig.check` reports it if not."""
  try:
    run.data.parts()
  except ConfigError:
    return False
  return True


def _reads(run: Any, *kinds: str) -> bool:
  return not _can_be_read(run) or bool(_kinds(run) & set(kinds))


def _tuned(run: Any) -> dict[str, list[Any]]:
  return tuned_values(run.train.tune)


def _groups(run: Any) -> int:
  """Groups of microbatches in a step; 1 if their number is not whole, which `check` reports."""
  try:
    count = run.train.microbatches(run.data.seq_len)
  except ConfigError:
    return 1
  return count // group_size(count, run.overlap.flight)


def _rows_are_many(run: Any) -> bool:
  """Whether rows of embeddings would take more than half the bytes of their table's sum.

  False where `model.vocab_size` is 0, so that the tokenizer's is not known yet.
  """
  if not run.model.vocab_size:
    return False
  travels = jnp.dtype(run.overlap.gradient_dtype).itemsize
  return not rows_are_fewer(
    run.train.tokens_per_step or run.train.batch_size * run.data.seq_len,
    run.model.vocab_size // run.mesh.tensor,
    itemsize=min(jnp.dtype(run.model.dtype).itemsize, travels),
    table_itemsize=travels,
    scattered=run.mesh.shard_state == "moments",
  )


_DENSE = lambda run: not run.model.wiring_rule.taps
_K = lambda run: run.model.wiring_rule.k

_TEXT = lambda run: not run.model.reads_images
_IMAGES = lambda run: run.model.reads_images

_VISION_RULES = (
  _Rule(
    ("model.vision.", "augment.", "data.image_field", "data.label_field"),
    _TEXT,
    "model.architecture={run.model.architecture!r} reads text",
    "set model.architecture=vit or swin",
  ),
  _Rule(
    ("model.vision.depths", "model.vision.window", "model.vision.moe_stages",
     "model.vision.last_wiring"),
    lambda run: run.model.architecture != "swin",
    "model.architecture={run.model.architecture!r} has no stages",
    "set model.architecture=swin",
  ),
  _Rule(
    ("model.num_layers",),
    lambda run: run.model.architecture == "swin",
    "the stages of a Swin have the blocks of model.vision.depths={run.model.vision.depths!r}",
    "set model.vision.depths, e.g. 2,6,2",
  ),
  _Rule(
    ("augment.erase_least", "augment.erase_most"),
    lambda run: not run.augment.erase,
    "augment.erase=0 erases nothing",
    "set augment.erase, e.g. 0.25",
  ),
  _Rule(
    ("augment.mix_share",),
    lambda run: not run.augment.mixup and not run.augment.cutmix,
    "augment.mixup=0 and augment.cutmix=0 mix nothing",
    "set one of them, e.g. augment.cutmix=1",
  ),
  _Rule(
    ("data.image_field", "data.label_field"),
    lambda run: run.data.source != "images",
    "data.source={run.data.source!r} reads no columns",
    "set data.source=images and data.path to a folder of Parquet files",
  ),
  _Rule(
    ("data.path",),
    lambda run: run.data.source in ("shapes", "digits"),
    "data.source={run.data.source!r} reads no path",
    "set data.source=images",
  ),
  _Rule(
    ("model.context", "model.vocab_size", "data.seq_len"),
    _IMAGES,
    "images of {run.model.vision.size} pixels in patches of {run.model.vision.patch} have "
    "{run.model.vision.side} x {run.model.vision.side} tokens, and model.vision.classes scores",
    "set model.vision.patch, model.vision.size or model.vision.classes",
  ),
  _Rule(
    ("data.field", "data.domain_field", "data.document_bytes", "data.limit_bytes",
     "data.tokenizer", "data.vocab_size", "data.eos_token", "data.packing",
     "data.document_mask", "data.read_threads", "data.prefetch", "model.rope.",
     "model.rope_theta", "overlap.embedding_rows"),
    _IMAGES,
    "model.architecture={run.model.architecture!r} reads images, not text",
    "set model.architecture=gpt and a data.source of text",
  ),
)  # fmt: skip

RULES = (
  *_VISION_RULES,
  _Rule(
    ("mesh.embedding",),
    lambda run: run.mesh.data == 1 and run.mesh.embedding != "whole",
    "mesh.data=1 leaves one rank, which holds the whole embedding",
    "set mesh.data to 2 or more, or leave mesh.embedding=whole",
  ),
  _Rule(
    ("mesh.shard_state", "mesh.bucket_bytes", "mesh.gather_again", "mesh.gather_ahead"),
    lambda run: run.mesh.token_shards == 1 and run.mesh.shard_state != "none",
    "mesh.data=1, mesh.expert=1 and mesh.sequence=1 leave one rank, which holds the whole state",
    "set mesh.data or mesh.expert to 2 or more, or leave mesh.shard_state=none",
  ),
  _Rule(
    ("overlap.gradient_dtype", "overlap.embedding_rows"),
    lambda run: run.mesh.token_shards == 1,
    "mesh.data=1, mesh.expert=1 and mesh.sequence=1 leave one rank, which sends no gradients",
    "set mesh.data or mesh.expert to 2 or more",
  ),
  _Rule(
    ("overlap.embedding_rows",),
    lambda run: run.mesh.embedding == "partitioned",
    "mesh.embedding='partitioned' sends rows as it is",
    "leave mesh.embedding=whole",
  ),
  _Rule(
    ("overlap.embedding_rows",),
    lambda run: run.mesh.shard_state == "parameters",
    "mesh.shard_state='parameters' scatters the gradients of each microbatch",
    "set mesh.shard_state=moments or none",
  ),
  _Rule(
    ("overlap.embedding_rows",),
    lambda run: run.overlap.embedding_rows and _TEXT(run) and run.model.tie_embeddings,
    "model.tie_embeddings=True: the head's gradient has all rows of the table",
    "set model.tie_embeddings=False, or leave overlap.embedding_rows=False",
  ),
  _Rule(
    ("overlap.embedding_rows",),
    lambda run: run.overlap.embedding_rows and _groups(run) > 1,
    "train.tokens_per_step={run.train.tokens_per_step} adds up several microbatches as a table",
    "set train.tokens_per_step=0 and a larger train.batch_size, or overlap.flight to the number of "
    "microbatches",
  ),
  _Rule(
    ("overlap.embedding_rows",),
    lambda run: run.overlap.embedding_rows and _rows_are_many(run),
    "the tokens of a step, train.batch_size={run.train.batch_size} x data.seq_len="
    "{run.data.seq_len} or train.tokens_per_step, have rows of more than half the bytes of a table "
    "of model.vocab_size={run.model.vocab_size}",
    "leave overlap.embedding_rows=False",
  ),
  _Rule(
    ("overlap.embedding_rows",),
    lambda run: run.lora.rank > 0,
    "lora.rank={run.lora.rank} trains adapters, and no embedding",
    "leave lora.rank=0",
  ),
  _Rule(
    ("overlap.copy_engines",),
    lambda run: run.mesh.size == 1,
    "a mesh of one device has no all-to-all",
    "set mesh.expert to 2 or more",
  ),
  _Rule(
    ("mesh.sequence_attention",),
    lambda run: run.mesh.sequence == 1,
    "with mesh.sequence=1 each device has whole rows",
    "set mesh.sequence to 2 or more",
  ),
  _Rule(
    ("mesh.bucket_bytes",),
    lambda run: run.mesh.shard_state == "none",
    "with mesh.shard_state='none' no rank holds a share",
    "set mesh.shard_state=moments or parameters",
  ),
  _Rule(
    ("mesh.gather_again", "mesh.gather_ahead"),
    lambda run: run.mesh.shard_state != "parameters",
    "mesh.shard_state={run.mesh.shard_state!r} gathers no parameters in a pass",
    "set mesh.shard_state=parameters",
  ),
  _Rule(
    ("mesh.gather_ahead",),
    lambda run: not run.mesh.gather_again,
    "mesh.gather_again=False keeps what is gathered",
    "leave mesh.gather_again=True",
  ),
  _Rule(
    ("multitask.loads", "multitask.lengths", "multitask.plan"),
    lambda run: not run.multitask.names,
    "multitask.names='' leaves one task",
    "set multitask.names, one name for each part of data.mixture",
  ),
  _Rule(
    ("train.sample_every", "train.sample_tokens"),
    lambda run: bool(run.multitask.names),
    "a run of several tasks prints no samples",
    "leave it out, and call scmoe.generate --task NAME",
  ),
  _Rule(
    ("mesh.moments_ahead", "mesh.moments_update", "mesh.moments_kept"),
    lambda run: run.mesh.moments_in == "device",
    "mesh.moments_in='device' keeps moments where they are updated",
    "set mesh.moments_in=host",
  ),
  _Rule(
    ("overlap.ahead",),
    lambda run: run.mesh.experts_in == "host",
    "with mesh.experts_in='host' no pair begins the dispatch of the next one",
    "leave overlap.ahead out",
  ),
  _Rule(
    ("mesh.moments_folder",),
    lambda run: run.mesh.moments_in != "files",
    "mesh.moments_in={run.mesh.moments_in!r} writes no moments to files",
    "set mesh.moments_in=files",
  ),
  _Rule(
    ("mesh.moments_kept",),
    lambda run: run.mesh.moments_update == "host",
    "with mesh.moments_update='host' no moment is copied to the device",
    "set mesh.moments_update=device",
  ),
  _Rule(
    ("model.ffn.num_sms",),
    lambda run: not run.model.ffn.may_have_kernels,
    "XLA's or MegaBlocks' products compute the experts",
    "set model.ffn.backend=auto and model.ffn.impl=auto",
  ),
  _Rule(
    ("model.num_experts", "model.zero_experts", "model.expert_hidden", "model.expert_bias",
     "model.ffn.impl", "model.ffn.backend", "model.ffn.fp8", "model.ffn.num_sms", "model.top_k",
     "router.",
     "dispatch.", "mesh.expert", "mesh.experts_in"),
    _DENSE,
    "model.wiring='dense' has no routed experts",
    "set model.wiring, e.g. scmoe_pos2",
  ),
  _Rule(
    ("model.top_k",),
    lambda run: _K(run) is not None and run.model.top_k != _K(run),
    "model.wiring={run.model.wiring!r} gives a token {run.model.wiring_rule.k} experts per gating",
    "set model.wiring=topk (or shared_expert, scmoe_pos2), which read it",
  ),
  _Rule(
    ("model.shared_hidden", "model.mix", "model.ablation.mix_input"),
    lambda run: not run.model.wiring_rule.shared_expert,
    "model.wiring={run.model.wiring!r} has no shared expert",
    "set model.wiring=shared_expert or scmoe_pos2",
  ),
  _Rule(
    ("model.ablation.norm_after",),
    lambda run: not run.model.wiring_rule.taps,
    "model.wiring={run.model.wiring!r} has no experts",
    "set model.wiring=top2",
  ),
  _Rule(
    ("model.ablation.norm_after",),
    lambda run: run.model.wiring_rule.is_shortcut and run.model.shortcut_norm == "megatron",
    "model.shortcut_norm='megatron' has the norm already",
    "set model.shortcut_norm=shared or own",
  ),
  _Rule(
    ("model.shortcut_norm",),
    lambda run: not run.model.wiring_rule.is_shortcut,
    "model.wiring={run.model.wiring!r} has no shortcut",
    "set model.wiring=scmoe_pos2",
  ),
  _Rule(
    ("model.rope_theta",),
    lambda run: run.model.style != "llama",
    "model.style={run.model.style!r} has learned positions",
    "set model.style=llama",
  ),
  _Rule(
    ("router.real_experts",),
    lambda run: not run.model.zero_experts or run.router.bias == "none",
    "no share is held with model.zero_experts={run.model.zero_experts} and "
    "router.bias={run.router.bias!r}",
    "set model.zero_experts, and router.bias=pid",
  ),
  _Rule(
    ("model.attention_out_bias",),
    lambda run: not run.model.attention_bias,
    "model.attention_bias=False leaves out all biases of attention",
    "set model.attention_bias=True",
  ),
  _Rule(
    ("model.attention_temperature_floor",),
    lambda run: not run.model.attention_temperature,
    "model.attention_temperature=0 multiplies no queries",
    "set model.nope_layers and model.attention_temperature, e.g. 0.1",
  ),
  _Rule(
    ("model.rope.",),
    lambda run: run.model.style != "llama",
    "model.style={run.model.style!r} has learned positions",
    "set model.style=llama",
  ),
  _Rule(
    ("model.latent_norm_eps",),
    lambda run: not run.model.kv_lora_rank,
    "model.kv_lora_rank=0 means ordinary attention, which has no such norm",
    "set model.kv_lora_rank and the widths of the heads",
  ),
  _Rule(
    ("router.topk_group", "router.group_score"),
    lambda run: run.router.n_group == 1,
    "router.n_group=1 does not group the experts",
    "set router.n_group",
  ),
  _Rule(
    ("router.cosine_dim",),
    lambda run: run.router.gate != "cosine",
    "router.gate={run.router.gate!r} has no projection",
    "set router.gate=cosine",
  ),
  _Rule(
    ("router.bias_rate",),
    lambda run: run.router.bias == "none",
    "router.bias='none' has no bias to move",
    "set router.bias=sign or pid",
  ),
  _Rule(
    ("router.balance",),
    lambda run: not run.router.balance_loss and run.router.balance != "none",
    "router.balance_loss=0 is the weight of the balancing loss",
    "set router.balance_loss, e.g. 0.01",
  ),
  _Rule(
    ("router.balance_over",),
    lambda run: run.router.balance == "none" or not run.router.balance_loss,
    "there is no balancing loss",
    "set router.balance=gshard and router.balance_loss, e.g. 0.01",
  ),
  _Rule(
    ("router.balance_loss",),
    lambda run: run.router.balance == "none" and run.router.balance_loss > 0,
    "router.balance='none' means no balancing loss",
    "set router.balance=gshard",
  ),
  _Rule(
    ("dispatch.capacity_factor",),
    lambda run: (kind := run.dispatch.kind) is not None and not kind.drops,
    "dispatch.transport={run.dispatch.transport!r} has no capacity",
    "set dispatch.transport=capacity or packed",
  ),
  _Rule(
    ("dispatch.slack",),
    lambda run: run.dispatch.fixed_buffers,
    "dispatch.transport={run.dispatch.transport!r} has fixed buffers",
    "set dispatch.transport=packed, dropless or per_rank, or dispatch.capacity_factor",
  ),
  _Rule(
    ("dispatch.overflow",),
    lambda run: run.dispatch.fixed_buffers and "transport" not in _tuned(run),
    "dispatch.transport={run.dispatch.transport!r} has no overflow rounds",
    "set dispatch.transport=packed, dropless or per_rank",
  ),
  _Rule(
    ("dispatch.overflow", "dispatch.fp8", "dispatch.put_blocks"),
    lambda run: not run.dispatch.adaptive_r and "adaptive_r" not in _tuned(run),
    "dispatch.adaptive_r=0 gathers the experts' weights and exchanges no rows",
    "set dispatch.adaptive_r=1",
  ),
  _Rule(
    ("dispatch.overflow", "dispatch.fp8", "dispatch.put_blocks"),
    lambda run: run.mesh.expert == 1,
    "mesh.expert=1 leaves the rows on their device, which has all experts",
    "set mesh.expert to 2 or more",
  ),
  _Rule(
    ("dispatch.put_blocks",),
    lambda run: run.dispatch.kind is not None and run.dispatch.kind.exchanges,
    "dispatch.transport={run.dispatch.transport!r} sends rows without the kernel of puts",
    "set dispatch.transport=put",
  ),
  _Rule(
    ("dispatch.overflow",),
    lambda run: run.dispatch.overflow == "repeat" and run.dispatch.ablation.first_round,
    "dispatch.ablation.first_round=True loses the rows that a repeated step would send",
    "leave dispatch.ablation.first_round out",
  ),
  _Rule(
    ("dispatch.overflow",),
    lambda run: run.dispatch.kind is None,
    "dispatch.transport={run.dispatch.transport!r} sends rows in its own way",
    "set dispatch.transport=packed, dropless or per_rank",
  ),
  _Rule(
    ("train.preference_beta", "train.reference_free"),
    lambda run: not run.data.reads_preferences,
    "data.source={run.data.source!r} has no pairs of answers",
    "set data.source=preference",
  ),
  _Rule(
    ("train.teacher_share", "train.teacher_temperature", "train.teacher_hidden"),
    lambda run: run.data.reads_preferences,
    "the teacher is the reference of data.source='preference'",
    "set train.preference_beta",
  ),
  _Rule(
    ("train.teacher_share", "train.teacher_temperature", "train.teacher_hidden"),
    lambda run: not run.train.teacher,
    "train.teacher='' means no teacher",
    "set train.teacher, e.g. runs/teacher",
  ),
  _Rule(
    ("lora.alpha", "lora.targets", "lora.base"),
    lambda run: not run.lora.rank,
    "lora.rank=0 means no adapters",
    "set lora.rank, e.g. 8",
  ),
  _Rule(
    ("optimizer.muon_beta", "optimizer.muon_rms"),
    lambda run: run.optimizer.name != "muon",
    "optimizer.name={run.optimizer.name!r} has no Muon",
    "set optimizer.name=muon",
  ),
  _Rule(
    ("optimizer.decay_fraction",),
    lambda run: run.optimizer.schedule != "wsd",
    "optimizer.schedule={run.optimizer.schedule!r} has no decay phase of its own",
    "set optimizer.schedule=wsd",
  ),
  _Rule(
    ("optimizer.min_lr_ratio",),
    lambda run: run.optimizer.schedule == "constant",
    "optimizer.schedule='constant' does not decay",
    "set optimizer.schedule=cosine or wsd",
  ),
  _Rule(
    ("train.profile_steps",),
    lambda run: not run.train.profile_step,
    "train.profile_step=0 traces nothing",
    "set train.profile_step, e.g. 2",
  ),
  _Rule(
    ("train.tune_rounds",),
    lambda run: not run.train.tune,
    "train.tune is empty",
    "set train.tune, e.g. chunks=1,2",
  ),
  _Rule(
    ("train.eval_every", "train.eval_batches"),
    lambda run: not run.data.validation_fraction and _kinds(run) <= {"stdlib", "procedural"},
    "data.validation_fraction=0 leaves no validation text",
    "set data.validation_fraction, e.g. 0.05",
  ),
  _Rule(
    ("overlap.search_seconds",),
    lambda run: run.overlap.schedule != "auto",
    "overlap.schedule={run.overlap.schedule!r} leaves nothing to search",
    "set overlap.schedule=auto",
  ),
  _Rule(
    ("overlap.ahead",),
    lambda run: not make_schedule(run.model.wiring_rule, run.model.moe_every).begins_next,
    "model.wiring={run.model.wiring!r} with model.moe_every={run.model.moe_every} begins nothing "
    "of the next pair",
    "set model.moe_every=1 with model.wiring=scmoe_pos2 or scmoe_pos3",
  ),
  _Rule(
    ("overlap.ablation.profile_runs",),
    lambda run: not run.overlap.ablation.profile_guided,
    "overlap.ablation.profile_guided=false profiles nothing",
    "set overlap.ablation.profile_guided=true",
  ),
  _Rule(
    ("data.path",),
    lambda run: _kinds(run) == {"stdlib"} or run.data.source == "mixture",
    "data.source={run.data.source!r} reads no path",
    "set data.source=auto, which follows the path, or name the path in data.mixture",
  ),
  _Rule(
    ("data.field",),
    lambda run: not _reads(run, "jsonl", "parquet", "arrow"),
    "only rows of jsonl, parquet and arrow have columns",
    "give a data.path that ends in .jsonl or .parquet",
  ),
  _Rule(
    ("data.domain_field",),
    lambda run: not _reads(run, "jsonl", "parquet", "arrow", "chat", "preference"),
    "only rows of files have columns",
    "give a data.path that ends in .jsonl or .parquet",
  ),
  _Rule(
    ("data.chat_template", "data.train_on", "data.long_conversations"),
    lambda run: not _reads(run, "chat", "preference"),
    "no source has conversations",
    "set data.source=chat and data.path to a .jsonl file",
  ),
  _Rule(
    ("data.document_bytes",),
    lambda run: not _reads(run, "text"),
    "only text files are cut",
    "give a data.path that ends in .txt",
  ),
  _Rule(
    ("data.vocab_size",),
    lambda run: run.data.tokenizer != "bpe",
    "data.tokenizer={run.data.tokenizer!r} has a vocabulary of its own",
    "set data.tokenizer=bpe",
  ),
  _Rule(
    ("data.eos_token",),
    lambda run: run.data.tokenizer in ("bytes", "bpe"),
    "data.tokenizer={run.data.tokenizer!r} has an end of text of its own",
    "set data.tokenizer to the path of a tokenizer.json",
  ),
)  # fmt: skip


def check_typed(run: Any, names: Iterable[str]) -> None:
  """Checks that every field of the command line changes something in this run, by its whole value.

  Args:
    run: a `RunConfig` with the typed values in it.
    names: dotted names of the fields that were typed.

  Raises:
    ConfigError: one of them has no effect; the message says why, and a remedy. Or it is larger than
      the number of things that it is about (`check_excess`).
  """
  for name in (RENAMED.get(name, name) for name in names):
    for rule in RULES:
      covers = any(name == f or (f.endswith(".") and name.startswith(f)) for f in rule.fields)
      if covers and rule.idle(run):
        why = rule.why.format(run=run)
        raise ConfigError(f"{name}={_value(run, name)!r} has no effect: {why}; {rule.remedy}, "
                          f"or leave {name} out")  # fmt: skip
    check_excess(name, _value(run, name), run)


def _value(run: Any, name: str) -> Any:
  for part in name.split("."):
    run = getattr(run, part)
  return run
