"""The family `scmoe`: config.json of models that no released family can express.

transformers has no such models, so their folder holds its own code, `CODE`, which transformers runs
if the caller trusts it. Beside scmoe's options the configuration has what that code computes with
but a reader of JSON should not have to derive: the values that routed experts read, and the
frequencies of the rotary embedding.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

from scmoe.base.errors import ConfigError, DataError
from scmoe.base.extensions import is_import_path
from scmoe.models.config import ModelConfig
from scmoe.moe.options import RouterConfig
from scmoe.pretrained.fields import Fields
from scmoe.run.config import RunConfig, from_dict, to_dict
from scmoe.training.schema import upgraded_config

FAMILY = "scmoe"
CODE = "modeling_scmoe.py"  # in the model's folder, and in `remote` beside this file
# Largest numbers from which lists are made before any tensor is compared with the files.
_LARGEST = {"model.num_layers": 2**14, "model.moe_every": 2**10, "router.compat.gates": 2**8}
# Options that `CODE` does not compute, besides `model.qk_norm=l2`.
_UNWRITTEN = ("attention_chunk", "nope_layers", "attention_temperature")
# What the user's own code computes does not leave with the options.
_CODE_FIELDS = ("model.experts", "router.gate", "router.balance")


def code() -> str:
  """The source of the model for transformers."""
  return (Path(__file__).parent / "remote" / CODE).read_text("utf-8")


@functools.cache
def _words(name: str) -> tuple[str, ...]:
  """The words of `CODE`'s table or tuple `name`, from its source: running it needs PyTorch."""
  for line in ast.parse(code()).body:
    match line:
      case (
        ast.Assign(targets=[ast.Name(id=found)], value=ast.Dict(keys=words))
        | ast.Assign(targets=[ast.Name(id=found)], value=ast.Tuple(elts=words))
      ) if found == name:
        return tuple(str(word.value) for word in words if isinstance(word, ast.Constant))
  raise AssertionError(f"{CODE} has no {name}")


def activations() -> dict[str, bool]:
  """The activations that `CODE` computes, and whether each has a gate."""
  return dict.fromkeys(_words("GATED"), True) | dict.fromkeys(_words("PLAIN"), False)


def gates() -> tuple[str, ...]:
  """The words of `router.gate` that `CODE` computes."""
  return _words("GATES")


def write(model: ModelConfig, router: RouterConfig) -> dict[str, Any]:
  """The config.json of a resolved model.

  Raises:
    ConfigError: the model reads images, experts or gate are the user's own code, experts take turns
      (`router.compat.uniform`), each of several tasks has a gate, or `CODE` does not compute an
      option, the activation or the gate.
  """
  named = to_dict(RunConfig(model=model, router=router))
  for field in ("model.experts", "router.gate"):
    if is_import_path(value := _at(named, field)):
      raise ConfigError(
        f"{field}={value!r} is code of your own, which cannot be written for transformers; use a "
        "word of this option"
      )
  if model.reads_images:
    raise ConfigError(f"model.architecture={model.architecture!r} is no language model; use 'gpt'")
  if router.compat.uniform:
    raise ConfigError(
      "router.compat.uniform=True gives experts their tokens in turn, so a token's experts depend "
      "on its place in the batch; such a model cannot be written"
    )
  if router.tasks:
    raise ConfigError(
      f"router.tasks={router.tasks}: a folder holds one task's gates; choose a task (--task)"
    )
  if rare := next((name for name in _UNWRITTEN if getattr(model, name)), None):
    raise ConfigError(
      f"model.{rare}={getattr(model, rare)!r} leaves as a Llama-4 only, and other options are not "
      f"those of one; the code for transformers has none of {', '.join(_UNWRITTEN)}"
    )
  if model.qk_norm == "l2":
    raise ConfigError("model.qk_norm='l2' leaves as a Llama-4 only; use 'none', 'head' or 'all'")
  if model.ffn.activation not in activations():
    raise ConfigError(
      f"model.ffn.activation={model.ffn.activation!r} is none that the code for transformers has: "
      f"{', '.join(activations())}; add it to GATED or PLAIN in {CODE}"
    )
  if router.gate not in gates():
    raise ConfigError(
      f"router.gate={router.gate!r} is none that the code for transformers has: "
      f"{', '.join(gates())}; add it to GATES and to the class Gate in {CODE}"
    )
  own, routing = named["model"], named["router"]
  del own["vision"]
  if is_import_path(router.balance):  # a loss of the user's own, which the model does not need
    routing |= {"balance": "none", "balance_loss": 0.0}
  return {
    "architectures": ["ScmoeForCausalLM"],
    "model_type": FAMILY,
    "auto_map": {
      "AutoConfig": f"{Path(CODE).stem}.ScmoeConfig",
      "AutoModelForCausalLM": f"{Path(CODE).stem}.ScmoeForCausalLM",
    },
    "vocab_size": model.vocab_size,
    "hidden_size": model.width,
    "num_hidden_layers": model.num_layers,
    "num_attention_heads": model.num_heads,
    "num_key_value_heads": model.num_kv_heads,
    "max_position_embeddings": model.context,
    "tie_word_embeddings": model.tie_embeddings,
    FAMILY: {"model": own, "router": routing, "derived": derived(model)},
  }


