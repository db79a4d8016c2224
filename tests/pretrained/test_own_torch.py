"""The shipped code under transformers: its logits, whole and cached, are those of the run.

torch and transformers are no requirement of this project. Where they are installed, these tests
load each folder with `trust_remote_code=True`, as its users do.
"""

import os
import subprocess
import sys

import jax
import leaving
import numpy as np
import pytest
import released
from leaving import CASES, run_of, write_run
from peers import torch_and_transformers

from scmoe.data.tokenizers import ByteTokenizer, prompt_ids
from scmoe.run.exported import export_model

torch, transformers = torch_and_transformers()
TOLERANCE = 1e-4  # absolute, of float32 logits of size 5
PROMPT = 5


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
  """transformers copies the code of a folder into its cache before it imports it."""
  with pytest.MonkeyPatch.context() as patch:
    place = str(tmp_path_factory.mktemp("modules"))
    patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", place)
    yield
    sys.path[:] = [path for path in sys.path if path != place]


def folder_of(name, tmp_path):
  run = run_of(name)
  write_run(run, tmp_path / "run")
  export_model(tmp_path / "run", tmp_path / name.replace(" ", "_"))
  return tmp_path / name.replace(" ", "_")


def loaded(folder, **options):
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=True, output_loading_info=True, **options
  )
  assert not any(info.values()), info
  return model.eval()


def cached(model, tokens):
  """Logits of a prompt and of the following tokens one by one."""
  cache, parts = None, []
  for cut in (slice(0, PROMPT), *(slice(i, i + 1) for i in range(PROMPT, tokens.shape[1]))):
    out = model(tokens[:, cut], past_key_values=cache, use_cache=True)
    cache = out[1]
    parts.append(out.logits)
  return torch.cat(parts, 1).numpy()


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_logits_and_cached_decode_are_ours(name, tmp_path):
  folder = folder_of(name, tmp_path)
  tokens = np.random.default_rng(1).integers(0, leaving.VOCAB, (2, 10)).astype(np.int32)
  with jax.default_matmul_precision("highest"):
    ours = released.run(folder, "data=1", tokens)
  model, ids = loaded(folder), torch.tensor(tokens)
  out = model(ids, use_cache=False, output_hidden_states=True)
  hidden = torch.stack(out.hidden_states).numpy()
  np.testing.assert_allclose(out.logits.numpy(), ours["logits"], atol=TOLERANCE, rtol=0)
  np.testing.assert_allclose(hidden, ours["hidden"], atol=TOLERANCE, rtol=0)
  np.testing.assert_allclose(cached(model, ids), ours["decoded"], atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_generation_of_several_prompts_is_that_of_each_alone(tmp_path):
  """Prompts of different lengths are padded at the left; a wiring that hands values over."""
  model = loaded(folder_of("scmoe_pos2, dense layers", tmp_path))
  prompts = [[5, 6, 7, 8, 9], [11, 12]]
  options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
  alone = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
  padded = torch.tensor([prompts[0], [0, 0, 0, *prompts[1]]])
  mask = torch.tensor([[1] * 5, [0, 0, 0, 1, 1]])
  found = model.generate(padded, attention_mask=mask, **options)
  assert [row[5:].tolist() for row in found] == alone
  greedy = [*prompts[0]]
  for _ in range(6):
    greedy.append(int(model(torch.tensor([greedy])).logits[0, -1].argmax()))
  assert greedy[5:] == alone[0]


@torch.no_grad()
def test_bfloat16_a_loss_and_random_weights(tmp_path):
  folder = folder_of("cg2", tmp_path)
  model = loaded(folder, dtype=torch.bfloat16)
  ids = torch.arange(12)[None]
  wide = loaded(folder, dtype=torch.float32)(ids, labels=ids)
  narrow = model(ids, labels=ids)
  assert narrow.logits.dtype == torch.float32
  nats = torch.nn.functional.cross_entropy(wide.logits[0, :-1], ids[0, 1:])
  assert wide.loss == pytest.approx(float(nats))
  assert float(narrow.loss) == pytest.approx(float(wide.loss), rel=0.05)
  config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
  fresh = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
  assert float(fresh(ids, labels=ids).loss) == pytest.approx(np.log(leaving.VOCAB), rel=0.1)


def test_the_tokenizer_begins_prompts_as_scmoe_does(tmp_path):
  folder = folder_of("direct", tmp_path)
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
  text = "two  words\n東"
  assert tokenizer(text)["input_ids"] == prompt_ids(ByteTokenizer(), text)
  assert tokenizer.decode(ByteTokenizer().encode(text)) == text
  assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (256, 256)


def test_a_process_with_transformers_alone_writes_it_again(tmp_path):
  """`save_pretrained` keeps weights and configuration; the process imports nothing of scmoe."""
  folder = folder_of("dgmoe_share gpt2", tmp_path)
  code = (
    "import sys; from transformers import AutoModelForCausalLM as A;"
    f"m = A.from_pretrained({str(folder)!r}, trust_remote_code=True);"
    f"m.save_pretrained({str(tmp_path / 'saved')!r}); assert 'scmoe' not in sys.modules"
  )
  environment = os.environ | {"HF_HOME": str(tmp_path / "hub")}
  subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)
  tokens = np.arange(20, dtype=np.int32)[None]
  first, second = (released.run(f, "data=1", tokens) for f in (folder, tmp_path / "saved"))
  np.testing.assert_array_equal(first["logits"], second["logits"])
