"""Speed on a GPU: kernels and engine as fractions of what this device was measured to do in the same run.

PYTHONPATH=benchmarks python -m gpu [--part kernels,engine-8b] [--minutes 9] [--out FOLDER] [--json]

control/         a run in parts: processes, limits, lines of JSON, the table
parts/           what each part does
kit/             what a machine without a package registry lacks
stopwatch.py     device time of a call, caches flushed
ceilings.py      copy bandwidth and bf16 matrix products: what everything is measured against
shapes.py        real models, as a config.json and as numbers
cases.py         a kernel's work, and how others do it; what all cases are made of
attention_cases.py, expert_cases.py, layer_cases.py, table_cases.py, quantized_cases.py
engine.py        decode, prefill, idle time and mixed load of the whole engine, with random weights
spans.py         when the device worked, from a trace
transformers_peer.py   what transformers does with the mixed load, in a separate process
figures.py       a figure as a row of a table
runs/            lines of runs on real devices
"""
