# oallama as an image: `docker build -t oallama .`, for NVIDIA GPUs `docker build --target cuda -t oallama:cuda .`.
# The wheel is made in a stage of its own; the images have no compiler. compose.yaml runs one with a folder of models.
ARG BASE=debian:bookworm-slim
ARG CUDA_BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04

# ---- the wheel, for every x86-64 CPU and Vulkan --------------------------------------------------------------------
FROM ${BASE} AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends \
        g++ git ca-certificates glslc libvulkan-dev python3-dev python3-venv spirv-headers && \
    rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /build
WORKDIR /src
COPY . .
RUN /build/bin/pip wheel . --no-deps --wheel-dir /wheels \
        -C cmake.define.OALLAMA_CPU=ALL -C cmake.define.OALLAMA_CUDA=OFF -C cmake.define.OALLAMA_VULKAN=ON \
        -C cmake.define.OALLAMA_NOTICES="/usr/share/doc/libvulkan-dev/copyright"

# ---- the same with CUDA; GPUs from Turing (sm_75) on -------------------------------------------------------------------
FROM ${CUDA_BASE} AS cuda-wheel
RUN apt-get update && apt-get install -y --no-install-recommends g++ git python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /build
WORKDIR /src
COPY . .
ARG CUDA_ARCHITECTURES="75-virtual;80-real;86-real;89-real;90-real;120-real"
RUN /build/bin/pip wheel . --no-deps --wheel-dir /wheels \
        -C cmake.define.OALLAMA_CPU=ALL -C cmake.define.OALLAMA_VULKAN=OFF -C cmake.define.OALLAMA_CUDA=ON \
        -C cmake.define.CMAKE_CUDA_COMPILER=/usr/local/cuda/bin/nvcc \
        -C cmake.define.GGML_CUDA_NCCL=OFF -C "cmake.define.CMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES}"

# ---- CUDA: the host gives the driver (nvidia-container-toolkit), wheels of NVIDIA the libraries ------------------------
FROM ubuntu:24.04 AS cuda
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3-venv && \
    rm -rf /var/lib/apt/lists/*
COPY --from=cuda-wheel /wheels /wheels
RUN python3 -m venv /opt/oallama && \
    /opt/oallama/bin/pip install --no-cache-dir /wheels/oallama-*.whl nvidia-cuda-runtime nvidia-cublas && rm -rf /wheels
RUN useradd --create-home oallama
USER oallama
ENV PATH=/opt/oallama/bin:$PATH
VOLUME ["/models", "/home/oallama/.cache"]
EXPOSE 8080
HEALTHCHECK --start-period=5m --interval=30s CMD ["python3", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=5)"]
ENTRYPOINT ["oallama"]
CMD ["--help"]

# ---- CPU and Vulkan: the last stage is what `docker build` makes -------------------------------------------------------
FROM ${BASE} AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libgomp1 libvulkan1 python3-venv && \
    rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
RUN python3 -m venv /opt/oallama && \
    /opt/oallama/bin/pip install --no-cache-dir /wheels/oallama-*.whl && rm -rf /wheels
RUN useradd --create-home oallama
USER oallama
ENV PATH=/opt/oallama/bin:$PATH
VOLUME ["/models", "/home/oallama/.cache"]
EXPOSE 8080
HEALTHCHECK --start-period=5m --interval=30s CMD ["python3", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=5)"]
ENTRYPOINT ["oallama"]
CMD ["--help"]
