# torch_lms on stock PyTorch. Say which PyTorch with pip's variables: docker/README.md.
ARG BUILD_BASE=debian:bookworm-20250520-slim@sha256:90522eeb7e5923ee2b871c639059537b30521272f10ca86fdbbbb2b75a8c40cd
ARG RUN_BASE=debian:bookworm-20250520-slim@sha256:90522eeb7e5923ee2b871c639059537b30521272f10ca86fdbbbb2b75a8c40cd

FROM ${BUILD_BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG MAX_JOBS=2
WORKDIR /torch-lms
COPY build_scripts build_scripts
RUN build_scripts/install_packages.sh extension-build && \
  build_scripts/make_environment.sh /opt/build --requirement build_scripts/requirements.txt
COPY csrc csrc
COPY python python
COPY LICENSE README.md pyproject.toml setup.py ./
ENV PYTHON=/opt/build/bin/python
RUN build_scripts/build_extension.sh
ENV PYTHON=python3
RUN build_scripts/make_environment.sh /opt/torch-lms --wheels dist --extra cli --constraint build_scripts/requirements.txt

FROM ${RUN_BASE} AS run
RUN --mount=type=bind,source=build_scripts,target=/build_scripts \
  /build_scripts/install_packages.sh extension-run && /build_scripts/add_user.sh lms
COPY --from=build /opt/torch-lms /opt/torch-lms
ENV PATH=/opt/torch-lms/bin:$PATH
# lms
USER 10001
WORKDIR /home/lms
CMD ["python", "-m", "torch_lms", "doctor"]
