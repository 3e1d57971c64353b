"""The thread pool as Python sees it: changed while it works, from several threads at once."""

import subprocess
import sys

import pytest

#: One thread runs forward calls, whose interrupt hook wants the GIL; another resizes the pool.
RESIZE = """
import sys, threading
import numpy as np
sys.path.insert(0, sys.argv[1])
import kvcomm
from kvcomm._core import Session, Workspace
model = kvcomm.Model.load(sys.argv[2], device=sys.argv[3])
ids = np.arange(1500) % 300
def run():
    for _ in range(4):
        Workspace(model.core).forward([Session(model.core)], [ids], output="argmax")
workers = [threading.Thread(target=run) for _ in range(2)]
for worker in workers: worker.start()
n = 0
while any(worker.is_alive() for worker in workers):
    n += 1
    kvcomm.set_num_threads(1 + n % 3)
for worker in workers: worker.join()
print("resized", n)
"""


@pytest.mark.parametrize("start", range(2))
def test_pool_is_resized_while_it_works(tiny, device, start) -> None:
    root = str(__file__).rsplit("/", 2)[0]
    command = [sys.executable, "-c", RESIZE, root, str(tiny("llama")), device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("resized")
