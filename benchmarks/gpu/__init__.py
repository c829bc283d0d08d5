"""The speed of nanoscale on one GPU, compared with a hand-written loop and Hugging Face's Trainer.

Usage: python3 -m benchmarks.gpu [--minutes 8] [--limit 180] [--tiny] [--out DIR] PART…
       python3 -m benchmarks.gpu --show FILE…

Each row is a training of its own on random tokens. `nanoscale plan --search` chooses the fastest layout that
fits the device. A call ends by itself after --minutes: a row that does not fit into the time left is not
started, and a row that takes longer than --limit seconds is cut off. JSON and a table are written after every
row, to --out, or to $OUT, or to benchmarks/results/.
"""
