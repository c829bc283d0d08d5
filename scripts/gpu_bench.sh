#!/usr/bin/env bash
# What nanoscale reaches on one GPU, beside loops written by hand, in at most nine minutes: scripts/gpu_bench.py says
# what is measured; its parts and options may be given here (`--help`).
#
#   scripts/gpu_bench.sh                   everything, with the Python of .venv, or python3, or $PYTHON
#   scripts/gpu_bench.sh --tiny            the same of toy models, on a CPU too: whether the script itself works
#
# Figures go to $OUT, or to benchmarks/results/. On a machine without a network, put wheels of what is missing there
# into a folder `wheels` (or $WHEELS) beforehand, on one that has a network; they are installed into a folder of
# their own and nothing else is touched:
#
#   pip wheel --no-deps -w wheels antlr4-python3-runtime==4.9.3
#   pip download --no-deps -d wheels --only-binary=:all: --python-version 3.12 --implementation cp \
#     --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
#     --platform manylinux2014_x86_64 hydra-core==1.3.8 omegaconf==2.3.1 torchao==0.18.0
#
# and, where they are not there yet: typer rich shellingham click pyyaml numpy tokenizers jinja2 markupsafe pyarrow
# psutil nvidia-ml-py xxhash safetensors huggingface-hub, of the versions in requirements.lock.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
wheels=${WHEELS:-$root/wheels}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if compgen -G "$wheels/*.whl" >/dev/null; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$site" "$wheels"/*.whl
  export PYTHONPATH="$PYTHONPATH:$site"
fi
"$python" "$root/scripts/gpu_bench.py" "$@"
