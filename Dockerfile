# An image with nanoscale, torch and its CUDA libraries; docs/hosts.md says how it is used.
#   docker build --tag nanoscale .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# A C compiler for torch.compile, ssh for the hosts of a hostfile, and RDMA's libraries for NCCL
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev openssh-client libibverbs1 rdma-core \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/nanoscale
COPY pyproject.toml README.md LICENSE ./
COPY nanoscale nanoscale
COPY conf conf
COPY recipes recipes
# Further parts, such as deepspeed or transformers: --build-arg EXTRAS=[deepspeed,transformers]
ARG EXTRAS=
RUN pip install --no-cache-dir ".${EXTRAS}"

WORKDIR /work
CMD ["nanoscale", "doctor"]
