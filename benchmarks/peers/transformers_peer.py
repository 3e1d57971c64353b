"""transformers, as the benchmarks ask it: eager PyTorch in inference mode.

Settings: sdpa attention, weights in the type asked for, `logits_to_keep=1` (the head on the last
row only), rows of a batch padded on the left, as many threads as kvcomm has. Compiled graphs are
not used. What is timed is stated at each operation; tensors of ids are made before.
"""

import copy
import inspect
import time
from typing import Any

import torch
import transformers
from wire import memory, serve

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class TransformersPeer:
    def open(self, folder: str, dtype: str, threads: int) -> dict[str, Any]:
        """Load the model."""
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.folder, self.dtype = folder, DTYPES[dtype]
        self.base, _ = memory()
        self.model = self._load()
        names = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        return {"about": f"{versions}, sdpa, {torch.get_num_threads()} threads"}

    def _load(self) -> Any:
        new = int(transformers.__version__.split(".")[0]) >= 5
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder,
            attn_implementation="sdpa",
            **{"dtype" if new else "torch_dtype": self.dtype},
        )
        return model.eval()

    def load(self) -> dict[str, Any]:
        """Window: from_pretrained of a second copy, and one token through it."""
        ids = torch.tensor([[1]])
        start = time.perf_counter()
        second = self._load()
        second(input_ids=ids).logits.argmax(-1).item()
        seconds = time.perf_counter() - start
        del second
        return {"seconds": seconds}

    def _inputs(self, rows: list[list[int]]) -> dict[str, Any]:
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        inputs = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1}
        if len(rows) > 1:
            lengths = torch.tensor([[len(row)] for row in rows])
            places = torch.arange(width) - (width - lengths)
            inputs["attention_mask"] = (places >= 0).long()
            inputs["position_ids"] = places.clamp(min=0)
        return inputs

    @torch.inference_mode()
    def prefill(self, rows: list[list[int]]) -> dict[str, Any]:
        """Window: one forward call into a fresh cache, and the last row's argmax."""
        inputs = self._inputs(rows)
        start = time.perf_counter()
        tokens = self.model(**inputs).logits[:, -1].argmax(-1).tolist()
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    @torch.inference_mode()
    def context(self, rows: list[list[int]]) -> dict[str, Any]:
        """Not timed: rows that `steps` and `copies` go on from."""
        inputs = self._inputs(rows)
        out = self.model(**inputs)
        self.lengths, self.mask = [len(row) for row in rows], inputs.get("attention_mask")
        self.cache, self.tokens = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        return {"seconds": 0.0}

    @torch.inference_mode()
    def steps(self, n: int) -> dict[str, Any]:
        """Window: n greedy tokens of every row; then the cache is cut back."""
        tokens, mask, found = self.tokens, self.mask, []
        places = torch.tensor([[length] for length in self.lengths])
        start = time.perf_counter()
        for _ in range(n):
            further = {}
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
                further = {"attention_mask": mask, "position_ids": places}
                places = places + 1
            out = self.model(
                input_ids=tokens,
                use_cache=True,
                logits_to_keep=1,
                **{self.cache_name: self.cache},
                **further,
            )
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            found.append(tokens[0].item())
        seconds = time.perf_counter() - start
        self.cache.crop(-n)
        return {"seconds": seconds, "tokens": found}

    @torch.inference_mode()
    def copies(self, n: int) -> dict[str, Any]:
        """Window: the cache copied for n receivers, since each would append to it in place."""
        start = time.perf_counter()
        made = [copy.deepcopy(self.cache) for _ in range(n)]
        seconds = time.perf_counter() - start
        del made
        return {"seconds": seconds}

    def peak(self) -> dict[str, Any]:
        """Most bytes resident so far, beyond those before the model was loaded."""
        return {"bytes": memory()[1] - self.base}


if __name__ == "__main__":
    serve(TransformersPeer())
