# The store's image (target store) and the worker's, which has torch besides (target worker).
#   docker build --target store -t ctxcache:0.1.0 .
# PYTHON_IMAGE may name a digest; production should.
ARG PYTHON_IMAGE=python:3.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python -m venv /opt/ctxcache
COPY pyproject.toml README.md LICENSE ./
COPY ctxcache ctxcache
COPY gpu_worker gpu_worker
RUN /opt/ctxcache/bin/pip install --no-cache-dir --no-compile .

FROM build AS build-worker
ARG TORCH=torch==2.13.0
RUN /opt/ctxcache/bin/pip install --no-cache-dir --no-compile "${TORCH}" ".[gpu]"

FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/ctxcache/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --system --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin ctxcache
ENTRYPOINT ["ctxcache"]

FROM base AS worker
COPY --from=build-worker /opt/ctxcache /opt/ctxcache
USER 10001:10001
CMD ["worker", "serve"]

FROM base AS store
COPY --from=build /opt/ctxcache /opt/ctxcache
USER 10001:10001
EXPOSE 7420 7421 7422
CMD ["serve"]
