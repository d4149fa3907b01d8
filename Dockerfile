# The store's image (target store) and the worker's, which has torch besides (target worker).
#   docker build --target store -t ctxcache:0.1.0 .
#   docker run -v ctxcache:/var/lib/ctxcache --shm-size 8g ctxcache:0.1.0
# It listens on loopback of its own; elsewhere by CTXCACHE_LISTEN with TLS, see docs/operations.md, Images.
# PYTHON_IMAGE is any Debian with `python` (CPython 3.11 to 3.13) and its venv; production should name a digest.
# The secret `pip` is a pip.conf for the build alone, where packages come from an index of one's own:
#   docker build --secret id=pip,src=$HOME/.config/pip/pip.conf ...
# With podman or buildah: `--format docker`; OCI's own format has no HEALTHCHECK.
ARG PYTHON_IMAGE=python:3.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python -m venv /opt/ctxcache
# pip compiles what it installs: users of the image cannot write there, and a start would compile it all again.
COPY pyproject.toml README.md LICENSE ./
COPY ctxcache ctxcache
COPY gpu_worker gpu_worker
COPY proto proto
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/ctxcache/bin/pip install --no-cache-dir ".[fleet]"

FROM build AS build-worker
ARG TORCH=torch==2.13.0
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/ctxcache/bin/pip install --no-cache-dir "${TORCH}" ".[server,gpu]"

FROM ${PYTHON_IMAGE} AS base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ctxcache" \
      org.opencontainers.image.description="A context cache for LLM inference" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# HOME: what libraries cache, Triton's kernels among it, goes where every user may write, also one that has no entry.
ENV PATH=/opt/ctxcache/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# Directories are made before VOLUME: a volume that is new takes owner and mode from here.
RUN useradd --uid 10001 --user-group --no-create-home --no-log-init --shell /usr/sbin/nologin ctxcache \
    && install --directory --owner=10001 --group=10001 --mode=0700 /var/lib/ctxcache /run/ctxcache-worker
ENTRYPOINT ["ctxcache"]
STOPSIGNAL SIGTERM

FROM base AS worker
COPY --from=build-worker /opt/ctxcache /opt/ctxcache
USER 10001:10001
VOLUME /run/ctxcache-worker
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD ["ctxcache", "worker", "stats", "--listen=/run/ctxcache-worker/worker.sock"]
CMD ["worker", "serve", "--listen=/run/ctxcache-worker/worker.sock"]

FROM base AS store
# A directory of its own in the volume: a volume's root may be another user's, with a lost+found in it.
ENV CTXCACHE_DATA_DIRECTORY=/var/lib/ctxcache/store
COPY --from=build /opt/ctxcache /opt/ctxcache
USER 10001:10001
VOLUME /var/lib/ctxcache
EXPOSE 7420 7421 7422
# It asks without a token, at the socket that is there whatever the TCP port wants of callers.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["ctxcache", "--target", "unix:/var/lib/ctxcache/store/ctxcache.sock", "--timeout", "4", "health"]
CMD ["serve"]
