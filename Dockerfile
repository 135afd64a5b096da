# oallama as an image: `docker build -t oallama .`, with CUDA `docker build --build-arg KIND=cuda -t oallama:cuda .`.
# A stage of its own makes the wheel, so the image has no compiler. compose.yaml runs it with a folder of models.
ARG KIND=cpu
ARG BASE=ubuntu:24.04
ARG CUDA_BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04

# ---- the wheel: every x86-64 CPU, and Vulkan ---------------------------------------------------------------------------
FROM ${BASE} AS wheel-cpu
RUN apt-get update && apt-get install -y --no-install-recommends \
        ca-certificates g++ git glslc libvulkan-dev python3-dev python3-venv spirv-headers && \
    rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /build
WORKDIR /src
COPY . .
RUN /build/bin/pip wheel . --no-deps --wheel-dir /wheels -C cmake.define.OALLAMA_CPU=ALL \
        -C cmake.define.OALLAMA_CUDA=OFF -C cmake.define.OALLAMA_VULKAN=ON \
        -C cmake.define.OALLAMA_NOTICES=vulkan-headers:/usr/share/doc/libvulkan-dev/copyright

# ---- and the CUDA backend for NVIDIA's GPUs from Turing (sm_75) on. CUDA's libraries come from NVIDIA's wheels. ------
FROM ${CUDA_BASE} AS cuda13
RUN apt-get update && apt-get install -y --no-install-recommends g++ git python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /build
WORKDIR /src
COPY . .
# Architectures as for CMake; by default those in packages/cuda13/pyproject.toml.
ARG CUDA_ARCHITECTURES=""
RUN /build/bin/pip wheel packages/cuda13 --no-deps --wheel-dir /wheels \
        -C cmake.define.CMAKE_CUDA_COMPILER=/usr/local/cuda/bin/nvcc \
        ${CUDA_ARCHITECTURES:+-C "cmake.define.CMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES}"}

FROM wheel-cpu AS wheel-cuda
COPY --from=cuda13 /wheels /wheels

FROM wheel-${KIND} AS wheel

# ---- the image -----------------------------------------------------------------------------------------------------------
FROM ${BASE}
# mesa-vulkan-drivers for GPUs of AMD and Intel, with --device /dev/dri. NVIDIA's container toolkit brings its own.
ARG PACKAGES=""
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates libgomp1 libvulkan1 python3-venv ${PACKAGES} && \
    rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m venv /opt/oallama && \
    /opt/oallama/bin/pip install --no-cache-dir /wheels/*.whl
# Volumes take the owner of these folders.
RUN useradd --create-home oallama && install -d -o oallama -g oallama /models /home/oallama/.cache
USER oallama
ENV PATH=/opt/oallama/bin:$PATH
VOLUME ["/models", "/home/oallama/.cache"]
EXPOSE 8080
ENTRYPOINT ["oallama"]
CMD ["--help"]
