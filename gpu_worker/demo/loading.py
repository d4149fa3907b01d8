"""A model directory on disk as a transformers model ready to serve; never asks the network.

Worst case: the weights are read into memory whole.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar


def load_model(
    path: Path, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model on the CPU in eval mode, and its tokenizer.

    The default is fp32, faster and closer than bf16 on a CPU without bf16 units.
    Raises OSError when the directory is not one of transformers.
    """
    # Its bars would break into whatever the caller draws.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return model.train(mode=False), tokenizer
