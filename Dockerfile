# Octavo on an NVIDIA GPU. Build and run:
#   docker build -t octavo .
#   docker run --gpus all -v "$PWD:/work" octavo doctor
# PyTorch's image brings CUDA and Triton. Octavo's kernels are Triton, so nothing is compiled while the image is built.
# NVIDIA's own image of PyTorch calls its torch a pre-release, which pip would replace. No test builds this file.
ARG IMAGE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime
FROM ${IMAGE}

# Triton compiles a small launcher in C for each kernel, when the kernel first runs.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
# The image's torch is within the required versions and stays.
RUN pip install --no-cache-dir "/src[hf]" && rm -rf /src
WORKDIR /work
ENTRYPOINT ["octavo"]
CMD ["--help"]
