"""Lines of text as characters, and a small language model that has learnt a little of them.

Nothing is downloaded: the text is this folder's own source code, and the model is trained here and
saved as transformers saves models. For your own model, pass its folder or name to the examples, and
replace the lines by your own tokens.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

PADDING, IGNORED = 0, -100


def lines(longest: int = 40) -> list[Tensor]:
    """The lines of this folder's files as character codes, of different lengths, shuffled."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    text = [line[:longest] for file in files for line in file.read_text().splitlines()]
    found = [torch.tensor([min(ord(c), 127) for c in line]) for line in text if len(line) > 4]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[i] for i in order]


def padded(batch: list[Tensor]) -> dict[str, Tensor]:
    """A batch for a language model, padded at the right; attention and loss ignore the padding."""
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PADDING)
    mask = ids != PADDING
    labels = ids.masked_fill(~mask, IGNORED)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def pretrained(folder: Path, steps: int) -> Path:
    """A folder with a trained model, as `save_pretrained` writes it."""
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, max_position_embeddings=64, pad_token_id=PADDING)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = lines()
    for step in range(steps):
        optimizer.zero_grad()
        model(**padded(data[8 * step : 8 * step + 8])).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder
