#!/usr/bin/env bash
# Writes the images' locks anew: `make lock`. Each lists every package of an image with the hashes of
# its files. PyTorch's build without CUDA comes from an index of its own, so the CPU image's lock
# leaves out PyTorch and what only its CUDA build needs.
set -euo pipefail
cd "$(dirname "$0")/../.."

lock() {
  local name=$1
  shift
  "${UV:-uv}" pip compile pyproject.toml --python-version 3.12 --python-platform x86_64-manylinux_2_36 \
    --only-binary :all: --generate-hashes --no-annotate --quiet --extra sentencepiece --extra otel \
    --custom-compile-command "make lock" --output-file "deploy/container/$name.lock" "$@"
}

# The version of PyTorch that the GPU tests ran with.
lock cuda --extra cuda -c <(echo torch==2.11.0)
without=()
while read -r package; do
  without+=(--no-emit-package "$package")
done < <(grep -oE '^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==' deploy/container/cuda.lock | tr -d '=')
lock cpu -c constraints.txt "${without[@]}"
