"""README's Python, pasted block behind block: the store alone, then an engine, on one store and again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from byte_tokenizer import TOKEN_COUNT, byte_tokenizer
from documents import ROOT, aimed_at, blocks
from server_process import ServerProcess
from transformers import LlamaConfig, LlamaForCausalLM

TIMEOUT_S = 240
BLOCKS = blocks(ROOT / "README.md", "python")
TOLD = re.compile(r"^(\d+) tokens restored, (\d+) computed$", re.MULTILINE)


def _write_model(directory: Path) -> None:
    """A tiny random model where README's name of one is looked for first: the working directory."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=TOKEN_COUNT,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    [name] = re.findall(r'^source = "(.*)"$', BLOCKS[1], re.MULTILINE)
    LlamaForCausalLM(config).save_pretrained(directory / name)
    byte_tokenizer().save_pretrained(directory / name)


def test_the_second_run_restores_what_the_first_computed(tmp_path: Path) -> None:
    """As README says, and prints how much."""
    _write_model(tmp_path)
    with ServerProcess(tmp_path / "data") as server:
        source = aimed_at("\n".join(BLOCKS), server.target)
        first, again = (_said(source, tmp_path) for _ in range(2))

    asked, replied = len("Hello!"), 32
    assert TOLD.findall(first) == [("0", str(asked))]
    assert TOLD.findall(again) == [(str(asked + replied), str(asked))]
    assert [said.partition(" ")[0] for said in (first, again)] == ["100", "200"]


def _said(source: str, directory: Path) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", source],
        cwd=directory,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
