"""Speed on a GPU: kernels and engine as fractions of what this device was measured to do in the same run.

PYTHONPATH=benchmarks python -m gpu [--only kernels,engine] [--model 8B] [--json]

budget.py        eight minutes, and what no longer fits into them
stopwatch.py     device time of a call, caches flushed
ceilings.py      copy bandwidth and bf16 matrix products: what everything is measured against
shapes.py        real models, as a config.json and as numbers
cases.py         a kernel's work, and how others do it; what all cases are made of
attention_cases.py, layer_cases.py, table_cases.py, quantized_cases.py
kernels.py       … measured
engine.py        decode, prefill, idle time and mixed load of the whole engine, with random weights
handoff.py       KV of a prompt from one process to another on the same device
transformers_peer.py   what transformers does with the mixed load, in a process of its own
figures.py       what was found, what it should be, and the table of both
"""
