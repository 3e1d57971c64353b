"""The published code of the paper, from a folder that the user names, as the benchmarks ask it.

Nothing of it is here: its classes run unchanged, on the CPU, with f32 weights and sdpa attention.
Replaced are the data (records that arrive in a file), the metric (answers are kept, not judged) and
the web logger it imports. Needs transformers 4.53.3, as it says itself.
"""

import json
import logging
import sys
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers
from wire import memory, serve

MAX_INPUT = 64000


class Records:
    """Records where the published code expects one of its data sets."""

    def __init__(self, items: list[dict[str, str]], max_new_tokens: int) -> None:
        self.name, self.max_tokens, self.truncate_input = "hotpotqa", max_new_tokens, True
        self._items = items
        self.responses: list[str] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(self._items)

    def evaluate_item(self, item: dict[str, str], response: str) -> None:
        self.responses.append(response)

    def get_result(self) -> float:
        return 0.0


class PublishedPeer:
    def open(self, folder: str, dtype: str, threads: int, published: str) -> dict[str, Any]:
        """Load sender and receiver, two copies as published."""
        if dtype != "f32":
            raise ValueError(f"dtype: expected f32, found {dtype}")
        torch.set_num_threads(threads)
        logging.disable(logging.INFO)
        transformers.logging.set_verbosity_error()
        sys.path.insert(0, published)
        sys.modules.setdefault("wandb", ModuleType("wandb"))
        from eval import CommunicationEvaluator
        from layer_importance import get_top_layers
        from models import CVCommunicator

        self.evaluator, self.communicator = CommunicationEvaluator, CVCommunicator
        self.top_layers, self.traced = get_top_layers, None
        self.base, _ = memory()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.sender, self.receiver = (self._load(folder) for _ in range(2))
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        return {"about": f"published code, {versions}, sdpa, {torch.get_num_threads()} threads"}

    def _load(self, folder: str) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        model.name = folder
        return model

    def evaluate(
        self, records: str, ratio: float, n_calibration: int, max_new_tokens: int
    ) -> dict[str, Any]:
        """Window: calibration on the first records, and answers to all others; no metrics.

        records: a file with a JSON list of {"prompt_A": context, "prompt_B": question}.
        """
        with open(records, encoding="utf-8") as file:
            items = json.load(file)
        wanted = SimpleNamespace(alpha=1.0, mu=0.5, sigma=10.0, top_layers=ratio, layers_list=[-1])
        start = time.perf_counter()
        data = Records(items[:n_calibration], max_new_tokens)
        evaluator = self.evaluator(data, self.tokenizer, False, MAX_INPUT)
        if self.traced is None:  # its tracers stay in the receiver's layers, as published
            self.traced = self._join(wanted, trace=True)
        evaluator.test(self.sender, self.traced, no_wandb=True, do_calc_layer_importance=True)
        wanted = self.top_layers(evaluator.layer_importance_total, wanted)
        data = Records(items[n_calibration:], max_new_tokens)
        evaluator = self.evaluator(data, self.tokenizer, False, MAX_INPUT)
        evaluator.test(self.sender, self._join(wanted, trace=False))
        seconds = time.perf_counter() - start
        if len(data.responses) != len(items) - n_calibration:
            raise RuntimeError(f"{len(data.responses)} answers to {len(items)} records")
        return {"seconds": seconds, "answers": data.responses}

    def _join(self, wanted: SimpleNamespace, trace: bool) -> Any:
        return self.communicator(
            self.sender,
            self.receiver,
            0,
            self.sender.config.num_hidden_layers - 1,
            layers_list=wanted.layers_list,
            top_layers=wanted.top_layers,
            apply_attn_tracer=trace,
            shift_back=False,
        )


if __name__ == "__main__":
    serve(PublishedPeer())
