"""The files beside weights and config.json of the family `scmoe`.

A released family's files come from the released folder. A run of this project has a tokenizer and
conventions for the beginning and end of texts; here they become the files that transformers reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from scmoe.base.sizes import number
from scmoe.data.tokenizers import TOKENIZER, JsonTokenizer, Tokenizer, byte_tokenizer_json
from scmoe.pretrained import own
from scmoe.pretrained.conventions import GENERATION, TEMPLATE, TOKENIZER_CONFIG, begins_with
from scmoe.run.config import RunConfig, to_dict

CARD = "README.md"


def text_files(run: RunConfig, tokenizer: Tokenizer) -> dict[str, str]:
  """The tokenizer's files by name, so that transformers' prompts have the ids of scmoe's prompts.

  A tokenizer of bytes becomes a tokenizer.json with the same ids. `tokenizer.begin_ids` become its
  post-processor, since that is the one place from which every version of transformers takes them.

  Args:
    run: the resolved configuration.
    tokenizer: that of the run.
  """
  is_json = isinstance(tokenizer, JsonTokenizer)
  content = tokenizer.content if is_json else byte_tokenizer_json()  # the others read bytes
  known = JsonTokenizer(content, eos_id=tokenizer.eos_id)
  if begins_with(known.parsed) != tuple(tokenizer.begin_ids):
    content = json.dumps(_beginning(known, tokenizer.begin_ids), ensure_ascii=False)
  ends = [tokenizer.eos_id, *sorted(tokenizer.stop_ids - {tokenizer.eos_id})]
  words = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": known.token(tokenizer.bos_id),
    "eos_token": known.token(tokenizer.eos_id),
    "model_max_length": run.model.context,
    "clean_up_tokenization_spaces": False,
  }
  generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if ends[1:] else ends[0]}
  template = is_json and tokenizer.conventions and tokenizer.conventions.chat_template
  files = {
    TOKENIZER: content,
    TOKENIZER_CONFIG: json.dumps(words, indent=2, ensure_ascii=False) + "\n",
    GENERATION: json.dumps(generation, indent=2) + "\n",
  }
  return files | ({TEMPLATE: template} if template else {})


def _beginning(tokenizer: JsonTokenizer, begin_ids: Sequence[int]) -> dict[str, Any]:
  """A tokenizer.json whose post-processor puts these tokens before a text."""
  special = {tokenizer.token(i): i for i in begin_ids}
  before = [{"SpecialToken": {"id": tokenizer.token(i), "type_id": 0}} for i in begin_ids]
  text = lambda name, kind: {"Sequence": {"id": name, "type_id": kind}}
  template = {
    "type": "TemplateProcessing",
    "single": [*before, text("A", 0)],
    "pair": [*before, text("A", 0), text("B", 1)],
    "special_tokens": {
      word: {"id": word, "ids": [i], "tokens": [word]} for word, i in special.items()
    },
  }
  old = tokenizer.parsed.get("post_processor")
  kept = isinstance(old, dict) and old.get("type") == "ByteLevel"  # it only shifts offsets
  both = {"type": "Sequence", "processors": [old, template]}
  return {**tokenizer.parsed, "post_processor": both if kept else template}


def card(run: RunConfig, step: int, card: Mapping[str, Any], *, dtype: str, parameters: int) -> str:
  """The folder's model card: how to load the model, what it is, and how it was trained.

  The name of the training host and its environment are left out.

  Args:
    run: the resolved configuration.
    step: of the checkpoint.
    card: the run's card (`scmoe.training.card`); {} if there is none.
    dtype: type of the weights.
    parameters: their number.
  """
  model, rule = run.model, run.model.wiring_rule
  kind = f"{model.style} style, wiring {model.wiring}"
  if rule.taps:
    chosen = rule.routed_per_token(model.top_k)
    kind += f", {model.num_experts} experts of which a token visits {chosen}"
  made = {name: card[name] for name in ("time", "git", "versions", "command") if name in card}
  made |= {"devices": card["devices"]} if card.get("devices") else {}
  options = to_dict(run)
  lines = [
    "---", "library_name: transformers", "pipeline_tag: text-generation", "tags: [scmoe, moe]",
    "---", "", f"# {run.name}", "",
    f"A language model of {number(parameters)} parameters in {dtype}: {kind}; {model.num_layers} "
    f"blocks of width {model.width}, context {model.context} tokens. Step {step} of its run.", "",
    "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
    'model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)',
    'tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)',
    'prompt = tokenizer("Once", return_tensors="pt", return_token_type_ids=False)',
    "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))", "```", "",
    f"`{own.CODE}` is the model's code; `trust_remote_code=True` runs it. No token is dropped at a "
    "full expert, as in scmoe's generation.", "",
    "`python -m scmoe.convert --from FOLDER --workdir RUN` turns the folder into a run of scmoe.",
    "", "## Training", "",
  ]  # fmt: skip
  if not made:
    lines += ["The run has no card.", ""]
  for title, value in (("The run's card", made), ("Configuration", options)):
    if value:
      lines += [f"{title}:", "", "```json", json.dumps(value, indent=1), "```", ""]
  return "\n".join(lines)
