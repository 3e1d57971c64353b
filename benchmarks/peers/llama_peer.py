"""llama.cpp through llama-cpp-python's low-level interface, as the benchmarks ask it.

Settings: a build for this machine (make.py), file mapped, 512-token physical batches, flash
attention as the library decides, keys and values in f16 (its default), one stream per sequence,
logits of last tokens only, as many threads as kvcomm has. Batches are filled before the window of a
prefill; logits are read where they are, not copied into Python.
"""

import time
from typing import Any

import llama_cpp
import numpy as np
from wire import memory, serve

UBATCH = 512


class LlamaPeer:
    def open(self, gguf: str, dtype: str, threads: int) -> dict[str, Any]:
        """Load the model."""
        del dtype  # the file has its type
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        self.path, self.threads = gguf.encode(), threads
        self.base, _ = memory()
        self.model = self._load()
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.session, self.size = None, (0, 0)
        return {"about": f"llama-cpp-python {llama_cpp.__version__}, {threads} threads, kv f16"}

    def _load(self) -> Any:
        model = llama_cpp.llama_model_load_from_file(
            self.path, llama_cpp.llama_model_default_params()
        )
        if not model:
            raise OSError(f"{self.path.decode()}: llama.cpp does not load it")
        return model

    def load(self) -> dict[str, Any]:
        """Window: a second load of the file, a context, and one token through it."""
        start = time.perf_counter()
        model = self._load()
        context = self._new_context(model, 1, UBATCH)
        self._decode(context, [[1]], [0])
        seconds = time.perf_counter() - start
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
        return {"seconds": seconds}

    def _new_context(self, model: Any, n_rows: int, n_tokens: int) -> Any:
        """Room for n_rows sequences of n_tokens each."""
        params = llama_cpp.llama_context_default_params()
        each = -(-n_tokens // 256) * 256
        params.n_ctx = n_rows * each
        params.n_batch = n_rows * each
        params.n_ubatch = UBATCH
        params.n_seq_max = n_rows
        params.kv_unified = False
        params.n_threads = params.n_threads_batch = self.threads
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise MemoryError(f"no context for {n_rows} sequences of {n_tokens} tokens")
        return context

    def _fresh(self, rows: list[list[int]], room: int) -> None:
        """An empty context for these rows and `room` tokens more."""
        size = (len(rows), max(map(len, rows)) + room)
        if size != self.size:
            if self.session:
                llama_cpp.llama_free(self.session)
            self.session, self.size = self._new_context(self.model, *size), size
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.session), True)

    @staticmethod
    def _fill(rows: list[list[int]], starts: list[int]) -> tuple[Any, list[int]]:
        """A batch of all rows, and the place of each row's last token."""
        total = sum(map(len, rows))
        batch = llama_cpp.llama_batch_init(total, 0, 1)
        batch.n_tokens = total
        place, lasts = 0, []
        for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
            for offset, token in enumerate(row):
                batch.token[place] = token
                batch.pos[place] = start + offset
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = number
                batch.logits[place] = offset == len(row) - 1
                place += 1
            lasts.append(place - 1)
        return batch, lasts

    def _run(self, context: Any, batch: Any, lasts: list[int]) -> list[int]:
        """The argmax after each row."""
        status = llama_cpp.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status} for {batch.n_tokens} tokens")
        return [
            int(
                np.ctypeslib.as_array(
                    llama_cpp.llama_get_logits_ith(context, last), (self.n_vocab,)
                ).argmax()
            )
            for last in lasts
        ]

    def _decode(self, context: Any, rows: list[list[int]], starts: list[int]) -> list[int]:
        batch, lasts = self._fill(rows, starts)
        try:
            return self._run(context, batch, lasts)
        finally:
            llama_cpp.llama_batch_free(batch)

    def prefill(self, rows: list[list[int]]) -> dict[str, Any]:
        """Window: one llama_decode into an empty context, and the last rows' argmax."""
        self._fresh(rows, 0)
        batch, lasts = self._fill(rows, [0] * len(rows))
        start = time.perf_counter()
        tokens = self._run(self.session, batch, lasts)
        seconds = time.perf_counter() - start
        llama_cpp.llama_batch_free(batch)
        return {"seconds": seconds, "tokens": tokens}

    def context(self, rows: list[list[int]]) -> dict[str, Any]:
        """Not timed: rows that `steps` goes on from."""
        self._fresh(rows, UBATCH)
        self.lengths = [len(row) for row in rows]
        self.tokens = self._decode(self.session, rows, [0] * len(rows))
        return {"seconds": 0.0}

    def steps(self, n: int) -> dict[str, Any]:
        """Window: n greedy tokens of every row; then the memory is cut back."""
        tokens, found = self.tokens, []
        batch, lasts = self._fill([[token] for token in tokens], self.lengths)
        start = time.perf_counter()
        for step in range(n):
            for row, token in enumerate(tokens):
                batch.token[row] = token
                batch.pos[row] = self.lengths[row] + step
            tokens = self._run(self.session, batch, lasts)
            found.append(tokens[0])
        seconds = time.perf_counter() - start
        llama_cpp.llama_batch_free(batch)
        memory_ = llama_cpp.llama_get_memory(self.session)
        for row, length in enumerate(self.lengths):
            llama_cpp.llama_memory_seq_rm(memory_, row, length, -1)
        return {"seconds": seconds, "tokens": found}

    def peak(self) -> dict[str, Any]:
        """Most bytes resident so far, mapped pages of the file included, beyond those before."""
        return {"bytes": memory()[1] - self.base}


if __name__ == "__main__":
    serve(LlamaPeer())
