"""The speed of nanoscale on one GPU, compared with a hand-written loop and Hugging Face's Trainer.

Usage: python3 -m benchmarks.gpu [--minutes 14] [--limit 180] [--tiny] [--out DIR] PART…
       python3 -m benchmarks.gpu --show FILE…

The parts `correct` and `kernels` check and time single operations. Each other row is a training of its own on
random tokens. `nanoscale plan --search` chooses the fastest layout that
fits the device. A call ends by itself after --minutes: a row that does not fit into the time left is not
started, and a row that takes longer than --limit seconds is cut off. JSON and a table are written after every
row, to --out, or to $OUT, or to benchmarks/results/.
"""
