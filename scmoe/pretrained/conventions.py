"""Reads from a released model's folder with which tokens its texts begin and end.

Four files give such tokens, and they do not always agree: config.json (`bos_token_id`,
`eos_token_id`), generation_config.json (the same fields, including the tokens that end an instruct
model's answer), tokenizer_config.json (`bos_token`, `eos_token`, `add_bos_token`, `chat_template`)
and tokenizer.json (its post-processor adds tokens before each text). The rules here follow
transformers, so that a prompt becomes the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scmoe.base.errors import DataError
from scmoe.base.stored import parse_json
from scmoe.data.conventions import TEMPLATE_BYTES, Conventions, is_token_id
from scmoe.data.tokenizers import JsonTokenizer
from scmoe.pretrained.folder import CONFIG
from scmoe.pretrained.header import read_object, read_text

GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
# Files that `scmoe.convert --to` writes back unchanged.
KEPT = (GENERATION, TOKENIZER_CONFIG, TEMPLATE, "special_tokens_map.json")
_BYTES = 2**24  # limit on the size of each
# Classes of transformers' tokenizers that add `bos_token` unless `add_bos_token` forbids it.
_ADD_BOS = (
  "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast",
  "GemmaTokenizer", "GemmaTokenizerFast", "CohereTokenizerFast",
)  # fmt: skip


def kept_files(folder: Path) -> dict[str, str]:
  """The contents of the files of `KEPT` that a folder has, by name.

  Raises:
    DataError: a file cannot be read, or is named .json and is not a JSON object.
  """
  found = {name: read_text(folder / name, _BYTES) for name in KEPT if (folder / name).exists()}
  for name, text in found.items():
    if name.endswith(".json"):
      parse_json(text, str(folder / name))
  return found


def eos_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
  """Tokens that end a text: those of config.json first, then those of generation_config.json.

  Raises:
    DataError: the value in a file is not a token id or a list of them.
  """
  found = _token_ids(config, "eos_token_id", folder / CONFIG)
  if (folder / GENERATION).exists():
    generation = read_object(folder / GENERATION, _BYTES)
    found += _token_ids(generation, "eos_token_id", folder / GENERATION)
  return tuple(dict.fromkeys(found))


def eos_token(folder: Path) -> str:
  """The text of the end-of-text token in tokenizer_config.json; "" if the file has none.

  Raises:
    DataError: the file is not a JSON object.
  """
  path = folder / TOKENIZER_CONFIG
  value = read_object(path, _BYTES).get("eos_token") if path.exists() else None
  token = value.get("content") if isinstance(value, dict) else value
  return token if isinstance(token, str) else ""


def read_conventions(
  folder: Path, config: Mapping[str, Any], tokenizer: JsonTokenizer
) -> Conventions:
  """Reads the conventions of a released model.

  Args:
    folder: the model's folder.
    config: its parsed config.json.
    tokenizer: the tokenizer of its tokenizer.json.

  Raises:
    DataError: a file cannot be used; one line names the file and the field.
  """
  path, vocab = folder / TOKENIZER_CONFIG, tokenizer.vocab
  said = read_object(path, _BYTES) if path.exists() else None
  stop = eos_ids(folder, config)
  if said is not None and (eos := _named(said, "eos_token", vocab, path)) is not None:
    stop = tuple(dict.fromkeys((*stop, eos)))
  if said is not None and "bos_token" in said:
    bos = _named(said, "bos_token", vocab, path)
  else:
    bos = next(iter(_token_ids(config, "bos_token_id", folder / CONFIG)), None)
  begin = _begin(said, tokenizer.parsed, bos, path)
  if bos is None and begin:
    bos = begin[-1]
  return Conventions(begin, bos, stop, _template(folder, said or {}))


def _begin(
  said: Mapping[str, Any] | None, tokenizer: Mapping[str, Any], bos: int | None, path: Path
) -> tuple[int, ...]:
  """The ids of the tokens that the model's tokenizer puts before a text.

  The first of these that the folder has decides: `add_bos_token` of tokenizer_config.json; a
  `tokenizer_class` that adds the token by default; the template of tokenizer.json's post-processor.
  Without any of them, texts begin with `bos` if there is no tokenizer_config.json, else with none.
  """
  alone = () if bos is None else (bos,)
  adds = (said or {}).get("add_bos_token")
  if adds is not None and not isinstance(adds, bool):
    raise DataError(f"{path}: add_bos_token={adds!r} is neither true nor false")
  if adds and bos is None:
    raise DataError(f"{path}: add_bos_token=true needs a bos_token that is in the vocabulary")
  if adds is not None:
    return alone if adds else ()
  if (said or {}).get("tokenizer_class") in _ADD_BOS:
    return alone
  template = _before_text(tokenizer.get("post_processor"))
  if template is not None:
    return template
  return alone if said is None else ()


def _before_text(processor: Any) -> tuple[int, ...] | None:
  """Ids that a post-processor of tokenizer.json adds before a text; None if its kind adds none."""
  if not isinstance(processor, dict):
    return None
  if processor.get("type") == "Sequence":
    found = [_before_text(part) for part in processor.get("processors") or []]
    return next((ids for ids in found if ids is not None), None)
  if processor.get("type") in ("BertProcessing", "RobertaProcessing"):
    return (processor["cls"][1],)
  if processor.get("type") != "TemplateProcessing":
    return None
  ids: list[int] = []
  for part in processor["single"]:
    if "SpecialToken" not in part:
      break
    ids += processor["special_tokens"][part["SpecialToken"]["id"]]["ids"]
  return tuple(ids)


def begins_with(tokenizer: Mapping[str, Any]) -> tuple[int, ...]:
  """The ids that the post-processor of a parsed tokenizer.json puts before a text."""
  return _before_text(tokenizer.get("post_processor")) or ()


def _token_ids(values: Mapping[str, Any], field: str, path: Path) -> list[int]:
  """Reads a field that is a token id, a list of them, or null; returns a list."""
  value = values.get(field)
  ids = [] if value is None else value if isinstance(value, list) else [value]
  if len(ids) > 256 or not all(map(is_token_id, ids)):
    raise DataError(f"{path}: {field}={str(value)[:80]} is neither a token id nor a list of them")
  return ids


def _named(
  values: Mapping[str, Any], field: str, vocab: Mapping[str, int], path: Path
) -> int | None:
  """The id of the token in a field of tokenizer_config.json; None for null.

  The field is the token's text, or an object whose `content` is that text.
  """
  value = values.get(field)
  token = value.get("content") if isinstance(value, dict) else value
  if token is None:
    return None
  if not isinstance(token, str) or token not in vocab:
    raise DataError(f"{path}: {field}={str(token)[:80]!r} is not a token of tokenizer.json")
  return vocab[token]


def _template(folder: Path, said: Mapping[str, Any]) -> str:
  """The chat template from its own file or from tokenizer_config.json; "" if there is none.

  The field of tokenizer_config.json is a template, or a list of named ones, of which this takes
  the one named "default".
  """
  if (folder / TEMPLATE).exists():
    return read_text(folder / TEMPLATE, TEMPLATE_BYTES)
  value, path = said.get("chat_template"), folder / TOKENIZER_CONFIG
  if isinstance(value, list):
    named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
    value = named.get("default")
  if value is None:
    return ""
  if not isinstance(value, str) or len(value) > TEMPLATE_BYTES:
    raise DataError(f"{path}: chat_template is not a text of at most {TEMPLATE_BYTES} characters")
  return value


def check_kept(files: Any, path: Path) -> dict[str, str]:
  """Checks the copies of `KEPT` files that a run's source.json holds, {name: text}.

  Raises:
    DataError: a name is not one of `KEPT`, or a value is not a text.
  """
  if not isinstance(files, dict) or not all(
    name in KEPT and isinstance(text, str) for name, text in files.items()
  ):
    raise DataError(f"{path}: `files` must map names to texts; known names: {', '.join(KEPT)}")
  return files


def config_fields(bos_id: int, stop_ids: tuple[int, ...]) -> dict[str, Any]:
  """The fields of config.json that say, for a run trained here, how its texts begin and end."""
  ends: Any = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)
  return {"bos_token_id": bos_id, "eos_token_id": ends}
