"""Fine-tune a language model of transformers reversibly, in bfloat16, with its own Trainer.

`reversify` gives a model of the same class: Trainer, PEFT and `save_pretrained` take it as it is.

    python examples/finetune_huggingface.py             # all weights
    python examples/finetune_huggingface.py --lora      # low-rank adapters by PEFT
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from characters import lines, padded, pretrained
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import revcompile


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Load, make reversible, fine-tune, save; returns the loss before and after."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="name or folder; without, a small one is trained first")
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("out/finetuned"))
    args = parser.parse_args(argv)

    folder = args.model or pretrained(args.out / "pretrained", args.steps)
    model = AutoModelForCausalLM.from_pretrained(folder)
    data = lines()
    net: Any = revcompile.reversify(model, example_kwargs=padded(data[:2]), policy="pretrained")
    print(net.summary())
    if args.lora:
        from peft import LoraConfig, get_peft_model

        net = get_peft_model(net, LoraConfig(task_type="CAUSAL_LM"))

    settings = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        bf16=True,
        use_cpu=not torch.accelerator.is_available(),
        eval_strategy="steps",
        eval_steps=max(1, args.steps // 2),
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(
        model=net,
        args=settings,
        train_dataset=data[:-64],
        eval_dataset=data[-64:],
        data_collator=padded,
    )
    before: float = trainer.evaluate()["eval_loss"]
    trainer.train()
    after: float = trainer.evaluate()["eval_loss"]
    print(f"loss {before:.3f} -> {after:.3f}")

    trainer.save_model()  # the original's format: from_pretrained loads it anywhere
    return before, after


if __name__ == "__main__":
    main()
