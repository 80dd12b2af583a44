# One image for every part: `dynamo frontend CONFIG` or `dynamo worker NAME CONFIG`. docs/how-to/deploy.md explains it.
#
#   docker build -t dynamo .
#   docker build -t dynamo:nats --build-arg PLUGINS="engines/mocker transports/nats discovery/etcd frontends/openai routers/round-robin" .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
# Extras of the runtime.
ARG EXTRAS="text,uvloop,otlp"
# Folders below libs/: what plugins share.
ARG LIBS="generation http leases redis telemetry text wire"
# Folders below plugins/, with extras if need be: transports/nats[nkeys].
ARG PLUGINS="engines/mocker engines/upstream transports/inproc transports/tcp transports/nats transports/redis discovery/memory discovery/file discovery/redis discovery/etcd discovery/kubernetes routers/round-robin routers/load-aware routers/kv routers/affinity routers/slot-tracker admission/token-capacity admission/fair-queue[redis] admission/rate-limit[redis] frontends/openai frontends/responses frontends/anthropic stores/sqlite stores/redis parsers/standard"
# Distributions from elsewhere, as pip takes them.
ARG PACKAGES=""
WORKDIR /src
COPY core core
COPY runtime runtime
COPY libs libs
COPY plugins plugins
# An index of your own: docker build --secret id=pip.conf,src=pip.conf
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python -m venv --without-pip /opt/dynamo \
    && set -f -- ./core "./runtime${EXTRAS:+[${EXTRAS}]}" \
    && for lib in ${LIBS}; do set -- "$@" "./libs/${lib}"; done \
    && for plugin in ${PLUGINS}; do set -- "$@" "./plugins/${plugin}"; done \
    && for package in ${PACKAGES}; do set -- "$@" "${package}"; done \
    && python -m pip --python /opt/dynamo/bin/python install --no-cache-dir "$@"

FROM python:${PYTHON}-slim-bookworm
# A new volume takes over owner and mode of the folder that it is mounted at; all of these are the user's own.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /var/lib/dynamo dynamo \
    && install --directory --owner=dynamo --group=dynamo --mode=0700 /var/lib/dynamo /var/cache/dynamo
COPY --from=build /opt/dynamo /opt/dynamo
COPY deploy/image/healthcheck.py /opt/dynamo/healthcheck.py
ENV PATH="/opt/dynamo/bin:${PATH}" \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/dynamo
USER 10001:10001
WORKDIR /var/lib/dynamo
# Public API of a frontend; health and metrics of a worker; calls from frontends to a worker over tcp.
EXPOSE 8000 9090 7100
# Whichever part runs: a frontend answers the first, a worker the second. Another port needs a health check of its own.
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "/opt/dynamo/healthcheck.py", "http://127.0.0.1:8000/ready", "http://127.0.0.1:9090/health"]
ENTRYPOINT ["dynamo"]
CMD ["--help"]