def derived(model: ModelConfig) -> dict[str, Any]:
  """The group `derived`, which follows from the options; `ScmoeConfig` in `CODE` describes it."""
  rule, latent = model.wiring_rule, model.kv_lora_rank
  turning = model.qk_rope_head_dim if latent else model.rope.turning(model.head_dim)
  query = model.qk_nope_head_dim + turning if latent else model.head_dim
  rotary = model.style == "llama"
  # Left out where they say nothing: folders that earlier versions wrote do not have these fields,
  # and `read` compares what a folder states with what its options imply.
  rare: dict[str, Any] = {"skips": True} if rule.skips else {}
  if model.opens_apart:
    rare["first_taps"] = [tap.name.lower() for tap in rule.opening.taps]
  if model.full_layers:
    rare["full_layers"] = list(model.full_layers)
  return {
    **rare,
    "taps": [tap.name.lower() for tap in rule.taps],
    "top_k": rule.routed_per_gating(model.top_k),
    "shared_expert": rule.shared_expert,
    "distinct": rule.distinct,
    "units_per_moe": rule.units_per_moe,
    "dense_layers": list(model.dense_indices),
    "frequencies": model.rope.frequencies(turning, model.rope_theta).tolist() if rotary else [],
    "amplitude": model.rope.amplitude,
    "score_scale": model.rope.score_factor * query**-0.5
    if latent
    else (model.attention_multiplier or query**-0.5),
  }


def read(c: Fields) -> tuple[ModelConfig, RouterConfig]:
  """The options of model and router that `write` has written.

  Raises:
    DataError: the group is missing, a number is too large, an option names code to import, or what
      `CODE` computes with is not what the options imply.
    ConfigError: an option is unknown or has a value that does not fit.
  """
  group = c.values.get(FAMILY)
  if not isinstance(group, dict) or not {"model", "router", "derived"} <= set(group):
    raise DataError(f"{c.name}: {FAMILY!r} does not have the groups model, router and derived")
  given = {name: group[name] for name in ("model", "router")}
  for name, value in given.items():
    if not isinstance(value, dict):
      raise DataError(f"{c.name}: {FAMILY}.{name}={str(value)[:40]!r} is not a group of fields")
  named = upgraded_config(given)
  run = from_dict(named, FAMILY)
  known = to_dict(run)
  for field, most in _LARGEST.items():
    if (value := _at(known, field)) > most:
      raise DataError(f"{c.name}: {field}={value} is more than the limit of {most}")
  for field in _CODE_FIELDS:
    if is_import_path(value := _at(known, field)):
      raise DataError(f"{c.name}: {field}={value!r} names code, which a model's folder may not")
  if run.model.reads_images:
    raise DataError(f"{c.name}: model.architecture={run.model.architecture!r}; known: 'gpt'")
  model = run.model.resolve()
  implied, stated = derived(model), group["derived"]
  if wrong := next((n for n in implied if _of(stated, n) != implied[n]), None):
    raise DataError(
      f"{c.name}: {FAMILY}.derived.{wrong}={str(_of(stated, wrong))[:40]} is not what the options "
      f"imply, {str(implied[wrong])[:40]}"
    )
  return model, run.router


def _of(group: Any, name: str) -> Any:
  return group.get(name) if isinstance(group, dict) else None


def _at(values: Any, path: str) -> Any:
  for name in path.split("."):
    values = values[name]
  return values
