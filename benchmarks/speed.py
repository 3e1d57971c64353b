"""First speed figures: prefill and decode of one sequence, beside the machine's own limits.

Prefill: seconds of one forward call over `--tokens` random ids in a fresh session, the head on the
last row only; its matrix products are counted by the core and set against NumPy's OpenBLAS on the
same shapes. Decode: one token a call, after those tokens; bytes are the weights as stored (without
the embedding table where the head is another, since one row of it is read) plus the keys and values
read, set against the memory-read limit. No tokenizer, no sampling, no load is in
the timed window. Rounds alternate between the two, best and median are printed.

    python benchmarks/speed.py --model smollm2-135m --tokens 512 --dtype f32 --json
"""

import argparse
import json
import os
import statistics
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="f32", choices=["f32", "f16", "bf16"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # limits.py calls it from as many threads as asked

    import numpy as np
    from limits import Products, Reads, matrices

    import kvcomm
    from kvcomm._core import Session, Workspace
    from kvcomm.shapes import Shape

    kvcomm.set_num_threads(args.threads)
    model = kvcomm.Model.load(args.model, dtype=args.dtype)
    core = model.core
    ids = np.random.default_rng(0).integers(1, model.vocab_size, args.tokens)
    workspace = Workspace(core)
    prefill, decode, flops, n_steps = [], [], 0.0, 8
    for _ in range(args.rounds + 1):
        session, before = Session(core), workspace.counts
        start = time.perf_counter()
        workspace.forward([session], [ids], output="argmax")
        prefill.append(time.perf_counter() - start)
        flops = workspace.counts["linear_flops"] - before["linear_flops"]
        start = time.perf_counter()
        for _ in range(n_steps):
            workspace.forward([session], [ids[:1]], output="argmax")
        decode.append((time.perf_counter() - start) / n_steps)
    prefill, decode = prefill[1:], decode[1:]  # the first round touches memory for the first time

    config, element = model.config.core, {"f32": 4, "f16": 2, "bf16": 2}[args.dtype]
    unread = 0 if config["tied_head"] else config["vocab_size"] * config["dim"] * element
    kv_bytes = 2 * model.n_layers * model.n_kv_heads * model.head_dim * 4 * args.tokens
    limits = {
        "prefill": Products(matrices(Shape.of(model)), args.threads).rate(least=1.0) / 1e9,
        "decode": Reads(args.threads).rate() / 1e9,
    }
    reached = {
        "prefill": flops / min(prefill) / 1e9,
        "decode": (core.nbytes - unread + kv_bytes) / min(decode) / 1e9,
    }
    for name, seconds, tokens in (("prefill", prefill, args.tokens), ("decode", decode, 1)):
        unit = {"prefill": "GFLOP/s", "decode": "GB/s"}[name]
        row = {
            "name": name,
            "model": args.model,
            "dtype": args.dtype,
            "threads": args.threads,
            "tokens": args.tokens,
            "value": round(tokens / min(seconds), 1),
            "unit": "tokens/s",
            "median": round(tokens / statistics.median(seconds), 1),
            "reached": round(reached[name], 1),
            "limit": round(limits[name], 1),
            "limit_unit": unit,
            "limit_share": round(reached[name] / limits[name], 3),
            "rounds": args.rounds,
        }
        if args.json:
            print(json.dumps(row))
        else:
            print(
                f"{name:8} {row['value']:8.1f} tokens/s (median {row['median']:.1f}): "
                f"{row['reached']:.1f} of {row['limit']:.1f} {unit}, {row['limit_share']:.0%}"
            )


if __name__ == "__main__":
    main()
