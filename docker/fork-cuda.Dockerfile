# PyTorch with the fork's patches, for CUDA 11.8: everything that PyTorch has by itself, from a checkout of the tag.
FROM nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04@sha256:8f9dd0d09d3ad3900357a1cf7f887888b5b74056636cd6ef03c160c3cd4b1d95 AS configured
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG VERSION=v1.13.1
ARG PROFILE=full
ARG TORCH_CUDA_ARCH_LIST="7.0;8.0;8.6;9.0"
WORKDIR /torch-lms
COPY build_scripts build_scripts
RUN build_scripts/install_packages.sh fork-build fork-cuda-build && \
  build_scripts/make_environment.sh /opt/build --requirement build_scripts/requirements-fork.txt
COPY patches patches
RUN build_scripts/get_source.sh "$VERSION" /pytorch --from git
COPY csrc csrc
RUN build_scripts/apply_patches.sh "$VERSION" /pytorch
ENV PYTHON=/opt/build/bin/python
RUN build_scripts/build_wheel.sh /pytorch --device cuda --profile "$PROFILE" --configure-only

FROM configured AS wheel
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PROFILE=full
ARG TORCH_CUDA_ARCH_LIST="7.0;8.0;8.6;9.0"
ARG MAX_JOBS=2
ENV CCACHE_DIR=/ccache
RUN --mount=type=cache,target=/ccache build_scripts/build_wheel.sh /pytorch --device cuda --profile "$PROFILE"
ENV PYTHON=python3
RUN build_scripts/make_environment.sh /opt/torch --wheels /pytorch/dist --constraint build_scripts/requirements-fork.txt numpy

FROM nvidia/cuda:11.8.0-cudnn8-runtime-ubuntu22.04@sha256:85fb7ac694079fff1061a0140fd5b5a641997880e12112d92589c3bbb1e8b7ca AS run
RUN --mount=type=bind,source=build_scripts,target=/build_scripts \
  /build_scripts/install_packages.sh fork-cuda-run && /build_scripts/add_user.sh lms
COPY --from=wheel /opt/torch /opt/torch
ENV PATH=/opt/torch/bin:$PATH
# lms
USER 10001
WORKDIR /home/lms
CMD ["python", "-c", "import torch; print(torch.__version__, torch.Tensor.pageout_manual, torch.cuda.create_swap_env)"]
