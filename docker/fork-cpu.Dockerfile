# PyTorch with the fork's patches, for the CPU: from the distribution's source package, with the distribution's libraries.
FROM python:3.10.16-slim-bookworm@sha256:f9fd9a142c9e3bc54d906053b756eb7e7e386ee1cf784d82c251cf640c502512 AS configured
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG VERSION=v1.13.1
ARG SOURCE=package
ARG PROFILE=lean
WORKDIR /torch-lms
COPY build_scripts build_scripts
RUN build_scripts/install_packages.sh fork-build fork-libraries && \
  build_scripts/make_environment.sh /opt/build --requirement build_scripts/requirements-fork.txt
COPY patches patches
RUN build_scripts/get_source.sh "$VERSION" /pytorch --from "$SOURCE"
COPY csrc csrc
RUN build_scripts/apply_patches.sh "$VERSION" /pytorch
ENV PYTHON=/opt/build/bin/python
RUN build_scripts/build_wheel.sh /pytorch --profile "$PROFILE" --configure-only

FROM configured AS wheel
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PROFILE=lean
ARG MAX_JOBS=2
ENV CCACHE_DIR=/ccache
RUN --mount=type=cache,target=/ccache build_scripts/build_wheel.sh /pytorch --profile "$PROFILE"
ENV PYTHON=python3
RUN build_scripts/make_environment.sh /opt/torch --wheels /pytorch/dist --constraint build_scripts/requirements-fork.txt numpy

FROM python:3.10.16-slim-bookworm@sha256:f9fd9a142c9e3bc54d906053b756eb7e7e386ee1cf784d82c251cf640c502512 AS run
RUN --mount=type=bind,source=build_scripts,target=/build_scripts \
  /build_scripts/install_packages.sh fork-run && /build_scripts/add_user.sh lms
COPY --from=wheel /opt/torch /opt/torch
ENV PATH=/opt/torch/bin:$PATH
# lms
USER 10001
WORKDIR /home/lms
CMD ["python", "-c", "import torch; print(torch.__version__, torch.Tensor.pageout_manual, torch.cuda.create_swap_env)"]
